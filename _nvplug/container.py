"""What a container is given: pure functions from devices and configuration to the answer of Allocate."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from _nvplug.config import Config
from _nvplug.resources import Device

__all__ = ["ContainerEdits", "DeviceNode", "edits_for"]


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A character device that a container can open; ``permissions`` are of its device cgroup: r, w, m."""

    container_path: str
    host_path: str
    permissions: str = "rw"


@dataclass(frozen=True, slots=True)
class ContainerEdits:
    """Everything that is added to one container."""

    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    device_nodes: tuple[DeviceNode, ...] = ()


def edits_for(devices: Sequence[Device], control_nodes: Sequence[str], config: Config) -> ContainerEdits:
    """What a container with these devices gets.

    Args:
        devices: in the order in which the container is to see them.
        control_nodes: paths of the device nodes that all GPUs share.
        config: chooses the form.
    """
    by_index = config.device_id_strategy == "index"
    ids = dict.fromkeys(device.index if by_index else device.uuid for device in devices)
    environment = MappingProxyType({"NVIDIA_VISIBLE_DEVICES": ",".join(ids)})
    if not config.pass_device_specs:
        return ContainerEdits(environment)
    paths = dict.fromkeys([*control_nodes, *(path for device in devices for path in _paths(device))])
    nodes = tuple(DeviceNode(path, posixpath.join(config.dev_root, path.lstrip("/"))) for path in paths)
    return ContainerEdits(environment, nodes)


def _paths(device: Device) -> Iterator[str]:
    """The nodes of one device: its GPU's, and of a MIG device those that grant access to its two instances."""
    if device.gpu.minor is not None:
        yield f"/dev/nvidia{device.gpu.minor}"
    if device.mig is not None:
        for minor in (device.mig.gpu_instance_minor, device.mig.compute_instance_minor):
            if minor is not None:
                yield f"/dev/nvidia-caps/nvidia-cap{minor}"
