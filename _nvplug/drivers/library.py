"""Finding and loading libnvidia-ml.so.1, wherever a driver was installed."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from _nvplug.errors import LibraryNotFoundError

__all__ = ["SONAME", "Library", "candidates", "load"]

SONAME: Final = "libnvidia-ml.so.1"

# Where NVIDIA's plugin looks, in its order: whoever changes to this plugin gets the same library.
_REFERENCE: Final = (
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
)

# Where it does not, and drivers are nevertheless.
_MORE: Final = (
    # Debian's alternatives: the usual place holds an absolute link, which leads out of a mounted root.
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu/nvidia/current",
    "usr/lib/nvidia/current",
    # Arch, openSUSE and others without multiarch.
    "usr/lib",
    "opt/nvidia/lib64",
    # Container-Optimized OS, seen from the host and through Google's mount.
    "home/kubernetes/bin/nvidia/lib64",
    "usr/local/nvidia/lib64",
    # NVIDIA's driver container, where nobody pointed --driver-root-ctr-path at it.
    "run/nvidia/driver/usr/lib/x86_64-linux-gnu",
    "run/nvidia/driver/usr/lib/aarch64-linux-gnu",
    "run/nvidia/driver/usr/lib64",
    # NixOS, Talos, WSL2.
    "run/opengl-driver/lib",
    "usr/local/glibc/usr/lib",
    "usr/lib/wsl/lib",
)


@dataclass(frozen=True, slots=True)
class Library:
    """The library, loaded.

    Attributes:
        path: of the file itself, links resolved.
        handle: for ``ctypes``.
    """

    path: str
    handle: ctypes.CDLL


def candidates(root: str, library_path: str = "") -> tuple[str, ...]:
    """Where the library may be, best first.

    Args:
        root: the driver's root as this process sees it.
        library_path: the value of LD_LIBRARY_PATH. An operator who sets it wants that library, so it goes
            before what is installed in ``/``, as the dynamic loader would have it; but after ``root``, an
            option of this very program, while images of CUDA set LD_LIBRARY_PATH on everybody's behalf.
    """
    directories = [
        *(Path(root, place) for place in _REFERENCE),
        *(Path(entry) for entry in library_path.split(":") if entry.startswith("/")),
        *(Path("/", place) for place in _REFERENCE),
        *(Path(root, place) for place in _MORE),
        *(Path("/", place) for place in _MORE),
    ]
    return tuple(dict.fromkeys(str(directory / SONAME) for directory in directories))


def load(root: str, library_path: str = "") -> Library:
    """Loads the first library that can be loaded. Blocks; looks at about 40 paths if there is none.

    The file is opened by its real, versioned name: the dynamic loader takes one soname, or one path, for one
    library, and would hand out the old one after the driver was upgraded.

    Args:
        root: as for ``candidates``.
        library_path: the same.

    Raises:
        LibraryNotFoundError: none can. Every path tried is in its message, and what the dynamic loader said.
    """
    missing, refused = [], []
    for path in candidates(root, library_path):
        try:
            real = os.path.realpath(path, strict=True)
            return Library(real, ctypes.CDLL(real))
        except (FileNotFoundError, NotADirectoryError):
            missing.append(str(Path(path).parent))
        except OSError as error:
            # Of another architecture, unreadable or half installed. The next one may do.
            refused.append(_explanation(error, path))
    try:
        # The loader's own places: its cache, and what ld.so.conf names.
        handle = ctypes.CDLL(SONAME)
        real = _file_of(handle)
        if os.access(real, os.F_OK):
            return Library(real, handle)
        # It is in this process from earlier, and the loader looks no further than that.
        refused.append(f"{SONAME}: {real} was loaded, and has been removed since")
    except OSError as error:
        refused.append(_explanation(error, SONAME))
    if not Path(root).is_dir():
        missing = [root, *(place for place in missing if not Path(place).is_relative_to(root))]
    raise LibraryNotFoundError(
        f"{SONAME} not found: {'; '.join(refused)}; not in {', '.join(missing)}",
        remedy="install the NVIDIA driver on this node, or, in a container, mount the driver's root and point"
        " --driver-root-ctr-path at it, or run with the nvidia runtime class",
    )


class _DlInfo(ctypes.Structure):
    """What dladdr(3) says of an address."""

    _fields_ = (
        ("dli_fname", ctypes.c_char_p),
        ("dli_fbase", ctypes.c_void_p),
        ("dli_sname", ctypes.c_char_p),
        ("dli_saddr", ctypes.c_void_p),
    )


def _file_of(handle: ctypes.CDLL) -> str:
    """The file that the dynamic loader chose for a soname; "" for one that has none of NVML's functions."""
    info = _DlInfo()
    function = getattr(handle, "nvmlInit_v2", None)
    if function is None or not ctypes.CDLL(None).dladdr(function, ctypes.byref(info)):
        return ""
    return os.path.realpath(os.fsdecode(info.dli_fname))


def _explanation(error: OSError, name: str) -> str:
    """What the dynamic loader said of a library: in a frozen program, PyInstaller's own text stands in front of it."""
    text = str(error.__cause__ or error)
    return text if text.startswith(f"{name}:") else f"{name}: {text}"
