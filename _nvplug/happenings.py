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
    "Deregistered",
    "DevicesListed",
    "DirectoryDead",
    "DriverFound",
    "DriverTrouble",
    "EventsLost",
    "EventsRegained",
    "GpuEventsMissing",
    "GpuLeftOut",
    "GpuRestored",
    "GpuUnhealthy",
    "Happening",
    "KubeletAwaited",
    "KubeletRestarted",
    "ListRefused",
    "LivingSocketsFound",
    "Publish",
    "Registered",
    "RegistrationRefused",
    "RegistrationUnanswered",
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
