"""What a container may need besides its GPUs: GDRCopy, GPUDirect Storage, InfiniBand, and IMEX channels.

Which files these are is what NVIDIA's plugin looks for. They come with drivers of their own, at any time: so the node
is looked at, and what is not there is left out.
"""

from __future__ import annotations

import glob
import os
import stat
from typing import Final, NamedTuple

from _nvplug.config import Config
from _nvplug.container.cdi_names import GDRCOPY, GDS, MOFED

__all__ = ["KINDS", "Extra", "driver_seen", "find_extras", "find_imex_channels", "imex_path"]


class Extra(NamedTuple):
    """One of these, as the node has it.

    Attributes:
        device_class: of its CDI name.
        nodes: character devices, by their paths in a container.
        mounts: files and directories, by their paths in the driver's root and in a container.
    """

    device_class: str
    nodes: tuple[str, ...]
    mounts: tuple[str, ...] = ()


KINDS: Final = (
    ("gdrcopy_enabled", GDRCOPY, ("/dev/gdrdrv",), ()),
    ("gds_enabled", GDS, ("/dev/nvidia-fs*",), ("/etc/cufile.json", "/run/udev")),
    ("mofed_enabled", MOFED, ("/dev/infiniband/uverbs*", "/dev/infiniband/rdma_cm"), ()),
)


def find_extras(config: Config, root: str = "/") -> tuple[Extra, ...]:
    """Those that are switched on, and of which there is a device node. Blocks.

    Args:
        config: says which, and where the driver's root is.
        root: the root of this process.
    """
    files = driver_seen(config, root)
    found = []
    for field, device_class, patterns, mounts in KINDS:
        if not getattr(config, field):
            continue
        nodes = tuple(path for pattern in patterns for path in _nodes(pattern, config, root))
        if nodes:
            there = tuple(path for path in mounts if os.path.exists(f"{files}{path}"))  # noqa: PTH110 - the same
            found.append(Extra(device_class, nodes, there))
    return tuple(found)


def driver_seen(config: Config, root: str = "/") -> str:
    """Where this process sees the driver's root, without a slash at the end: mounted, or as the host has it."""
    base = root.rstrip("/")
    mounted = f"{base}{config.driver_root_ctr_path}".rstrip("/")
    # Outside a container, or in one that has the driver's files from a runtime.
    return mounted if os.path.isdir(mounted or "/") else f"{base}{config.driver_root}".rstrip("/")  # noqa: PTH112


def find_imex_channels(config: Config, root: str = "/") -> tuple[str, ...]:
    """The ids of those IMEX channels that containers are to be given, and that there are. Blocks."""
    return tuple(channel for channel in config.imex_channel_ids if _nodes(imex_path(channel), config, root))


def imex_path(channel: str) -> str:
    """The device node of an IMEX channel."""
    return f"/dev/nvidia-caps-imex-channels/channel{channel}"


def _nodes(pattern: str, config: Config, root: str) -> list[str]:
    """The character devices that fit, in the driver's root if that has a ``dev``, else in the process's own."""
    own = root.rstrip("/")
    for base in (f"{own}{config.driver_root_ctr_path}".rstrip("/"), own):
        if not os.path.isdir(f"{base}/dev"):  # noqa: PTH112 - nothing is made of it
            continue
        found = sorted(glob.glob(f"{glob.escape(base)}{pattern}"))  # noqa: PTH207 - the same
        if nodes := [path.removeprefix(base) for path in found if _is_character_device(path)]:
            return nodes
    return []


def _is_character_device(path: str) -> bool:
    try:
        return stat.S_ISCHR(os.stat(path).st_mode)  # noqa: PTH116 - the same
    except OSError:
        return False
