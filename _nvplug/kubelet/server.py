"""The DevicePlugin service on one socket: an endpoint, from its bind to its last trace."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import betterproto2
import trio
import trio_asyncio
from grpclib.const import Cardinality, Status
from grpclib.const import Handler as Method
from grpclib.encoding.base import CodecBase
from grpclib.exceptions import GRPCError
from grpclib.server import Stream

from _nvplug.container import ContainerEdits
from _nvplug.errors import RequestTooLargeError, UnknownDeviceError, UnusableDeviceError
from _nvplug.kubelet.api.v1beta1 import (
    AllocateRequest,
    AllocateResponse,
    ContainerAllocateRequest,
    ContainerPreferredAllocationRequest,
    ContainerPreferredAllocationResponse,
    DevicePluginOptions,
    Empty,
    ListAndWatchResponse,
    PreferredAllocationRequest,
    PreferredAllocationResponse,
    PreStartContainerRequest,
    PreStartContainerResponse,
)
from _nvplug.kubelet.client import plugin_options
from _nvplug.kubelet.connections import Connection, Connections
from _nvplug.kubelet.wire import container_response, encoded_preferences, preferences_asked
from _nvplug.latest import Latest
from _nvplug.resources import Resource

__all__ = ["Endpoint", "Listing", "Owner"]

# Seconds that the kubelet has to close its connection after its stream was ended; it takes under 1 ms [measured].
KUBELET_CLOSES_WITHIN = 0.05

# Seconds that connections have to close after we closed them. Then they are aborted.
CLOSED_WITHIN = 0.2

# Seconds for a request to arrive in full. The kubelet sends it in one piece.
REQUEST_WITHIN = 10.0

BACKLOG = 128

# Seconds to wait for a descriptor where there is none left for another connection.
ACCEPT_AGAIN_AFTER = 0.05


@dataclass(frozen=True, slots=True)
class Listing:
    """A device list, encoded. Lists with the same encoding are the same list, whatever else has changed."""

    encoded: bytes
    resource: Resource = field(compare=False)


class Owner(Protocol):
    """Whose devices an endpoint offers. Everything here is synchronous, quick, and called in the Trio thread."""

    def stream_opened(self, *, stranger: bool) -> None:
        """ListAndWatch was called, and the first list is on its way."""

    def stream_ended(self, *, stranger: bool) -> None:
        """That stream is no more, and not because the endpoint was retired."""

    def listed(self, listing: Listing, *, stranger: bool) -> None:
        """A list was sent."""

    def allocate(self, ids: Sequence[str]) -> ContainerEdits:
        """What a container with these devices gets, or one of the errors of `chosen`."""

    def preferred(self, available: Sequence[str], required: Sequence[str], size: int) -> Sequence[str]:
        """The best ``size`` of the available devices."""


class Endpoint:
    """One socket in the kubelet's directory, its listener, its connections and their streams.

    Args:
        path: of the socket.
        listing: the list to begin with.
        owner: answers and is told.

    Attributes:
        path: as given.
        listing: the list that every stream shows. None, at the end, ends the streams.
        kubelet: the pid of the process that listens on kubelet.sock, 0 if it cannot be told; a stream of any other
            process is a stranger's.
    """

    def __init__(self, path: Path, listing: Listing, owner: Owner) -> None:
        self.path = path
        self.listing: Latest[Listing | None] = Latest(listing)
        self.kubelet = 0
        self._owner = owner
        self._connections = Connections(self._methods, _Codec())
        self._socket: socket.socket | None = None
        self._accepting = trio.CancelScope()
        self._closed = trio.Event()

    def bind(self) -> None:
        """Makes the socket, listening: from now on calls are queued, and from serve() on they are answered.

        Raises:
            OSError: it cannot be made. Nothing is left of it.
        """
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            bound.bind(str(self.path))
            bound.listen(BACKLOG)
        except OSError:
            bound.close()
            raise
        self._socket = bound

    async def serve(self) -> None:
        """Accepts connections until cancelled or retired."""
        bound = self._socket
        assert bound is not None
        try:
            with self._accepting:
                while True:
                    await self._accept(bound)
        finally:
            bound.close()
            self._closed.set()

    async def _accept(self, bound: socket.socket) -> None:
        # Not asyncio's server. It accepts a whole backlog before the connections that are too many can be ended, and
        # where no descriptor is left it is deaf for a second, after which it goes on with a socket that may be closed.
        await trio.lowlevel.wait_readable(bound)
        loop = asyncio.get_event_loop()
        try:
            accepted, _ = bound.accept()
        except (BlockingIOError, ConnectionAbortedError):
            # Who called has hung up.
            return
        except OSError as error:
            loop.call_exception_handler({"message": "accept", "exception": error})
            await trio.sleep(ACCEPT_AGAIN_AFTER)
            return
        accepted.setblocking(False)
        with trio.CancelScope(shield=True):
            await trio_asyncio.aio_as_trio(loop.connect_accepted_socket)(self._connections.accept, accepted)

    async def retire(self) -> None:
        """Ends everything, in the order that no kubelet misunderstands; takes a third of a second at most.

        The streams end with status OK, the kubelet closes its connection, and only then do the listener, the other
        connections and the file go.
        """
        self.listing.set(None)
        with trio.move_on_after(KUBELET_CLOSES_WITHIN):
            await self._gone(lambda connection: connection.watching)
        self._accepting.cancel()
        for connection in self._connections:
            connection.close()
        with trio.move_on_after(CLOSED_WITHIN):
            await self._closed.wait()
            await self._gone(lambda _connection: True)
        for connection in self._connections:
            connection.abort()
        # On a file system that was made read-only it stays; the next start removes it.
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)

    async def _gone(self, concerned: Callable[[Connection], bool]) -> None:
        count = self._connections.count
        while any(concerned(connection) for connection in self._connections):
            await count.newer_than(count.version)

    # --- the service

    def _methods(self, connection: Connection) -> Mapping[str, Method]:
        unary, stream = Cardinality.UNARY_UNARY, Cardinality.UNARY_STREAM
        service = "/v1beta1.DevicePlugin/"
        return {
            service + "GetDevicePluginOptions": Method(_unary(_options), unary, Empty, DevicePluginOptions),
            service + "ListAndWatch": Method(partial(self._watch, connection), stream, Empty, ListAndWatchResponse),
            service + "GetPreferredAllocation": Method(
                _unary(self._preferred), unary, PreferredAllocationRequest, PreferredAllocationResponse
            ),
            service + "Allocate": Method(_unary(self._allocate), unary, AllocateRequest, AllocateResponse),
            service + "PreStartContainer": Method(
                _unary(_prestart), unary, PreStartContainerRequest, PreStartContainerResponse
            ),
        }

    async def _watch(self, connection: Connection, stream: Stream[Empty, Listing]) -> None:
        await _received(stream)
        connection.watching = True
        stranger = 0 not in {connection.pid, self.kubelet} and connection.pid != self.kubelet
        if self.listing.value is None:
            return
        # Before the first list is sent: a stream that ends while it is being sent must not end unnoticed.
        self._owner.stream_opened(stranger=stranger)
        try:
            while (listing := self.listing.value) is not None:
                version = self.listing.version
                await stream.send_message(listing)
                self._owner.listed(listing, stranger=stranger)
                await trio_asyncio.trio_as_aio(self.listing.newer_than)(version)
        finally:
            if self.listing.value is not None:
                self._owner.stream_ended(stranger=stranger)

    def _allocate(self, request: AllocateRequest) -> AllocateResponse:
        asked = [
            _well_formed(each.devices_ids, str)
            for each in _well_formed(request.container_requests, ContainerAllocateRequest)
        ]
        return AllocateResponse(container_responses=[container_response(self._owner.allocate(ids)) for ids in asked])

    def _preferred(self, request: PreferredAllocationRequest) -> PreferredAllocationResponse:
        responses = []
        for each in _well_formed(request.container_requests, ContainerPreferredAllocationRequest):
            available = _well_formed(each.available_deviceIDs, str)
            required = _well_formed(each.must_include_deviceIDs, str)
            ids = self._owner.preferred(available, required, each.allocation_size)
            responses.append(ContainerPreferredAllocationResponse(device_i_ds=list(ids)))
        return PreferredAllocationResponse(container_responses=responses)


T = TypeVar("T")
Request = TypeVar("Request", bound=betterproto2.Message)


def _options(_request: Empty) -> DevicePluginOptions:
    return plugin_options()


def _prestart(_request: PreStartContainerRequest) -> PreStartContainerResponse:
    return PreStartContainerResponse()


def _unary(
    answer: Callable[[Request], betterproto2.Message],
) -> Callable[[Stream[Any, Any]], Awaitable[None]]:
    """A method out of a plain function: its errors become the statuses that say whose fault it is."""

    async def method(stream: Stream[Any, Any]) -> None:
        request = await _received(stream)
        try:
            reply = answer(request)
        except (RequestTooLargeError, UnknownDeviceError) as error:
            raise GRPCError(Status.INVALID_ARGUMENT, f"{error}; {error.remedy}") from None
        except UnusableDeviceError as error:
            raise GRPCError(Status.FAILED_PRECONDITION, f"{error}; {error.remedy}") from None
        await stream.send_message(reply)

    return method


async def _received(stream: Stream[Request, Any]) -> Request:
    try:
        async with asyncio.timeout(REQUEST_WITHIN):
            request = await stream.recv_message()
    except TimeoutError:
        raise GRPCError(Status.DEADLINE_EXCEEDED, f"no complete request within {REQUEST_WITHIN:.0f} s") from None
    if request is None:
        raise GRPCError(Status.INVALID_ARGUMENT, "the request holds no message")
    return request


def _well_formed(parts: Sequence[T], kind: type[T]) -> Sequence[T]:
    # betterproto2 decodes a repeated field of the wrong wire type to whatever it finds.
    if all(isinstance(part, kind) for part in parts):
        return parts
    raise GRPCError(Status.INVALID_ARGUMENT, "the request is not a message of the device plugin API v1beta1")


class _Codec(CodecBase):
    """Messages of betterproto2, but for those that may be long: lists, and requests for a preference."""

    __content_subtype__ = "proto"

    def encode(self, message: Any, message_type: Any) -> bytes:
        if isinstance(message, Listing):
            return message.encoded
        if isinstance(message, PreferredAllocationResponse):
            return encoded_preferences(message)
        assert isinstance(message, message_type)
        return bytes(message)

    def decode(self, data: bytes, message_type: Any) -> Any:
        asked = preferences_asked(data) if message_type is PreferredAllocationRequest else None
        try:
            return asked or message_type.parse(data)
        except (ValueError, EOFError) as error:
            raise GRPCError(Status.INVALID_ARGUMENT, f"the request cannot be decoded: {error}") from None
