"""What a node offers: resources and their devices, out of hardware and health."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import trio

from _nvplug.errors import UnknownDeviceError, UnusableDeviceError
from _nvplug.hardware import Gpu, Hardware
from _nvplug.health import Health
from _nvplug.latest import Latest

__all__ = ["GPU_RESOURCE", "Device", "Offer", "Resource", "chosen", "keep_offer", "next_offer"]

GPU_RESOURCE = "nvidia.com/gpu"


@dataclass(frozen=True, slots=True)
class Device:
    """One thing that a container can be allotted.

    Attributes:
        id: unique over all resources of the node, and the same after a restart; here the GPU's UUID.
        gpu: where it lives.
        trouble: why it is unhealthy; ``""`` if it is healthy.
    """

    id: str
    gpu: Gpu
    trouble: str = ""

    @property
    def healthy(self) -> bool:
        """Whether new containers can be given it."""
        return not self.trouble


@dataclass(frozen=True, slots=True)
class Resource:
    """What the kubelet knows under one name.

    Attributes:
        name: an extended resource, such as ``nvidia.com/gpu``.
        devices: in index order.
        departed: ids that were offered before and are not any more, each with the reason.
        control_nodes: the device nodes that every container with a device needs, as paths.
    """

    name: str
    devices: tuple[Device, ...] = ()
    departed: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    control_nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Offer:
    """Everything that the kubelet is told about a node, and answered from."""

    resources: tuple[Resource, ...] = ()


def next_offer(previous: Offer, hardware: Hardware, health: Health) -> Offer:
    """The offer that follows ``previous``.

    A resource begins with the first GPU that is seen: a node without GPUs must not get a ``nvidia.com/gpu: 0`` that the
    kubelet would keep for ever. Once begun it goes on, with an empty list if need be.
    """
    gpus = sorted(hardware.gpus, key=lambda gpu: gpu.index)
    devices = tuple(_device(gpu, health) for gpu in gpus)
    before = previous.resources[0] if previous.resources else None
    if before is None and not devices:
        return previous
    return Offer((Resource(GPU_RESOURCE, devices, _departed(before, devices), hardware.control_nodes),))


def _device(gpu: Gpu, health: Health) -> Device:
    verdict = health.of(gpu.uuid)
    return Device(gpu.uuid, gpu, verdict.reason if verdict else "")


def _departed(before: Resource | None, devices: tuple[Device, ...]) -> Mapping[str, str]:
    if before is None:
        return MappingProxyType({})
    gone = dict(before.departed) | {device.id: "it is no longer among the node's GPUs" for device in before.devices}
    for device in devices:
        gone.pop(device.id, None)
    return MappingProxyType(gone)


def chosen(resource: Resource, sent: Resource | None, ids: Iterable[str]) -> tuple[Device, ...]:
    """The devices that an allocation names, each once, in index order.

    Args:
        resource: what is offered now.
        sent: what the kubelet was told last; it can only be held to that.
        ids: device ids in any order, as the kubelet sends them.

    Raises:
        UnknownDeviceError: an id that was never offered.
        UnusableDeviceError: a device that is gone, or that the kubelet was told is unhealthy.
    """
    wanted = set(ids)
    devices = tuple(device for device in resource.devices if device.id in wanted)
    for missing in sorted(wanted - {device.id for device in devices}):
        if missing in resource.departed:
            raise UnusableDeviceError(
                f"{resource.name}: device {missing} cannot be allocated: {resource.departed[missing]}",
                remedy="create the pod again: the kubelet will choose another device",
            )
        # Cut, since nobody bounds what may be asked for, and an answer has to fit into headers.
        raise UnknownDeviceError(
            f"{resource.name}: there is no device {missing[:100]!r}",
            remedy="ask for ids that ListAndWatch listed",
        )
    known_bad = {device.id for device in sent.devices if not device.healthy} if sent else set()
    for device in devices:
        if device.trouble and device.id in known_bad:
            raise UnusableDeviceError(
                f"{resource.name}: device {device.id} cannot be allocated: {device.trouble}",
                remedy="create the pod again: the kubelet will choose another device",
            )
    return devices


async def keep_offer(hardware: Latest[Hardware], health: Latest[Health], offer: Latest[Offer]) -> None:
    """The offer task: whatever changes, ``offer`` follows."""

    def renew(_changed: object) -> None:
        offer.set(next_offer(offer.value, hardware.value, health.value))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(hardware.follow, renew)
        nursery.start_soon(health.follow, renew)
