"""From devices, configuration and facts to the answer of Allocate: a pure function.

The strategies, which can be combined, and what they are for:

- ``envvar``: NVIDIA's runtime reads NVIDIA_VISIBLE_DEVICES, and does the rest.
- ``volume-mounts``: the same, told by mounts, which a pod cannot make up as it can the variable.
- ``cdi-annotations``, ``cdi-cri``: the runtime looks up names in the node's CDI documents. As annotations for runtimes
  that know CDI by these alone, as a field of the CRI for kubelets from 1.29 on.
- ``direct``: nodes, libraries and programs themselves. No runtime has to know anything of NVIDIA.

The first four give what NVIDIA's plugin gives, in its order; but each thing once, and the same for the same question.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Final

from _nvplug.config import Config
from _nvplug.container.cdi_names import ALL, GPU, IMEX_CHANNEL, annotation_key, device_name, qualified
from _nvplug.container.edits import ContainerEdits, DeviceNode, Mount, on_host
from _nvplug.container.extras import imex_path
from _nvplug.container.facts import NodeFacts
from _nvplug.container.nodes import node_paths
from _nvplug.errors import UnusableDeviceError
from _nvplug.resources import Device

__all__ = ["edits_for"]

# Where NVIDIA's runtime looks for devices that are told by mounts.
_MOUNTED_DEVICES: Final = "/var/run/nvidia-container-devices"

_SWITCHES: Final = (
    ("gdrcopy_enabled", "NVIDIA_GDRCOPY"),
    ("gds_enabled", "NVIDIA_GDS"),
    ("mofed_enabled", "NVIDIA_MOFED"),
)


def edits_for(
    devices: Sequence[Device],
    control_nodes: Sequence[str],
    config: Config,
    facts: NodeFacts = NodeFacts(),  # noqa: B008 - frozen
) -> ContainerEdits:
    """What a container with these devices gets.

    Args:
        devices: in the order in which the container is to see them.
        control_nodes: paths of the device nodes that all GPUs share.
        config: chooses the form.
        facts: what else there is on the node.

    Raises:
        UnusableDeviceError: an IMEX channel that is required does not exist.
    """
    if config.imex_required and facts.imex_channels != config.imex_channel_ids:
        raise UnusableDeviceError(
            "the IMEX channel that is required (imex.required) does not exist: there is no "
            + ", ".join(imex_path(each) for each in config.imex_channel_ids if each not in facts.imex_channels),
            remedy="load the kernel module nvidia with NVreg_CreateImexChannel0=1, or leave imex.required out",
        )
    by_index = config.device_id_strategy == "index"
    ids = tuple(dict.fromkeys(device.index if by_index else device.uuid for device in devices))
    strategies = set(config.device_list_strategy)
    names = _cdi_names(ids, facts) if ids and strategies & {"cdi-annotations", "cdi-cri"} else ()
    return ContainerEdits(
        MappingProxyType(_environment(ids, strategies, config, facts)),
        _nodes(devices, control_nodes, strategies, config, facts),
        _mounts(ids, strategies, config, facts),
        MappingProxyType(
            {annotation_key(config.cdi_annotation_prefix, devices[0].uuid): ",".join(names)}
            if names and "cdi-annotations" in strategies
            else {}
        ),
        names if "cdi-cri" in strategies else (),
    )


def _environment(ids: Sequence[str], strategies: set[str], config: Config, facts: NodeFacts) -> dict[str, str]:
    environment = {}
    if strategies != {"direct"}:
        # Words to NVIDIA's runtime.
        environment.update({variable: "enabled" for field, variable in _SWITCHES if getattr(config, field)})
    if "envvar" in strategies:
        environment["NVIDIA_VISIBLE_DEVICES"] = ",".join(ids)
        if facts.imex_channels:
            environment["NVIDIA_IMEX_CHANNELS"] = ",".join(facts.imex_channels)
    if "volume-mounts" in strategies:
        environment["NVIDIA_VISIBLE_DEVICES"] = _MOUNTED_DEVICES
    return environment


def _cdi_names(ids: Sequence[str], facts: NodeFacts) -> tuple[str, ...]:
    return (
        *(qualified(GPU, device_name(each)) for each in ids),
        *(qualified(IMEX_CHANNEL, channel) for channel in facts.imex_channels),
        # A name that no document has would keep the container from starting.
        *(qualified(extra.device_class, ALL) for extra in facts.extras),
    )


def _nodes(
    devices: Sequence[Device], control_nodes: Sequence[str], strategies: set[str], config: Config, facts: NodeFacts
) -> tuple[DeviceNode, ...]:
    direct = "direct" in strategies
    if not direct and not (config.pass_device_specs and strategies & {"envvar", "volume-mounts"}):
        return ()
    paths = [*control_nodes, *(path for device in devices for path in node_paths(device))]
    paths += [imex_path(channel) for channel in facts.imex_channels]
    if direct:
        paths += [path for extra in facts.extras for path in extra.nodes]
    return tuple(DeviceNode(path, on_host(config.dev_root, path)) for path in dict.fromkeys(paths))


def _mounts(ids: Sequence[str], strategies: set[str], config: Config, facts: NodeFacts) -> tuple[Mount, ...]:
    mounts: dict[str, Mount] = {}
    if "volume-mounts" in strategies:
        told = [*ids, *(f"imex/{channel}" for channel in facts.imex_channels)]
        # What is mounted does not matter: NVIDIA's runtime reads the names.
        for path in (f"{_MOUNTED_DEVICES}/{each}" for each in told):
            mounts[path] = Mount(path, "/dev/null", read_only=False)
    if "direct" in strategies:
        for mount in facts.driver_mounts:
            mounts.setdefault(mount.container_path, mount)
        for path in (path for extra in facts.extras for path in extra.mounts):
            mounts.setdefault(path, Mount(path, on_host(config.driver_root, path)))
    return tuple(mounts.values())
