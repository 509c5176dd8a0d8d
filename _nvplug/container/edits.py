"""What can be added to one container, as data."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

__all__ = ["ContainerEdits", "DeviceNode", "Mount", "on_host"]


class DeviceNode(NamedTuple):
    """A character device that a container can open; ``permissions`` are of its device cgroup: r, w, m."""

    container_path: str
    host_path: str
    permissions: str = "rw"


class Mount(NamedTuple):
    """A file or directory of the host that a container sees."""

    container_path: str
    host_path: str
    read_only: bool = True


@dataclass(frozen=True, slots=True)
class ContainerEdits:
    """Everything that is added to one container.

    Attributes:
        environment: variables with their values.
        device_nodes: in the order in which they are made.
        mounts: in the order in which they are made.
        annotations: of the container, for its runtime.
        cdi_devices: fully qualified names, which the runtime looks up in the node's CDI documents.
    """

    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    device_nodes: tuple[DeviceNode, ...] = ()
    mounts: tuple[Mount, ...] = ()
    annotations: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    cdi_devices: tuple[str, ...] = ()


def on_host(root: str, path: str) -> str:
    """Where the host has what a path names below a root of the host's."""
    return posixpath.join(root, path.lstrip("/"))
