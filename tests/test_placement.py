"""Whole devices of which nothing is known but their order."""

from __future__ import annotations

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
