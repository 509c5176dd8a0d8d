"""Which devices belong together: the answer to GetPreferredAllocation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from _nvplug.resources import Resource

__all__ = ["preferred"]


def preferred(resource: Resource, available: Iterable[str], required: Sequence[str], size: int) -> tuple[str, ...]:
    """The best devices for one container: always the required ones, then the available ones in index order.

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
    known = [device.id for device in resource.devices if device.id in candidates]
    for device_id in [*known, *sorted(candidates.difference(known))]:
        if len(chosen) >= size:
            break
        chosen[device_id] = None
    return tuple(chosen)
