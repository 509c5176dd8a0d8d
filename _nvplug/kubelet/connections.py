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
from h2.events import Event as H2Event
from h2.events import UnknownFrameReceived

from _nvplug.kubelet.client import peer_pid
from _nvplug.latest import Latest

__all__ = ["Connection", "Connections"]

# The kubelet has one connection, for a moment two. More than this many are a fault of somebody's.
MOST_CONNECTIONS = 64

# Seconds in which a connection must have made a request. The kubelet makes one at once.
FIRST_REQUEST_WITHIN = 10.0

# Bytes of one request: the limit that gRPC servers have by default. 60,000 device ids take 2.7 MB.
LONGEST_REQUEST = 4 << 20


class Connection(H2Protocol):
    """One connection.

    Attributes:
        pid: of the process at the other end, see peer_pid.
        requests: how many are open.
        idle_since_birth: whether it has never made any.
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
        super().__init__(_Requests(owner.methods(self), owner.codec, self), Configuration().__for_server__(), config)
        self.pid = 0
        self.requests = 0
        self.idle_since_birth = True
        self.watching = False
        self._owner = owner
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: the connection begins."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.pid = peer_pid(transport.get_extra_info("socket"))
        super().connection_made(transport)
        # RFC 9113, 5.5: frames of an unknown type are ignored. grpclib raises NotImplementedError on them.
        self.processor.processors[UnknownFrameReceived] = _ignore
        self._owner.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        """asyncio: the connection is gone."""
        super().connection_lost(exc)
        self._owner.remove(self)

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
        # In order of age.
        self._open: dict[Connection, None] = {}

    def __iter__(self) -> Iterator[Connection]:
        return iter(tuple(self._open))

    def accept(self) -> Connection:
        """The factory for asyncio."""
        return Connection(self)

    def add(self, connection: Connection) -> None:
        """Takes a connection in, and ends another if there are too many."""
        self._open[connection] = None
        self.count.set(len(self._open))
        loop = asyncio.get_event_loop()
        loop.call_later(FIRST_REQUEST_WITHIN, self._judge, connection)
        if len(self._open) > self._most:
            # Somebody opens connections without using them. The newest may be the kubelet's, and the oldest is the
            # likeliest to be nobody's; one with a request under way is ended only if there is no other.
            idle = [each for each in self._open if not each.requests]
            (idle or [connection])[0].abort()

    def remove(self, connection: Connection) -> None:
        """Takes note of a connection's end."""
        self._open.pop(connection, None)
        self.count.set(len(self._open))

    def _judge(self, connection: Connection) -> None:
        if connection in self._open and connection.idle_since_birth:
            connection.abort()


class _Requests(Handler):
    """grpclib's tasks of one connection, each with a bound on the size of its message."""

    def __init__(self, methods: Mapping[str, Method], codec: CodecBase, connection: Connection) -> None:
        super().__init__(dict(methods), codec, None, _DispatchServerEvents())
        self._connection = connection

    def accept(self, stream: Stream, headers: list[tuple[str, str]], release_stream: Callable[[], None]) -> None:
        assert stream.id is not None
        stream.buffer = _BoundedBuffer(partial(stream.connection.ack, stream.id))
        connection = self._connection
        connection.requests += 1
        connection.idle_since_birth = False

        def release() -> None:
            connection.requests -= 1
            release_stream()

        super().accept(stream, headers, release)


class _BoundedBuffer(Buffer):
    async def read(self, size: int) -> bytes:
        if size > LONGEST_REQUEST:
            raise GRPCError(Status.RESOURCE_EXHAUSTED, f"a request of {size} bytes; at most {LONGEST_REQUEST}")
        return await super().read(size)


def _ignore(_event: H2Event) -> None:
    pass
