"""The HTTP/2 connections on one listener: bounded in number, in age before the first request, and in message size."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from grpclib.config import Configuration
from grpclib.const import Handler as Method
from grpclib.const import Status
from grpclib.encoding.base import CodecBase
from grpclib.events import _DispatchServerEvents  # a Server has one, but then is registered in a global set
from grpclib.exceptions import GRPCError
from grpclib.protocol import Buffer, H2Protocol, Stream
from grpclib.server import Handler
from h2.config import H2Configuration

from _nvplug.kubelet.client import ignore_unknown_frames, peer_pid
from _nvplug.latest import Latest

__all__ = ["Connection", "Connections"]

# The kubelet has one connection, for a moment two. More than this many are a fault of somebody's.
MOST_CONNECTIONS = 64

# Seconds in which a connection must have made a request. The kubelet makes one at once.
FIRST_REQUEST_WITHIN = 10.0

# Bytes of one request: the limit that gRPC servers have by default. 60,000 device ids take 2.7 MB.
LONGEST_REQUEST = 4 << 20

# A kubelet takes back a call when its own patience ends, once in a while. Each costs 10 kB until the garbage collector
# comes round, so that a connection that did nothing else for 2 s took 30 MB.
MOST_CANCELLED = 200

# What grpclib reads of a request's headers. Of the others it decodes some, stumbling over what is not well-formed. The
# deadline of a call (grpc-timeout) is not among them: our answers take no time, and a caller that has given up says so.
_HEADERS_READ = frozenset({":method", ":path", "content-type", "te", "user-agent"})
_HEADERS_NEEDED = frozenset({":method", ":path"})


class Connection(H2Protocol):
    """One connection.

    Attributes:
        pid: of the process at the other end, see peer_pid.
        watching: whether it has called ListAndWatch.
    """

    def __init__(self, owner: Connections) -> None:
        config = H2Configuration(
            client_side=False,
            # Whatever bytes a header holds, they are no reason to lose the connection.
            header_encoding="latin-1",
            # Kubelets before 1.26 send the socket's path as :authority.
            validate_inbound_headers=False,
            validate_outbound_headers=False,
            normalize_inbound_headers=False,
            normalize_outbound_headers=False,
        )
        self._requests = _Requests(owner.methods(self), owner.codec)
        super().__init__(self._requests, Configuration().__for_server__(), config)
        self.pid = 0
        self.watching = False
        self._owner = owner
        self._transport: asyncio.Transport

    @property
    def requests(self) -> int:
        """How many are open."""
        return len(self._requests.releases)

    @property
    def idle_since_birth(self) -> bool:
        """Whether it has never made a request."""
        return not self._requests.any_yet

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: the connection begins."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.pid = peer_pid(transport.get_extra_info("socket"))
        super().connection_made(transport)
        ignore_unknown_frames(self)
        self._owner.add(self)

    def data_received(self, data: bytes) -> None:
        """asyncio: the peer has sent something."""
        super().data_received(data)
        if self._requests.cancelled > MOST_CANCELLED:
            self.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        """asyncio: the connection is gone."""
        super().connection_lost(exc)
        self._owner.remove(self)
        # What refers to us, so that a thousand dead connections do not wait for the garbage collector, at 20 kB each.
        self._requests.mapping.clear()

    def pause_writing(self) -> None:
        """asyncio: the peer does not read. Then it is not read either, for much of what it sends wants an answer."""
        super().pause_writing()
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """asyncio: the peer reads again."""
        super().resume_writing()
        self._transport.resume_reading()

    def close(self) -> None:
        """Ends the connection when what is written has been sent."""
        self.processor.close("closed by nvplug")

    def abort(self) -> None:
        """Ends the connection now."""
        self.processor.close("closed by nvplug")
        self._transport.abort()


class Connections:
    """The connections of one listener.

    Args:
        methods: the service's methods, as one connection sees them.
        codec: for their messages.

    Attributes:
        count: how many there are.
    """

    def __init__(self, methods: Callable[[Connection], Mapping[str, Method]], codec: CodecBase) -> None:
        self.methods = methods
        self.codec = codec
        self.count = Latest(0)
        # Far from all descriptors, so that there is always one left for calling the kubelet.
        self._most = min(MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        # In order of age, each with the timer by which it must have made a request.
        self._open: dict[Connection, asyncio.TimerHandle] = {}

    def __iter__(self) -> Iterator[Connection]:
        return iter(tuple(self._open))

    def accept(self) -> Connection:
        """The factory for asyncio."""
        return Connection(self)

    def add(self, connection: Connection) -> None:
        """Takes a connection in, and ends another if there are too many."""
        loop = asyncio.get_event_loop()
        self._open[connection] = loop.call_later(FIRST_REQUEST_WITHIN, self._judge, connection)
        self.count.set(len(self._open))
        if len(self._open) > self._most:
            # Somebody opens connections without using them. The newest may be the kubelet's, and the oldest is the
            # likeliest to be nobody's; one with a request under way is ended only if there is no other.
            idle = [each for each in self._open if not each.requests]
            (idle or [connection])[0].abort()

    def remove(self, connection: Connection) -> None:
        """Takes note of a connection's end."""
        timer = self._open.pop(connection, None)
        if timer is not None:
            timer.cancel()
        self.count.set(len(self._open))

    def _judge(self, connection: Connection) -> None:
        if connection.idle_since_birth:
            connection.abort()


class _Requests(Handler):
    """grpclib's tasks of one connection, one for each request.

    Attributes:
        any_yet: whether there has been a request.
        cancelled: how many the caller took back.
        releases: of the open ones; what is to be called at their end.
    """

    def __init__(self, methods: Mapping[str, Method], codec: CodecBase) -> None:
        super().__init__(dict(methods), codec, None, _DispatchServerEvents())
        self.any_yet = False
        self.cancelled = 0
        self.releases: dict[Stream, Callable[[], None]] = {}

    def accept(self, stream: Stream, headers: list[tuple[str, str]], release_stream: Callable[[], None]) -> None:
        assert stream.id is not None
        self.any_yet = True
        self.releases[stream] = release_stream
        read = [(name, value) for name, value in headers if name in _HEADERS_READ]
        if self.cancelled > MOST_CANCELLED or not _HEADERS_NEEDED.issubset(name for name, _ in read):
            self._release(stream)
            return
        stream.buffer = _Request(partial(stream.connection.ack, stream.id))
        super().accept(stream, read, partial(self._release, stream))

    def cancel(self, stream: Stream) -> None:
        super().cancel(stream)
        self.cancelled += 1
        # A task that is cancelled before its first step never gets to its own clean-up.
        self._release(stream)

    def _release(self, stream: Stream) -> None:
        release = self.releases.pop(stream, None)
        if release is None:
            return
        release()
        if stream.closable:
            # It was not answered, or while it was still being sent (RFC 9113, 8.1).
            stream.reset_nowait()


class _Request(Buffer):
    """The bytes of a request: a prefix and one message. What is wrong with them is the caller's fault, not ours."""

    def __init__(self, acknowledge: Callable[[int], None]) -> None:
        super().__init__(acknowledge)
        self._prefix_read = False

    def add(self, data: bytes, ack_size: int) -> None:
        # An empty frame is no end; grpclib takes it for one.
        if ack_size:
            super().add(data, ack_size)

    async def read(self, size: int) -> bytes:
        """The next bytes; none at the end. grpclib asks for the prefix (a flag, a length) and then for the message."""
        if size > LONGEST_REQUEST:
            raise GRPCError(Status.RESOURCE_EXHAUSTED, f"a request of {size} bytes; at most {LONGEST_REQUEST}")
        try:
            data = await super().read(size)
        except AssertionError:
            # So grpclib calls an end in the middle.
            raise GRPCError(Status.INVALID_ARGUMENT, "the request ends within its message") from None
        if not self._prefix_read and data[:1] > b"\0":
            raise GRPCError(Status.UNIMPLEMENTED, "the request is compressed; no encoding but identity is understood")
        if self._prefix_read and len(data) < size:
            raise GRPCError(Status.INVALID_ARGUMENT, "the request ends before its message")
        self._prefix_read = True
        return data
