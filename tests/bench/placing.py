"""How long a plugin thinks about which GPUs to prefer, and how good nvplug's answer is where it cannot try them all."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from itertools import combinations
from typing import TYPE_CHECKING, Any, Final

from peer.kubelet import GPU, CallError, Kubelet

from _nvplug.hardware import Gpu, Link, PciPath
from _nvplug.placement.bandwidth import Layout, layout_of
from _nvplug.placement.search import search
from bench.figures import MILLISECONDS, PERCENT, Figure, Missed, Sample, median
from bench.node import NVPLUG, MissedError, Node

if TYPE_CHECKING:
    from bench.trials import Pace, Samples

__all__ = ["EVERY_SIZE", "GAPS", "every_size", "gaps", "preferred"]

EVERY_SIZE: Final = {
    (8, 1): Figure("GetPreferredAllocation, each size of 8 GPUs", MILLISECONDS, 5e-3),
    (16, 1): Figure("GetPreferredAllocation, each size of 16 GPUs", MILLISECONDS, 5e-3),
    (32, 1): Figure("GetPreferredAllocation, each size of 32 GPUs", MILLISECONDS, 10e-3),
    (8, 128): Figure("GetPreferredAllocation, sizes of 1,024 replicas", MILLISECONDS, 5e-3),
}
"""By GPUs, and the replicas of each. A sample is the median of some calls for one size, so the worst is a size's."""

GAPS: Final = Figure("bandwidth short of the best, 18 to 32 GPUs", PERCENT)


async def preferred(kubelet: Kubelet, ids: tuple[str, ...], size: int) -> float:
    """Seconds that one call took."""
    # Kubelet.preferred returns the ids only. By the test's clock a call would take half a millisecond more.
    arguments: dict[str, Any] = {
        "resource": GPU,
        "available": list(ids),
        "must_include": [],
        "size": size,
        "timeout": 10.0,
    }
    return float((await kubelet._ask("preferred", **arguments))["seconds"])  # noqa: SLF001


async def every_size(node: Node, pace: Pace, *, gpus: int, replicas: int) -> Samples:
    """All are free, and any number of them is asked for; of replicas, some numbers."""
    total = gpus * replicas
    sizes = range(1, total + 1) if total <= 32 else (1, 2, 3, 4, 8, 9, 64, 100, 511, 512, 1000, 1023, 1024)
    samples: list[Sample] = []
    for size in sizes:
        await node.ready(gpus, replicas, patience=pace.patience)
        if not samples:
            # A plugin may have prepared itself for these GPUs, a while after it listed them.
            await node.quiet(min(2.0, pace.quiet))
        ids = node.kubelet.lists[-1].healthy
        try:
            seconds: list[Sample] = [await preferred(node.kubelet, ids, size) for _ in range(pace.sizes)]
        except CallError as error:
            if error.code != "DEADLINE_EXCEEDED":
                raise MissedError(error.code) from None
            # It may go on thinking about that for a long time.
            samples.append(Missed(f"not within 10 s for {size}"))
            await node.kill()
        else:
            samples.append(median(seconds))
    return {EVERY_SIZE[gpus, replicas]: samples}


async def gaps(node: Node, pace: Pace) -> Samples:
    """The search, for every size of which the best can be found: by all sets of 18 GPUs, and by few of 32."""
    if node.plugin.name != NVPLUG.name:
        raise MissedError("nvplug only")
    chance = random.Random(1)  # noqa: S311 - no secret
    samples: list[Sample] = []
    for count in (18, 32):
        for layout in _layouts(count, chance, kinds=4 if pace.repeat else 1):
            best = _best_of_all(layout) if count == 18 else _best_of_few(layout)
            for size, score in best.items():
                found = layout.score(search(layout, (1 << count) - 1, 0, size, (*layout.islands, *layout.nodes)))
                samples.append(1 - found / score)
    return {GAPS: samples}


def _layouts(count: int, chance: random.Random, *, kinds: int) -> Iterator[Layout]:
    """Nodes without any order in the links; with pairs; with islands of five, some of whose links are dead."""
    for kind in range(kinds):
        shuffled = chance.sample(range(count), count)
        rows = [[Link()] * count for _ in range(count)]
        for one, other in combinations(range(count), 2):
            a, b = shuffled[one], shuffled[other]
            path = PciPath.NUMA_NODE if a * 2 // count == b * 2 // count else PciPath.SYSTEM
            nvlinks = (
                chance.choice((0, 0, 1, 2)),
                4 * (a // 2 == b // 2),
                2 * (a // 5 == b // 5 and chance.random() < 0.9),
                chance.randrange(5),
            )[kind]
            rows[one][other] = rows[other][one] = Link(path, nvlinks)
        gpus = [Gpu(each, f"GPU-{each}", "", "", each, shuffled[each] * 2 // count, 0) for each in range(count)]
        yield layout_of(gpus, rows)


def _best_of_all(layout: Layout) -> dict[int, int]:
    """The highest score of each size, by the sum over the pairs of every set."""
    sums = array("q", [0])
    for number, row in enumerate(layout.direct):
        for members in range(1 << number):
            sums.append(sums[members] + sum(row[each] for each in range(number) if members >> each & 1))
    best: dict[int, int] = {}
    for members, score in enumerate(sums):
        size = members.bit_count()
        best[size] = max(best.get(size, 0), score * (size - 1))
    return {size: score for size, score in best.items() if size > 1}


def _best_of_few(layout: Layout) -> dict[int, int]:
    """The highest score of the sizes of which there are few sets: of three GPUs, and of all but two."""
    count = len(layout.uuids)
    best = {}
    for size in (2, 3, count - 2, count - 1):
        few = min(size, count - size)
        weights = layout.weights(size)
        everything = sum(map(sum, weights)) // 2
        scores = []
        for some in combinations(range(count), few):
            inside = sum(weights[one][other] for one, other in combinations(some, 2))
            # Without some: all pairs, less those that have one of them.
            scores.append(inside if few == size else everything - sum(sum(weights[one]) for one in some) + inside)
        best[size] = max(scores)
    return best
