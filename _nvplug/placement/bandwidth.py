"""How well the GPUs of a set are joined: the score by which sets are compared.

**A pair** of GPUs has what its NVLinks and its PCIe path carry in one direction, in GB/s:

=====================================  ==
each NVLink                            20
PCIe: on one board                     14
PCIe: through one switch               12
PCIe: through several switches         10
PCIe: through the host bridge           8
PCIe: through the NUMA node             6
PCIe: from one socket to another        4
PCIe: unknown                           2
=====================================  ==

20 for an NVLink and 12 for a PCIe switch are what NVIDIA's NCCL reckons with (src/graph/topo.h: 20.0 for V100 and
A100, 20.6 for H100; 12.0 for PCIe 3 x16); for what is left between two sockets it has 5 (6.0 over QPI, less what
Intel's CPUs add to the traffic between GPUs). The other levels stand between these in equal steps. Only proportions
matter, and newer NVLinks and newer PCIe are both faster. As the steps are a fifth of those by which NVIDIA's own plugin
counts (10 a level, 100 an NVLink), both rank the sets of a machine without NVSwitches alike.

PCIe counts beside NVLink, since both are there at once; and of GPUs that are equals over NVLink, those that are near
each other on PCIe are near the same network cards and the same memory.

**NVSwitches** let a GPU reach every other one with all its NVLinks, but it has them once: in a set of k GPUs it shares
them among k - 1 others. So such a pair has 20 GB/s x links / (k - 1). If each pair counted in full, a set of eight
would pass for seven times as fast as its GPUs can send.

**A set** has the sum over its pairs. To stay with whole numbers, scores are in GB/s x (k - 1); only sets of one size
are ever compared. A set of one has 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Final

from _nvplug.hardware import Gpu, Link, PciPath

__all__ = ["LARGEST", "Layout", "bits", "breakage", "layout_of"]

NVLINK: Final = 20
PCIE: Final[Mapping[PciPath, int]] = {
    PciPath.SAME_BOARD: 14,
    PciPath.ONE_SWITCH: 12,
    PciPath.SWITCHES: 10,
    PciPath.HOST_BRIDGE: 8,
    PciPath.NUMA_NODE: 6,
    PciPath.SYSTEM: 4,
    PciPath.UNKNOWN: 2,
}

LARGEST: Final = 64
"""The most GPUs that are laid out. No node has as many, and the work grows with their square."""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """How the GPUs of a node are joined, in the form in which it is reckoned with.

    A set of GPUs is a number with one bit for each. The first GPU has the highest bit: so that of two sets of one size
    the first in index order is the greater number.

    Attributes:
        uuids: of the GPUs, in index order.
        bit: of each GPU, by UUID.
        direct: GB/s of each pair over PCIe and over NVLinks that lead from one to the other, by position.
        switched: GB/s of each pair over NVSwitches, if the two had their NVLinks for themselves.
        islands: sets of GPUs, two or more, that NVLinks join, directly or over others.
        nodes: sets of GPUs, two or more, that are on one NUMA node.
    """

    uuids: tuple[str, ...] = ()
    bit: Mapping[str, int] = field(default_factory=dict)
    direct: tuple[tuple[int, ...], ...] = ()
    switched: tuple[tuple[int, ...], ...] = ()
    islands: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()

    def positions(self, members: int) -> list[int]:
        """The GPUs of a set, in index order."""
        last = len(self.uuids) - 1
        return [last - bit for bit in bits(members)][::-1]

    def weights(self, size: int) -> list[list[int]]:
        """What each pair adds to the score of a set of that size, by position."""
        return [
            [direct * (size - 1) + switched for direct, switched in zip(*rows, strict=True)]
            for rows in zip(self.direct, self.switched, strict=True)
        ]

    def score(self, members: int) -> int:
        """Of a set, in GB/s x (its size - 1)."""
        positions = self.positions(members)
        weights = self.weights(len(positions))
        return sum(weights[one][other] for one, other in combinations(positions, 2))


def layout_of(gpus: Sequence[Gpu], links: Sequence[Sequence[Link]]) -> Layout:
    """Lays out the GPUs of a node; nothing of more than `LARGEST`.

    Where the two directions of a link differ, the better one counts: it is more likely that one end could not be read
    than that the other one sees what is not there.

    Args:
        gpus: in index order.
        links: as in `Hardware.links`; empty where unknown.
    """
    count = len(gpus)
    if count > LARGEST:
        return Layout()
    known = len(links) == count
    direct, switched = ([[0] * count for _ in gpus] for _ in range(2))
    joined = [1 << count - 1 - position for position in range(count)]
    for one, other in combinations(range(count), 2):
        ways = (links[one][other], links[other][one]) if known else ()
        path = min((way.path for way in ways), default=PciPath.UNKNOWN)
        straight = max((way.nvlinks for way in ways if not way.switched), default=0)
        through = max((way.nvlinks for way in ways if way.switched), default=0)
        numa = {gpus[one].numa, gpus[other].numa}
        if path is PciPath.UNKNOWN and None not in numa:
            path = PciPath.NUMA_NODE if len(numa) == 1 else PciPath.SYSTEM
        direct[one][other] = direct[other][one] = PCIE[path] + NVLINK * straight
        switched[one][other] = switched[other][one] = NVLINK * through
        if straight or through:
            joined[one] |= 1 << count - 1 - other
    nodes: dict[int, int] = {}
    for position, gpu in enumerate(gpus):
        if gpu.numa is not None:
            nodes[gpu.numa] = nodes.get(gpu.numa, 0) | 1 << count - 1 - position
    return Layout(
        tuple(gpu.uuid for gpu in gpus),
        {gpu.uuid: 1 << count - 1 - position for position, gpu in enumerate(gpus)},
        tuple(map(tuple, direct)),
        tuple(map(tuple, switched)),
        tuple(each for each in _united(joined) if each.bit_count() > 1),
        tuple(each for _, each in sorted(nodes.items()) if each.bit_count() > 1),
    )


def _united(sets: Iterable[int]) -> list[int]:
    """The smallest sets that hold all of the given ones and do not overlap, in index order."""
    united: list[int] = []
    for each in sets:
        apart = [other for other in united if not other & each]
        for other in united:
            if other & each:
                each |= other  # noqa: PLW2901 - it grows
        united = [*apart, each]
    return sorted(united, reverse=True)


def breakage(chosen: int, free: int, parts: Iterable[int]) -> tuple[int, int]:
    """What taking ``chosen`` out of ``free`` does to islands and NUMA nodes; less is better.

    Returns:
        how many of ``parts``, until now free as a whole, are broken up; and how many have some of their free GPUs taken
        and others left: of two that are broken already, the one that is used up is the better one to take from.
    """
    whole = rest = 0
    for part in parts:
        left = part & free & ~chosen
        if part & chosen and left:
            rest += 1
            whole += not part & ~free
    return whole, rest


def bits(members: int) -> Iterator[int]:
    """The numbers of the bits that are set, the lowest first."""
    while members:
        lowest = members & -members
        yield lowest.bit_length() - 1
        members ^= lowest
