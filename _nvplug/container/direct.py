"""The driver's files for a container that no runtime of NVIDIA and no CDI document gives them.

Libraries lie where the dynamic loader of any image finds them (see library_paths), programs on every PATH.

Where the driver has a directory to itself (Container-Optimized OS), that is mounted as well, whole, as Google's plugin
does: what is written into it later, such as plugins of NCCL, is there, too.
"""

from __future__ import annotations

import os
import posixpath
from typing import Final

from _nvplug.config import Config
from _nvplug.container.driver_files import DriverFiles, find_driver_files
from _nvplug.container.edits import Mount, on_host
from _nvplug.container.extras import driver_seen
from _nvplug.container.library_paths import library_paths
from _nvplug.happenings import ConfigUnmet, DriverFilesFound, Happening

__all__ = ["driver_mounts", "find_driver_mounts"]

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
    base, host = root.rstrip("/"), config.driver_root.rstrip("/")
    seen = driver_seen(config, root)
    named = config.direct_host_path
    if named:
        # A path of the host, of which this process may see the driver's root alone.
        seen = f"{seen}{named.removeprefix(host)}" if named.startswith(f"{host}/") else f"{base}{named}"
    files = find_driver_files(seen or "/", version)
    where = named or on_host(config.driver_root, files.root).rstrip("/") or "/"
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
    whole = config.direct_host_path or (on_host(host, files.root) if files.root in _APART else "")
    if whole:
        mounts[config.direct_container_path] = Mount(config.direct_container_path, whole)
    for path, source in library_paths(files, f"{machine}-linux-gnu"):
        mounts.setdefault(path, Mount(path, on_host(host, source)))
    for file in (*files.programs, *files.graphics):
        path = f"{_PROGRAMS}/{posixpath.basename(file.path)}" if file in files.programs else file.path
        mounts.setdefault(path, Mount(path, on_host(host, file.source)))
    return tuple(mounts.values())
