"""A stand-in for the files of a driver, in any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Final

__all__ = ["DEBIAN", "VERSION", "lay", "link"]

VERSION: Final = "550.54.15"
DEBIAN: Final = "/usr/lib/x86_64-linux-gnu"

# As real drivers have them; each with its link, and those that programs look for without a version.
_LIBRARIES: Final = (
    ("libcuda.so", "libcuda.so.1"),
    ("libcudadebugger.so", "libcudadebugger.so.1"),
    ("libnvidia-ml.so", "libnvidia-ml.so.1"),
    ("libnvidia-ptxjitcompiler.so", "libnvidia-ptxjitcompiler.so.1"),
    ("libnvidia-gpucomp.so", ""),
)


def lay(root: Path, libraries: str = DEBIAN, *, version: str = VERSION, programs: str = "/usr/bin") -> None:
    """Lays the files of a driver below ``root``: libraries, programs and firmware."""
    place = root / libraries.lstrip("/")
    place.mkdir(parents=True, exist_ok=True)
    for stem, name in _LIBRARIES:
        (place / f"{stem}.{version}").write_text(stem)
        if name:
            link(place / name, f"{stem}.{version}")
    link(place / "libcuda.so", "libcuda.so.1")
    for name in ("nvidia-smi", "nvidia-debugdump"):
        write(root / programs.lstrip("/") / name)
    write(root / "lib/firmware/nvidia" / version / "gsp_ga10x.bin")


def write(path: Path, text: str = "") -> None:
    """Makes a file, and the directories that it needs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text or path.name)


def link(path: Path, target: str) -> None:
    """Makes a link in place of what is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(target)
