"""A good set of GPUs where there is no table, in a bounded number of steps.

Sets are grown from several GPUs, each time by the GPU that adds most, and cut down from all by the GPU that adds least.
Then one GPU in the set is exchanged for one outside for as long as that is better. ``make bench`` shows how far from
the best set this ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import add, sub
from typing import Final

from _nvplug.placement.bandwidth import Layout, breakage

__all__ = ["search"]

STEPS: Final = 4_096
"""How many sums are looked at to grow sets: 2 ms' worth. There is one for each GPU whenever one is added to a set."""

COMPARED: Final = 5
"""For how many of the fastest sets that were found the best set is sought among the rest."""


def search(layout: Layout, free: int, required: int, size: int, parts: Sequence[int]) -> int:
    """The same as `Table.best`, where the answer is not promised to be the best."""
    weights = layout.weights(size)

    def fastest(free: int, required: int, steps: int) -> tuple[int, list[int]]:
        """The highest score found, and the sets that have it."""
        found = dict(_Field(layout, weights, free, required, size).sets(steps))
        highest = max(found.values())
        return highest, [members for members, score in found.items() if score == highest]

    _, sets = fastest(free, required, STEPS)
    sets.sort(key=lambda members: (breakage(members, free, parts), -members))
    if len(sets) > 1 and 2 * size <= free.bit_count():
        # Of equals the first.
        return max(sets[:COMPARED], key=lambda members: fastest(free & ~members, 0, 0)[0])
    return sets[0]


class _Field:
    """The free GPUs, by their number among them, and what each pair adds to the score of a set."""

    def __init__(self, layout: Layout, weights: Sequence[Sequence[int]], free: int, required: int, size: int) -> None:
        positions = layout.positions(free)
        self._bits = [1 << len(layout.uuids) - 1 - position for position in positions]
        self._weights = [[weights[one][other] for other in positions] for one in positions]
        self._required = [number for number, bit in enumerate(self._bits) if bit & required]
        self._others = [number for number, bit in enumerate(self._bits) if not bit & required]
        self._size = size

    def sets(self, steps: int) -> Iterator[tuple[int, int]]:
        """Sets of the size, each with its score, that no exchange of one GPU makes better.

        Args:
            steps: what it may take to grow some, from GPUs all over the node.
        """
        yield self._improved(*self._cut_down())
        wanted = self._size - len(self._required)
        starts = min(steps // (len(self._bits) * max(1, wanted)), len(self._others))
        if wanted and starts:
            for start in self._others[:: -(-len(self._others) // starts)]:
                yield self._improved(*self._grown(start))

    def _sums(self, inside: Iterable[int]) -> list[int]:
        """What each GPU has with those of a set."""
        return list(map(sum, zip([0] * len(self._bits), *(self._weights[each] for each in inside), strict=True)))

    def _grown(self, start: int) -> tuple[list[int], list[int], list[int]]:
        inside, outside = [start], [each for each in self._others if each != start]
        sums = self._sums([*self._required, start])
        while len(self._required) + len(inside) < self._size:
            best = max(outside, key=sums.__getitem__)
            outside.remove(best)
            inside.append(best)
            sums = list(map(add, sums, self._weights[best]))
        return inside, outside, sums

    def _cut_down(self) -> tuple[list[int], list[int], list[int]]:
        # From the end: of equals those that come first stay.
        inside, outside = self._others[::-1], list[int]()
        sums = self._sums(range(len(self._bits)))
        while len(self._required) + len(inside) > self._size:
            worst = min(inside, key=sums.__getitem__)
            inside.remove(worst)
            outside.append(worst)
            sums = list(map(sub, sums, self._weights[worst]))
        return inside, outside, sums

    def _improved(self, inside: list[int], outside: list[int], sums: list[int]) -> tuple[int, int]:
        weights = self._weights
        for _ in inside if outside else ():
            gains = [sums[other] for other in outside]
            gain, out = max(
                (max(map(sub, gains, [weights[each][other] for other in outside])) - sums[each], each)
                for each in inside
            )
            if gain <= 0:
                break
            into = max(outside, key=lambda other: sums[other] - weights[out][other])
            inside[inside.index(out)], outside[outside.index(into)] = into, out
            sums = [each + plus - minus for each, plus, minus in zip(sums, weights[into], weights[out], strict=True)]
        members = [*self._required, *inside]
        return sum(self._bits[each] for each in members), sum(sums[each] for each in members) // 2
