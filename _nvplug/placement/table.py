"""The best set of up to 16 GPUs, exactly: a table that is made once for a node, and questions to it.

There are 65,536 sets of 16 GPUs, and 12,870 of eight: too many to go through for every question, above all as each of
them raises the question which is the best among the rest. So for each size the table has the sets in order, the best
first, and for each GPU a number whose bit n says whether it is in the n-th of them. Which sets avoid what others have,
hold what is required, tie with the best, break up the fewest islands: each is an operation or two on such numbers, and
the best is their lowest bit. What the best set within any group of GPUs is worth is looked up.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import compress
from operator import add
from typing import Final, NamedTuple

from _nvplug.placement.bandwidth import Layout, bits

__all__ = ["MOST", "Ranking", "Table"]

MOST: Final = 16
"""The most GPUs that there is a table for."""

# From digits to what compress() takes.
_TRUTH: Final = bytes.maketrans(b"01", b"\0\1")


class _Sets(NamedTuple):
    """All sets of one size; a number of many bits stands for some of them, by position.

    Attributes:
        members: of each set, the best first: the highest score, and of equals the first in index order.
        ranks: where each score begins. The rank of a set is the number of scores that are better, and one.
        with_gpu: the sets that have a GPU, by the number of its bit.
        within: by the GPUs that there are, the rank of the best set of them; empty where no two sets find room.
    """

    members: array[int]
    ranks: array[int]
    with_gpu: tuple[int, ...]
    within: array[int]

    def members_of(self, sets: int) -> Iterator[int]:
        """The members of each of the sets, the best first."""
        return compress(self.members, f"{sets:b}".encode().translate(_TRUTH)[::-1])

    def of(self, gpus: int) -> int:
        """The sets that have no GPU but these."""
        others = 0
        for bit, sets in enumerate(self.with_gpu):
            if not gpus >> bit & 1:
                others |= sets
        return (1 << len(self.members)) - 1 & ~others

    def holding(self, gpus: int) -> int:
        """The sets that have all of these GPUs."""
        sets = (1 << len(self.members)) - 1
        for bit in bits(gpus):
            sets &= self.with_gpu[bit]
        return sets

    def touching(self, gpus: int) -> int:
        """The sets that have some of these GPUs."""
        sets = 0
        for bit in bits(gpus):
            sets |= self.with_gpu[bit]
        return sets

    def best(self, sets: int) -> int:
        """Those with the highest score."""
        rank = bisect_right(self.ranks, (sets & -sets).bit_length() - 1)
        end = self.ranks[rank] if rank < len(self.ranks) else len(self.members)
        return sets & ((1 << end) - 1)


class Ranking(NamedTuple):
    """How a choice came about: how many sets were left after each rule.

    Attributes:
        possible: those that hold what is required, of what is free.
        fastest: with the greatest bandwidth.
        considerate: of these, those after which the best set of the same size is greatest.
        unbroken: of these, those that break up the fewest islands and NUMA nodes.
    """

    possible: int
    fastest: int
    considerate: int
    unbroken: int


class Table:
    """All sets of the GPUs of a layout, of which there may be `MOST`.

    To make one takes a millisecond for 8 GPUs, and 0.1 s and 4 MB for 16, of which 1.5 MB are kept. An answer takes
    0.1 ms, and 2 ms at worst.
    """

    def __init__(self, layout: Layout) -> None:
        count = len(layout.uuids)
        direct, switched = _sums(layout.direct), _sums(layout.switched)
        by_size = [array("H") for _ in range(count + 1)]
        for members in range(1 << count):
            by_size[members.bit_count()].append(members)
        self._sets = [_sorted(sets, direct, switched, count) for sets in by_size]

    def best(self, free: int, required: int, size: int, parts: Sequence[int]) -> int:
        """The best set: the rules are `preferred`'s.

        Args:
            free: the GPUs to choose from.
            required: those of them that must be in the set.
            size: of the set: at least as many as are required, at most as many as are free.
            parts: the islands and NUMA nodes that are not to be broken up.
        """
        chosen = _Choosing(self._sets[size], free, required, size, parts)
        return chosen.first()

    def ranking(self, free: int, required: int, size: int, parts: Sequence[int]) -> Ranking:
        """How the same question is decided."""
        return _Choosing(self._sets[size], free, required, size, parts).ranking()


class _Choosing:
    """One question."""

    def __init__(self, sets: _Sets, free: int, required: int, size: int, parts: Sequence[int]) -> None:
        self._sets = sets
        self._free = free
        self._parts = parts
        self._two = 2 * size <= free.bit_count()
        # No set that is left can be better than this: none has what is required.
        self._hoped = sets.within[free & ~required] if self._two else 0
        self._possible = sets.of(free) & sets.holding(required)
        self._fastest = sets.best(self._possible)

    def first(self) -> int:
        """The set that is chosen."""
        # Where many sets are equally fast the GPUs are much alike, and one of the first is as good as can be hoped for.
        return next(self._leaving(self._hoped), 0) or next(self._leaving(self._best_left()))

    def ranking(self) -> Ranking:
        """How many sets are left after each rule."""
        best_left = self._best_left()
        levels = [sum(1 for _ in self._leaving(best_left, level)) for level in self._levels()]
        return Ranking(self._possible.bit_count(), self._fastest.bit_count(), sum(levels), next(filter(None, levels)))

    def _best_left(self) -> int:
        """The best rank that one of the fastest leaves."""
        within, free = self._sets.within, self._free
        return min([within[free & ~each] for each in self._sets.members_of(self._fastest)]) if self._two else 0

    def _leaving(self, rank: int, *levels: int) -> Iterator[int]:
        """Those of the fastest that leave a set of this rank, by level, and in index order."""
        within, free = self._sets.within, self._free
        for level in levels or self._levels():
            for members in self._sets.members_of(level):
                # Where too few GPUs are left for a set of the same size, all are equal in what they leave.
                if not self._two or within[free & ~members] == rank:
                    yield members

    def _levels(self) -> Iterator[int]:
        """The fastest sets by `breakage`, those with the least first."""
        levels = {(0, 0): self._fastest}
        for part in self._parts:
            free = part & self._free
            broken = self._sets.touching(part) & ~self._sets.holding(free) if free else 0
            whole = not part & ~self._free
            after: dict[tuple[int, int], int] = {}
            for (wholes, rests), sets in levels.items():
                for key, some in (((wholes, rests), sets & ~broken), ((wholes + whole, rests + 1), sets & broken)):
                    if some:
                        after[key] = after.get(key, 0) | some
            levels = after
        return (sets for _, sets in sorted(levels.items()))


def _sums(weights: Sequence[Sequence[int]]) -> array[int]:
    """For every set the sum over its pairs."""
    sums = array("q", [0])
    for bit, weight in enumerate(reversed(weights)):
        # What this GPU has with each set of those that have lower bits.
        row = array("q", [0])
        for one in weight[: -bit - 1 : -1]:
            row.extend(array("q", map(one.__add__, row)))
        sums.extend(array("q", map(add, sums, row)))
    return sums


_DIGITS: Final = tuple(f"{byte:08b}" for byte in range(256))


def _sorted(sets: array[int], direct: array[int], switched: array[int], count: int) -> _Sets:
    size = sets[0].bit_count()
    # Highest score first, then highest number. One number for both is sorted in half the time of a key.
    keyed = sorted(
        [(direct[each] * (size - 1) + switched[each]) << MOST | each for each in sets],
        reverse=True,
    )
    members = array("H", [each & (1 << MOST) - 1 for each in keyed])
    ranks, before = array("H"), None
    room = 2 * size <= count
    within = array("H", [_NONE]) * ((1 << count) if room else 0)
    for position, each in enumerate(keyed):
        if each >> MOST != before:
            before = each >> MOST
            ranks.append(position)
        if room:
            within[members[position]] = len(ranks)
    # The digits of all sets in a row, the last set first, each with its high byte first: every 16th is one of a number.
    digits = "".join(map(_DIGITS.__getitem__, members.tobytes()[::-1]))
    with_gpu = tuple(int(digits[MOST - 1 - bit :: MOST], 2) for bit in range(count))
    return _Sets(members, ranks, with_gpu, _least_below(within, count))


_NONE: Final = 0x7FFF
"""More than any rank. The bit above it must be free."""


def _least_below(values: array[int], count: int) -> array[int]:
    """For every set the least value of it and of all sets in it.

    All values stand in one long number, 16 bits each, and are compared at once: 40 times as fast as one by one.
    """
    if not values:
        return values
    lanes = int.from_bytes(values.tobytes(), "little")
    for bit in range(count):
        block = 1 << bit
        # The highest bit of the lanes whose set has this GPU; the lane of the set without it is so many lanes below.
        guards = int.from_bytes((bytes(2 * block) + b"\x00\x80" * block) * (1 << count - bit - 1), "little")
        without = (lanes << 16 * block) & (guards | guards - (guards >> 15))
        # The guard survives the subtraction where the other value is no greater.
        greater = ((lanes | guards) - without) & guards
        lanes ^= (lanes ^ without) & (greater - (greater >> 15))
    return array("H", lanes.to_bytes(2 << count, "little"))
