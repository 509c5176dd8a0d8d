"""What happened, as data: what operators read in the log, and later scrape as metrics.

Rooms publish these; observe/ turns them into lines. A room never logs by itself, so that what it says can be
tested as data and is worded in one place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = [
    "Allocated",
    "AllocationRefused",
    "ConfigApplied",
    "ConfigKeysObeyed",
    "ConfigRedundant",
    "ConfigRefused",
    "ConfigUnmet",
    "ConfigWaits",
    "Deregistered",
    "DeviceExcluded",
    "DeviceNodesMade",
    "DeviceNodesMissing",
    "DeviceNotOffered",
    "DevicesListed",
    "DevicesNotDescribed",
    "DirectoryDead",
    "DocumentNotWritten",
    "DocumentRemoved",
    "DocumentWritten",
    "DriverFilesFound",
    "DriverFound",
    "DriverTrouble",
    "EventsLost",
    "EventsRegained",
    "GpuEventsMissing",
    "GpuLate",
    "GpuLeftOut",
    "GpuReleased",
    "GpuRestored",
    "GpuTakenUp",
    "GpuUnhealthy",
    "Happening",
    "HealthForgotten",
    "HealthNotKept",
    "HealthPolicyInForce",
    "HealthPolicyMalformed",
    "HealthRemembered",
    "KubeletAwaited",
    "KubeletRestarted",
    "ListRefused",
    "LivingSocketsFound",
    "ProbesNotAnswered",
    "Publish",
    "Registered",
    "RegistrationRefused",
    "RegistrationUnanswered",
    "RemapPending",
    "SocketNotMade",
    "SocketVanished",
    "StaleSocketRemoved",
    "StreamLost",
    "StreamMissing",
    "XidUnplaced",
]


@dataclass(frozen=True, slots=True)
class Happening:
    """Something that an operator may care about. The fields of each kind are the fields of its log line."""


Publish = Callable[[Happening], None]
"""Synchronous, cheap, never raises."""


@dataclass(frozen=True, slots=True)
class DriverFound(Happening):
    """The driver answers, and these are its GPUs. Published again whenever the set changes."""

    driver: str
    version: str
    gpus: int


@dataclass(frozen=True, slots=True)
class DriverFilesFound(Happening):
    """What containers are given of the driver's files. Published again whenever that changes."""

    directory: str
    version: str
    libraries: int
    programs: int


@dataclass(frozen=True, slots=True)
class DriverTrouble(Happening):
    """The driver cannot be used at present; it is tried again. Published once per change of ``reason``."""

    reason: str
    remedy: str


@dataclass(frozen=True, slots=True)
class GpuLeftOut(Happening):
    """A GPU that the driver counts is not offered, because it could not be read."""

    index: int
    reason: str


@dataclass(frozen=True, slots=True)
class GpuUnhealthy(Happening):
    """A GPU was offered, and now is offered as unhealthy."""

    uuid: str
    index: int
    reason: str
    remedy: str


@dataclass(frozen=True, slots=True)
class GpuRestored(Happening):
    """An unhealthy GPU is healthy again."""

    uuid: str
    index: int
    evidence: str


@dataclass(frozen=True, slots=True)
class GpuLate(Happening):
    """The driver has not answered for a GPU since the last look at it; the others are looked at meanwhile."""

    uuid: str
    index: int


@dataclass(frozen=True, slots=True)
class GpuReleased(Happening):
    """nvplug holds nothing of an unhealthy GPU any more, so that it can be reset or replaced."""

    uuid: str
    index: int


@dataclass(frozen=True, slots=True)
class GpuTakenUp(Happening):
    """A GPU that was released is used by nvplug again."""

    uuid: str
    index: int


@dataclass(frozen=True, slots=True)
class RemapPending(Happening):
    """A row of a GPU's memory is to be remapped at the next reset. The GPU serves on."""

    uuid: str
    index: int
    remedy: str


@dataclass(frozen=True, slots=True)
class HealthPolicyInForce(Happening):
    """What takes a GPU away. Published at start."""

    policy: str


@dataclass(frozen=True, slots=True)
class HealthPolicyMalformed(Happening):
    """A part of the operator's health policy makes no sense and is left out."""

    item: str
    remedy: str


@dataclass(frozen=True, slots=True)
class HealthRemembered(Happening):
    """Verdicts from before the start stand, as nothing has shown since that they are over."""

    gpus: str
    file: str


@dataclass(frozen=True, slots=True)
class HealthForgotten(Happening):
    """Verdicts from before the start do not stand."""

    file: str
    reason: str


@dataclass(frozen=True, slots=True)
class HealthNotKept(Happening):
    """Verdicts cannot be written down; a restart of nvplug would lose them. Once per change of ``reason``."""

    file: str
    reason: str
    remedy: str


@dataclass(frozen=True, slots=True)
class EventsLost(Happening):
    """Errors of GPUs cannot be heard at present; it is tried again. Once per change of ``reason``."""

    reason: str
    remedy: str


@dataclass(frozen=True, slots=True)
class EventsRegained(Happening):
    """Errors that the driver reports are heard again."""


@dataclass(frozen=True, slots=True)
class GpuEventsMissing(Happening):
    """One GPU's errors cannot be heard; it is tried again. Published once per change of ``reason``."""

    uuid: str
    index: int
    reason: str


@dataclass(frozen=True, slots=True)
class XidUnplaced(Happening):
    """The driver reported a critical error, but not of any GPU that is known. Once per ``reason``."""

    code: int
    reason: str


@dataclass(frozen=True, slots=True)
class ConfigApplied(Happening):
    """The configuration was read again, and is obeyed from now on; ``changed`` are the options that it changes."""

    file: str
    changed: str


@dataclass(frozen=True, slots=True)
class ConfigKeysObeyed(Happening):
    """The file has keys that NVIDIA's plugin accepts and ignores, and nvplug obeys."""

    file: str
    keys: str


@dataclass(frozen=True, slots=True)
class ConfigRedundant(Happening):
    """A part of the configuration that is obeyed, and that could be left out."""

    option: str
    reason: str


@dataclass(frozen=True, slots=True)
class ConfigRefused(Happening):
    """The configuration was read again and cannot be obeyed; the one before stands. Once per change of ``reason``."""

    file: str
    reason: str
    remedy: str


@dataclass(frozen=True, slots=True)
class ConfigUnmet(Happening):
    """A part of the configuration that this node's hardware cannot meet; the rest is obeyed."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class ConfigWaits(Happening):
    """An option was changed that holds for as long as the process runs."""

    option: str
    value: str


@dataclass(frozen=True, slots=True)
class DeviceExcluded(Happening):
    """The configuration keeps a GPU from being offered."""

    index: str
    uuid: str
    reason: str


@dataclass(frozen=True, slots=True)
class DeviceNodesMade(Happening):
    """Device nodes were missing, and nvidia-modprobe has made them."""

    nodes: str


@dataclass(frozen=True, slots=True)
class DeviceNodesMissing(Happening):
    """Device nodes that containers need are missing, and cannot be made. Once per change."""

    nodes: str
    reason: str
    remedy: str


@dataclass(frozen=True, slots=True)
class DeviceNotOffered(Happening):
    """A GPU or MIG device fits the configuration nowhere; all others are offered."""

    index: str
    uuid: str
    reason: str


@dataclass(frozen=True, slots=True)
class DevicesListed(Happening):
    """A list was sent to the kubelet."""

    resource: str
    devices: int
    healthy: int


@dataclass(frozen=True, slots=True)
class DirectoryDead(Happening):
    """The kubelet's directory was deleted behind our mount of it; the process ends after ``seconds`` of it."""

    directory: str
    seconds: float


@dataclass(frozen=True, slots=True)
class ProbesNotAnswered(Happening):
    """`nvplug health` does not ask this process; it is tried again. Published once."""

    socket: str
    reason: str


@dataclass(frozen=True, slots=True)
class DocumentWritten(Happening):
    """A CDI document has a new content."""

    file: str


@dataclass(frozen=True, slots=True)
class DocumentNotWritten(Happening):
    """Containers cannot be given devices by their CDI names; it is tried again. Once per change of ``reason``."""

    reason: str
    remedy: str


@dataclass(frozen=True, slots=True)
class DocumentRemoved(Happening):
    """A CDI document was removed, because the program ends and was asked to."""

    file: str


@dataclass(frozen=True, slots=True)
class DevicesNotDescribed(Happening):
    """Devices are offered that no CDI document describes, since a device node of theirs is missing."""

    uuids: str


@dataclass(frozen=True, slots=True)
class StaleSocketRemoved(Happening):
    """A socket of an earlier life of ours, on which nobody listens, was removed."""

    socket: str


@dataclass(frozen=True, slots=True)
class LivingSocketsFound(Happening):
    """Somebody else offers the same resource on this node."""

    directory: str
    sockets: str


@dataclass(frozen=True, slots=True)
class KubeletAwaited(Happening):
    """No kubelet listens."""

    resource: str
    reason: str


@dataclass(frozen=True, slots=True)
class Registered(Happening):
    """The kubelet watches a resource's devices; ``took`` seconds since it last did, or since the start."""

    resource: str
    socket: str
    took: float


@dataclass(frozen=True, slots=True)
class RegistrationRefused(Happening):
    """The kubelet replied to Register with an error. Published once per change of ``reason``."""

    resource: str
    reason: str


@dataclass(frozen=True, slots=True)
class RegistrationUnanswered(Happening):
    """The kubelet did not reply to Register. Published once per change of ``reason``."""

    resource: str
    reason: str


@dataclass(frozen=True, slots=True)
class SocketNotMade(Happening):
    """Our socket cannot be made in the kubelet's directory. Published once per change of ``reason``."""

    resource: str
    socket: str
    reason: str


@dataclass(frozen=True, slots=True)
class StreamMissing(Happening):
    """The kubelet accepted a registration, and does not call ListAndWatch."""

    resource: str


@dataclass(frozen=True, slots=True)
class StreamLost(Happening):
    """The kubelet's stream ended; we did not end it."""

    resource: str


@dataclass(frozen=True, slots=True)
class KubeletRestarted(Happening):
    """kubelet.sock is a new one."""

    resource: str


@dataclass(frozen=True, slots=True)
class SocketVanished(Happening):
    """Our socket was deleted or replaced, so that no kubelet can reach us there."""

    resource: str
    socket: str


@dataclass(frozen=True, slots=True)
class Deregistered(Happening):
    """A resource's streams were ended and its socket removed, because the program ends."""

    resource: str
    took: float


@dataclass(frozen=True, slots=True)
class ListRefused(Happening):
    """A device list cannot be sent; the one before stands."""

    resource: str
    reason: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Allocated(Happening):
    """A container was given devices."""

    resource: str
    devices: str


@dataclass(frozen=True, slots=True)
class AllocationRefused(Happening):
    """A container was not given the devices that were asked for."""

    resource: str
    reason: str
