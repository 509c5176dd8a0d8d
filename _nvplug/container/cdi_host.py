"""What of a host goes into its CDI documents: looked for, in files that answer at once."""

from __future__ import annotations

import functools
import mmap
import os
import posixpath
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from _nvplug.config import Config
from _nvplug.container.cdi import CONTROL_NODES, HOOKS, CharacterDevice, Hooks, Host
from _nvplug.container.driver_files import DriverFiles, find_driver_files
from _nvplug.container.extras import driver_seen
from _nvplug.container.nodes import node_paths
from _nvplug.resources import Device

__all__ = ["look"]

# Of NVIDIA's toolkit, the older program and the newer one, where packages put them.
_TOOLKITS: Final = ("/usr/bin/nvidia-ctk", "/usr/bin/nvidia-cdi-hook")

# Every toolkit that knows CDI has these hooks.
_FIRST_HOOKS: Final = frozenset({"create-symlinks", "update-ldcache"})

_DISPLAY: Final = re.compile(r"(card|renderD)[0-9]+")
_TRIPLET: Final = re.compile(r"/([a-z0-9_]+-linux-gnu)(/|$)")


def look(
    devices: Sequence[Device], version: str, config: Config, further: Sequence[str] = (), *, root: str = ""
) -> Host:
    """Looks at what there is now. Blocks, for some ten milliseconds.

    Args:
        devices: whose nodes are looked for.
        version: of the driver, as NVML says it.
        config: says where the host's files are, and where this process sees them.
        further: paths of device nodes that are looked for besides.
        root: what stands in front of every path, for tests.
    """
    seen = driver_seen(config, root)
    files = find_driver_files(seen or "/", version)
    if "disable-ipc-discoverer" in config.cdi_feature_flags:
        files = files._replace(sockets=())
    in_container = seen == (root + config.driver_root_ctr_path).rstrip("/")
    # As with NVIDIA's plugin: a /dev in the driver's root is preferred to this process's own.
    roots = [seen, root] if in_container else [root + config.dev_root, root]
    host_root: str | None = root
    if in_container:
        host_root = seen if config.driver_root == "/" else None
    displays = {device.gpu.pci: tuple(_displays(device.gpu.pci, root)) for device in devices if device.gpu.pci}
    paths = [*CONTROL_NODES, *(path for device in devices for path in node_paths(device))]
    paths += [*(path for each in displays.values() for path in each), *further]
    nodes = {path: node for path in paths if (node := _node(path, roots)) is not None}
    return Host(
        files,
        nodes,
        {pci: tuple(path for path in each if path in nodes) for pci, each in displays.items()},
        _hooks(config, host_root),
        _triplet(files),
    )


def _node(path: str, roots: Iterable[str]) -> CharacterDevice | None:
    for root in roots:
        try:
            status = os.stat(root.rstrip("/") + path)  # noqa: PTH116 - by the dozen
        except OSError:
            continue
        if stat.S_ISCHR(status.st_mode):
            numbers = os.major(status.st_rdev), os.minor(status.st_rdev)
            return CharacterDevice(*numbers, stat.S_IMODE(status.st_mode), status.st_gid)
    return None


def _displays(pci: str, root: str) -> Iterator[str]:
    """The paths of a GPU's nodes below /dev/dri."""
    for name in sorted(_entries(f"{root}/sys/bus/pci/devices/{pci}/drm")):
        if _DISPLAY.fullmatch(name):
            yield f"/dev/dri/{name}"


def _entries(directory: str) -> list[str]:
    try:
        return os.listdir(directory)  # noqa: PTH208 - names are what is wanted
    except OSError:
        return []


def _triplet(files: DriverFiles) -> str:
    found = next((match for file in files.libraries if (match := _TRIPLET.search(posixpath.dirname(file.path)))), None)
    return found[1] if found else f"{os.uname().machine}-linux-gnu"


def _hooks(config: Config, host_root: str | None) -> Hooks | None:
    """NVIDIA's toolkit on the host, and what of it is to be used.

    Args:
        config: names the program, and what is not wanted of it.
        host_root: where this process sees the host's root; None if it does not.
    """
    unwanted = frozenset(config.cdi_disable_hooks)
    asked = config.nvidia_cdi_hook_path
    if "all" in unwanted or not asked.startswith("/"):
        return None
    if host_root is None:
        # Whoever names another place than the usual one knows of a program there.
        return Hooks(asked, frozenset(HOOKS) - unwanted) if asked not in _TOOLKITS else None
    for program in _TOOLKITS if asked in _TOOLKITS else [asked]:
        try:
            status = os.stat(host_root.rstrip("/") + program)  # noqa: PTH116 - the first error is the answer
            known = _known_hooks(host_root.rstrip("/") + program, status.st_ino, status.st_mtime_ns)
        except OSError:
            continue
        return Hooks(program, known - unwanted)
    return None


@functools.lru_cache(maxsize=4)
def _known_hooks(file: str, _inode: int, _changed: int) -> frozenset[str]:
    """Which hooks a program has, by the words in it: older ones fail on those that they do not know.

    Raises:
        OSError: it cannot be read.
    """
    with Path(file).open("rb") as opened:
        if opened.read(4) != b"\x7fELF":
            # A script around the program.
            return frozenset(HOOKS)
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _FIRST_HOOKS | {hook for hook in HOOKS if content.find(hook.encode()) >= 0}
