"""The first module of the frozen program: makes extension modules importable.

Modules in Python come from the archive by the standard library's zipimport. Extension modules are files without names,
known by their descriptors.
"""

from __future__ import annotations

import sys

# importlib's own, by the names under which they are there from the start: importlib is in the part of the archive that
# needs zlib, an extension module.
from _frozen_importlib import ModuleSpec
from _frozen_importlib_external import ExtensionFileLoader

from _extensions import DESCRIPTORS  # type: ignore[import-not-found]  # made by bundle.py

__all__: list[str] = []


class _Extensions:
    """A finder of extension modules."""

    @staticmethod
    def find_spec(name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        descriptor = DESCRIPTORS.get(name)
        if descriptor is None:
            return None
        place = f"/proc/self/fd/{descriptor}"
        return ModuleSpec(name, ExtensionFileLoader(name, place), origin=place)


# Behind those for what is built in or frozen into Python itself, and before the archive.
sys.meta_path.insert(2, _Extensions)
# As PyInstaller has it, and what asks whether it is frozen asks for this.
sys.frozen = True  # type: ignore[attr-defined]  # see above
