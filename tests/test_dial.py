"""Dialling kubelet.sock, in this process, against listeners that answer as kubelets in trouble do."""

from __future__ import annotations

import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
from conftest import Measure
from h2.config import H2Configuration
from h2.connection import H2Connection

from _nvplug.kubelet.client import DialError, dial
from _nvplug.kubelet.loop import open_loop


@contextmanager
def listening(path: Path) -> Generator[trio.SocketListener]:
    """A listener on a path."""
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
        bound.listen()
        bound.setblocking(False)
        yield trio.SocketListener(trio.socket.from_stdlib_socket(bound))


def settings() -> bytes:
    """What a server says first."""
    server = H2Connection(H2Configuration(client_side=False))
    server.initiate_connection()
    return server.data_to_send()


async def test_a_connection_counts_when_the_listener_has_spoken(tmp_path: Path) -> None:
    """Not before: a connection that was accepted may be nobody's."""
    dialled = trio.Event()

    async def call() -> None:
        connection = await dial(tmp_path / "s")
        dialled.set()
        connection.close()

    with listening(tmp_path / "s") as listener:
        async with open_loop(), trio.open_nursery() as nursery:
            nursery.start_soon(call)
            async with await listener.accept() as accepted:
                await trio.sleep(0.3)

                assert not dialled.is_set()
                await accepted.send_all(settings())
                with trio.fail_after(10):
                    await dialled.wait()


@pytest.mark.parametrize("seconds", [0.5, pytest.param(14.0, marks=pytest.mark.slow)])
async def test_a_listener_that_ends_what_it_held_is_dialled_at_once(
    tmp_path: Path, seconds: float, measure: Measure
) -> None:
    """It never served what it had accepted, but serves what comes now; that must not wait for the next attempt."""
    held: list[trio.SocketStream] = []

    async def hold(listener: trio.SocketListener) -> None:
        while True:
            held.append(await listener.accept())

    async def answer(listener: trio.SocketListener) -> None:
        held.append(await listener.accept())
        await held[-1].send_all(settings())

    with listening(tmp_path / "s") as listener:
        async with open_loop(), trio.open_nursery() as nursery:

            async def change_mind() -> None:
                with trio.move_on_after(seconds):
                    await hold(listener)
                times.append(time.monotonic())
                for each in held:
                    await each.aclose()
                nursery.start_soon(answer, listener)

            times: list[float] = []
            nursery.start_soon(change_mind)
            connection = await dial(tmp_path / "s")
            connection.close()
            measure("dialled after: connections held and ended", time.monotonic() - times[0], 0.25)
        for each in held:
            await each.aclose()


async def test_a_listener_that_ends_everything_is_not_dialled_in_haste(tmp_path: Path) -> None:
    """Ten times a second at most."""
    accepted = 0

    async def hang_up(listener: trio.SocketListener) -> None:
        nonlocal accepted
        while True:
            stream = await listener.accept()
            accepted += 1
            await stream.aclose()

    with listening(tmp_path / "s") as listener:
        async with open_loop(), trio.open_nursery() as nursery:
            nursery.start_soon(hang_up, listener)
            with trio.move_on_after(1):
                await dial(tmp_path / "s")
            nursery.cancel_scope.cancel()

    assert 1 <= accepted <= 11


@pytest.mark.parametrize("dead", [False, True])
async def test_nobody_there_is_told_at_once(tmp_path: Path, dead: bool) -> None:
    """Whether there is no file or one on which nobody listens; the path and the reason are named."""
    if dead:
        with listening(tmp_path / "s"):
            pass
    async with open_loop():
        with pytest.raises(DialError, match=rf"{tmp_path}/s: (Connection refused|No such file)"):
            await dial(tmp_path / "s")
