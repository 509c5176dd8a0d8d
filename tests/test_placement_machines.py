"""Machines that are in the field: what is chosen on them, and why."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Final

import pytest
from topologies import Node, best, gpu, indices, joined, machine, reference_choice, reference_score

from _nvplug.hardware import Link, PciPath
from _nvplug.placement import preferred


def pcie(count: int, *, sockets: int, per_switch: int) -> Node:
    """GPUs in order behind switches, and these in order behind sockets, without NVLink."""

    def link(one: int, other: int) -> Link:
        if one // per_switch == other // per_switch:
            return Link(PciPath.ONE_SWITCH)
        if one * sockets // count == other * sockets // count:
            return Link(PciPath.HOST_BRIDGE if sockets == 1 else PciPath.NUMA_NODE)
        return Link(PciPath.SYSTEM)

    everyone = range(count)
    gpus = tuple(gpu(each, each * sockets // count) for each in everyone)
    return Node(gpus, tuple(tuple(link(one, other) for other in everyone) for one in everyone))


def changed(node: Node, one: int, other: int, link: Link) -> Node:
    """With another link between two GPUs, as both of them see it."""
    matrix = [list(row) for row in node.links]
    matrix[one][other] = matrix[other][one] = link
    return replace(node, links=tuple(map(tuple, matrix)))


def tired(node: Node, index: int, nvlinks: int) -> Node:
    """With fewer NVLinks from one GPU into the fabric."""
    for other in range(len(node.gpus)):
        if other != index:
            node = changed(node, index, other, replace(node.links[index][other], nvlinks=nvlinks))
    return node


# PCIe cards, with bridges of twelve NVLinks from one to another: here not to the one behind the same switch.
BRIDGED: Final = joined(
    "X      PIX     NV12/NODE NODE     SYS     SYS     SYS     SYS",
    "PIX    X       NODE     NV12/NODE SYS     SYS     SYS     SYS",
    "NV12/NODE NODE X        PIX      SYS     SYS     SYS     SYS",
    "NODE   NV12/NODE PIX    X        SYS     SYS     SYS     SYS",
    "SYS    SYS     SYS      SYS      X       PIX     NV12/NODE NODE",
    "SYS    SYS     SYS      SYS      PIX     X       NODE     NV12/NODE",
    "SYS    SYS     SYS      SYS      NV12/NODE NODE  X        PIX",
    "SYS    SYS     SYS      SYS      NODE    NV12/NODE PIX     X",
    numa="00001111",
)

DGX_1: Final = machine("8xV100")
ALL_OF_8: Final = range(8)

CHOICES: Final[dict[str, tuple[Node, list[tuple[range | list[int], list[int], int, list[int]]]]]] = {
    "DGX-1": (
        DGX_1,
        [
            # Two NVLinks and one PCIe switch: 2-3 and 6-7 have both, and each leaves the other.
            (ALL_OF_8, [], 2, [2, 3]),
            # With 0 comes 3: two NVLinks, in the same socket, which 4 is not.
            (ALL_OF_8, [0], 2, [0, 3]),
            # A side of the cube has nine NVLinks in itself, and no other four have as many.
            (ALL_OF_8, [], 4, [0, 1, 2, 3]),
            # After a single GPU the other side is still whole, and the four come from there.
            (range(1, 8), [], 4, [4, 5, 6, 7]),
            # Two pods of one: the second takes from the socket that is broken already, so a side stays whole.
            ([0, 1, 2, 3, 5, 6, 7], [], 1, [5]),
            # Without 3 and 7 no side is whole: the four around an edge of two NVLinks, 1-2 and 5-6, are joined best.
            ([0, 1, 2, 4, 5, 6], [], 4, [1, 2, 5, 6]),
        ],
    ),
    "DGX-2": (
        machine("16xV100"),
        [
            # All reach all at the same speed; what is left is nearness: the same PCIe switches, then the same socket.
            (range(16), [], 4, [0, 1, 2, 3]),
            (range(1, 16), [], 4, [4, 5, 6, 7]),
            (range(1, 16), [], 8, [8, 9, 10, 11, 12, 13, 14, 15]),
            # From the socket that is broken already, and there from the switch that is.
            ([0, *range(2, 16)], [], 1, [0]),
            (range(9, 16), [], 3, [9, 10, 11]),
        ],
    ),
    "DGX A100": (
        machine("8xA100"),
        [
            (ALL_OF_8, [], 2, [0, 1]),
            # 1 is alone on its switches: a pair that shares some goes before it.
            ([1, 2, 3, 4, 5, 6, 7], [], 2, [2, 3]),
            ([1, 2, 3, 4, 5, 6, 7], [], 4, [4, 5, 6, 7]),
        ],
    ),
    "HGX H100": (
        machine("8xH100"),
        [
            (ALL_OF_8, [], 4, [0, 1, 2, 3]),
            # One socket for all four, where it has them.
            ([1, 2, 3, 4, 5, 6, 7], [], 4, [4, 5, 6, 7]),
            # Two pods of one: from the same socket.
            ([0, 1, 2, 3, 5, 6, 7], [], 1, [5]),
            # With 3 required, its own socket.
            ([1, 2, 3, 4, 5, 6, 7], [3], 2, [1, 3]),
            # Pods of two: that which leaves four on one socket goes first.
            ([0, 1, 4, 5, 6, 7], [], 2, [0, 1]),
        ],
    ),
    "HGX H100, one NVLink of GPU 1 dead": (
        tired(machine("8xH100"), 1, 17),
        [
            # Whoever has 1 is slower: the other socket is the faster one.
            (ALL_OF_8, [], 4, [4, 5, 6, 7]),
            (ALL_OF_8, [], 2, [0, 2]),
            # Alone, 1 does not miss it; but nobody knows, and the first of equals it is.
            (ALL_OF_8, [], 1, [0]),
        ],
    ),
    "HGX H100, GPU 2 lost": (
        Node(machine("8xH100").gpus, tired(machine("8xH100"), 2, 0).links),
        [
            # The kubelet does not offer it, and nothing is amiss with the rest.
            ([0, 1, 3, 4, 5, 6, 7], [], 4, [4, 5, 6, 7]),
            ([0, 1, 3, 4, 5, 6, 7], [], 3, [0, 1, 3]),
            ([0, 1, 3, 4, 5, 6, 7], [], 7, [0, 1, 3, 4, 5, 6, 7]),
        ],
    ),
    "DGX-1, the NVLinks between 2 and 3 dead": (
        changed(DGX_1, 2, 3, Link(PciPath.ONE_SWITCH)),
        [
            # 6-7 is as 2-3 was; the side of 2 and 3 is the slower one.
            (ALL_OF_8, [], 2, [6, 7]),
            (ALL_OF_8, [], 4, [4, 5, 6, 7]),
        ],
    ),
    "two boards of NVSwitches": (
        machine("16xH100"),
        [
            # A board for each pod of eight; sockets of different boards have the same number, and no NVLink.
            (range(16), [], 8, list(range(8))),
            (range(1, 16), [], 8, list(range(8, 16))),
            ([*range(6), *range(8, 12)], [], 4, [8, 9, 10, 11]),
        ],
    ),
    "GB200 tray": (
        machine("4xGB200"),
        [
            # Two GPUs on each Grace CPU.
            (range(4), [], 2, [0, 1]),
            ([1, 2, 3], [], 2, [2, 3]),
            ([0, 2, 3], [], 1, [0]),
        ],
    ),
    "four with NVLinks to each other": (
        machine("4xA100"),
        [(range(4), [], 2, [0, 1]), ([0, 2, 3], [], 2, [2, 3]), (range(4), [2], 2, [2, 3])],
    ),
    "pairs with bridges": (
        BRIDGED,
        [
            # Bridges, and not the switches that 0 and 1 share.
            (ALL_OF_8, [], 2, [0, 2]),
            ([1, 2, 3, 4, 5], [], 2, [1, 3]),
            (ALL_OF_8, [], 4, [0, 1, 2, 3]),
            # A single GPU comes from a pair that is broken already.
            ([0, 1, 3, 4, 5, 6, 7], [], 1, [0]),
            ([1, 3, 4, 5, 7], [], 1, [4]),
            # Three: a pair, and the half of a pair that shares a switch with it; the last pair stays whole.
            (ALL_OF_8, [], 3, [0, 1, 2]),
            ([0, 1, 3, 4, 5, 6, 7], [], 3, [0, 1, 3]),
        ],
    ),
    "PCIe only, 4 on one socket": (
        pcie(4, sockets=1, per_switch=2),
        [(range(4), [], 2, [0, 1]), ([1, 2, 3], [], 2, [2, 3]), (range(4), [], 3, [0, 1, 2])],
    ),
    "PCIe only, 4 on two sockets": (
        pcie(4, sockets=2, per_switch=1),
        # A single GPU from the socket that is broken already.
        [(range(4), [], 2, [0, 1]), ([0, 1, 3], [], 2, [0, 1]), ([0, 1, 3], [], 1, [3])],
    ),
    "PCIe only, 8 on one socket": (
        pcie(8, sockets=1, per_switch=4),
        [([1, 2, 3, 4, 5, 6, 7], [], 4, [4, 5, 6, 7]), ([1, 2, 3, 4, 5, 6, 7], [], 3, [1, 2, 3])],
    ),
    "PCIe only, 8 on two sockets": (
        pcie(8, sockets=2, per_switch=2),
        [
            (ALL_OF_8, [], 2, [0, 1]),
            # Both 1-2 and 2-3 are in the socket; 2-3 share a switch.
            ([1, 2, 3, 5, 7], [], 2, [2, 3]),
            # The five have one from the other socket at least.
            (ALL_OF_8, [], 5, [0, 1, 2, 3, 4]),
        ],
    ),
    "PCIe only, 10 on one socket": (
        pcie(10, sockets=1, per_switch=5),
        [
            # Two large switches, as in servers with ten double-width cards.
            (range(10), [], 5, [0, 1, 2, 3, 4]),
            (range(1, 10), [], 5, [5, 6, 7, 8, 9]),
            (range(1, 10), [], 4, [1, 2, 3, 4]),
        ],
    ),
    "PCIe only, 10 on two sockets": (
        pcie(10, sockets=2, per_switch=5),
        [
            (range(10), [], 8, [0, 1, 2, 3, 4, 5, 6, 7]),
            # Both sockets have four that share a switch; four of the first use that up, and leave five whole.
            (range(1, 10), [], 4, [1, 2, 3, 4]),
            ([0, 2, 3, 5, 6, 7, 8, 9], [], 3, [0, 2, 3]),
        ],
    ),
    "nothing is known of the links": (
        Node(tuple(gpu(each, each % 2) for each in range(6)), ()),
        # What is left is the NUMA node.
        [(range(6), [], 3, [0, 2, 4]), ([1, 2, 3, 4], [], 2, [1, 3])],
    ),
}  # fmt: skip

CASES: Final = [(name, *case) for name, (_, cases) in CHOICES.items() for case in cases]


@pytest.mark.parametrize(("name", "available", "required", "size", "expected"), CASES)
def test_the_choice_on_a_machine(
    name: str, available: range | list[int], required: list[int], size: int, expected: list[int]
) -> None:
    """As a person would choose, and as trying every set does."""
    node = CHOICES[name][0]
    answer = preferred(node.resource, node.ids(available), node.ids(required), size, node.plan())

    assert list(indices(node, answer)) == expected
    assert tuple(expected) == best(node, available, required, size)


SMALL: Final = [name for name, (node, _) in CHOICES.items() if len(node.gpus) <= 10]


@pytest.mark.parametrize("name", SMALL)
def test_every_size_on_a_machine(name: str) -> None:
    """The best of any size, of all the GPUs and when one of each socket is taken."""
    node = CHOICES[name][0]
    count = len(node.gpus)
    plan = node.plan()
    for available in (list(range(count)), [each for each in range(count) if each not in {0, count // 2 + 1}]):
        for size in range(1, len(available) + 1):
            answer = preferred(node.resource, node.ids(available), [], size, plan)

            assert indices(node, answer) == best(node, available, [], size)


PLAIN: Final = [
    name
    for name in SMALL
    if CHOICES[name][0].links and not any(link.switched for row in CHOICES[name][0].links for link in row)
]


@pytest.mark.parametrize("name", PLAIN)
def test_never_worse_than_the_reference(name: str) -> None:
    """By its own score, which knows nothing of NVSwitches."""
    node = CHOICES[name][0]
    count = len(node.gpus)
    plan = node.plan()
    # One and the other taken, which is where its partition of what is left and the best set part.
    for taken in [(), (0,), (count - 1,), (0, count // 2), (1, 2, count - 1)]:
        available = [each for each in range(count) if each not in taken]
        for size in range(1, len(available)):
            answer = indices(node, preferred(node.resource, node.ids(available), [], size, plan))
            theirs = reference_choice(node, available, [], size)

            assert reference_score(node, answer) >= reference_score(node, theirs)


def test_the_reference_is_worse_somewhere() -> None:
    """Its partition serves sets that nobody asked for: on DGX-1 there are questions where that costs the pod."""
    plan = DGX_1.plan()
    worse = 0
    for available in combinations(range(8), 6):
        answer = indices(DGX_1, preferred(DGX_1.resource, DGX_1.ids(available), [], 4, plan))
        theirs = reference_choice(DGX_1, available, [], 4)
        worse += reference_score(DGX_1, theirs) < reference_score(DGX_1, answer)

    assert worse > 0


def test_pods_of_two_fill_a_machine_in_pairs() -> None:
    """One after the other each has NVLinks, whatever came before: nothing is broken up that need not be."""
    plan = BRIDGED.plan()
    free = [*range(8)]
    pods = []
    while free:
        pods.append(indices(BRIDGED, preferred(BRIDGED.resource, BRIDGED.ids(free), [], 2, plan)))
        free = [each for each in free if each not in pods[-1]]

    assert pods == [(0, 2), (1, 3), (4, 6), (5, 7)]
