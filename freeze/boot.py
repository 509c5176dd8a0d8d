"""The first module of the frozen program: makes all others importable, fast.

What is imported is in files without names, known by their descriptors: each extension module in one, all modules in
Python in another, one behind the other. Python itself would find them in a zip file, at the price of unpacking them
and of much code in Python for each: a fifth of the time that a start would take.

A quarter would go to compiling, as dataclasses and attrs write methods as text, at each import. What they write is the
same each time, so it was compiled when the program was built, and is found here by its text. Other text is compiled as
ever.
"""

from __future__ import annotations

import sys

# importlib's own, by the names under which they are there from the start.
from _frozen_importlib import ModuleSpec
from _frozen_importlib_external import ExtensionFileLoader
from marshal import loads as _loads
from posix import pread

# Made by bundle.py.
from _index import COMPILED, EXTENSIONS, MODULES, PLACES  # type: ignore[import-not-found]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType, ModuleType
    from typing import Any

__all__: list[str] = []


class _Extensions:
    """Finds extension modules."""

    @staticmethod
    def find_spec(name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        descriptor = EXTENSIONS.get(name)
        if descriptor is None:
            return None
        place = f"/proc/self/fd/{descriptor}"
        return ModuleSpec(name, ExtensionFileLoader(name, place), origin=place)


class _Modules:
    """Finds and loads modules in Python."""

    @classmethod
    def find_spec(cls, name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        place = PLACES.get(name)
        # A loader by its methods; importlib.abc, which has the base class, is not there yet.
        return place and ModuleSpec(name, cls, is_package=place[2])  # type: ignore[arg-type]

    @staticmethod
    def create_module(_spec: ModuleSpec) -> None:
        """Python makes it."""

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        start, size, _ = PLACES[module.__name__]
        code = _read(start, size)
        module.__file__ = code.co_filename
        # A global of this name is found before the built-in.
        module.__dict__.update(_INSTEAD.get(module.__name__, {}))
        exec(code, module.__dict__)  # noqa: S102  # that is what importing is
        if module.__name__ == "dataclasses":
            module.__dict__["inspect"] = _Inspect(module.__dict__["inspect"])


class _Inspect:
    """In place of inspect, for dataclasses.

    A class without a docstring is given its signature as one: 16 ms at each start, since all docstrings were left out.
    """

    def __init__(self, true: ModuleType) -> None:
        self._true = true

    def __getattr__(self, name: str) -> Any:
        return getattr(self._true, name)

    @staticmethod
    def signature(_class: type) -> str:
        return ""


def _exec(text: str, *namespaces: Any) -> None:
    exec(_compiled.get(text, text), *namespaces)  # noqa: S102  # for dataclasses, whose own text it is


def _compile(text: str, filename: str, mode: str) -> CodeType:
    return _compiled.get(text) or compile(text, filename, mode)


def _hash(_name: str) -> int:
    """For attrs, which writes the hash of each class's name into a method: it would be another at each start."""
    return 0


def _read(start: int, size: int) -> Any:
    return _loads(pread(MODULES, size, start))  # noqa: S302  # a part of this very program


_compiled: dict[str, CodeType] = _read(*COMPILED)
_INSTEAD: dict[str, dict[str, object]] = {
    "dataclasses": {"exec": _exec},
    "attr._make": {"compile": _compile, "hash": _hash},
}

# Behind those for what is built in or frozen into Python itself, and before the archive that this module came from.
sys.meta_path[2:2] = [_Modules, _Extensions]
# As PyInstaller has it, and what asks whether it is frozen asks for this.
sys.frozen = True  # type: ignore[attr-defined]  # see above
