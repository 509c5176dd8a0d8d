"""Which files of a driver a container needs, and where they are.

Everything is looked for below one directory, the driver's root, and links are followed within it: the root of a driver
that was installed from a container is mounted somewhere on the host, and an absolute link in it means a file in it.
What is not there, and links that lead nowhere, are left out: no runtime starts a container with a mount of them.
"""

from __future__ import annotations

import errno
import os
import posixpath
import re
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from _nvplug.container.elf import read_elf

__all__ = ["DriverFile", "DriverFiles", "find_driver_files", "resolve"]

# Where drivers are, below the root that an operator names, which on most hosts is the host's own.
_ROOTS: Final = (
    "/",
    # NVIDIA's driver container.
    "/run/nvidia/driver",
    # Container-Optimized OS, as the host and as Google's mount have it.
    "/home/kubernetes/bin/nvidia",
    "/usr/local/nvidia",
    "/opt/nvidia",
    # Talos.
    "/usr/local/glibc",
)

_LIBRARY_PLACES: Final = (
    "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/lib64",
    "/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    # Debian's alternatives.
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/usr/lib/aarch64-linux-gnu/nvidia/current",
    "/usr/lib/nvidia/current",
    # Arch, openSUSE and others without multiarch.
    "/usr/lib",
    # NixOS.
    "/run/opengl-driver/lib",
)

# By these a driver is known.
_MAIN: Final = re.compile(r"lib(?:cuda|nvidia-ml)\.so\.(?:1|([0-9]+(?:\.[0-9]+)+))")
# Of the thousands of libraries of a host these are looked at.
_LOOKED_AT: Final = re.compile(r"lib(cuda|nv)|lib.*nvidia|libGLX_indirect")
# With versions of their own, and part of the driver nevertheless.
_PLATFORMS: Final = re.compile(r"libnvidia-egl-[a-z0-9]+\.so\.[0-9.]+")
# Where files have no version in their names.
_UNVERSIONED: Final = re.compile(r"lib(cuda|nvidia-[a-z]+)\.so\.[0-9]+")

_PROGRAM_PLACES: Final = (
    "/usr/local/sbin",
    "/usr/local/bin",
    "/usr/sbin",
    "/usr/bin",
    "/sbin",
    "/bin",
    "/run/current-system/sw/bin",
)
_PROGRAMS: Final = (
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
    "nvidia-debugdump",
    "nvidia-imex",
    "nvidia-imex-ctl",
    "nvidia-persistenced",
    "nvidia-smi",
)

_FIRMWARE_PLACES: Final = ("/lib/firmware", "/usr/lib/firmware", "/run/current-system/firmware")
_FIRMWARE: Final = re.compile(r"gsp.*\.bin")

# The last one is a directory: of the pipes of MPS, by its default.
_SOCKETS: Final = ("/run/nvidia-fabricmanager/socket", "/run/nvidia-persistenced/socket", "/tmp/nvidia-mps")  # noqa: S108 - NVIDIA's choice

_SHARE_PLACES: Final = (
    "/etc",
    "/usr/local/share",
    "/usr/share",
    "/run/opengl-driver/share",
    # Container-Optimized OS, for Vulkan.
    "/",
)
_SHARED: Final = (
    ("X11/xorg.conf.d", re.compile(r"10-nvidia\.conf|nvidia-drm-outputclass\.conf")),
    ("egl/egl_external_platform.d", re.compile(r"[0-9]+_nvidia_.*\.json")),
    ("glvnd/egl_vendor.d", re.compile(r"[0-9]+_nvidia\.json")),
    ("nvidia", re.compile(r"nvoptix\.bin")),
    ("vulkan/icd.d", re.compile(r"nvidia_(icd|layers)(\.\w+)?\.json")),
    ("vulkan/implicit_layer.d", re.compile(r"nvidia_layers\.json")),
)
_MODULE_PLACES: Final = ("nvidia/xorg", "xorg/modules/drivers", "xorg/modules/extensions")

_MOST_LINKS: Final = 40


class DriverFile(NamedTuple):
    """One file, or for MPS one directory, of the driver.

    Attributes:
        path: where programs expect it, in a file system whose root is the driver's.
        source: what to mount: the file itself, links resolved, below the directory that was searched.
        names: of a library, the other names by which it is asked for, such as ``libcuda.so.1``; in order.
    """

    path: str
    source: str
    names: tuple[str, ...] = ()


class DriverFiles(NamedTuple):
    """What there is of a driver, each kind in the order of its paths. Without libraries there is nothing.

    Attributes:
        root: the driver's root below the directory that was searched; ``/`` if it is that directory itself.
        version: of the libraries; ``""`` if their names do not tell.
        libraries: for one machine, each name once.
        programs: such as nvidia-smi.
        firmware: for the GPUs' system processor.
        sockets: of the driver's daemons, and the directory of MPS.
        graphics: by which OpenGL, Vulkan and X find the libraries.
    """

    root: str = "/"
    version: str = ""
    libraries: tuple[DriverFile, ...] = ()
    programs: tuple[DriverFile, ...] = ()
    firmware: tuple[DriverFile, ...] = ()
    sockets: tuple[DriverFile, ...] = ()
    graphics: tuple[DriverFile, ...] = ()


def find_driver_files(directory: str, version: str = "") -> DriverFiles:
    """Looks for the driver below ``directory``. Blocks, for some milliseconds.

    Args:
        directory: the driver's root, or a host's, as this process sees it.
        version: of the driver, as NVML says it. Of several installations the one of that version counts; where no
            file has it, the one that libcuda.so.1 leads to, in the first place that has one.
    """
    roots = [_Root(directory, where) for where in _ROOTS]
    found = [(root, number) for root in roots for number in root.versions()]
    if not found:
        return DriverFiles()
    root, number = next((each for each in found if each[1] == version), found[0])
    return DriverFiles(
        root.where,
        number,
        root.libraries(number),
        tuple(file for name in _PROGRAMS for file in root.first(f"{place}/{name}" for place in _PROGRAM_PLACES)),
        root.matching([f"{place}/nvidia/{number}" for place in _FIRMWARE_PLACES], _FIRMWARE),
        # A daemon of the host may serve a driver that was installed from a container.
        tuple(file for path in _SOCKETS for file in (root.first([path]) or roots[0].first([path]))),
        root.graphics(number),
    )


def resolve(root: str, path: str) -> str | None:
    """Follows every link of a path, as a process would whose root is ``root``. Blocks.

    Returns:
        The path of the file itself, below ``root``; None if there is none.
    """
    pending = path.split("/")[::-1]
    done: list[str] = []
    links = 0
    while pending:
        part = pending.pop()
        if part in {"", "."}:
            continue
        if part == "..":
            del done[-1:]
            continue
        done.append(part)
        try:
            target = os.readlink("/".join([root, *done]))  # noqa: PTH115 - by the hundred
        except OSError as error:
            # What is there and is no link.
            if error.errno == errno.EINVAL:
                continue
            return None
        links += 1
        if links > _MOST_LINKS:
            return None
        del done[0 if target.startswith("/") else -1 :]
        pending += target.split("/")[::-1]
    return "/" + "/".join(done)


class _Root:
    """The root of a driver: paths in it, and what is there."""

    def __init__(self, directory: str, where: str) -> None:
        self.where = where
        self._directory = directory
        self._base = resolve(directory, where)

    def source(self, path: str) -> str | None:
        """The file itself, below the directory that is searched; None if there is none."""
        if self._base is None:
            return None
        inner = resolve(self._directory + self._base, path)
        # What is no text can be said neither to the kubelet nor in a document, and would keep back all the rest.
        return posixpath.join(self._base, inner[1:]) if inner is not None and inner.isprintable() else None

    def entries(self, place: str) -> list[str]:
        """The names in a directory; none if there is none."""
        source = self.source(place)
        if source is None:
            return []
        try:
            names = os.listdir(self._directory + source)  # noqa: PTH208 - names are what is wanted
        except OSError:
            return []
        return sorted(name for name in names if name.isprintable())

    def first(self, paths: Iterable[str]) -> list[DriverFile]:
        """The first that there is, if any."""
        sources = ((path, self.source(path)) for path in paths)
        return [DriverFile(path, source) for path, source in sources if source is not None][:1]

    def matching(self, places: Iterable[str], pattern: re.Pattern[str]) -> tuple[DriverFile, ...]:
        """Of each name that fits ``pattern`` the first that there is."""
        found: dict[str, DriverFile] = {}
        for place in places:
            for name in self.entries(place):
                path = posixpath.join(place, name)
                if pattern.fullmatch(name) and name not in found and (source := self.source(path)) is not None:
                    found[name] = DriverFile(path, source)
        return tuple(sorted(found.values()))

    def versions(self) -> Iterator[str]:
        """Of which drivers there are libraries; ``""`` stands for one whose files do not tell."""
        for place in _LIBRARY_PLACES:
            for name in self.entries(place):
                if _MAIN.fullmatch(name) and (source := self.source(posixpath.join(place, name))) is not None:
                    match = _MAIN.fullmatch(posixpath.basename(source))
                    if match is not None:
                        yield match[1] or ""

    def libraries(self, version: str) -> tuple[DriverFile, ...]:
        """Those of one version."""
        names: dict[str, set[str]] = {}
        for place in _LIBRARY_PLACES:
            for directory in (place, f"{place}/vdpau"):
                for name in self.entries(directory):
                    if _LOOKED_AT.match(name) and (source := self.source(posixpath.join(directory, name))) is not None:
                        names.setdefault(source, set()).add(name)
        kept: dict[str, DriverFile] = {}
        machine = None
        # The main ones first: they decide for which machine the others are to be.
        for source in sorted(names, key=lambda each: _MAIN.fullmatch(posixpath.basename(each)) is None):
            name = posixpath.basename(source)
            if name in kept or not _belongs(name, version) or not os.path.isfile(self._directory + source):  # noqa: PTH113 - no need of a Path
                continue
            elf = read_elf(self._directory + source)
            if elf is not None:
                machine = machine or elf.machine
                if elf.machine != machine:
                    continue
                names[source].add(elf.soname)
            kept[name] = DriverFile(
                source.removeprefix(self._base or "") if self._base != "/" else source,
                source,
                tuple(sorted(names[source] - {name, ""})),
            )
        return tuple(sorted(kept.values()))

    def graphics(self, version: str) -> tuple[DriverFile, ...]:
        """What leads to the libraries for graphics."""
        found = [
            # Nobody looks for a /vulkan.
            file._replace(path=f"/etc{file.path}") if file.path.startswith("/vulkan/") else file
            for part, pattern in _SHARED
            for file in self.matching([posixpath.join(place, part) for place in _SHARE_PLACES], pattern)
        ]
        modules = [f"{place}/{part}" for place in _LIBRARY_PLACES for part in _MODULE_PLACES]
        found += self.matching(modules, re.compile(rf"nvidia_drv\.so|libglxserver_nvidia\.so\.{re.escape(version)}"))
        return tuple(sorted(found))


def _belongs(name: str, version: str) -> bool:
    """Whether a library is part of the driver of a version."""
    if not version:
        return _UNVERSIONED.fullmatch(name) is not None
    return name.endswith(f".so.{version}") or _PLATFORMS.fullmatch(name) is not None
