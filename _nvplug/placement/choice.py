"""The choice itself: pure, and as fast as the plan allows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from _nvplug.placement.bandwidth import Layout
from _nvplug.placement.plan import Plan
from _nvplug.placement.replicas import in_turn
from _nvplug.placement.search import search
from _nvplug.resources import Resource

__all__ = ["Question", "preferred", "question"]

_UNKNOWN: Final = Plan()


def preferred(
    resource: Resource, available: Iterable[str], required: Sequence[str], size: int, plan: Plan = _UNKNOWN
) -> tuple[str, ...]:
    """The best devices for one container: always the required ones, then the available ones.

    Of whole GPUs it is the set

    - with the greatest bandwidth, as reckoned in bandwidth.py;
    - of equals, the one after which the best set of the same size among those that remain is greatest;
    - of equals, the one that breaks up the fewest NVLink islands and NUMA nodes that are free as a whole, and then the
      one that leaves the fewest with a rest of free GPUs;
    - of equals, the first in index order.

    Replicas and MIG devices are spread or packed by the rules in replicas.py. What has broken since the kubelet was
    told, and what is not offered any more, is advised only where nothing else is left.

    Args:
        resource: what is offered now.
        available: ids to choose from, in any order.
        required: ids that must be among the chosen.
        size: how many in all, the required ones counted.
        plan: of the node. Without one, whole GPUs come in index order.

    Returns:
        ``size`` ids where that many are available, fewer otherwise. Never an error: the kubelet would reject the pod.
    """
    chosen = dict.fromkeys(required)
    candidates = set(available)

    def wishes() -> Iterator[str]:
        known = [device for device in resource.devices if device.id in candidates or device.id in chosen]
        if any(device.replica is not None or device.mig for device in known):
            yield from in_turn(resource.devices, plan.layout, resource.policy, candidates, set(chosen))
        else:
            yield from _best(resource, candidates, chosen.keys(), size, plan)
        yield from (device.id for device in known if device.healthy)
        yield from (device.id for device in known if not device.healthy)
        yield from sorted(candidates)

    if len(chosen) < size:
        for device_id in wishes():
            chosen[device_id] = None
            if len(chosen) >= size:
                break
    return tuple(chosen)


class Question(NamedTuple):
    """Which GPUs; sets as in `Layout`.

    Attributes:
        free: those to choose from, the required ones among them; of the others those that are well.
        required: those that must be chosen.
        size: how many in all.
        parts: NVLink islands and NUMA nodes, as far as they are offered and well.
    """

    free: int
    required: int
    size: int
    parts: tuple[int, ...]


def question(
    resource: Resource, available: Collection[str], required: Collection[str], size: int, layout: Layout
) -> Question:
    """What is asked, as far as it is about whole GPUs that are laid out."""
    free = must = offered = 0
    for device in resource.devices:
        bit = layout.bit.get(device.gpu.uuid, 0)
        if device.id in required:
            must |= bit
        elif device.id in available and device.healthy:
            free |= bit
        if device.healthy:
            offered |= bit
    offered |= must
    parts = (part & offered for part in (*layout.islands, *layout.nodes))
    elsewhere = len(required) - must.bit_count()
    return Question(free | must, must, size - elsewhere, tuple(part for part in parts if part.bit_count() > 1))


def _best(
    resource: Resource, available: Collection[str], required: Collection[str], size: int, plan: Plan
) -> list[str]:
    """The best whole GPUs, in index order."""
    asked = question(resource, available, required, size, plan.layout)
    if asked.size >= asked.free.bit_count():
        members = asked.free
    elif asked.size <= asked.required.bit_count():
        members = asked.required
    else:
        members = plan.table.best(*asked) if plan.table else search(plan.layout, *asked)
    return [device.id for device in resource.devices if plan.layout.bit.get(device.gpu.uuid, 0) & members]
