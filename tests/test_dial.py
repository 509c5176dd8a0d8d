"""Dialling kubelet.sock, in this process, against listeners that answer as kubelets in trouble do."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
from conftest import Measure
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import StreamEnded

from _nvplug.kubelet.client import DialError, dial
from _nvplug.kubelet.loop import open_loop
from _nvplug.kubelet.registration import Accepted, Event, Refused, Unanswered


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


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A frame of HTTP/2."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


async def register_with(path: Path, reply: Callable[[H2Connection, int], bytes], greeting: bytes = b"") -> Event:
    """Registers with a listener that says ``greeting`` after its settings, and answers the call with ``reply``."""
    outcomes: list[Event] = []

    async def answer(listener: trio.SocketListener) -> None:
        server = H2Connection(H2Configuration(client_side=False))
        server.initiate_connection()
        async with await listener.accept() as accepted:
            await accepted.send_all(server.data_to_send() + greeting)
            while True:
                events = server.receive_data(await accepted.receive_some())
                await accepted.send_all(server.data_to_send())
                for event in events:
                    if isinstance(event, StreamEnded):
                        await accepted.send_all(reply(server, event.stream_id))

    with listening(path) as listener:
        async with open_loop(), trio.open_nursery() as nursery:
            nursery.start_soon(answer, listener)
            with trio.fail_after(20):
                connection = await dial(path)
                outcomes.append(await connection.register("nvidia.com/gpu", "s.sock"))
            connection.close()
            nursery.cancel_scope.cancel()
    return outcomes[0]


def replied(
    *, status: str = "0", message: bytes | None = b"\0\0\0\0\0", headers: bool = True
) -> Callable[[H2Connection, int], bytes]:
    """What a server says to a call."""

    def reply(server: H2Connection, stream: int) -> bytes:
        first = [(":status", "200"), ("content-type", "application/grpc")]
        last = [("grpc-status", status)]
        if headers:
            server.send_headers(stream, first)
            if message is not None:
                server.send_data(stream, message)
            server.send_headers(stream, last, end_stream=True)
        else:
            server.send_headers(stream, [*first, *last], end_stream=True)
        return server.data_to_send()

    return reply


async def test_frames_without_meaning_are_passed_over(tmp_path: Path) -> None:
    """RFC 9113, 5.5: neither the connection nor the call suffers."""
    unknown = frame(0xEE, 0, 0, b"?") + frame(0xA, 0, 0, b"\0\x03a.bh2=")

    assert await register_with(tmp_path / "s", replied(), unknown) == Accepted()


@pytest.mark.parametrize(
    "reply",
    [
        replied(message=b"\1\0\0\0\0"),
        replied(message=b"\0\0\0\0\7cut"),
        replied(message=None),
        replied(headers=False),
    ],
    ids=["compressed", "cut", "no message", "trailers only"],
)
async def test_a_reply_that_makes_no_sense_is_a_refusal(
    tmp_path: Path, reply: Callable[[H2Connection, int], bytes]
) -> None:
    """It is no fault of nvplug's, and the call is repeated as after any refusal."""
    assert isinstance(await register_with(tmp_path / "s", reply), Refused | Unanswered)
