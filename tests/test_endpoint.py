# ruff: noqa: ASYNC110 - what is waited for has no event
"""One socket and the service on it, in this process, with an owner that the test writes."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import struct
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from grpclib.protocol import Stream
from http2 import ALLOCATE, OPTIONS, WATCH, Http2, framed, http2_to

from _nvplug.container import ContainerEdits
from _nvplug.kubelet import connections, server
from _nvplug.kubelet.loop import open_loop
from _nvplug.kubelet.server import Endpoint, Listing
from _nvplug.resources import Resource

pytestmark = pytest.mark.process

LISTING = Listing(b"\n\x03\n\x01a", Resource("nvidia.com/gpu"))


class Owner:
    """Offers a device, counts streams, and has a bug in Allocate."""

    def __init__(self) -> None:
        self.streams: list[str] = []

    def stream_opened(self, *, stranger: bool) -> None:
        """See `server.Owner`."""
        self.streams.append(f"opened, stranger={stranger}")

    def stream_ended(self, *, stranger: bool) -> None:
        """See `server.Owner`."""
        self.streams.append(f"ended, stranger={stranger}")

    def listed(self, listing: Listing, *, stranger: bool) -> None:
        """See `server.Owner`."""

    def allocate(self, ids: Sequence[str]) -> ContainerEdits:
        """See `server.Owner`."""
        raise ZeroDivisionError(f"a bug, met with {len(ids)} ids")

    def preferred(self, available: Sequence[str], required: Sequence[str], size: int) -> Sequence[str]:
        """See `server.Owner`."""
        return [*required, *available][:size]


@asynccontextmanager
async def serving(directory: Path) -> AsyncGenerator[tuple[Endpoint, Owner], None]:
    """An endpoint that serves."""
    owner = Owner()
    endpoint = Endpoint(directory / "s", LISTING, owner)
    endpoint.bind()
    async with open_loop(), trio.open_nursery() as nursery:
        nursery.start_soon(endpoint.serve)
        yield endpoint, owner
        await endpoint.retire()
        nursery.cancel_scope.cancel()


async def test_a_bug_of_ours_is_seen_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An exception that nobody foresaw ends its call alone, and its traceback is logged exactly once."""
    async with serving(tmp_path) as (endpoint, _), http2_to(endpoint.path) as caller:
        reply = await caller.call(ALLOCATE, framed(b"\n\x03\n\x01a"))
        again = await caller.call(OPTIONS, framed(b""))
        records = [record for record in caplog.records if record.levelno >= logging.WARNING]

        assert reply.status == 2
        assert again.status == 0
        assert len(records) == 1
        assert records[0].exc_info is not None
        assert isinstance(records[0].exc_info[1], ZeroDivisionError)


async def test_troubles_of_others_are_told_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    """A thousand connections not accepted, or dropped, are one line; a fault of ours is one line each time."""
    async with open_loop():
        loop = asyncio.get_event_loop()
        for _ in range(1000):
            loop.call_exception_handler({"message": "accept", "exception": OSError(errno.EMFILE, "none left")})
            loop.call_exception_handler({"message": "read", "exception": ValueError("odd"), "transport": None})
        for _ in range(2):
            loop.call_exception_handler({"message": "a callback", "exception": ZeroDivisionError("a bug")})

    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR", "ERROR"]


UNUSUAL = {
    "a header that is not ASCII": [(b"x-n\xc3\xa4me", b"\xff\xfe")],
    "metadata that is not base64": [(b"x-bin", b"\xff###=")],
    "a timeout that is no time": [(b"grpc-timeout", b"soon")],
    "a timeout beyond numbers": [(b"grpc-timeout", b"9" * 400 + b"H")],
    "a path for an authority": [(b":authority", b"/var/lib/kubelet/device-plugins/s")],
    "a header twice": [(b"te", b"trailers"), (b"te", b"trailers")],
    "a connection header": [(b"connection", b"close")],
}


def usual(**changes: bytes | None) -> list[tuple[bytes, bytes]]:
    """The headers of a call, but for what is changed; None leaves a header out."""
    fields: dict[str, bytes | None] = {
        ":method": b"POST",
        ":scheme": b"http",
        ":path": OPTIONS.encode(),
        "content-type": b"application/grpc",
        "te": b"trailers",
        **changes,
    }
    return [(name.encode(), value) for name, value in fields.items() if value is not None]


@pytest.mark.parametrize("name", UNUSUAL)
async def test_unusual_headers_are_no_obstacle(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    """Nothing that we do not need has to be well-formed."""
    async with serving(tmp_path) as (endpoint, _), http2_to(endpoint.path) as caller:
        reply = await caller.call(OPTIONS, framed(b""), headers=[*usual(), *UNUSUAL[name]])

        assert reply.status == 0
        assert not caplog.records


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({":method": b"GET"}, -2),
        ({":method": None}, -1),
        ({":path": None}, -1),
        ({":path": b"/v1beta1.DevicePlugin/Nothing"}, 12),
        ({"content-type": b"text/html"}, 2),
        ({"content-type": None}, 2),
        ({"te": None}, 2),
    ],
)
async def test_what_is_no_call_of_ours_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, bytes | None], status: int
) -> None:
    """With an answer or a reset, at once; the connection goes on, and nothing is said about it."""
    async with serving(tmp_path) as (endpoint, _), http2_to(endpoint.path) as caller:
        refused = await caller.call(OPTIONS, framed(b""), headers=usual(**changes))
        served = await caller.call(OPTIONS, framed(b""))

        assert refused.status == status
        assert served.status == 0
        assert not caplog.records


@pytest.mark.parametrize(
    ("message", "status", "words"),
    [
        (None, 3, "holds no message"),
        (b"\0\0", 3, "ends within"),
        (framed(b"\n\0", length=10), 3, "ends within"),
        (framed(b"", length=10), 3, "ends before"),
        (framed(b"\n\0", compressed=True), 12, "compressed"),
        (framed(b"\n\0", length=2**32 - 1), 8, "4294967295 bytes"),
        (framed(bytes(5 << 20)), 8, "5242880 bytes"),
    ],
    ids=["nothing", "half a prefix", "half a message", "a prefix", "compressed", "4 GiB", "5 MiB"],
)
async def test_a_request_that_is_not_whole_is_the_callers_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, message: bytes | None, status: int, words: str
) -> None:
    """It is told what is wrong, and the connection goes on."""
    async with serving(tmp_path) as (endpoint, _), http2_to(endpoint.path) as caller:
        refused = await caller.call(ALLOCATE, message)
        served = await caller.call(OPTIONS, framed(b""))

        assert refused.status == status
        assert words in refused.words
        assert served.status == 0
        assert not caplog.records


async def test_a_message_may_come_in_pieces(tmp_path: Path) -> None:
    """Byte by byte, with empty frames between."""
    async with serving(tmp_path) as (endpoint, _), http2_to(endpoint.path) as caller:
        number = await caller.request(OPTIONS, None, end=False)
        for byte in framed(b"\x1a\x01a"):
            caller.h2.send_data(number, b"")
            caller.h2.send_data(number, bytes([byte]), pad_length=3)
            await caller.flush()
        caller.h2.end_stream(number)
        await caller.flush()

        with trio.fail_after(10):
            assert (await caller.reply(number)).status == 0


@pytest.mark.slow
async def test_what_was_begun_must_be_finished(tmp_path: Path) -> None:
    """A request that does not become whole is refused after a while, and a connection without one is ended."""
    async with serving(tmp_path) as (endpoint, _), http2_to(endpoint.path) as idle, http2_to(endpoint.path) as slow:
        numbers = [await slow.request(ALLOCATE, message, end=False) for message in (None, b"\0\0", b"\0\0\0\0\x09abc")]
        with trio.fail_after(2 * max(server.REQUEST_WITHIN, connections.FIRST_REQUEST_WITHIN)):
            replies = [await slow.reply(number) for number in numbers]

            assert [reply.status for reply in replies] == [4, 4, 4]
            assert await idle.is_closed()


async def test_a_cancelled_call_leaves_nothing(tmp_path: Path) -> None:
    """Also when it is cancelled before its task has begun; 150 of them on one connection are none at the end."""

    def streams() -> int:
        gc.collect()
        return sum(isinstance(each, Stream) for each in gc.get_objects())

    before = streams()
    async with serving(tmp_path) as (endpoint, owner), http2_to(endpoint.path) as caller:
        for _ in range(150):
            number = caller.h2.get_next_available_stream_id()
            caller.h2.send_headers(number, usual())
            caller.h2.reset_stream(number)
            await caller.flush()
        # grpclib forgets tasks that are done at every tenth request.
        for _ in range(20):
            await caller.call(OPTIONS, framed(b""))

        assert streams() < before + 20
        assert not owner.streams


async def test_a_watcher_that_does_not_read_gets_the_newest_list_in_the_end(tmp_path: Path) -> None:
    """Lists do not pile up for it, and the others get theirs meanwhile."""

    async def receives(caller: Http2, number: int, last: bytes) -> int:
        with trio.fail_after(20):
            while not caller.received.get(number, b"").endswith(last):
                await caller.receive()
        return len(caller.received[number])

    async with (
        serving(tmp_path) as (endpoint, owner),
        http2_to(endpoint.path) as deaf,
        http2_to(endpoint.path) as other,
    ):
        deafs, others = [await caller.request(WATCH, framed(b"")) for caller in (deaf, other)]
        with trio.fail_after(10):
            while len(owner.streams) < 2:
                await trio.sleep(0.01)
        for turn in range(200):
            encoded = struct.pack(">I", turn) * 10_000
            endpoint.listing.set(Listing(encoded, LISTING.resource))
            size = await receives(other, others, encoded)
        rest = await receives(deaf, deafs, encoded)

        assert size > 200 * 40_000
        # What a window of HTTP/2 and the kernel's buffer hold, and then the last.
        assert rest < size / 4
        assert owner.streams == ["opened, stranger=False"] * 2


async def test_a_stream_that_ends_before_its_first_list_is_told(tmp_path: Path) -> None:
    """A kubelet that hangs up while it is being sent is to be registered with anew at once, not when it is missed."""

    async def told(owner: Owner, number: int) -> None:
        with trio.fail_after(10):
            while len(owner.streams) < number:
                await trio.sleep(0.01)

    async with serving(tmp_path) as (endpoint, owner):
        # More than a window of HTTP/2 holds, and the caller reads nothing.
        endpoint.listing.set(Listing(bytes(1_000_000), LISTING.resource))
        async with http2_to(endpoint.path) as caller:
            await caller.request(WATCH, framed(b""))
            await told(owner, 1)
        await told(owner, 2)

        assert owner.streams == ["opened, stranger=False", "ended, stranger=False"]
