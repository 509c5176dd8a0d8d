"""From devices and configuration to the answer of Allocate: pure functions."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from types import MappingProxyType

from _nvplug.config import Config
from _nvplug.container.edits import ContainerEdits, DeviceNode
from _nvplug.container.nodes import node_paths
from _nvplug.resources import Device

__all__ = ["edits_for"]


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
    paths = dict.fromkeys([*control_nodes, *(path for device in devices for path in node_paths(device))])
    nodes = tuple(DeviceNode(path, posixpath.join(config.dev_root, path.lstrip("/"))) for path in paths)
    return ContainerEdits(environment, nodes)
