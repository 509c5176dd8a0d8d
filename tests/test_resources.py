from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from types import MappingProxyType

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from _nvplug.config import Config
from _nvplug.container.facts import Terms
from _nvplug.errors import UnknownDeviceError, UnusableDeviceError
from _nvplug.hardware import Gpu, Hardware
from _nvplug.health import Health, Verdict
from _nvplug.latest import Latest
from _nvplug.resources import GPU_RESOURCE, Device, Offer, Resource, chosen, keep_offer, next_offer


def gpu(index: int, uuid: str = "") -> Gpu:
    """A GPU of which only what identifies it matters."""
    return Gpu(index, uuid or f"GPU-{index}", "Tesla T4", "", index, None, 0)


UUIDS = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")

# Snapshots of one slowly changing node, in any order; a GPU may come back with another index.
snapshots = st.builds(
    lambda indices, uuids: Hardware(tuple(map(gpu, indices, uuids))),
    st.permutations(range(len(UUIDS))),
    st.lists(st.sampled_from(UUIDS), unique=True),
)
healths = st.sets(st.sampled_from(UUIDS), max_size=2).map(
    lambda uuids: Health(MappingProxyType({uuid: Verdict(f"XID {uuid}", "reset it") for uuid in uuids}))
)
histories = st.lists(st.tuples(snapshots, healths), min_size=1, max_size=4)


def fold(history: list[tuple[Hardware, Health]]) -> list[Offer]:
    """The offers that follow each other."""
    return list(accumulate(history, lambda offer, news: next_offer(offer, *news), initial=Offer()))


def the(offer: Offer) -> Resource:
    """The only resource."""
    (resource,) = offer.resources
    return resource


@given(histories)
def test_every_gpu_is_offered_once(history: list[tuple[Hardware, Health]]) -> None:
    """The devices are the GPUs of the newest snapshot, each once, in index order, and ids are unique."""
    offer = fold(history)[-1]
    gpus = history[-1][0].gpus

    devices = the(offer).devices if offer.resources else ()
    assert [device.gpu for device in devices] == sorted(gpus, key=lambda gpu: gpu.index)
    assert [device.id for device in devices] == [device.gpu.uuid for device in devices]
    assert len({device.id for device in devices}) == len(devices)


@given(histories)
def test_the_order_of_a_snapshot_is_irrelevant(history: list[tuple[Hardware, Health]]) -> None:
    """The same GPUs give the same offer, in whatever order they are reported."""
    otherwise = [(replace(hardware, gpus=hardware.gpus[::-1]), health) for hardware, health in history]

    assert fold(otherwise) == fold(history)


@given(histories)
def test_nothing_offered_is_forgotten(history: list[tuple[Hardware, Health]]) -> None:
    """What was ever offered is either a device or departed with a reason, never both."""
    offer = fold(history)[-1]
    ever = {gpu.uuid for hardware, _ in history for gpu in hardware.gpus}

    ids = {device.id for resource in offer.resources for device in resource.devices}
    departed = {one: reason for resource in offer.resources for one, reason in resource.departed.items()}
    assert ids | departed.keys() == ever
    assert not ids & departed.keys()
    assert all(departed.values())


@given(histories)
def test_a_resource_begins_with_a_gpu_and_never_ends(history: list[tuple[Hardware, Health]]) -> None:
    """A node without GPUs gets no resource; a node that had one keeps it, if need be with an empty list."""
    seen = False
    for (hardware, _), offer in zip(history, fold(history)[1:], strict=True):
        seen = seen or bool(hardware.gpus)

        assert [resource.name for resource in offer.resources] == ([GPU_RESOURCE] if seen else [])


@given(histories)
def test_health_is_the_newest(history: list[tuple[Hardware, Health]]) -> None:
    """A device is unhealthy, for the reason given, exactly where the newest health says so."""
    offer = fold(history)[-1]
    health = history[-1][1]

    for device in (device for resource in offer.resources for device in resource.devices):
        verdict = health.of(device.id)
        assert device.healthy is (verdict is None)
        assert device.trouble == (verdict.reason if verdict else "")


@given(histories)
def test_no_news_is_no_news(history: list[tuple[Hardware, Health]]) -> None:
    """The same hardware and health once more make an equal offer."""
    offer = fold(history)[-1]

    assert next_offer(offer, *history[-1]) == offer


def test_control_nodes_are_handed_on() -> None:
    """Every container needs the device nodes that the GPUs share."""
    hardware = Hardware((gpu(0),), control_nodes=("/dev/nvidiactl",))

    assert the(next_offer(Offer(), hardware, Health())).control_nodes == ("/dev/nvidiactl",)


RESOURCE = Resource(
    GPU_RESOURCE,
    (Device("GPU-0", gpu(0)), Device("GPU-1", gpu(1), "XID 79"), Device("GPU-2", gpu(2))),
    MappingProxyType({"GPU-9": "it is no longer among the node's GPUs"}),
)


@given(st.lists(st.sampled_from(["GPU-0", "GPU-2"])))
def test_an_allocation_has_no_order(ids: list[str]) -> None:
    """Ids may come in any order and more than once: the devices are each given once, in index order."""
    assert [device.id for device in chosen(RESOURCE, RESOURCE, ids)] == sorted(set(ids))


@pytest.mark.parametrize("bad", ["GPU-7", "", "GPU-0::1", "gpu-0"])
def test_a_device_never_offered_is_unknown(bad: str) -> None:
    """An id that nobody was told of is an error of the asker, and the error names it."""
    with pytest.raises(UnknownDeviceError, match=f"there is no device {bad!r}"):
        chosen(RESOURCE, RESOURCE, ["GPU-0", bad])


def test_a_departed_device_is_unusable() -> None:
    """An id that was offered once is no error of the asker; the error says what became of it."""
    with pytest.raises(UnusableDeviceError, match="GPU-9 cannot be allocated: it is no longer among"):
        chosen(RESOURCE, RESOURCE, ["GPU-0", "GPU-9"])


def test_a_device_known_to_be_unhealthy_is_unusable() -> None:
    """The kubelet is held to the health that it was told, and hears the reason."""
    with pytest.raises(UnusableDeviceError, match="GPU-1 cannot be allocated: XID 79"):
        chosen(RESOURCE, RESOURCE, ["GPU-1"])


@pytest.mark.parametrize(
    "sent", [None, Resource(GPU_RESOURCE, tuple(replace(d, trouble="") for d in RESOURCE.devices))]
)
def test_the_kubelet_is_not_held_to_what_it_was_not_told(sent: Resource | None) -> None:
    """Trouble that is not yet on the stream refuses nothing: the kubelet chose in good faith."""
    assert [device.id for device in chosen(RESOURCE, sent, ["GPU-1"])] == ["GPU-1"]


def test_a_device_that_recovered_is_usable() -> None:
    """A device that was sent as unhealthy and is well by now is given."""
    well = replace(RESOURCE, devices=tuple(replace(device, trouble="") for device in RESOURCE.devices))

    assert [device.id for device in chosen(well, RESOURCE, ["GPU-1"])] == ["GPU-1"]


async def test_the_offer_follows_hardware_and_health() -> None:
    """Whichever of the two changes, the offer follows; what changes nothing makes no version."""
    hardware, health, offer = Latest(Hardware()), Latest(Health()), Latest(Offer())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            keep_offer, hardware, health, Latest(Config()), Latest(Terms(Config())), offer, lambda _remark: None
        )
        await trio.testing.wait_all_tasks_blocked()
        assert offer.value == Offer()

        hardware.set(Hardware((gpu(0),)))
        await offer.newer_than(0)
        assert [device.healthy for device in the(offer.value).devices] == [True]

        health.set(Health(MappingProxyType({"GPU-0": Verdict("XID 79", "")})))
        await offer.newer_than(1)
        assert [device.healthy for device in the(offer.value).devices] == [False]

        # Of a GPU that this node does not have.
        health.set(Health(MappingProxyType({"GPU-0": Verdict("XID 79", ""), "GPU-5": Verdict("XID 48", "")})))
        hardware.set(Hardware((gpu(0),), driver_version="580.1"))
        await trio.testing.wait_all_tasks_blocked()
        assert offer.version == 2
        nursery.cancel_scope.cancel()
