"""What the driver answered, put together: pure functions over data."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from _nvplug.hardware import Gpu, LeftOut, Link, PciPath

__all__ = [
    "Answer",
    "Census",
    "Failure",
    "Listing",
    "Paths",
    "Reading",
    "Registration",
    "Remote",
    "link_table",
    "nvml_address",
    "pair",
    "settle",
    "sysfs_address",
]


@dataclass(frozen=True, slots=True)
class Remote:
    """The far end of an active NVLink.

    Attributes:
        pci: its address, as sysfs writes it.
        gpu: whether sysfs says that a GPU is there; False for switches, and where sysfs cannot tell.
    """

    pci: str
    gpu: bool


@dataclass(frozen=True, slots=True)
class Registration:
    """How a GPU stands with an event set.

    Attributes:
        event_set: the number of the set; 0 if there was none yet.
        heard: whether its XIDs arrive there.
        trouble: why not, where that is an error; "" where the GPU simply has no such events.
    """

    event_set: int = 0
    heard: bool = False
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Reading:
    """One GPU, as read.

    Attributes:
        gpu: what is for everybody.
        remotes: one for each active NVLink.
        registration: whether its events can be heard.
        address: of the handle, by which events name the GPU.
        handle: a ``pynvml`` handle, of use in the session that it is from, and only there.
    """

    gpu: Gpu
    remotes: tuple[Remote, ...]
    registration: Registration
    address: int
    handle: Any = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Failure:
    """A GPU of this index that could not be read.

    Attributes:
        index: NVML's.
        reason: what the driver said.
        remedy: what a person can do.
        code: an ``nvmlReturn_t``; 0 if it was not the driver that failed.
    """

    index: int
    reason: str
    remedy: str = ""
    code: int = 0


Answer = Reading | Failure

Paths = Mapping[frozenset[str], PciPath]
"""How GPUs meet over PCI Express, by the two UUIDs."""


@dataclass(frozen=True, slots=True)
class Census:
    """What one session has been told so far.

    Attributes:
        asked: the indices of the GPUs that are asked; None before that is known.
        answers: the newest of each, by index.
        control_nodes: as in ``Hardware``.
    """

    asked: frozenset[int] | None = None
    answers: Mapping[int, Answer] = field(default_factory=dict)
    control_nodes: tuple[str, ...] = ()

    @property
    def missing(self) -> frozenset[int]:
        """The GPUs that have not answered yet."""
        return (self.asked or frozenset()) - self.answers.keys()


@dataclass(frozen=True, slots=True)
class Listing:
    """Which GPUs there are.

    Attributes:
        present: in index order.
        gone: those that were present once, and that the driver does not list any more.
        left_out: those that could never be read.
    """

    present: tuple[Reading, ...] = ()
    gone: tuple[Reading, ...] = ()
    left_out: tuple[LeftOut, ...] = ()

    @property
    def readings(self) -> tuple[Reading, ...]:
        """All that are to be listed, in index order.

        Operators alarm on devices that are not healthy, and cannot on devices that are not there.
        """
        return tuple(sorted((*self.present, *self.gone), key=lambda reading: reading.gpu.index))

    def at(self, index: int) -> Reading | None:
        """The GPU of this index."""
        return next((reading for reading in self.present if reading.gpu.index == index), None)


def settle(census: Census, before: Listing, apart: frozenset[str] = frozenset()) -> Listing:
    """Decides which GPUs there are.

    A GPU that was read once is not dropped because it cannot be read now: whether it is healthy is another
    question, asked elsewhere. It is gone when the driver does not list it any more, and dropped when another GPU
    sits at its address.

    Args:
        census: what the driver says now.
        before: what the last call settled on.
        apart: UUIDs of GPUs that the driver is not asked about.
    """
    fresh = {answer.gpu.uuid for answer in census.answers.values() if isinstance(answer, Reading)}
    taken: dict[str, int] = {}
    present: list[Reading] = []
    left_out: list[LeftOut] = []
    for index in sorted(census.asked or ()):
        answer = census.answers.get(index, Failure(index, "the driver has not answered"))
        if isinstance(answer, Failure):
            old = before.at(index)
            if old is None or old.gpu.uuid in fresh:
                left_out.append(LeftOut(index, answer.reason))
                continue
            answer = old
        if answer.gpu.uuid in taken:
            # Two devices of one id would be one device to the kubelet.
            left_out.append(LeftOut(index, f"it has the UUID of GPU {taken[answer.gpu.uuid]}"))
            continue
        taken[answer.gpu.uuid] = index
        present.append(answer)
    addresses = {reading.gpu.pci for reading in present if reading.gpu.pci}
    indices = {reading.gpu.index for reading in present}
    gone: list[Reading] = []
    for old in (*before.present, *before.gone):
        if old.gpu.uuid in taken:
            continue
        if old.gpu.uuid in apart and old in before.present:
            present.append(old)
        elif old.gpu.pci not in addresses if old.gpu.pci else old.gpu.index not in indices:
            gone.append(old)
    return Listing(tuple(sorted(present, key=lambda reading: reading.gpu.index)), tuple(gone), tuple(left_out))


def pair(one: Reading, other: Reading) -> frozenset[str]:
    """The key of two GPUs in ``Paths``."""
    return frozenset((one.gpu.uuid, other.gpu.uuid))


def link_table(readings: Sequence[Reading], paths: Paths) -> tuple[tuple[Link, ...], ...]:
    """How every GPU reaches every other, symmetric whatever the two ends said.

    An NVLink whose far end is no GPU goes to an NVSwitch. All GPUs with such links are taken to share a fabric.
    """
    ours = {reading.gpu.pci for reading in readings}
    # A GPU that does not know its own address may be at the end of any link.
    switches = "" not in ours
    direct = [Counter(remote.pci for remote in reading.remotes if remote.pci in ours) for reading in readings]
    switched = [
        sum(switches and remote.pci not in ours and not remote.gpu for remote in reading.remotes)
        for reading in readings
    ]

    def link(i: int, j: int) -> Link:
        if i == j:
            return Link()
        path = paths.get(pair(readings[i], readings[j]), PciPath.UNKNOWN)
        # One end may be unreadable for a moment; the better answer is the likelier one.
        straight = max(direct[i][readings[j].gpu.pci], direct[j][readings[i].gpu.pci])
        if straight:
            return Link(path, straight)
        through = min(switched[i], switched[j])
        return Link(path, through, switched=through > 0)

    everyone = range(len(readings))
    return tuple(tuple(link(i, j) for j in everyone) for i in everyone)


def sysfs_address(bus_id: str) -> str:
    """Turns NVML's ``00000000:1B:00.0`` into sysfs's ``0000:1b:00.0``; anything else into ``""``."""
    match = re.fullmatch(r"([0-9a-f]{4,8}):([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", bus_id.lower())
    # Domains above ffff exist (VMD, Azure); sysfs then writes as many digits as are needed.
    return f"{int(match[1], 16):04x}:{match[2]}" if match else ""


def nvml_address(pci: str) -> str:
    """The opposite of ``sysfs_address``."""
    domain, _, rest = pci.partition(":")
    return f"{int(domain, 16):08X}:{rest.upper()}"
