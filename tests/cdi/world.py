"""A host with a driver and GPUs, and the root of a container, both made for a test."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path
from typing import Final

from driver_tree import DEBIAN, VERSION, lay

__all__ = ["NODES", "make_container", "make_host", "make_nodes"]

NODES: Final = {
    "nvidia0": (1, 3),
    "nvidia1": (1, 5),
    "nvidiactl": (1, 7),
    "nvidia-uvm": (1, 8),
    "nvidia-caps/nvidia-cap19": (1, 9),
    "nvidia-caps/nvidia-cap20": (1, 3),
}
"""With the numbers of devices that every kernel has, so that a container can open them: null, zero, full, random."""

_LIBRARIES: Final = {
    "libcuda.so": "libcuda.so.1",
    "libnvidia-ml.so": "libnvidia-ml.so.1",
    "libnvidia-gpucomp.so": f"libnvidia-gpucomp.so.{VERSION}",
}
_COMPILE_LIMIT: Final = 60.0


def make_host(root: Path, libraries: str = DEBIAN) -> None:
    """Lays a driver with libraries that can be loaded, and the device nodes of two GPUs, one with a MIG device.

    libcuda needs libnvidia-gpucomp, which it asks for by its versioned name, as the real one does.

    Raises:
        PermissionError: device nodes can only be made by root.
    """
    lay(root, libraries)
    place = root / libraries[1:]
    for stem, soname in reversed(_LIBRARIES.items()):
        needed = [place / f"libnvidia-gpucomp.so.{VERSION}"] if stem == "libcuda.so" else []
        _compile(place / f"{stem}.{VERSION}", "-shared", "-nostdlib", f"-Wl,--no-as-needed,-soname,{soname}", *needed)
    make_nodes(root)


def make_nodes(root: Path) -> None:
    """Makes the device nodes of a host.

    Raises:
        PermissionError: only root can.
    """
    for name, numbers in NODES.items():
        path = root / "dev" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mknod(path, stat.S_IFCHR, os.makedev(*numbers))
        path.chmod(0o666)


def make_container(root: Path) -> None:
    """Makes a root with /probe, a dynamic loader and its cache, and nothing else."""
    for name in ("dev", "etc", "proc", "sys", "tmp", "run"):
        (root / name).mkdir(parents=True)
    _compile(root / "probe", "-Wall", "-Wextra", "-Werror", source=Path(__file__).with_name("probe.c"))
    listed = subprocess.run(["ldd", root / "probe"], check=True, text=True, capture_output=True).stdout
    for word in listed.split():
        if word.startswith("/"):
            file = root / word[1:]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(Path(word).read_bytes())
            file.chmod(0o755)
    # As images have it, without the libraries that are not in the image.
    subprocess.run(["ldconfig", "-r", root], check=True, capture_output=True, timeout=_COMPILE_LIMIT)


def _compile(file: Path, *options: str | Path, source: Path | None = None) -> None:
    command = ["cc", "-o", file, *([source] if source else ["-x", "c", "/dev/null", "-x", "none"]), *options]
    subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_LIMIT)
