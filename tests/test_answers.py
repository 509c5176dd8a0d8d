# ruff: noqa: S311 - no secrets
"""What ``nvplug run`` lists and answers, as a kubelet sees it."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import trio
from http2 import ALLOCATE, Http2, framed, http2_to
from hypothesis import given
from hypothesis import strategies as st
from node import GPUS, MACHINE, Node, node_in
from peer.kubelet import CallError, kubelet_in
from peer.program import program

from _nvplug.drivers.description import simulate
from _nvplug.drivers.machines import find_machine
from _nvplug.errors import UnusableDeviceError
from _nvplug.hardware import Hardware
from _nvplug.health import Health, Verdict
from _nvplug.placement import preferred
from _nvplug.resources import GPU_RESOURCE, Device, Offer, Resource, chosen, next_offer

pytestmark = pytest.mark.process

HARDWARE: Final = simulate(find_machine("8xH100")).hardware

# What the kubelet may send: any text that UTF-8 can write.
any_id = st.text(st.characters(codec="utf-8"), max_size=20) | st.sampled_from([gpu.uuid for gpu in HARDWARE.gpus])


@asynccontextmanager
async def described(directory: Path, **description: Any) -> AsyncGenerator[tuple[Node, Path], None]:
    """A node whose GPUs a file describes."""
    file = directory.with_name("gpus.json")
    file.write_text(json.dumps(description))
    expected = description["count"] - len(description.get("faults", {}))
    async with node_in(directory, f"--device-discovery-strategy=simulated:{file}", devices=expected) as node:
        yield node, file


def rewrite(file: Path, **description: Any) -> None:
    """Describes them anew, in one step."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps(description))
    new.rename(file)


async def test_the_list_is_the_hardware(disk: Path) -> None:
    """UUIDs in index order, each with its NUMA node."""
    async with node_in(disk) as node:
        (sent,) = node.kubelet.lists

        assert [device.id for device in sent.devices] == [gpu.uuid for gpu in HARDWARE.gpus]
        assert all(re.fullmatch(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", device.id) for device in sent.devices)
        assert [device.numa for device in sent.devices] == [(gpu.numa,) for gpu in HARDWARE.gpus]
        assert len({device.numa for device in sent.devices}) > 1


async def test_an_unknown_numa_node_is_left_out(disk: Path) -> None:
    """The kubelet would take -1, or 0 for unknown, for a node."""
    async with described(disk, count=3, gpus=[{"numa": None}, {"numa": 0}, {"numa": 7}]) as (node, _):
        assert [device.numa for device in node.kubelet.lists[0].devices] == [(), (0,), (7,)]


async def test_every_change_is_one_message(disk: Path) -> None:
    """However much changes at once: faults that come and go, GPUs that come and go."""
    async with described(disk, count=8) as (node, file):
        seen = 1

        async def becomes(total: int, healthy: int, **description: Any) -> None:
            nonlocal seen
            rewrite(file, **description)
            await node.kubelet.await_that(lambda: len(node.kubelet.lists) > seen, "a list")
            seen += 1
            last = node.kubelet.lists[-1]

            assert (len(last.devices), len(last.healthy)) == (total, healthy)

        await becomes(8, 7, count=8, faults={"3": {"xid": 79}})
        await becomes(8, 4, count=8, faults={str(n): {"xid": 79} for n in (0, 1, 2, 3)})
        await becomes(8, 7, count=8, faults={"7": {"reason": "fell off the bus"}})
        await becomes(6, 6, count=6)
        await becomes(12, 10, count=12, faults={"0": {"xid": 48}, "11": {"xid": 48}})
        await becomes(0, 0, count=0)
        await becomes(8, 8, count=8)
        # A new order of the same is no news to us either.
        rewrite(file, faults={}, count=8)
        rewrite(file, count=8, faults={"0": {"xid": 31}})
        await becomes(8, 7, count=8, faults={"5": {"xid": 79}})

        assert len(node.kubelet.lists) == seen
        assert len(node.kubelet.streams) == 1


async def test_allocate_depends_on_the_set_of_ids_alone(disk: Path) -> None:
    """Not on their order, nor on how often one is named, nor on what was asked before."""
    async with node_in(disk) as node:
        ids = [gpu.uuid for gpu in HARDWARE.gpus]
        wanted = [ids[5], ids[0], ids[3]]
        answers = [await node.kubelet.allocate(order) for order in itertools.permutations(wanted)]
        answers.append(await node.kubelet.allocate([*wanted, *wanted]))

        assert {answer.container.envs["NVIDIA_VISIBLE_DEVICES"] for answer in answers} == {
            f"{ids[0]},{ids[3]},{ids[5]}"
        }
        assert all(answer.containers == answers[0].containers for answer in answers)
        assert answers[0].container.envs.keys() == {"NVIDIA_VISIBLE_DEVICES"}
        assert answers[0].container.devices == ()


async def test_allocate_obeys_the_flags(disk: Path) -> None:
    """Indices instead of UUIDs, and device nodes as well, from another root on the host."""
    flags = (MACHINE, "--device-id-strategy=index", "--pass-device-specs", "--dev-root=/run/driver")
    async with node_in(disk, *flags) as node:
        ids = [gpu.uuid for gpu in HARDWARE.gpus]
        container = (await node.kubelet.allocate([ids[4], ids[2]])).container
        nodes = [(each.container_path, each.host_path, each.permissions) for each in container.devices]

        assert container.envs == {"NVIDIA_VISIBLE_DEVICES": "2,4"}
        paths = [*HARDWARE.control_nodes, "/dev/nvidia2", "/dev/nvidia4"]
        assert nodes == [(path, f"/run/driver{path}", "rw") for path in paths]


async def test_allocate_answers_every_container_for_itself(disk: Path) -> None:
    """Also one that wants nothing, and a request without containers."""
    async with node_in(disk) as node:
        ids = [gpu.uuid for gpu in HARDWARE.gpus]
        both = await node.kubelet.allocate([ids[1]], [], [ids[0], ids[1]])
        none = await node.kubelet.allocate()

        assert [container.envs["NVIDIA_VISIBLE_DEVICES"] for container in both.containers] == [
            ids[1],
            "",
            f"{ids[0]},{ids[1]}",
        ]
        assert none.containers == ()


async def test_an_unknown_id_is_named_and_disturbs_nothing(disk: Path) -> None:
    """INVALID_ARGUMENT, with as much of the id as a person can read; the next request is answered."""
    async with node_in(disk) as node:
        for wrong in ("GPU-1", "", "0", "all", "gpu\n", "Ünïcode", "x" * 100_000):
            with pytest.raises(CallError) as caught:
                await node.kubelet.allocate([HARDWARE.gpus[0].uuid, wrong])
            await node.serves()

            assert caught.value.code == "INVALID_ARGUMENT"
            assert repr(wrong)[1:40].rstrip("'") in caught.value.details
            assert len(caught.value.details) < 500
        assert max(map(len, node.nvplug.lines)) < 1000
        assert len(node.kubelet.streams) == 1


async def test_an_unhealthy_device_is_refused_with_its_reason(disk: Path) -> None:
    """FAILED_PRECONDITION, once the kubelet was told; after it was told otherwise, the device is given again."""
    async with described(disk, count=2) as (node, file):
        ids = [device.id for device in node.kubelet.lists[0].devices]
        rewrite(file, count=2, faults={"1": {"xid": 79}})
        await node.kubelet.await_allocatable(1)
        with pytest.raises(CallError, match=rf"FAILED_PRECONDITION: .*{ids[1]}.*XID 79"):
            await node.kubelet.allocate([ids[1]])
        await node.kubelet.allocate([ids[0]])
        rewrite(file, count=2)
        await node.kubelet.await_allocatable(2)
        await node.kubelet.allocate([ids[1]])


async def test_a_departed_device_is_refused_with_its_reason(disk: Path) -> None:
    """FAILED_PRECONDITION, since it was offered before, also by the next kubelet; and it may come back."""
    async with described(disk, count=2) as (node, file):
        ids = [device.id for device in node.kubelet.lists[0].devices]
        rewrite(file, count=1)
        await node.kubelet.await_allocatable(1)
        at = await node.kubelet.restart()
        await node.kubelet.await_back(1, after=at)
        with pytest.raises(CallError, match=rf"FAILED_PRECONDITION: .*{ids[1]}.*no longer among the node's GPUs"):
            await node.kubelet.allocate([ids[1]])
        rewrite(file, count=2)
        await node.kubelet.await_allocatable(2)
        await node.kubelet.allocate([ids[1]])


@given(st.sets(st.sampled_from(range(GPUS))), st.sets(st.sampled_from(range(GPUS))), st.booleans())
def test_the_kubelet_is_held_only_to_what_it_was_told(broken_now: set[int], broken_then: set[int], sent: bool) -> None:
    """A device that broke after the last list is given; one that was healed after it, too."""

    def offered(broken: set[int]) -> Resource:
        verdicts = {HARDWARE.gpus[index].uuid: Verdict("XID 79", "reset it") for index in broken}
        return next_offer(Offer(), HARDWARE, Health(verdicts)).resources[0]

    now, then = offered(broken_now), offered(broken_then) if sent else None
    for gpu in HARDWARE.gpus:
        told = sent and gpu.index in broken_then and gpu.index in broken_now
        try:
            assert [device.id for device in chosen(now, then, [gpu.uuid])] == [gpu.uuid]
            refused = False
        except UnusableDeviceError:
            refused = True

        assert refused == told


@pytest.mark.slow
async def test_sixty_thousand_devices_can_be_listed_and_allocated(disk: Path) -> None:
    """The longest list that a kubelet reads, all of it for one container, in time that other pods can wait."""
    async with described(disk, count=60_000) as (node, _):
        ids = [device.id for device in node.kubelet.lists[0].devices]
        random.Random(1).shuffle(ids)
        answer = await node.kubelet.allocate(ids, timeout=30)
        some = await node.kubelet.preferred(ids, 30_000, timeout=30)

        assert len(set(answer.container.envs["NVIDIA_VISIBLE_DEVICES"].split(","))) == 60_000
        assert len(set(some)) == 30_000
        assert answer.seconds < 10
        assert len(node.kubelet.streams) == 1


@pytest.mark.slow
async def test_a_list_that_no_kubelet_reads_is_not_sent(disk: Path) -> None:
    """It would end the stream; so the one before stands, an ERROR says why, and the next that fits is sent."""
    async with described(disk, count=8) as (node, file):
        rewrite(file, count=90_000)
        await node.nvplug.wait_for_line(" ERROR cannot send a device list; the one before stands", timeout=30)
        await node.serves()

        assert len(node.kubelet.lists) == 1
        rewrite(file, count=9)
        await node.kubelet.await_allocatable(9)

        assert len(node.kubelet.streams) == 1


@pytest.mark.slow
async def test_a_start_with_such_a_list_waits_for_another(disk: Path) -> None:
    """Nothing is registered until there is a list that can be sent."""
    file = disk.with_name("gpus.json")
    file.write_text('{"count": 90000}')
    async with (
        kubelet_in(disk) as kubelet,
        program(kubelet.socket, f"--device-discovery-strategy=simulated:{file}") as nvplug,
    ):
        await nvplug.wait_for_line(" ERROR cannot send a device list", timeout=30)

        assert not kubelet.registrations
        rewrite(file, count=2)
        await kubelet.await_allocatable(2)


async def test_preferences_are_whole(disk: Path) -> None:
    """Over the wire: the size asked for, the required ones among them, and no error whatever is asked."""
    async with node_in(disk) as node:
        ids = [gpu.uuid for gpu in HARDWARE.gpus]
        shuffled = random.Random(1).sample(ids, len(ids))

        assert len(set(await node.kubelet.preferred(shuffled, 4))) == 4
        assert await node.kubelet.preferred(shuffled, 8) == await node.kubelet.preferred(ids, 8)
        assert ids[6] in await node.kubelet.preferred(shuffled, 2, must_include=[ids[6]])
        assert await node.kubelet.preferred(ids, 0) == ()
        assert await node.kubelet.preferred(ids, -1) == ()
        assert set(await node.kubelet.preferred(ids, 99)) == set(ids)
        assert set(await node.kubelet.preferred(["unknown"], 2, must_include=["required"])) == {"unknown", "required"}
        assert await node.kubelet.preferred([], 3) == ()


@given(st.lists(any_id), st.lists(any_id), st.integers(-(2**31), 2**31 - 1), st.randoms())
def test_a_preference_never_fails(available: list[str], required: list[str], size: int, chance: random.Random) -> None:
    """Exactly as many as asked for where there are, always the required ones, else available ones, always the same."""
    resource = Resource(GPU_RESOURCE, tuple(Device(gpu.uuid, gpu) for gpu in HARDWARE.gpus))
    answer = preferred(resource, available, required, size)
    shuffled = chance.sample(available, len(available))

    assert len(set(answer)) == len(answer)
    assert set(required) <= set(answer) <= {*required, *available}
    possible = len({*required, *available})
    assert len(answer) == max(len(set(required)), min(size, possible))
    assert preferred(resource, shuffled, required, size) == answer


async def test_nothing_is_offered_from_an_empty_node() -> None:
    """Placement and choice know no device then, and do not fail."""
    assert next_offer(Offer(), Hardware(), Health()) == Offer()
    assert preferred(Resource(GPU_RESOURCE), [], [], 1) == ()


def field(number: int, kind: int, content: bytes) -> bytes:
    """A protobuf field, of a kind that may be wrong."""
    return bytes([number << 3 | kind]) + (bytes([len(content)]) if kind == 2 else b"") + content


MALFORMED: Final = {
    "no UTF-8": field(1, 2, field(1, 2, b"GPU-\xff")),
    "a number for a container": field(1, 0, b"\x01"),
    "a number for an id": field(1, 2, field(1, 0, b"\x01")),
    "cut short": field(1, 2, field(1, 2, b"GPU-1"))[:-2],
    "an endless number": b"\xff" * 20,
    "a group": b"\x0b\x0c\x0b",
    "a wire type that does not exist": b"\x0f",
}


async def test_a_malformed_request_is_the_callers_fault(disk: Path) -> None:
    """INVALID_ARGUMENT, and nothing else is disturbed."""
    async with node_in(disk) as node, http2_to(node.kubelet.plugin_sockets()[0]) as caller:
        for name, message in MALFORMED.items():
            reply = await caller.call(ALLOCATE, framed(message))

            assert reply.status == 3, (name, reply)
        await node.serves()


async def test_no_request_at_all_is_our_fault(disk: Path) -> None:
    """Random messages of all methods are answered with OK, or with INVALID_ARGUMENT."""
    chance = random.Random(1)
    methods = ("GetDevicePluginOptions", "Allocate", "GetPreferredAllocation", "PreStartContainer")

    def noise() -> bytes:
        kinds = (lambda: chance.randbytes(chance.randrange(12)), lambda: field(1, 2, noise()[:100]))
        return b"".join(chance.choice(kinds)() for _ in range(chance.randrange(3)))

    async def ask(caller: Http2) -> None:
        for _ in range(200):
            message = noise()
            reply = await caller.call(f"/v1beta1.DevicePlugin/{chance.choice(methods)}", framed(message))

            assert reply.status in {0, 3}, (message, reply)

    async with node_in(disk) as node:
        async with http2_to(node.kubelet.plugin_sockets()[0]) as caller:
            await ask(caller)
        await node.serves()
        with trio.fail_after(5):
            await node.kubelet.await_allocatable(GPUS)
