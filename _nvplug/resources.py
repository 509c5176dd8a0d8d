"""What a node offers: resources and their devices, out of hardware, health and configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Protocol, TypeVar

import trio

from _nvplug.config import Config
from _nvplug.config.model import MOST_REPLICAS, NamingRule, Selection, SharedResource
from _nvplug.errors import RequestTooLargeError, UnknownDeviceError, UnusableDeviceError
from _nvplug.happenings import ConfigUnmet, DeviceExcluded, DeviceNotOffered, Happening, Publish
from _nvplug.hardware import Gpu, Hardware, MigDevice
from _nvplug.health import Health
from _nvplug.latest import Latest
from _nvplug.mig import profile_of

__all__ = ["GPU_RESOURCE", "Device", "Offer", "Resource", "chosen", "keep_offer", "next_offer"]

GPU_RESOURCE = "nvidia.com/gpu"


@dataclass(frozen=True, slots=True)
class Device:
    """One thing that a container can be allotted.

    Attributes:
        id: unique over all resources of the node, and the same after a restart: the UUID, and of a replica
            ``UUID::n``.
        gpu: where it lives.
        trouble: why it is unhealthy; ``""`` if it is healthy.
        mig: the device of the GPU that it is, or None for all of it.
        replica: which of those that share it; None if it is not shared.
    """

    id: str
    gpu: Gpu
    trouble: str = ""
    mig: MigDevice | None = None
    replica: int | None = None

    @property
    def healthy(self) -> bool:
        """Whether new containers can be given it."""
        return not self.trouble

    @property
    def uuid(self) -> str:
        """Of the GPU or MIG device, which replicas have in common."""
        return self.mig.uuid if self.mig else self.gpu.uuid

    @property
    def index(self) -> str:
        """Of the GPU, ``3``, or of the MIG device, ``3:0``."""
        return f"{self.gpu.index}:{self.mig.index}" if self.mig else str(self.gpu.index)


@dataclass(frozen=True, slots=True)
class Resource:
    """What the kubelet knows under one name.

    Attributes:
        name: an extended resource, such as ``nvidia.com/gpu``.
        devices: in index order.
        departed: ids that were offered before and are not any more, each with the reason.
        control_nodes: the device nodes that every container with a device needs, as paths.
        one_replica_only: whether a container that asks for more than one device, a replica among them, is refused.
        policy: where the devices of one container come from, if several are on one GPU: see placement/replicas.py.
    """

    name: str
    devices: tuple[Device, ...] = ()
    departed: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    control_nodes: tuple[str, ...] = ()
    one_replica_only: bool = False
    policy: str = "distributed"


@dataclass(frozen=True, slots=True)
class Offer:
    """Everything that the kubelet is told about a node, and answered from.

    Attributes:
        resources: by name.
        remarks: what is not offered, and what of the configuration cannot be met, each with the reason.
    """

    resources: tuple[Resource, ...] = ()
    remarks: tuple[Happening, ...] = ()

    @property
    def uuids(self) -> frozenset[str]:
        """Of all GPUs and MIG devices in it."""
        return frozenset(device.uuid for resource in self.resources for device in resource.devices)


def next_offer(previous: Offer, hardware: Hardware, health: Health, config: Config = Config()) -> Offer:  # noqa: B008 - frozen
    """The offer that follows ``previous``.

    A resource begins with the first device that is seen: a node without GPUs must not get a ``nvidia.com/gpu: 0`` that
    the kubelet would keep for ever. Once begun it goes on, with an empty list if need be. Where NVIDIA's plugin ends
    because one device does not fit the configuration, here the others are offered, and that one is remarked upon.
    """
    plan = _Plan(config)
    gpus = plan.selected(sorted(hardware.gpus, key=lambda gpu: gpu.index))
    shares = plan.shared(plan.named(plan.devices(gpus)))
    before = {resource.name: resource for resource in previous.resources}
    present = {gpu.uuid for gpu in hardware.gpus}
    resources = []
    for name in sorted(before.keys() | shares.keys()):
        devices = tuple(_device(device, replica, health) for device, replica in shares.get(name, ()))
        resources.append(
            Resource(
                name,
                devices,
                _departed(before.get(name), devices, present),
                hardware.control_nodes,
                config.time_slicing.fail_requests_greater_than_one
                and any(each.replica is not None for each in devices),
                config.shared_devices_allocation_policy,
            )
        )
    return Offer(tuple(resources), tuple(plan.remarks))


def _device(device: Device, replica: int | None, health: Health) -> Device:
    device_id = device.uuid if replica is None else f"{device.uuid}::{replica}"
    return Device(device_id, device.gpu, _trouble(device, health), device.mig, replica)


def _trouble(device: Device, health: Health) -> str:
    """What is wrong with a device, and so with each of its replicas."""
    mig = device.mig
    verdict = health.of(device.gpu.uuid, mig.gpu_instance, mig.compute_instance) if mig else health.of(device.gpu.uuid)
    return verdict.reason if verdict else ""


def _shape(device: Device) -> str:
    """What devices of one kind have in common: the MIG profile; ``""`` for a whole GPU."""
    return str(profile_of(device.gpu, device.mig)) if device.mig else ""


def _references(device: Device) -> tuple[str, ...]:
    """What a device is called in the configuration."""
    if device.mig is None:
        return device.index, device.uuid
    # The last one is the UUID that drivers before 470 give it.
    legacy = f"MIG-{device.gpu.uuid}/{device.mig.gpu_instance}/{device.mig.compute_instance}"
    return device.index, device.uuid, legacy


# In a DGX Station, beside the GPUs that are meant. NVIDIA's plugin does not offer them either.
_DISPLAYS: Final = frozenset({"DGX Display", "NVIDIA DGX Display"})

_GPU_NAMES: Final = (NamingRule("*", GPU_RESOURCE),)


class _Plan:
    """From GPUs to names and replicas, step by step; ``remarks`` gathers what falls by the wayside."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.remarks: list[Happening] = []

    def selected(self, gpus: Sequence[Gpu]) -> list[Gpu]:
        """Those that the configuration leaves."""
        selection = self._config.selection
        self._unmatched(selection, gpus)
        chosen = []
        for gpu in gpus:
            excluding = next((each for each in selection.exclude if each.matches(gpu)), None)
            if excluding is not None:
                self.remarks.append(DeviceExcluded(str(gpu.index), gpu.uuid, f"selection.exclude has {excluding}"))
            elif selection.include is None and gpu.name in _DISPLAYS:
                self.remarks.append(DeviceExcluded(str(gpu.index), gpu.uuid, "it is there for a display"))
            elif selection.include is not None and not any(each.matches(gpu) for each in selection.include):
                self.remarks.append(DeviceExcluded(str(gpu.index), gpu.uuid, "it is not in selection.include"))
            else:
                chosen.append(gpu)
        return chosen

    def _unmatched(self, selection: Selection, gpus: Sequence[Gpu]) -> None:
        for name, selectors in (("include", selection.include or ()), ("exclude", selection.exclude)):
            for selector in selectors:
                if gpus and not any(selector.matches(gpu) for gpu in gpus):
                    self.remarks.append(ConfigUnmet(f"selection.{name}", f"no GPU has {selector}"))

    def devices(self, gpus: Sequence[Gpu]) -> list[Device]:
        """The devices that the MIG strategy makes of GPUs."""
        if self._config.mig_strategy == "none":
            return [Device(gpu.uuid, gpu) for gpu in gpus]
        devices = []
        for gpu in gpus:
            if not gpu.mig_enabled:
                devices.append(Device(gpu.uuid, gpu))
            elif gpu.mig_devices:
                devices += [
                    Device(mig.uuid, gpu, mig=mig) for mig in sorted(gpu.mig_devices, key=lambda mig: mig.index)
                ]
            else:
                self._leave(Device(gpu.uuid, gpu), "MIG is enabled, and there is no MIG device in it")
        return self._alike(devices) if self._config.mig_strategy == "single" else devices

    def _alike(self, devices: Sequence[Device]) -> list[Device]:
        """The devices of the shape that most GPUs have.

        Of GPUs, not of devices, and not that of the first GPU: so that to partition one of eight anew takes that one
        away, and not the seven others.
        """
        gpus = Counter(shape for _, shape in dict.fromkeys((device.gpu.uuid, _shape(device)) for device in devices))
        # Of equals the first in index order.
        leading = max(gpus, key=lambda shape: gpus[shape], default="")
        alike = []
        for device in devices:
            if _shape(device) == leading:
                alike.append(device)
            else:
                kinds = [f"a MIG device {shape}" if shape else "a whole GPU" for shape in (_shape(device), leading)]
                self._leave(device, f"with the MIG strategy single all devices must be alike: this is {kinds[0]}, "
                            f"and most GPUs offer {kinds[1]}")  # fmt: skip
        return alike

    def named(self, devices: Iterable[Device]) -> dict[str, list[Device]]:
        """The devices under their names."""
        named: dict[str, list[Device]] = {}
        for device in devices:
            name = self._name(device)
            if name:
                named.setdefault(name, []).append(device)
            elif device.mig:
                self._leave(device, f"its profile {_shape(device)} matches no pattern of resources.mig")
            else:
                self._leave(device, f"its name {device.gpu.name!r} matches no pattern of resources.gpus")
        return named

    def _name(self, device: Device) -> str:
        if device.mig is None:
            rules, text = self._config.gpu_names or _GPU_NAMES, device.gpu.name
        elif self._config.mig_names:
            rules, text = self._config.mig_names, _shape(device)
        elif self._config.mig_strategy == "mixed":
            return profile_of(device.gpu, device.mig).resource
        else:
            rules, text = _GPU_NAMES, _shape(device)
        return next((rule.name for rule in rules if rule.matches(text)), "")

    def shared(self, named: Mapping[str, Sequence[Device]]) -> dict[str, list[tuple[Device, int | None]]]:
        """The devices under the names that they have in the end, each as often as it is shared."""
        slicing = self._config.time_slicing
        shares: dict[str, list[tuple[Device, int | None]]] = {}
        left = {name: list(devices) for name, devices in named.items()}
        for position, entry in enumerate(slicing.resources):
            key = f"sharing.timeSlicing.resources[{position}]"
            if named:
                taken = self._taken(key, entry, named.get(entry.name, ()), left.get(entry.name, []))
                offered = shares.setdefault(entry.offered_as, []) if taken else []
                offered += [(device, replica) for device in taken for replica in range(entry.replicas)]
        for name, devices in left.items():
            if devices:
                shares.setdefault(name, []).extend((device, None) for device in devices)
        for offered in shares.values():
            offered.sort(key=lambda share: _order(*share))
        return shares

    def _taken(self, key: str, entry: SharedResource, devices: Sequence[Device], left: list[Device]) -> list[Device]:
        """Takes from ``left`` what an entry shares, out of the ``devices`` of its resource."""
        if not devices:
            self.remarks.append(ConfigUnmet(key, f"no device of this node is {entry.name}"))
            return []
        match entry.devices:
            case None:
                taken = list(left)
            case int() as number:
                taken = left[:number]
                if len(taken) < number:
                    self.remarks.append(ConfigUnmet(f"{key}.devices", f"of {number} devices there are {len(taken)}"))
            case references:
                wanted = set(references)
                taken = [device for device in left if not wanted.isdisjoint(_references(device))]
                known = {reference for device in devices for reference in _references(device)}
                for reference in references:
                    if reference not in known:
                        self.remarks.append(ConfigUnmet(f"{key}.devices", f"{entry.name} has no device {reference}"))
        if len(taken) * entry.replicas > MOST_REPLICAS:
            reason = f"{len(taken)} devices of {entry.replicas} replicas are more than the {MOST_REPLICAS} of a list"
            self.remarks.append(ConfigUnmet(f"{key}.replicas", reason))
            return []
        gone = {device.uuid for device in taken}
        left[:] = [device for device in left if device.uuid not in gone]
        return taken

    def _leave(self, device: Device, reason: str) -> None:
        self.remarks.append(DeviceNotOffered(device.index, device.uuid, reason))


def _order(device: Device, replica: int | None) -> tuple[int, int, int]:
    return device.gpu.index, device.mig.index if device.mig else -1, -1 if replica is None else replica


def _departed(before: Resource | None, devices: Sequence[Device], gpus: set[str]) -> Mapping[str, str]:
    if before is None:
        return MappingProxyType({})
    gone = dict(before.departed) | {device.id: _farewell(device, gpus) for device in before.devices}
    for device in devices:
        gone.pop(device.id, None)
    return MappingProxyType(gone)


def _farewell(device: Device, gpus: set[str]) -> str:
    if device.gpu.uuid not in gpus:
        return "it is no longer among the node's GPUs"
    return "it is no longer offered here, since the configuration or the MIG devices have changed"


def chosen(resource: Resource, sent: Resource | None, ids: Iterable[str]) -> tuple[Device, ...]:
    """The devices that an allocation names, each once, in index order.

    Args:
        resource: what is offered now.
        sent: what the kubelet was told last; it can only be held to that.
        ids: device ids in any order, as the kubelet sends them.

    Raises:
        UnknownDeviceError: an id that was never offered.
        UnusableDeviceError: a device that is gone, or that the kubelet was told is unhealthy.
        RequestTooLargeError: several replicas, where the configuration allows one.
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
    if resource.one_replica_only and len(devices) > 1 and any(device.replica is not None for device in devices):
        raise RequestTooLargeError(
            f"{resource.name}: maximum request size for shared resources is 1; found {len(devices)}",
            remedy="ask for 1: more replicas give a container no more of the device. "
            "sharing.timeSlicing.failRequestsGreaterThanOne is what forbids it",
        )
    known_bad = {device.id for device in sent.devices if not device.healthy} if sent else set()
    for device in devices:
        if device.trouble and device.id in known_bad:
            raise UnusableDeviceError(
                f"{resource.name}: device {device.id} cannot be allocated: {device.trouble}",
                remedy="create the pod again: the kubelet will choose another device",
            )
    return devices


class Covering(Protocol):
    """By what containers are answered; see container/facts.py."""

    def cover(self, hardware: Hardware, config: Config) -> bool:
        """Whether the kubelet can ask for what these make."""


C = TypeVar("C", bound=Covering)


async def keep_offer(
    hardware: Latest[Hardware],
    health: Latest[Health],
    config: Latest[Config],
    terms: Latest[C],
    offer: Latest[Offer],
    publish: Publish,
) -> None:
    """The offer task: whatever changes, ``offer`` follows. Each remark is published once for as long as it holds.

    A kubelet asks as soon as it has heard of a device. So what is new waits until ``terms`` cover it.
    """
    covered: tuple[Hardware, Config] | None = None

    def renew(_changed: object) -> None:
        nonlocal covered
        if terms.value.cover(hardware.value, config.value):
            covered = hardware.value, config.value
        if covered is None:
            return
        before = set(offer.value.remarks)
        offer.set(next_offer(offer.value, covered[0], health.value, covered[1]))
        for remark in offer.value.remarks:
            if remark not in before:
                publish(remark)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(hardware.follow, renew)
        nursery.start_soon(health.follow, renew)
        nursery.start_soon(config.follow, renew)
        nursery.start_soon(terms.follow, renew)
