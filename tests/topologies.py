"""Nodes to place containers on, and the best choice on them, found the long way: by trying every set."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from typing import Any, Final

from hypothesis import strategies as st

from _nvplug.drivers.machines import find_machine
from _nvplug.hardware import Gpu, Link, PciPath
from _nvplug.placement import Plan
from _nvplug.placement.bandwidth import layout_of
from _nvplug.placement.table import MOST, Table
from _nvplug.resources import Device, Resource

__all__ = ["Node", "best", "indices", "joined", "machine", "nodes", "reference_choice", "reference_score"]

_SIDES: Final = (
    PciPath.SAME_BOARD,
    PciPath.ONE_SWITCH,
    PciPath.SWITCHES,
    PciPath.HOST_BRIDGE,
    PciPath.NUMA_NODE,
    PciPath.SYSTEM,
)
_PCIE: Final = dict(zip(_SIDES, (14, 12, 10, 8, 6, 4), strict=True))
_REFERENCE: Final = dict(zip(_SIDES, (60, 50, 40, 30, 20, 10), strict=True))


@dataclass(frozen=True)
class Node:
    """GPUs and how they are joined."""

    gpus: tuple[Gpu, ...]
    links: tuple[tuple[Link, ...], ...]

    @property
    def resource(self) -> Resource:
        """All of them, whole."""
        return Resource("nvidia.com/gpu", tuple(Device(gpu.uuid, gpu) for gpu in self.gpus))

    def ids(self, chosen: Iterable[int]) -> list[str]:
        """By position."""
        return [self.gpus[each].uuid for each in chosen]

    def plan(self) -> Plan:
        """All that can be made ready."""
        layout = layout_of(self.gpus, self.links)
        return Plan(layout, Table(layout) if len(self.gpus) <= MOST else None)

    def between(self, one: int, other: int, size: int) -> Fraction:
        """GB/s of a pair in a set of that size."""
        ways = [self.links[one][other], self.links[other][one]] if self.links else [Link(), Link()]
        path = min(way.path for way in ways)
        if path is PciPath.UNKNOWN:
            numa = {self.gpus[one].numa, self.gpus[other].numa}
            pcie = 2 if None in numa else 6 if len(numa) == 1 else 4
        else:
            pcie = _PCIE[path]
        direct = max(0 if way.switched else way.nvlinks for way in ways)
        switched = max(way.nvlinks if way.switched else 0 for way in ways)
        return pcie + 20 * direct + Fraction(20 * switched, size - 1)

    def bandwidth(self, members: Collection[int]) -> Fraction:
        """GB/s of a set."""
        pairs = combinations(sorted(members), 2)
        return sum((self.between(one, other, len(members)) for one, other in pairs), Fraction(0))

    def parts(self) -> list[set[int]]:
        """Its NVLink islands and NUMA nodes."""
        islands: list[set[int]] = []
        everyone = range(len(self.gpus))
        for start in everyone:
            if not any(start in island for island in islands):
                island, edge = {start}, [start]
                while edge:
                    here = edge.pop()
                    for there in everyone:
                        pair = (self.links[here][there], self.links[there][here]) if self.links else ()
                        if there not in island and any(link.nvlinks for link in pair):
                            island.add(there)
                            edge.append(there)
                islands.append(island)
        numbers = {gpu.numa for gpu in self.gpus} - {None}
        return islands + [{each for each in everyone if self.gpus[each].numa == number} for number in numbers]


def best(node: Node, available: Collection[int], required: Collection[int], size: int) -> tuple[int, ...]:
    """The best choice, by the rules and no other means."""
    sets = list(combinations(sorted(available), size))
    worth = {each: node.bandwidth(each) for each in sets}
    fastest: list[tuple[int, ...]] = []
    for each in sets:
        if {*each} >= {*required} and (not fastest or worth[each] >= worth[fastest[0]]):
            if fastest and worth[each] > worth[fastest[0]]:
                fastest.clear()
            fastest.append(each)

    def merits(chosen: tuple[int, ...]) -> tuple[Any, ...]:
        rest = max((worth[each] for each in sets if not {*each} & {*chosen}), default=0)
        broken, left = 0, 0
        for part in node.parts():
            free = part & {*available}
            if len(part) > 1 and part & {*chosen} and free - {*chosen}:
                left += 1
                broken += free == part
        return -rest, broken, left, chosen

    return min(fastest, key=merits)


def indices(node: Node, answer: Iterable[str]) -> tuple[int, ...]:
    """The positions of ids, in order."""
    places = {gpu.uuid: place for place, gpu in enumerate(node.gpus)}
    return tuple(sorted(places[each] for each in answer))


# --- the other plugin: what it is known to do


def reference_score(node: Node, members: Iterable[int]) -> int:
    """NVIDIA's plugin has, for each pair, 10 to 60 for the PCIe path, and 100 for each NVLink between the two."""
    score = 0
    for one, other in combinations(members, 2):
        link = node.links[one][other]
        score += _REFERENCE[link.path] + 100 * (0 if link.switched else link.nvlinks)
    return score


def reference_choice(node: Node, available: Sequence[int], required: Collection[int], size: int) -> tuple[int, ...]:
    """It cuts all that is available into sets of the size, so that the sum of their scores is greatest.

    The last set may have fewer. Of these sets it gives the one with the highest score that has what is required.
    """
    if size == 1:
        return tuple(required) or (available[0],)

    def cuts(rest: tuple[int, ...], missing: int) -> Iterator[list[tuple[int, ...]]]:
        if not rest:
            yield []
            return
        first, *others = rest
        for few in range(missing + 1):
            for mates in combinations(others, size - 1 - few) if size - 1 - few <= len(others) else ():
                left = tuple(each for each in others if each not in mates)
                for cut in cuts(left, missing - few):
                    yield [(first, *mates), *cut]

    highest, choice = -1, tuple[int, ...]()
    for cut in cuts(tuple(available), -len(available) % size):
        total = sum(reference_score(node, each) for each in cut)
        fit = [each for each in cut if len(each) == size and {*each} >= {*required}]
        if fit and total > highest:
            highest, choice = total, max(fit, key=lambda each: reference_score(node, each))
    return choice


# --- nodes


def gpu(index: int, numa: int | None) -> Gpu:
    """One of which nothing else is known."""
    return Gpu(index, f"GPU-{index:02}", "", "", index, numa, 0)


def machine(name: str) -> Node:
    """One of the table of simulated machines."""
    known = find_machine(name)
    return Node(tuple(known.gpu(index) for index in range(known.count)), known.links(known.count))


def joined(*rows: str, numa: str = "") -> Node:
    """A node out of a matrix as `nvidia-smi topo -m` has it: ``X PIX NODE``; with NVLinks as ``NV2/PHB``.

    ``numa`` has a digit for each GPU.
    """
    names = {"PIX": PciPath.ONE_SWITCH, "PXB": PciPath.SWITCHES, "PHB": PciPath.HOST_BRIDGE,
             "NODE": PciPath.NUMA_NODE, "SYS": PciPath.SYSTEM, "X": PciPath.UNKNOWN}  # fmt: skip

    def link(cell: str) -> Link:
        nvlinks, _, path = cell.rpartition("/")
        return Link(names[path], int(nvlinks.removeprefix("NV") or 0))

    return Node(
        tuple(gpu(index, int(numa[index]) if numa else None) for index in range(len(rows))),
        tuple(tuple(link(cell) for cell in row.split()) for row in rows),
    )


@st.composite
def nodes(draw: st.DrawFn, most: int = 7, *, plain: bool = False) -> Node:
    """Of few kinds of links, so that many sets tie; unless ``plain``, with all that may be odd about them."""
    count = draw(st.integers(1, most))
    paths = st.sampled_from(draw(st.lists(st.sampled_from(_SIDES), min_size=1, max_size=3)))
    counts = st.sampled_from(draw(st.lists(st.integers(0, 4), min_size=1, max_size=3)))
    odd = st.booleans() if not plain else st.just(value=False)
    kinds = draw(st.lists(st.builds(Link, paths, counts, odd), min_size=1, max_size=4))
    if not plain:
        kinds.append(Link())
    matrix = [[draw(st.sampled_from(kinds)) for _ in range(count)] for _ in range(count)]
    if plain or draw(st.booleans()):
        for one, other in combinations(range(count), 2):
            matrix[other][one] = matrix[one][other]
    numa = st.sampled_from([0, 1] if plain else [None, 0, 1])
    gpus = tuple(gpu(index, draw(numa)) for index in range(count))
    unknown = not plain and draw(st.integers(0, 9)) == 0
    return Node(gpus, () if unknown else tuple(map(tuple, matrix)))
