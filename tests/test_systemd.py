from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from _nvplug import happenings
from _nvplug.happenings import Happening
from _nvplug.latest import Latest
from _nvplug.observe.systemd import Service, State, after, keep_told, service_from, status

GPU = "nvidia.com/gpu"


@pytest.fixture
def manager() -> Iterator[socket.socket]:
    """The socket of a systemd."""
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(str(Path(directory) / "notify"))
        bound.settimeout(10)
        yield bound


async def heard(manager: socket.socket) -> list[str]:
    """The lines of the next datagram."""
    datagram: bytes = await trio.to_thread.run_sync(manager.recv, 4096)
    return datagram.decode().splitlines()


async def lives() -> None:
    """The loops turn."""


@pytest.mark.parametrize(
    ("happened", "ready", "words"),
    [
        ([], False, "starting"),
        ([happenings.DriverFound("nvml", "570", 8)], False, "starting"),
        ([happenings.DriverFound("nvml", "570", 0)], True, "the driver has no GPUs"),
        (
            [happenings.DriverTrouble("libnvidia-ml.so.1 not found: nowhere", "install it")],
            True,
            "waiting for the driver: libnvidia-ml.so.1 not found",
        ),
        ([happenings.KubeletAwaited(GPU, "refused")], True, "nvidia.com/gpu: waiting for the kubelet"),
        (
            [happenings.DevicesListed(GPU, 8, 7), happenings.Registered(GPU, "s", 0.1)],
            True,
            "nvidia.com/gpu: registered, 7 of 8 healthy",
        ),
        (
            [happenings.Registered(GPU, "s", 0.1), happenings.StreamLost(GPU)],
            True,
            "nvidia.com/gpu: registering anew",
        ),
        (
            [happenings.RegistrationRefused(GPU, "not you\nREADY=1\n")],
            True,
            "nvidia.com/gpu: refused by the kubelet: not you READY=1",
        ),
        (
            [happenings.Registered("b", "s", 0.1), happenings.Registered("a", "s", 0.1)],
            True,
            "a: registered; b: registered",
        ),
    ],
)
def test_the_state_in_words(happened: list[Happening], ready: bool, words: str) -> None:
    """One line says what nvplug is at; it is ready once the kubelet, or what there is to tell it, is waited for."""
    state = State()
    for happening in happened:
        state = after(state, happening)

    assert state.ready == ready
    assert status(state) == words


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"NOTIFY_SOCKET": ""}, None),
        ({"NOTIFY_SOCKET": "vsock:2:1234"}, None),
        ({"NOTIFY_SOCKET": "/run/n"}, Service("/run/n", 0)),
        ({"NOTIFY_SOCKET": "@n", "WATCHDOG_USEC": "3000000"}, Service("\0n", 3)),
        ({"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}, Service("/n", 3)),
        ({"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}, Service("/n", 0)),
    ],
)
def test_what_systemd_asks(environ: dict[str, str], expected: Service | None) -> None:
    """It is read from the environment, and taken out of it, since children are not the service."""
    assert service_from(environ) == expected
    assert not environ


async def test_it_is_told_of_the_start_a_change_and_the_end(manager: socket.socket) -> None:
    """READY comes when it is true, with every status."""
    state = Latest(State())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_told, Service(manager.getsockname(), 0), state, lives)

        assert await heard(manager) == ["STATUS=starting"]
        state.set(after(state.value, happenings.Registered(GPU, "s", 0.1)))
        assert await heard(manager) == [f"STATUS={GPU}: registered", "READY=1"]
        nursery.cancel_scope.cancel()
    assert await heard(manager) == ["STOPPING=1", "STATUS=ending"]


async def test_it_is_told_of_a_reload(manager: socket.socket) -> None:
    """As Type=notify-reload wants it: when it began, and that it is over; also if the new configuration is refused."""
    state = Latest(State(resources={GPU: "registered"}))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_told, Service(manager.getsockname(), 0), state, lives)
        await heard(manager)
        state.set(after(state.value, happenings.ConfigRefused("f", "bad", "mend it")))

        assert (await heard(manager))[0] == "RELOADING=1"
        assert "READY=1" in await heard(manager)
        nursery.cancel_scope.cancel()


async def test_the_watchdog_is_fed_only_while_the_loops_turn(manager: socket.socket) -> None:
    """A loop that hangs starves it, and one that turns again feeds it again."""
    state = Latest(State())
    turning = trio.Event()
    asked = 0

    async def turns() -> None:
        nonlocal asked
        asked += 1
        if 1 < asked < 4:
            await trio.sleep_forever()
        if asked == 4:
            turning.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_told, Service(manager.getsockname(), 0.15), state, turns)

        assert await heard(manager) == ["STATUS=starting"]
        assert await heard(manager) == ["WATCHDOG=1"]
        assert await heard(manager) == ["WATCHDOG=1"]
        assert turning.is_set()
        nursery.cancel_scope.cancel()


async def test_a_manager_that_is_away_disturbs_nothing() -> None:
    """It restarts, too."""
    with trio.move_on_after(0.2) as scope:
        await keep_told(Service("/nowhere/notify", 0.03), Latest(State()), lives)

    assert scope.cancelled_caught
