# ruff: noqa: S311 - no secrets
"""What may come over our socket, and must not disturb anything: nvplug serves on."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Final

import pytest
import trio
from conftest import Measure
from http2 import OPTIONS, WATCH, Http2, frame, framed, http2_to
from node import GPUS, Footprint, Node, node_in, settles

pytestmark = pytest.mark.process

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, CONTINUATION = 0, 1, 3, 4, 6, 7, 9

# Lines that any trouble of this kind may cost.
FEW_LINES: Final = 12


def our_socket(node: Node) -> Path:
    """Where the kubelet reaches us."""
    (path,) = node.kubelet.plugin_sockets()
    return path


async def sends(node: Node, data: bytes, *, times: int = 100, closes: bool = True) -> None:
    """Connections that send these bytes, and are closed because of it."""
    for _ in range(times):
        with contextlib.suppress(trio.BrokenResourceError):
            async with http2_to(our_socket(node), begin=False) as peer:
                await peer.stream.send_all(data)
                if closes:
                    assert await peer.is_closed()


async def floods(node: Node, piece: Callable[[int], bytes], *, reads: bool = True) -> None:
    """One connection that sends a piece again and again, until it is closed, or for two seconds."""
    async with http2_to(our_socket(node)) as peer, trio.open_nursery() as nursery:
        if reads:
            nursery.start_soon(_drain, peer)
        with trio.move_on_after(2):
            for number in itertools.count():
                try:
                    await peer.stream.send_all(piece(number))
                except trio.BrokenResourceError:
                    break
        nursery.cancel_scope.cancel()


async def _drain(peer: Http2) -> None:
    try:
        while await peer.stream.receive_some(65536):
            pass
    except trio.BrokenResourceError:
        pass


def headers_of(number: int) -> bytes:
    """An encoded block of headers for a call of GetDevicePluginOptions, without Huffman and without a table."""
    fields = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", OPTIONS.encode()),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
        (b"x", str(number).encode()),
    ]
    return b"".join(bytes([0, len(name)]) + name + bytes([len(value)]) + value for name, value in fields)


def rapid_reset(number: int) -> bytes:
    """A request, and its cancellation."""
    stream = 2 * number + 1
    return frame(HEADERS, headers_of(number), flags=4, stream=stream) + frame(RST_STREAM, bytes(4), stream=stream)


def endless_headers(number: int) -> bytes:
    """A block of headers that does not end."""
    if number == 0:
        return frame(HEADERS, headers_of(0), stream=1)
    return frame(CONTINUATION, bytes([0, 1]) + b"x" + bytes([100]) + bytes(100), stream=1)


async def half_open(node: Node, begun: bytes) -> None:
    """Connections that began something and do not go on, while the others are served."""
    async with AsyncExitStack() as stack:
        for _ in range(20):
            peer = await stack.enter_async_context(http2_to(our_socket(node), begin=False))
            await peer.stream.send_all(begun)
        await node.serves()


async def never_reads(node: Node) -> None:
    """A watcher that does not read, and asks for answers that it does not read."""
    async with http2_to(our_socket(node)) as peer:
        await peer.request(WATCH, framed(b""))
        with trio.move_on_after(1):
            while True:
                await peer.stream.send_all(frame(PING, bytes(8)) * 100)
        await node.serves()


async def comes_and_goes(node: Node, connections: int, *, at_once: int = 1) -> None:
    """Connections, one per millisecond or as many at once."""
    path = str(our_socket(node))
    for _ in range(connections // at_once):
        batch = []
        for _ in range(at_once):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            # A full queue is theirs to wait for.
            if sock.connect_ex(path) == 0:
                sock.send(PREFACE)
            batch.append(sock)
        await trio.sleep(0.001)
        for sock in batch:
            sock.close()


async def says_goodbye(node: Node) -> None:
    """GOAWAY, and then nothing."""
    async with http2_to(our_socket(node)) as peer:
        await peer.call(OPTIONS, framed(b""))
        await peer.stream.send_all(frame(GOAWAY, bytes(8)))
        assert await peer.is_closed()


async def many_watchers(node: Node) -> None:
    """More watchers than there can be."""
    async with AsyncExitStack() as stack:
        for _ in range(200):
            # Some are ended before they have begun.
            with contextlib.suppress(trio.BrokenResourceError):
                peer = await stack.enter_async_context(http2_to(our_socket(node)))
                await peer.request(WATCH, framed(b""))
        await node.serves()


BEGUN: Final = PREFACE + frame(SETTINGS)

TROUBLES: Mapping[str, Callable[[Node], Awaitable[None]]] = {
    "random bytes": partial(sends, data=random.Random(1).randbytes(1000), times=300),
    "zeros": partial(sends, data=bytes(1000)),
    "HTTP/1": partial(sends, data=b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    "TLS": partial(sends, data=bytes.fromhex("16030100c8010000c40303") + bytes(200)),
    "garbage after the preface": partial(sends, data=PREFACE + random.Random(2).randbytes(1000), closes=False),
    "DATA of no stream": partial(sends, data=BEGUN + frame(DATA, b"x", stream=1)),
    "frames too long": partial(sends, data=BEGUN + b"\xff\xff\xff" + bytes(6) + bytes(100)),
    "SETTINGS that are wrong": partial(sends, data=BEGUN + frame(SETTINGS, bytes(5))),
    "half-open: nothing": partial(half_open, begun=b""),
    "half-open: part of the preface": partial(half_open, begun=PREFACE[:10]),
    "half-open: the preface": partial(half_open, begun=PREFACE),
    "half-open: HEADERS": partial(half_open, begun=BEGUN + frame(HEADERS, headers_of(1), flags=4, stream=1)),
    "half-open: half a prefix": partial(
        half_open,
        begun=BEGUN + frame(HEADERS, headers_of(1), flags=4, stream=1) + frame(DATA, bytes(3), stream=1),
    ),
    "half-open: half a message": partial(
        half_open,
        begun=BEGUN
        + frame(HEADERS, headers_of(1), flags=4, stream=1)
        + frame(DATA, framed(bytes(10), length=100), stream=1),
    ),
    "half-open: headers that go on": partial(half_open, begun=BEGUN + endless_headers(0)),
    "flood of resets": partial(floods, piece=rapid_reset),
    "flood of PING": partial(floods, piece=lambda _number: frame(PING, bytes(8)) * 100),
    "flood of PING, never read": partial(floods, piece=lambda _number: frame(PING, bytes(8)) * 100, reads=False),
    "flood of SETTINGS": partial(floods, piece=lambda _number: frame(SETTINGS) * 100),
    "flood of SETTINGS, never read": partial(floods, piece=lambda _number: frame(SETTINGS) * 100, reads=False),
    "flood of CONTINUATION": partial(floods, piece=endless_headers),
    "flood of unknown frames": partial(floods, piece=lambda number: frame(0xF0 + number % 8, bytes(100)) * 100),
    "GOAWAY": says_goodbye,
    "a watcher that never reads": never_reads,
    "many watchers": many_watchers,
    "a connection per millisecond": partial(comes_and_goes, connections=3000),
    "thousands of connections": partial(comes_and_goes, connections=3000, at_once=100),
}

# Those that go on for seconds.
LONG_TROUBLES: Final = [name for name in TROUBLES if name.startswith("flood of") or "per millisecond" in name]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG_TROUBLES)) for name in TROUBLES]
)
async def test_it_serves_on(disk: Path, name: str) -> None:
    """During and after it: Allocate is answered, the stream lives, a restart is answered, little is held or said."""
    async with node_in(disk) as node:
        before, said = Footprint.of(node.nvplug), len(node.nvplug.lines)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(TROUBLES[name], node)
            await trio.sleep(0.05)
            await node.serves()
        allocations = 3
        await node.serves()

        assert len(node.kubelet.live_streams()) == 1
        assert len(node.kubelet.streams) == 1
        await settles(node.nvplug, before, growth=12 << 20)
        assert len(node.nvplug.lines) - said <= FEW_LINES + allocations, node.nvplug.log()
        at = await node.kubelet.restart()
        await node.kubelet.await_back(GPUS, after=at)
        await node.serves()


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG_TROUBLES)
async def test_a_restart_is_answered_in_the_midst_of_it(disk: Path, name: str, measure: Measure) -> None:
    """The kubelet does not have to wait until somebody else is done."""
    async with node_in(disk) as node:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(TROUBLES[name], node)
            await trio.sleep(0.2)
            at = await node.kubelet.restart()
            back = await node.kubelet.await_back(GPUS, after=at)
            measure(f"back after: restart amid: {name}", back - at, 1.0)
        await node.serves()


@pytest.mark.parametrize(("times", "lives"), [(150, True), (1000, False)])
async def test_calls_are_taken_back(disk: Path, times: int, *, lives: bool) -> None:
    """Who takes back a call now and then is answered as ever; who does nothing else loses its connection."""
    async with node_in(disk) as node, http2_to(our_socket(node)) as peer:
        with contextlib.suppress(trio.BrokenResourceError):
            for _ in range(times):
                number = await peer.request(WATCH, framed(b""))
                peer.h2.reset_stream(number)
                await peer.flush()

        if lives:
            assert (await peer.call(OPTIONS, framed(b""))).status == 0
        else:
            assert await peer.is_closed()
        await node.serves()


@pytest.mark.parametrize("limit", [24, pytest.param(64, marks=pytest.mark.slow)])
async def test_it_serves_on_with_few_descriptors(disk: Path, limit: int) -> None:
    """Where RLIMIT_NOFILE is small and is reached: the kubelet is served, restarts are answered, and little is said."""

    async def occupy() -> None:
        held: list[socket.socket] = []
        path = str(our_socket(node))
        for _ in range(20):
            for _ in range(100):
                held.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
                held[-1].connect_ex(path)
            await trio.sleep(0.05)
            for each in held:
                each.close()
            held.clear()

    async with node_in(disk, under=("sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh")) as node:
        before, said = Footprint.of(node.nvplug), len(node.nvplug.lines)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(occupy)
            await trio.sleep(0.1)
            await node.serves()

        assert len(node.kubelet.streams) == 1
        async with trio.open_nursery() as nursery:
            nursery.start_soon(occupy)
            await trio.sleep(0.1)
            at = await node.kubelet.restart()
            await node.kubelet.await_back(GPUS, after=at)
            await node.serves()
        await settles(node.nvplug, before)

        assert len(node.nvplug.lines) - said <= 2 * FEW_LINES, node.nvplug.log()
