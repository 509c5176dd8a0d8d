from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from _nvplug.hardware import Gpu
from _nvplug.placement import preferred
from _nvplug.resources import Device, Resource

RESOURCE = Resource(
    "nvidia.com/gpu",
    tuple(Device(uuid, Gpu(index, uuid, "", "", None, None, 0)) for index, uuid in enumerate("hgfedcba")),
)
ORDER = [device.id for device in RESOURCE.devices]

# Some of them nvplug does not know.
ids = st.lists(st.sampled_from("abcdefghxyz"), unique=True)


@given(ids, st.data())
def test_the_answer_is_of_the_size_asked_for(available: list[str], data: st.DataObject) -> None:
    """It holds the required devices and as many of the available as needed, each once, and no other."""
    required = data.draw(st.lists(st.sampled_from(available), unique=True)) if available else []
    size = data.draw(st.integers(len(required), len(available) + 2))

    answer = preferred(RESOURCE, available, required, size)

    assert len(answer) == len(set(answer)) == min(size, len(available))
    assert set(required) <= set(answer) <= set(available)


@given(ids, st.integers(0, 8))
def test_the_order_of_the_available_is_irrelevant(available: list[str], size: int) -> None:
    """The kubelet asks in the order of a Go map; the answer is the same each time."""
    assert preferred(RESOURCE, available, [], size) == preferred(RESOURCE, sorted(available), [], size)


@given(st.lists(st.sampled_from(ORDER), unique=True), st.integers(0, 8))
def test_the_first_of_the_known_are_preferred(available: list[str], size: int) -> None:
    """Where nothing is required, the answer is the first in index order."""
    assert list(preferred(RESOURCE, available, [], size)) == sorted(available, key=ORDER.index)[:size]


def test_what_is_known_comes_before_what_is_not() -> None:
    """An id that is not offered any more is advised only where nothing else is left."""
    assert preferred(RESOURCE, ["x", "a", "b"], [], 2) == ("b", "a")
    assert preferred(RESOURCE, ["z", "y", "x", "w", "v", "a", "b"], [], 7) == ("b", "a", "v", "w", "x", "y", "z")


def test_required_ids_are_never_dropped() -> None:
    """Even where a question contradicts itself, the required are in the answer: an error would reject the pod."""
    assert preferred(RESOURCE, ["a"], ["b", "x"], 1) == ("b", "x")


def shared(gpus: int, replicas: int, *, packed: bool = False) -> Resource:
    """GPUs, each shared by so many containers."""
    return Resource(
        "nvidia.com/gpu",
        tuple(
            Device(f"GPU-{index}::{number}", Gpu(index, f"GPU-{index}", "", "", None, None, 0), replica=number)
            for index in range(gpus)
            for number in range(replicas)
        ),
        packed=packed,
    )


def counts(answer: Sequence[str]) -> list[int]:
    """How many replicas of each GPU, the most first."""
    return sorted(Counter(one.partition("::")[0] for one in answer).values(), reverse=True)


@pytest.mark.parametrize(
    ("gpus", "replicas", "packed", "size", "expected"),
    [
        # As in NVIDIA's tests.
        (2, 4, False, 2, [1, 1]),
        (2, 4, False, 4, [2, 2]),
        (2, 4, True, 2, [2]),
        (2, 4, True, 4, [4]),
        (2, 4, True, 5, [4, 1]),
        (3, 2, False, 3, [1, 1, 1]),
        (3, 2, True, 3, [2, 1]),
        (1, 2, False, 5, [2]),
    ],
)
def test_replicas_are_distributed_or_packed(
    gpus: int, replicas: int, packed: bool, size: int, expected: list[int]
) -> None:
    """Over as many GPUs as there are, or as few as they fit on."""
    resource = shared(gpus, replicas, packed=packed)
    ids = [device.id for device in resource.devices]

    assert counts(preferred(resource, ids, [], size)) == expected


def test_what_others_have_counts() -> None:
    """The GPU with the fewest replicas in use comes first, or with the most; of equals one that is not mine yet."""
    available = ["GPU-0::0", "GPU-0::1", "GPU-1::1", "GPU-2::0", "GPU-2::1"]

    assert preferred(shared(3, 2), available, [], 2) == ("GPU-0::0", "GPU-2::0")
    assert preferred(shared(3, 2, packed=True), available, [], 2) == ("GPU-1::1", "GPU-0::0")
    assert counts(preferred(shared(2, 2), ["GPU-0::0", "GPU-0::1", "GPU-1::1"], [], 2)) == [1, 1]


def test_required_replicas_count_as_mine() -> None:
    """A container that has a share of one GPU already is given one of another."""
    resource = shared(2, 4)
    ids = [device.id for device in resource.devices]

    assert counts(preferred(resource, ids, ["GPU-0::3"], 2)) == [1, 1]


@given(st.data(), st.integers(1, 4), st.integers(2, 4), st.booleans())
def test_a_preference_for_replicas_is_whole(data: st.DataObject, gpus: int, replicas: int, packed: bool) -> None:
    """Of the size asked for, the required among them, each once, and the same in whatever order the kubelet asks."""
    resource = shared(gpus, replicas, packed=packed)
    every = [device.id for device in resource.devices]
    available = data.draw(st.lists(st.sampled_from([*every, "x", "y"]), unique=True))
    required = data.draw(st.lists(st.sampled_from(available), unique=True)) if available else []
    size = data.draw(st.integers(0, len(available) + 2))

    answer = preferred(resource, available, required, size)
    assert len(answer) == len(set(answer)) == max(len(required), min(size, len(available)))
    assert set(required) <= set(answer) <= set(available)
    assert preferred(resource, sorted(available), required, size) == answer
