"""Several devices on one GPU, replicas and MIG devices: which of them a container is to be given.

They count by the GPU that they are on. One after the other is taken, each from the GPU that comes first by:

============  ===========================  ===========================  ===========================
policy        distributed                  packed                       distinct
============  ===========================  ===========================  ===========================
first         fewest devices in use        most devices in use          fewest of this container
then          fewest of this container     fewest of this container     fewest devices in use
============  ===========================  ===========================  ===========================

and of equals by the order in which the GPUs would be taken one each: with those rules, then the most bandwidth to the
GPUs that were taken before, then the NUMA node with the fewest devices in use (packed: the most), then the index. So
containers spread over the GPUs and NUMA nodes, or leave whole ones free; and the GPUs of one container are near each
other where that is to be had.

In use is what others have, that is, what the kubelet does not call available, and what this container was given. Of a
GPU the MIG device with the fewest replicas in use comes first (packed: the most), and of equals the first by index.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import add

from _nvplug.placement.bandwidth import Layout
from _nvplug.resources import Device

__all__ = ["in_turn"]


def in_turn(
    devices: Iterable[Device], layout: Layout, policy: str, available: set[str], required: set[str]
) -> list[str]:
    """The ids that are available, well and not required, in the order in which one container is to be given them.

    Args:
        devices: of the resource, in index order.
        layout: which GPUs are near each other.
        policy: ``distributed``, ``packed`` or ``distinct``.
        available: ids that may be chosen.
        required: ids that the container has anyway.
    """
    gpus: dict[str, _Gpu] = {}
    for device in devices:
        gpu = gpus.get(device.gpu.uuid)
        if gpu is None:
            gpu = gpus[device.gpu.uuid] = _Gpu(device.gpu.uuid, device.gpu.numa)
        # There may be a thousand of them, and everybody waits.
        part = device.mig.index if device.mig else 0
        if device.id in required:
            gpu.mine += 1
            gpu.count(part)
        elif device.trouble:
            continue
        elif device.id in available:
            gpu.parts.setdefault(part, []).append(device.id)
        else:
            gpu.count(part)
    keyed = []
    for rank, gpu in enumerate(_one_each(list(gpus.values()), layout, policy)):
        first, then = gpu.claim(policy)
        # A GPU that is being packed stays the first until nothing of it is left.
        step = 0 if policy == "packed" else 1
        for turn, device_id in enumerate(gpu.free(policy)):
            keyed.append((first + turn * step, then + turn * step, rank, turn, device_id))
    return [device_id for *_, device_id in sorted(keyed)]


class _Gpu:
    """A GPU, and what of it is in use. What is not well is neither in use nor free.

    Attributes:
        uuid, numa: as in hardware.
        used: how many of its devices are in use, those of this container counted.
        mine: how many this container has.
        parts: what is free, by MIG device; those of which nothing is free are left out.
    """

    def __init__(self, uuid: str, numa: int | None) -> None:
        self.uuid = uuid
        self.numa = numa
        self.used = 0
        self.mine = 0
        self.parts: dict[int, list[str]] = {}
        self._used: dict[int, int] = {}

    def count(self, part: int) -> None:
        """One more of this part is in use."""
        self.used += 1
        self._used[part] = self._used.get(part, 0) + 1

    def claim(self, policy: str) -> tuple[int, int]:
        """What this GPU's place in the order begins with."""
        match policy:
            case "packed":
                return -self.used, self.mine
            case "distinct":
                return self.mine, self.used
            case _:
                return self.used, self.mine

    def free(self, policy: str) -> list[str]:
        """What is not in use, in the order in which it is to be taken."""
        if len(self.parts) == 1:
            return next(iter(self.parts.values()))
        keyed = []
        for part, ids in self.parts.items():
            used = self._used.get(part, 0)
            for turn, device_id in enumerate(ids):
                keyed.append((-used if policy == "packed" else used + turn, part, turn, device_id))
        return [device_id for *_, device_id in sorted(keyed)]


def _one_each(gpus: list[_Gpu], layout: Layout, policy: str) -> list[_Gpu]:
    """The order in which the GPUs that have something free would be taken, if each were taken once."""
    places = {uuid: place for place, uuid in enumerate(layout.uuids)}
    if not all(gpu.uuid in places for gpu in gpus):
        return gpus
    weights = layout.weights(2)
    near = [0] * len(places)
    on_node: dict[int | None, int] = {}
    for gpu in gpus:
        on_node[gpu.numa] = on_node.get(gpu.numa, 0) + gpu.used
        if gpu.mine:
            near = list(map(add, near, weights[places[gpu.uuid]]))
    sign = -1 if policy == "packed" else 1
    ordered = []
    left = [gpu for gpu in gpus if gpu.parts]
    while left:
        gpu = min(left, key=lambda each: (*each.claim(policy), -near[places[each.uuid]], sign * on_node[each.numa]))
        left.remove(gpu)
        ordered.append(gpu)
        on_node[gpu.numa] += 1
        near = list(map(add, near, weights[places[gpu.uuid]]))
    return ordered
