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
    "Paths",
    "Reading",
    "Registration",
    "Remote",
    "link_table",
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


Answer = Reading | LeftOut

Paths = Mapping[frozenset[str], PciPath]
"""How GPUs meet over PCI Express, by the two UUIDs."""


@dataclass(frozen=True, slots=True)
class Census:
    """What one session has been told so far.

    Attributes:
        count: how many GPUs there are; None before that is known.
        answers: the newest of each, by index.
        control_nodes: as in ``Hardware``.
    """

    count: int | None = None
    answers: Mapping[int, Answer] = field(default_factory=dict)
    control_nodes: tuple[str, ...] = ()

    @property
    def missing(self) -> frozenset[int]:
        """The GPUs that have not answered yet."""
        return frozenset(range(self.count or 0)) - self.answers.keys()


def settle(census: Census, known: Mapping[int, Reading]) -> tuple[tuple[Reading, ...], tuple[LeftOut, ...]]:
    """Decides which GPUs there are, in index order, and which are left out.

    A GPU that was read once is not dropped because it cannot be read now: whether it is healthy is another
    question, asked elsewhere. It goes when the driver counts fewer, or has another GPU of that index.

    Args:
        census: what the driver says now.
        known: the readings that the last call settled on, by index.
    """
    fresh = [answer for answer in census.answers.values() if isinstance(answer, Reading)]
    taken: dict[str, int] = {}
    readings: list[Reading] = []
    left_out: list[LeftOut] = []
    for index in range(census.count or 0):
        answer = census.answers.get(index, LeftOut(index, "the driver has not answered"))
        if isinstance(answer, LeftOut):
            old = known.get(index)
            if old is None or any(old.gpu.uuid == reading.gpu.uuid for reading in fresh):
                left_out.append(answer)
                continue
            answer = old
        if answer.gpu.uuid in taken:
            # Two devices of one id would be one device to the kubelet.
            left_out.append(LeftOut(index, f"it has the UUID of GPU {taken[answer.gpu.uuid]}"))
            continue
        taken[answer.gpu.uuid] = index
        readings.append(answer)
    return tuple(readings), tuple(left_out)


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
