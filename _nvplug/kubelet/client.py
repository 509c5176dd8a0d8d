"""Calling the kubelet: dial kubelet.sock until its listener speaks, then Register over that connection."""

from __future__ import annotations

import asyncio
import socket
import struct
from pathlib import Path

import trio
import trio_asyncio
from grpclib.client import Channel, Handler
from grpclib.config import Configuration
from grpclib.const import Status
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError
from grpclib.protocol import H2Protocol
from h2.config import H2Configuration
from h2.events import (
    AlternativeServiceAvailable,
    InformationalResponseReceived,
    PingAckReceived,
    PushedStreamReceived,
    UnknownFrameReceived,
)
from h2.events import Event as H2Event

from _nvplug.kubelet.api.v1beta1 import DevicePluginOptions, RegisterRequest, RegistrationStub
from _nvplug.kubelet.registration import Accepted, Refused, Unanswered

__all__ = ["API_VERSION", "Connection", "DialError", "dial", "ignore_unknown_frames", "peer_pid", "plugin_options"]

API_VERSION = "v1beta1"

# Seconds after which a kubelet that has not replied to Register is asked whether it is awake. It dials us back for up
# to ten, and only then says why it refuses.
REGISTER_WITHIN = 10.0

# Seconds that it has for the reply after it said so. It may have been frozen until then.
REPLY_AWAKE_WITHIN = 5.0

# Seconds between fresh connections to a kubelet.sock that accepts and stays mute; after the second figure the pause
# doubles up to the third. Each connection is kept for the fourth, in case the listener is only slow. One that it ends
# is followed by the next at once, but for the fifth.
FRESH_AFTER = 0.2
FRESH_FOR = 10.0
FRESH_AFTER_MAX = 5.0
SPEAK_WITHIN = 5.0
AT_LEAST = 0.1


# What grpclib and betterproto2 raise on replies that gRPC does not know: compressed, cut short, without a message or a
# status.
_NONSENSE = (AssertionError, EOFError, KeyError, NotImplementedError, ValueError)


class DialError(Exception):
    """Nobody listens on kubelet.sock. Not an NvplugError: it is the normal course of a kubelet's restart."""


def plugin_options() -> DevicePluginOptions:
    """What we want the kubelet to ask of us. Kubelets up to 1.24 read it in Register, later ones ask for it."""
    return DevicePluginOptions(pre_start_required=False, get_preferred_allocation_available=True)


def peer_pid(sock: socket.socket) -> int:
    """The process at the other end; 0 if it lives in a PID namespace that is not ours, or is not known.

    For a connection that we made it is the process that called listen().
    """
    try:
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    except OSError:
        return 0
    pid: int = struct.unpack("3i", credentials)[0]
    return pid


def ignore_unknown_frames(protocol: H2Protocol) -> None:
    """Has frames passed over that have no meaning here (RFC 9113, 5.5); grpclib raises NotImplementedError on them."""
    for kind in (
        AlternativeServiceAvailable,
        InformationalResponseReceived,
        PushedStreamReceived,
        UnknownFrameReceived,
    ):
        protocol.processor.processors[kind] = _pass_over


def _pass_over(_event: H2Event) -> None:
    pass


class _Protocol(H2Protocol):
    """HTTP/2, and word of the peer's first frame: a server's is SETTINGS (RFC 9113, 3.4)."""

    def __init__(self) -> None:
        config = H2Configuration(
            client_side=True,
            # Whatever bytes a header holds, they are no reason to lose the connection.
            header_encoding="latin-1",
            validate_inbound_headers=False,
            validate_outbound_headers=False,
            normalize_inbound_headers=False,
            normalize_outbound_headers=False,
        )
        self._calls = Handler()
        super().__init__(self._calls, Configuration().__for_client__(), config)
        self.spoke = trio.Event()
        self.awake = trio.Event()

    @property
    def lost(self) -> bool:
        return self._calls.connection_lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        ignore_unknown_frames(self)

    def ping(self) -> None:
        """Asks for a sign of life, which sets ``awake``.

        Once in a connection's life: a server that grpc-go made takes more than two within five minutes for an attack.
        """
        self.processor.processors[PingAckReceived] = lambda _event: self.awake.set()
        self.connection._connection.ping(b"awake?  ")  # noqa: SLF001  # grpclib pings only to close what is silent
        self.connection.flush()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.spoke.set()

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self.spoke.set()


class _Channel(Channel):
    """A channel with one connection for its life: another would perhaps reach another kubelet."""

    def __init__(self, protocol: _Protocol) -> None:
        super().__init__(path="")
        self._only = protocol

    async def __connect__(self) -> H2Protocol:
        if self._only.lost:
            raise StreamTerminatedError("the kubelet closed the connection")
        return self._only


class Connection:
    """A connection on which the kubelet's listener has spoken.

    Attributes:
        pid: of the process that listens, see peer_pid.
    """

    def __init__(self, protocol: _Protocol, transport: asyncio.BaseTransport, pid: int) -> None:
        self._protocol = protocol
        self._transport = transport
        self.pid = pid

    async def register(self, resource: str, socket_name: str) -> Accepted | Refused | Unanswered:
        """Calls Register and returns what came of it.

        A kubelet that is awake has 15 s for it; one that is frozen has all the time that it is frozen. To give up a
        call that it will take in hand when it continues, and to call again, leaves a client in that kubelet that nobody
        removes any more. (With the second call waiting when it continues: on 1.36.3 up to 5 of 15 times, 1.37.2 up to
        15 of 15 [measured].) A ping, which gRPC's transport answers by itself, tells the two apart.

        Without a grpc-timeout header: kubelets from 1.35 on would give their dial of us the same deadline.
        """
        outcome: list[Accepted | Refused | Unanswered] = []
        async with trio.open_nursery() as nursery:

            async def call() -> None:
                outcome.append(await self._register(resource, socket_name))
                nursery.cancel_scope.cancel()

            nursery.start_soon(call)
            await trio.sleep(REGISTER_WITHIN)
            if not self._protocol.lost:
                self._protocol.ping()
                await self._protocol.awake.wait()
                await trio.sleep(REPLY_AWAKE_WITHIN)
            nursery.cancel_scope.cancel()
        return outcome[0] if outcome else Unanswered("no reply, though the kubelet is awake")

    async def _register(self, resource: str, socket_name: str) -> Accepted | Refused | Unanswered:
        request = RegisterRequest(
            version=API_VERSION,
            endpoint=socket_name,
            resource_name=resource,
            options=plugin_options(),
        )
        stub = RegistrationStub(_Channel(self._protocol))
        try:
            await trio_asyncio.aio_as_trio(stub.register)(request)
        except GRPCError as error:
            return _refusal(error)
        except (StreamTerminatedError, ProtocolError, OSError) as error:
            return Unanswered(str(error) or type(error).__name__)
        except _NONSENSE as error:
            return Refused(f"its reply is not one of the device plugin API: {str(error) or type(error).__name__}")
        return Accepted()

    def close(self) -> None:
        """Ends the connection, at once."""
        self._protocol.processor.close("closed by nvplug")
        self._transport.abort()  # type: ignore[attr-defined]  # a socket's transport has it


def _refusal(error: GRPCError) -> Refused:
    reason = error.message or error.status.name
    # The kubelet's own words: `requested API version "v1" is not supported by kubelet. …` and
    # `the ResourceName "foo" is invalid`. Neither changes by asking again.
    final = "API version" in reason or ("ResourceName" in reason and "is invalid" in reason)
    if error.status is Status.UNIMPLEMENTED:
        reason = f"{reason} (is this socket the kubelet's, or a container runtime's?)"
    return Refused(reason, final=final)


async def dial(path: Path) -> Connection:
    """Connects to a kubelet and waits until its listener speaks, however long that takes.

    A connection that was accepted means little: the kernel queues it for a kubelet that is starting or stopped. To send
    a Register down such a connection would be to lose track of it, so we wait for the listener's first frame; and since
    a listener may come to life without serving what was queued, fresh connections are tried beside the waiting ones.

    Raises:
        DialError: nobody listens there.
    """
    connections: list[Connection] = []
    failures: list[DialError] = []
    ended = trio.Event()

    async def attempt(scope: trio.CancelScope) -> None:
        try:
            connection = await _connect(path)
        except DialError as error:
            failures.append(error)
            scope.cancel()
            return
        if connection is not None:
            connections.append(connection)
            scope.cancel()
        else:
            ended.set()

    try:
        async with trio.open_nursery() as nursery:
            started, pause = trio.current_time(), FRESH_AFTER
            while True:
                ended = trio.Event()
                nursery.start_soon(attempt, nursery.cancel_scope)
                await trio.sleep(AT_LEAST)
                with trio.move_on_after(pause - AT_LEAST):
                    await ended.wait()
                if trio.current_time() - started > FRESH_FOR:
                    pause = min(2 * pause, FRESH_AFTER_MAX)
        if connections:
            return connections.pop()
    finally:
        for spare in connections:
            spare.close()
    raise failures[0]


async def _connect(path: Path) -> Connection | None:
    """One connection on which the listener has spoken; None if it did not in time, or hung up."""
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    except OSError as error:
        raise DialError(f"a socket: {error.strerror}") from None
    try:
        # On a unix socket this never waits: it succeeds, or fails with EAGAIN when the listener's queue is full.
        sock.connect(str(path))
    except OSError as error:
        sock.close()
        raise DialError(f"{path}: {error.strerror}") from None
    pid = peer_pid(sock)
    loop = asyncio.get_event_loop()
    transport, protocol = await trio_asyncio.aio_as_trio(loop.create_unix_connection)(_Protocol, sock=sock)
    connection = Connection(protocol, transport, pid)
    keep = False
    try:
        with trio.move_on_after(SPEAK_WITHIN):
            await protocol.spoke.wait()
            keep = not protocol.lost
    finally:
        if not keep:
            connection.close()
    return connection if keep else None
