"""The driver's files for a container that no runtime of NVIDIA and no CDI document gives them.

Nobody runs ldconfig in such a container, so a library must lie where its dynamic loader looks anyway, under each name
that is asked for. That is in the directories that are built into the loader. Which ones depends on the image, that is
to say on its distribution, which nobody knows here; so those of both families get every library. Not chosen:

- LD_LIBRARY_PATH, which would take the place of the image's own, and be lost wherever a program is started without it;
- the container directory of Google's plugin alone, /usr/local/nvidia: images that are made from NVIDIA's have it in
  their LD_LIBRARY_PATH, and others need a script that sets it;
- a file in /etc/ld.so.conf.d, which only ldconfig reads, or a cache of our own over /etc/ld.so.cache, which would hide
  the image's libraries.

Where the driver has a directory to itself (Container-Optimized OS), that is mounted as well, whole, as Google's plugin
does: what is written into it later, such as plugins of NCCL, is there, too.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator
from typing import Final

from _nvplug.config import Config
from _nvplug.container.driver_files import DriverFile, DriverFiles, find_driver_files
from _nvplug.container.edits import Mount
from _nvplug.happenings import ConfigUnmet, DriverFilesFound, Happening

__all__ = ["driver_mounts", "find_driver_mounts"]

# Built into the dynamic loader of Debian and its descendants, and into that of Red Hat's, SUSE's and others.
_LOADED_FROM: Final = ("/usr/lib/{machine}-linux-gnu", "/usr/lib64")

# Where there is a driver and nothing else; the others of driver_files are roots with an operating system.
_APART: Final = frozenset({"/home/kubernetes/bin/nvidia", "/usr/local/nvidia", "/opt/nvidia"})

# On every PATH.
_PROGRAMS: Final = "/usr/bin"


def find_driver_mounts(config: Config, version: str, root: str = "/") -> tuple[tuple[Mount, ...], Happening]:
    """Looks for the driver's files. Blocks, for some milliseconds.

    Args:
        config: says where.
        version: of the driver, as NVML says it.
        root: the root of this process.

    Returns:
        The mounts, and what there is to say.
    """
    base = root.rstrip("/")
    driver = f"{base}{config.driver_root_ctr_path}".rstrip("/")
    seen = driver if os.path.isdir(driver) else base  # noqa: PTH112 - nothing is made of it
    named, host = config.direct_host_path, config.driver_root.rstrip("/")
    if named:
        # A path of the host, of which this process may see the driver's root alone.
        seen = f"{seen}{named.removeprefix(host)}" if named.startswith(f"{host}/") else f"{base}{named}"
    files = find_driver_files(seen or "/", version)
    where = named or posixpath.join(config.driver_root, files.root.lstrip("/"))
    mounts = driver_mounts(files, config, os.uname().machine)
    if not files.libraries:
        remark: Happening = ConfigUnmet(
            "device-list-strategy",
            f"direct: no driver was found in {where}, so containers are given"
            f"{' that directory and' if named else ''} device nodes, and no libraries",
        )
    else:
        remark = DriverFilesFound(where, files.version or version, len(files.libraries), len(files.programs))
    return mounts, remark


def driver_mounts(files: DriverFiles, config: Config, machine: str) -> tuple[Mount, ...]:
    """From files to mounts: without I/O, each place in the container once, in the order of the files.

    Args:
        files: as they were found in the driver's root, or in the directory that the operator names.
        config: says where that is on the host.
        machine: as uname(2) says it: ``x86_64`` or ``aarch64``.
    """
    host = config.direct_host_path or config.driver_root
    mounts: dict[str, Mount] = {}
    whole = config.direct_host_path or (posixpath.join(host, files.root[1:]) if files.root in _APART else "")
    if whole:
        mounts[config.direct_container_path] = Mount(config.direct_container_path, whole)
    for file in files.libraries:
        for path in _library_paths(file, machine):
            mounts.setdefault(path, Mount(path, posixpath.join(host, file.source[1:])))
    for file in (*files.programs, *files.graphics):
        path = f"{_PROGRAMS}/{posixpath.basename(file.path)}" if file in files.programs else file.path
        mounts.setdefault(path, Mount(path, posixpath.join(host, file.source[1:])))
    return tuple(mounts.values())


def _library_paths(file: DriverFile, machine: str) -> Iterator[str]:
    names = file.names or (posixpath.basename(file.path),)
    # Not the loader's business: libvdpau looks there.
    below = "vdpau/" if posixpath.basename(posixpath.dirname(file.path)) == "vdpau" else ""
    for place in _LOADED_FROM:
        for name in names:
            yield f"{place.format(machine=machine)}/{below}{name}"
