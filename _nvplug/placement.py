"""Which devices belong together: the answer to GetPreferredAllocation."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from _nvplug.resources import Device, Resource

__all__ = ["preferred"]


def preferred(resource: Resource, available: Iterable[str], required: Sequence[str], size: int) -> tuple[str, ...]:
    """The best devices for one container: always the required ones, then the available ones.

    Whole devices come in index order. Replicas come each from the device with the fewest replicas in use, or with the
    most where they are to be packed; of equals from the one that this container has least of.

    Args:
        resource: what is offered now.
        available: ids to choose from, in any order.
        required: ids that must be among the chosen.
        size: how many in all, the required ones counted.

    Returns:
        ``size`` ids where that many are available, fewer otherwise. Never an error: the kubelet would reject the pod.
    """
    chosen = dict.fromkeys(required)
    candidates = set(available)
    known = [device for device in resource.devices if device.id in candidates]
    order = [device.id for device in known]
    if any(device.replica is not None for device in resource.devices):
        order = _spread(resource, known, chosen.keys(), size)
    for device_id in [*order, *sorted(candidates.difference(order))]:
        if len(chosen) >= size:
            break
        chosen[device_id] = None
    return tuple(chosen)


def _spread(resource: Resource, available: Iterable[Device], required: Iterable[str], size: int) -> list[str]:
    """Replicas in the order in which one container is to be given them."""
    wanted = set(required)
    free: dict[str, deque[str]] = {}
    for device in available:
        if device.id not in wanted:
            free.setdefault(device.uuid, deque()).append(device.id)
    in_use = Counter(device.uuid for device in resource.devices)
    in_use.subtract({uuid: len(ids) for uuid, ids in free.items()})
    mine = Counter(device.uuid for device in resource.devices if device.id in wanted)
    order: list[str] = []
    while free and len(order) < size:
        # Of equals the first in index order.
        best = min(free, key=lambda uuid: (-in_use[uuid] if resource.packed else in_use[uuid], mine[uuid]))
        order.append(free[best].popleft())
        in_use[best] += 1
        mine[best] += 1
        if not free[best]:
            del free[best]
    return order
