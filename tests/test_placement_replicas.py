"""Several devices on one GPU: replicas, MIG devices, and replicas of those."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from topologies import Node, gpu, machine

from _nvplug.hardware import MigDevice
from _nvplug.placement import Plan, preferred
from _nvplug.resources import Device, Resource

DGX_1: Final = machine("8xV100")
POLICIES: Final = ("distributed", "packed", "distinct")


def shared(gpus: int | Node, replicas: int, policy: str = "distributed", *, migs: int = 0) -> Resource:
    """GPUs, or so many MIG devices on each, each shared by so many containers; ids are ``2:1::0`` and the like."""
    physical = [gpu(index, None) for index in range(gpus)] if isinstance(gpus, int) else gpus.gpus
    devices = []
    for each in physical:
        for part in range(max(migs, 1)):
            mig = MigDevice(part, f"MIG-{each.index}:{part}", part, 0, 0, 1, 1, 0) if migs else None
            name = f"{each.index}:{part}" if migs else f"{each.index}"
            devices += [
                Device(f"{name}::{number}" if replicas else name, each, mig=mig, replica=number if replicas else None)
                for number in range(max(replicas, 1))
            ]
    return Resource("nvidia.com/gpu", tuple(devices), policy=policy)


def free(resource: Resource, *taken: str) -> list[str]:
    """What is available when others have these."""
    return [device.id for device in resource.devices if device.id not in taken]


def counts(answer: Sequence[str]) -> list[int]:
    """How many of each GPU, the most first."""
    return sorted(Counter(one.partition(":")[0] for one in answer).values(), reverse=True)


@pytest.mark.parametrize(
    ("gpus", "replicas", "policy", "size", "expected"),
    [
        # As in NVIDIA's tests.
        (2, 4, "distributed", 2, [1, 1]),
        (2, 4, "distributed", 4, [2, 2]),
        (2, 4, "packed", 2, [2]),
        (2, 4, "packed", 4, [4]),
        (2, 4, "packed", 5, [4, 1]),
        (3, 2, "distributed", 3, [1, 1, 1]),
        (3, 2, "packed", 3, [2, 1]),
        (1, 2, "distributed", 5, [2]),
        (3, 2, "distinct", 3, [1, 1, 1]),
        (3, 2, "distinct", 4, [2, 1, 1]),
        (1, 4, "distinct", 2, [2]),
    ],
)
def test_replicas_are_distributed_or_packed(
    gpus: int, replicas: int, policy: str, size: int, expected: list[int]
) -> None:
    """Over as many GPUs as there are, or as few as they fit on."""
    resource = shared(gpus, replicas, policy)

    assert counts(preferred(resource, free(resource), [], size)) == expected


def test_what_others_have_counts() -> None:
    """The GPU with the fewest replicas in use comes first, or with the most; of equals one that is not mine yet."""
    taken = ["1::0"]
    distributed, packed = shared(3, 2), shared(3, 2, "packed")

    assert preferred(distributed, free(distributed, *taken), [], 2) == ("0::0", "2::0")
    assert preferred(packed, free(packed, *taken), [], 2) == ("1::1", "0::0")
    assert counts(preferred(shared(2, 2), ["0::0", "0::1", "1::1"], [], 2)) == [1, 1]


def test_required_replicas_count_as_mine() -> None:
    """A container that has a share of one GPU already is given one of another."""
    for policy in ("distributed", "distinct"):
        resource = shared(2, 4, policy)

        assert counts(preferred(resource, free(resource), ["0::3"], 2)) == [1, 1]


def test_distinct_comes_before_balance() -> None:
    """A busy GPU that the container has nothing of goes before an idle one that it has; not if distributed."""
    taken = ["0::0", "0::1", "0::2"]
    for policy, expected in (("distributed", [2]), ("distinct", [1, 1])):
        resource = shared(2, 5, policy)

        assert counts(preferred(resource, free(resource, *taken), [], 2)) == expected


@pytest.mark.parametrize(("policy", "expected"), [("distributed", [1, 1]), ("packed", [2]), ("distinct", [1, 1])])
def test_mig_devices_count_by_their_gpu(policy: str, expected: list[int]) -> None:
    """Two MIG devices of one GPU are one GPU, whether or not they are shared."""
    for replicas in (0, 3):
        resource = shared(2, replicas, policy, migs=3)

        assert counts(preferred(resource, free(resource), [], 2)) == expected


def test_a_gpu_with_mig_devices_in_use_is_in_use() -> None:
    """The next container comes to the other GPU, or to the same where they are to be packed."""
    for policy, expected in (("distributed", "1:0"), ("packed", "0:1")):
        resource = shared(2, 0, policy, migs=3)

        assert preferred(resource, free(resource, "0:0"), [], 1) == (expected,)


def test_replicas_spread_over_the_mig_devices_of_a_gpu() -> None:
    """The MIG device with the fewest replicas in use comes first, of equals the first; packed, the most."""
    resource = shared(1, 2, migs=3)

    assert preferred(resource, free(resource, "0:0::0"), [], 3) == ("0:1::0", "0:2::0", "0:0::1")
    resource = shared(1, 2, "packed", migs=3)

    assert preferred(resource, free(resource, "0:1::0"), [], 3) == ("0:1::1", "0:0::0", "0:0::1")


def test_containers_spread_over_the_numa_nodes() -> None:
    """One container after the other, each with one replica: from one node, then from the other. Packed: from one."""
    numa: dict[str, list[int]] = {}
    for policy in ("distributed", "packed"):
        resource = shared(DGX_1, 4, policy)
        left = free(resource)
        numa[policy] = []
        for _ in range(8):
            (chosen,) = preferred(resource, left, [], 1, DGX_1.plan())
            left.remove(chosen)
            numa[policy].append(int(chosen.partition(":")[0]) // 4)

    assert numa == {"distributed": [0, 1] * 4, "packed": [0] * 8}


def test_the_gpus_of_one_container_are_near_each_other() -> None:
    """Of GPUs that are equally busy those with NVLinks to the first; on DGX-1 that is the other side's GPU, too."""
    resource = shared(DGX_1, 4)

    assert preferred(resource, free(resource), ["6::0"], 2, DGX_1.plan()) == ("6::0", "7::0")
    assert preferred(resource, free(resource), [], 2, DGX_1.plan()) == ("0::0", "3::0")
    # 3 is busy; of the others 4 has as many NVLinks to 0 as that has.
    assert preferred(resource, free(resource, "3::0"), ["0::0"], 2, DGX_1.plan()) == ("0::0", "4::0")


def test_whole_gpus_are_placed_as_whole_though_others_are_shared() -> None:
    """Where what is available is whole, the best set is given, whatever else the resource has."""
    whole = DGX_1.resource.devices[:7]
    mixed = replace(DGX_1.resource, devices=(*whole, *(Device(f"7::{n}", DGX_1.gpus[7], replica=n) for n in (0, 1))))
    available = [device.id for device in whole]

    assert preferred(mixed, available, [], 2, DGX_1.plan()) == tuple(DGX_1.ids([2, 3]))
    # A replica is on the list: now GPUs count by what is in use of them.
    assert len(preferred(mixed, [*available, "7::1"], [], 8, DGX_1.plan())) == 8


def test_what_is_broken_is_not_in_use() -> None:
    """Nor is it given while anything else is left: a NUMA node with a broken GPU is no busier than another."""
    resource = shared(DGX_1, 2)
    devices = (replace(device, trouble="XID 79" * (device.gpu.index == 0)) for device in resource.devices)
    resource = replace(resource, devices=tuple(devices))
    left = free(resource)

    assert preferred(resource, left, [], 1, DGX_1.plan()) == ("1::0",)
    assert preferred(resource, ["0::0", "5::1"], [], 2, DGX_1.plan()) == ("5::1", "0::0")


@settings(deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(0, 3), st.integers(0, 3), st.sampled_from(POLICIES), st.booleans())
def test_a_preference_is_whole(
    data: st.DataObject, gpus: int, replicas: int, migs: int, policy: str, laid_out: bool
) -> None:
    """Of the size asked for, the required among them, each once, and the same in whatever order the kubelet asks."""
    node = Node(DGX_1.gpus[:gpus], tuple(row[:gpus] for row in DGX_1.links[:gpus]))
    resource = shared(node, replicas, policy, migs=migs)
    available = data.draw(st.lists(st.sampled_from([*free(resource), "x", "y"]), unique=True))
    required = data.draw(st.lists(st.sampled_from(available), unique=True)) if available else []
    size = data.draw(st.integers(0, len(available) + 2))
    plan = node.plan() if laid_out else Plan()
    answer = preferred(resource, available, required, size, plan)

    assert len(answer) == len(set(answer)) == max(len(required), min(size, len(available)))
    assert set(required) <= set(answer) <= set(available)
    assert preferred(resource, sorted(available), required, size, plan) == answer


@given(st.data(), st.integers(1, 5), st.integers(2, 4))
def test_distributed_leaves_no_gpu_behind(data: st.DataObject, gpus: int, replicas: int) -> None:
    """One more replica of a GPU is given only where no GPU with fewer in use has one left."""
    resource = shared(gpus, replicas)
    available = data.draw(st.lists(st.sampled_from(free(resource)), unique=True))
    size = data.draw(st.integers(0, len(available)))
    answer = preferred(resource, available, [], size)

    left = Counter(each.partition(":")[0] for each in {*available} - {*answer})
    mine = Counter(each.partition(":")[0] for each in answer)
    used = {str(index): replicas - left[str(index)] for index in range(gpus)}
    assert all(used[given] - 1 <= used[other] for given in mine for other in left)
