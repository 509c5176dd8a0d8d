"""Device lists and answers as bytes."""

from __future__ import annotations

import dataclasses
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from _nvplug.container import ContainerEdits, DeviceNode, Mount
from _nvplug.drivers.machines import find_machine
from _nvplug.errors import ListTooLongError
from _nvplug.hardware import Gpu
from _nvplug.kubelet.api import v1beta1
from _nvplug.kubelet.wire import (
    LIST_LIMIT,
    ListEncoder,
    container_response,
    encoded_preferences,
    preferences_asked,
)
from _nvplug.resources import Device

MACHINE = find_machine("8xH100")


def device(device_id: str, numa: int | None = None, trouble: str = "") -> Device:
    """A device whose id and NUMA node matter, and nothing else."""
    gpu = dataclasses.replace(MACHINE.gpu(0), uuid=device_id, numa=numa)
    return Device(device_id, gpu, trouble)


def encoded_whole(devices: list[Device]) -> bytes:
    """The same list, by betterproto2 alone."""
    return bytes(
        v1beta1.ListAndWatchResponse(
            devices=[
                v1beta1.Device(
                    id=each.id,
                    health="Healthy" if each.healthy else "Unhealthy",
                    topology=None
                    if each.gpu.numa is None
                    else v1beta1.TopologyInfo(nodes=[v1beta1.NumaNode(id=each.gpu.numa)]),
                )
                for each in devices
            ]
        )
    )


devices = st.lists(
    st.builds(
        device,
        st.text(st.characters(codec="utf-8"), min_size=1),
        st.none() | st.integers(0, 1023),
        st.sampled_from(["", "XID 79"]),
    ),
    unique_by=lambda each: each.id,
)


@given(st.lists(devices, min_size=1))
@settings(max_examples=settings().max_examples // 2)
def test_joined_pieces_are_the_list(lists: list[list[Device]]) -> None:
    """Byte for byte, for every list of a series, whatever was encoded before it."""
    encoder = ListEncoder()
    for each in lists:
        assert encoder.encode(each) == encoded_whole(each)


def test_node_zero_is_a_node() -> None:
    """And no node at all is something else."""
    assert b"\x1a\x02\n\x00" in ListEncoder().encode([device("a", 0)])
    assert v1beta1.ListAndWatchResponse.parse(ListEncoder().encode([device("a")])).devices[0].topology is None


def test_a_list_up_to_the_limit_is_sent() -> None:
    """One byte more is refused, with a remedy, and disturbs no later list."""
    encoder = ListEncoder()
    frame = len(encoder.encode([device("x" * 3_000_000)])) - 3_000_000
    longest = device("x" * (LIST_LIMIT - frame))

    assert len(encoder.encode([longest])) == LIST_LIMIT
    with pytest.raises(ListTooLongError) as caught:
        encoder.encode([device("x" * (LIST_LIMIT - frame + 1))])
    assert str(LIST_LIMIT + 1) in str(caught.value)
    assert caught.value.remedy
    assert len(encoder.encode([longest])) == LIST_LIMIT


@pytest.mark.slow
def test_the_second_list_of_sixty_thousand_takes_no_time() -> None:
    """Only what changed is encoded: 11 ms instead of more than a second; here with the factor for busy machines."""
    gpus: list[Gpu] = [MACHINE.gpu(index) for index in range(60_000)]
    listed = [Device(gpu.uuid, gpu) for gpu in gpus]
    encoder = ListEncoder()
    first = encoder.encode(listed)
    listed[7] = dataclasses.replace(listed[7], trouble="XID 79")
    before = time.thread_time()
    second = encoder.encode(listed)
    took = time.thread_time() - before

    assert took < 0.5
    assert first != second
    assert second == encoded_whole(listed)


def test_an_answer_holds_what_the_container_is_given() -> None:
    """All of it: environment, device nodes, mounts, annotations and CDI names, in their order."""
    nodes = (DeviceNode("/dev/b", "/root/dev/b"), DeviceNode("/dev/a", "/root/dev/a", "r"))
    mounts = (Mount("/b", "/host/b", read_only=False), Mount("/a", "/host/a"))
    edits = ContainerEdits({"B": "1", "A": "2"}, nodes, mounts, {"prefix/key": "value"}, ("v/c=b", "v/c=a"))
    read = v1beta1.ContainerAllocateResponse.parse(bytes(container_response(edits)))

    assert read.envs == {"B": "1", "A": "2"}
    assert [(each.container_path, each.host_path, each.permissions) for each in read.devices] == [
        ("/dev/b", "/root/dev/b", "rw"),
        ("/dev/a", "/root/dev/a", "r"),
    ]
    assert [(each.container_path, each.host_path, each.read_only) for each in read.mounts] == [
        ("/b", "/host/b", False),
        ("/a", "/host/a", True),
    ]
    assert read.annotations == {"prefix/key": "value"}
    assert [each.name for each in read.cdi_devices] == ["v/c=b", "v/c=a"]


texts = st.text(st.characters(codec="utf-8"), max_size=200)
requests = st.builds(
    v1beta1.PreferredAllocationRequest,
    container_requests=st.lists(
        st.builds(
            v1beta1.ContainerPreferredAllocationRequest,
            available_deviceIDs=st.lists(texts, max_size=4),
            must_include_deviceIDs=st.lists(texts, max_size=4),
            allocation_size=st.integers(-(2**31), 2**31 - 1) | st.integers(0, 200),
        ),
        max_size=3,
    ),
)


@settings(max_examples=settings().max_examples // 2)
@given(requests)
def test_a_request_for_preferences_is_read_as_betterproto_reads_it(request: v1beta1.PreferredAllocationRequest) -> None:
    """If it is read at all, which it is where ids and size are those of kubelets."""
    read = preferences_asked(bytes(request))
    each = request.container_requests
    usual = all(one.allocation_size >= 0 for one in each) and all(
        len(name.encode()) < 128 for one in each for name in (*one.available_deviceIDs, *one.must_include_deviceIDs)
    )

    assert read == request if usual else read in (None, request)


@settings(max_examples=settings().max_examples // 2)
@given(st.data(), requests)
def test_what_is_no_such_request_is_left_to_betterproto(
    data: st.DataObject, request: v1beta1.PreferredAllocationRequest
) -> None:
    """Bytes that were cut, changed or made up are not read, or read to the same."""
    encoded = bytearray(bytes(request))
    for _ in range(data.draw(st.integers(0, 3))):
        if encoded:
            encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(encoded[: data.draw(st.integers(0, len(encoded)))])
    for content in (bytes(encoded), cut, data.draw(st.binary(max_size=12))):
        read = preferences_asked(content)
        if read is not None:
            assert read == v1beta1.PreferredAllocationRequest.parse(content)


@settings(max_examples=settings().max_examples // 2)
@given(st.lists(st.lists(texts, max_size=5), max_size=3))
def test_preferences_are_encoded_as_betterproto_encodes_them(containers: list[list[str]]) -> None:
    """Byte for byte."""
    response = v1beta1.PreferredAllocationResponse(
        container_responses=[v1beta1.ContainerPreferredAllocationResponse(device_i_ds=ids) for ids in containers]
    )

    assert encoded_preferences(response) == bytes(response)
