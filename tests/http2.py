"""An HTTP/2 client made by hand, for saying what no client library says."""

from __future__ import annotations

import struct
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote

import trio
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)

__all__ = ["ALLOCATE", "OPTIONS", "WATCH", "Http2", "Reply", "frame", "framed", "http2_to"]

OPTIONS: Final = "/v1beta1.DevicePlugin/GetDevicePluginOptions"
WATCH: Final = "/v1beta1.DevicePlugin/ListAndWatch"
ALLOCATE: Final = "/v1beta1.DevicePlugin/Allocate"

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Reply:
    """What a request was answered with.

    Attributes:
        status: of gRPC; -1 if the stream was reset, -2 if the answer holds none.
        words: that go with it.
        body: the message of the answer.
    """

    status: int
    words: str
    body: bytes


class Http2:
    """One connection, see `http2_to`.

    Attributes:
        stream: the bytes.
        h2: the protocol.
        received: the DATA of each stream, so far.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.h2 = H2Connection(
            H2Configuration(
                client_side=True,
                header_encoding=None,
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
            )
        )
        self.received: dict[int, bytes] = {}
        self._events: list[Event] = []

    async def begin(self) -> None:
        """Sends the preface and the first SETTINGS."""
        self.h2.initiate_connection()
        await self.flush()

    async def flush(self) -> None:
        """Sends what h2 has to send."""
        await self.stream.send_all(self.h2.data_to_send())

    async def request(
        self, method: str, message: bytes | None, *, headers: Headers | None = None, end: bool = True
    ) -> int:
        """Sends a request and returns its stream.

        Args:
            method: its path.
            message: what the DATA frames hold, its gRPC prefix included; None for no DATA.
            headers: all of them, instead of those of gRPC.
            end: whether the request ends.
        """
        number = self.h2.get_next_available_stream_id()
        usual = [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", method.encode()),
            (b":authority", b"localhost"),
            (b"content-type", b"application/grpc"),
            (b"te", b"trailers"),
        ]
        self.h2.send_headers(number, list(usual if headers is None else headers), end_stream=end and message is None)
        await self.flush()
        rest = message or b""
        while message is not None:
            room = min(self.h2.local_flow_control_window(number), self.h2.max_outbound_frame_size)
            if not room and rest:
                await self.receive()
                if any(isinstance(event, StreamReset) and event.stream_id == number for event in self._events):
                    break
                continue
            piece, rest = rest[:room], rest[room:]
            self.h2.send_data(number, piece, end_stream=end and not rest)
            await self.flush()
            if not rest:
                break
        return number

    async def reply(self, number: int) -> Reply:
        """Waits for the end of the answer on a stream."""
        fields = dict[bytes, bytes]()
        while True:
            for event in self._events:
                if getattr(event, "stream_id", number) != number:
                    continue
                match event:
                    case ResponseReceived() | TrailersReceived():
                        fields |= dict(event.headers)
                    case StreamReset() if b"grpc-status" not in fields:
                        return Reply(-1, f"reset with {event.error_code}", b"")
                    case StreamEnded() | StreamReset():
                        status = int(fields.get(b"grpc-status", b"-2"))
                        words = unquote(fields.get(b"grpc-message", b"").decode())
                        return Reply(status, words, self.received.get(number, b"")[5:])
                    case _:
                        pass
            self._events.clear()
            await self.receive()

    async def call(self, method: str, message: bytes | None, *, headers: Headers | None = None) -> Reply:
        """One request and its answer."""
        with trio.fail_after(20):
            return await self.reply(await self.request(method, message, headers=headers))

    async def is_closed(self) -> bool:
        """Waits until the other end closes the connection."""
        with trio.fail_after(20):
            try:
                while await self.stream.receive_some(65536):
                    pass
            except trio.BrokenResourceError:
                pass
        return True

    async def receive(self) -> None:
        """Takes in what has come, or waits for more.

        Raises:
            ConnectionResetError: the other end closed the connection.
        """
        data = await self.stream.receive_some(65536)
        if not data:
            raise ConnectionResetError("closed by the other end")
        for event in self.h2.receive_data(data):
            if isinstance(event, ConnectionTerminated):
                raise ConnectionResetError(f"GOAWAY {event.error_code}")
            if isinstance(event, DataReceived):
                self.received[event.stream_id] = self.received.get(event.stream_id, b"") + event.data
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            self._events.append(event)
        await self.flush()


@asynccontextmanager
async def http2_to(path: Path, *, begin: bool = True) -> AsyncGenerator[Http2, None]:
    """A connection to a socket; without ``begin``, nothing is sent on it yet."""
    async with await trio.open_unix_socket(str(path)) as stream:
        connection = Http2(stream)
        if begin:
            await connection.begin()
        yield connection


def framed(message: bytes, *, compressed: bool = False, length: int | None = None) -> bytes:
    """A message with the prefix that gRPC puts before it."""
    return struct.pack(">?I", compressed, len(message) if length is None else length) + message


def frame(kind: int, body: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    """One HTTP/2 frame of any kind."""
    return struct.pack(">I", len(body))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + body
