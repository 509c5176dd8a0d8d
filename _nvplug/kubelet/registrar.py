"""The kubelet task: keeps every resource on offer registered, by doing what registration.py decides."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import trio

from _nvplug.container import ContainerEdits, edits_for
from _nvplug.container.facts import Terms
from _nvplug.errors import ListTooLongError, RequestTooLargeError, UnknownDeviceError, UnusableDeviceError
from _nvplug.happenings import (
    Allocated,
    AllocationRefused,
    Deregistered,
    DevicesListed,
    Happening,
    KubeletAwaited,
    KubeletRestarted,
    ListRefused,
    Publish,
    Registered,
    RegistrationRefused,
    RegistrationUnanswered,
    SocketNotMade,
    SocketVanished,
    StreamLost,
    StreamMissing,
)
from _nvplug.kubelet.client import Connection, DialError, dial
from _nvplug.kubelet.registration import (
    BindFailed,
    Command,
    Connected,
    DialFailed,
    Due,
    Event,
    KubeletReplaced,
    Phase,
    Refused,
    Registration,
    Retired,
    SocketLost,
    StreamEnded,
    StreamOpened,
    Unanswered,
    step,
)
from _nvplug.kubelet.server import Endpoint, Listing
from _nvplug.kubelet.sockets import Change, Poller, clear_leftovers, identify, new_socket
from _nvplug.kubelet.wire import ListEncoder
from _nvplug.latest import Latest
from _nvplug.placement import Plan, preferred
from _nvplug.resources import Offer, Resource, chosen
from _nvplug.supervise import again

__all__ = ["keep_registered"]


async def keep_registered(offer: Latest[Offer], plan: Latest[Plan], terms: Latest[Terms], publish: Publish) -> None:
    """Keeps every resource of ``offer`` registered with the kubelet, until cancelled; then leaves no socket behind.

    Raises:
        DirectoryDeadError: see Poller.run.
    """
    directory = terms.value.config.kubelet_socket.parent
    clear_leftovers(directory, "nvplug-*.sock", ("nvidia-gpu.sock", "nvidiaGPU-*.sock"), publish)
    registrars: dict[str, _Registrar] = {}
    poller = Poller(directory, lambda: all(each.streaming for each in registrars.values()), publish)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(again, "the poller", poller.run)
        while True:
            version = offer.version
            for resource in offer.value.resources:
                if resource.name not in registrars:
                    registrar = _Registrar(resource.name, offer, plan, terms, poller, publish)
                    registrars[resource.name] = registrar
                    nursery.start_soon(again, resource.name, registrar.run)
            await offer.newer_than(version)


class _Registrar:
    """One resource: its registration, and the endpoint that it has for the time being.

    All that happens comes through one inbox and is taken in by one task, in order. An entry is a function, called when
    its turn comes: what an earlier dial or Register brings home late is recognised then, and dropped.
    """

    def __init__(
        self,
        name: str,
        offer: Latest[Offer],
        plan: Latest[Plan],
        terms: Latest[Terms],
        poller: Poller,
        publish: Publish,
    ) -> None:
        self._name = name
        self._offer = offer
        self._plan = plan
        self._terms = terms
        self._poller = poller
        self._publish = publish
        self._encoder = ListEncoder()
        self._sent: Resource | None = None
        self._state = Registration()

    @property
    def streaming(self) -> bool:
        """Whether the kubelet watches our devices."""
        return self._state.phase is Phase.STREAMING

    async def run(self) -> None:
        """One life, from nothing to nothing."""
        self._wanting_since = trio.current_time()
        self._state = Registration(due=self._wanting_since)
        self._said: Happening | None = None
        self._endpoint: Endpoint | None = None
        self._connection: Connection | None = None
        # What is under way; the scope of each call is also the token by which its outcome is known.
        self._dialling = trio.CancelScope()
        self._registering = trio.CancelScope()
        self._unwatch_socket: Callable[[], None] | None = None
        self._inbox, inbox = trio.open_memory_channel[_News](math.inf)
        listing, version = await self._first_listing()
        self._listing = listing
        unwatch_kubelet = self._poller.watch(self._terms.value.config.kubelet_socket, self._kubelet_socket_changed)
        try:
            async with trio.open_nursery() as self._nursery:
                self._nursery.start_soon(self._follow_offer, version)
                while True:
                    event = await self._next_event(inbox)
                    if event is not None:
                        self._take(event)
        finally:
            unwatch_kubelet()
            with trio.CancelScope(shield=True):
                await self._leave(inbox)

    async def _leave(self, inbox: trio.MemoryReceiveChannel[_News]) -> None:
        started = trio.current_time()
        self._dialling.cancel()
        self._registering.cancel()
        while inbox.statistics().current_buffer_used:
            inbox.receive_nowait()()
        self._drop_connection()
        if self._endpoint is not None:
            await self._abandon(self._endpoint)
        self._publish(Deregistered(self._name, trio.current_time() - started))

    async def _next_event(self, inbox: trio.MemoryReceiveChannel[_News]) -> Event | None:
        await trio.lowlevel.checkpoint()
        try:
            return inbox.receive_nowait()()
        except trio.WouldBlock:
            pass
        with trio.move_on_at(self._state.due):
            news = await inbox.receive()
            return news()
        return Due()

    def _take(self, event: Event) -> None:
        before, now = self._state, trio.current_time()
        self._state, commands = step(before, event, now=now, luck=random.random())  # noqa: S311  # no secret: pacing
        self._tell(before.phase, event, now)
        for command in commands:
            _ACTIONS[command](self)
        if self._state.phase not in {Phase.DIALLING, Phase.REDIALLING}:
            self._dialling.cancel()
            self._drop_connection()

    # --- what the machine commands

    def _dial(self) -> None:
        self._dialling.cancel()
        self._drop_connection()
        self._dialling = trio.CancelScope()
        self._nursery.start_soon(self._call_dial, self._dialling)

    async def _call_dial(self, scope: trio.CancelScope) -> None:
        with scope:
            try:
                connection = await dial(self._terms.value.config.kubelet_socket)
            except DialError as error:
                self._report(scope, lambda: self._dialling, DialFailed(str(error)))
            else:
                # What the poller would tell at its next tick must come before this: the kubelet that answered may be
                # another than the one that our endpoint was bound for.
                self._poller.look()
                self._inbox.send_nowait(partial(self._connected, scope, connection))

    def _connected(self, scope: trio.CancelScope, connection: Connection) -> Event | None:
        if scope is not self._dialling or scope.cancel_called:
            connection.close()
            return None
        self._connection = connection
        return Connected()

    def _announce(self) -> None:
        path = new_socket(self._terms.value.config.kubelet_socket.parent, self._name)
        endpoint = Endpoint(path, self._listing, self)
        try:
            endpoint.bind()
        except OSError as error:
            reason = error.strerror or str(error)
            self._inbox.send_nowait(lambda: BindFailed(reason))
            return
        self._endpoint = endpoint
        self._unwatch_socket = self._poller.watch(path, lambda _change: self._inbox.send_nowait(SocketLost))
        if identify(path) is None:
            # Wiped since its bind, and before anybody looked.
            self._inbox.send_nowait(SocketLost)
        self._nursery.start_soon(endpoint.serve)
        self._register()

    def _register(self) -> None:
        connection, self._connection = self._connection, None
        assert connection is not None
        assert self._endpoint is not None
        self._endpoint.kubelet = connection.pid
        self._registering.cancel()
        self._registering = trio.CancelScope()
        self._nursery.start_soon(self._call_register, self._registering, connection, self._endpoint.path.name)

    async def _call_register(self, scope: trio.CancelScope, connection: Connection, socket_name: str) -> None:
        try:
            with scope:
                outcome = await connection.register(self._name, socket_name)
                self._report(scope, lambda: self._registering, outcome)
        finally:
            connection.close()

    def _retire(self) -> None:
        self._registering.cancel()
        endpoint, self._endpoint = self._endpoint, None
        assert endpoint is not None
        self._nursery.start_soon(self._call_retire, endpoint)

    async def _call_retire(self, endpoint: Endpoint) -> None:
        # Shielded: a socket once bound is always removed.
        with trio.CancelScope(shield=True):
            await self._abandon(endpoint)
        self._inbox.send_nowait(Retired)

    async def _abandon(self, endpoint: Endpoint) -> None:
        if self._unwatch_socket is not None:
            self._unwatch_socket()
            self._unwatch_socket = None
        await endpoint.retire()

    def _drop_connection(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # --- what happens

    def _report(self, scope: trio.CancelScope, current: Callable[[], trio.CancelScope], event: Event) -> None:
        """Puts the outcome of a call into the inbox. It counts if the call is still the current one at its turn."""
        self._inbox.send_nowait(lambda: event if scope is current() and not scope.cancel_called else None)

    def _kubelet_socket_changed(self, change: Change) -> None:
        if change is not Change.VANISHED:
            self._inbox.send_nowait(KubeletReplaced)

    async def _first_listing(self) -> tuple[Listing, int]:
        while True:
            version = self._offer.version
            listing = self._encode()
            if listing is not None:
                return listing, version
            await self._offer.newer_than(version)

    async def _follow_offer(self, version: int) -> None:
        while True:
            await self._offer.newer_than(version)
            version = self._offer.version
            listing = self._encode()
            if listing is not None:
                self._listing = listing
                if self._endpoint is not None:
                    self._endpoint.listing.set(listing)

    def _encode(self) -> Listing | None:
        resource = self._resource()
        try:
            return Listing(self._encoder.encode(resource.devices), resource)
        except ListTooLongError as error:
            self._publish(ListRefused(self._name, str(error), error.remedy))
            return None

    def _resource(self) -> Resource:
        return next(each for each in self._offer.value.resources if each.name == self._name)

    # --- Owner, for the endpoint

    def stream_opened(self, *, stranger: bool) -> None:
        self._inbox.send_nowait(lambda: StreamOpened(stranger))

    def stream_ended(self, *, stranger: bool) -> None:
        self._inbox.send_nowait(lambda: StreamEnded(stranger))

    def listed(self, listing: Listing, *, stranger: bool) -> None:
        if stranger and self._state.streams:
            # A monitor, which may call as often as it likes.
            return
        self._sent = listing.resource
        devices = listing.resource.devices
        self._publish(DevicesListed(self._name, len(devices), sum(device.healthy for device in devices)))

    def allocate(self, ids: Sequence[str]) -> ContainerEdits:
        resource = self._resource()
        try:
            devices = chosen(resource, self._sent, ids)
            terms = self._terms.value
            edits = edits_for(devices, resource.control_nodes, terms.config, terms.facts)
        except (RequestTooLargeError, UnknownDeviceError, UnusableDeviceError) as error:
            self._publish(AllocationRefused(self._name, str(error)))
            raise
        self._publish(Allocated(self._name, ",".join(device.id for device in devices)))
        return edits

    def preferred(self, available: Sequence[str], required: Sequence[str], size: int) -> Sequence[str]:
        return preferred(self._resource(), available, required, size, self._plan.value)

    # --- what an operator reads

    def _tell(self, before: Phase, event: Event, now: float) -> None:
        happening: Happening | None = None
        if self.streaming and before is not Phase.STREAMING and self._endpoint is not None:
            happening = Registered(self._name, self._endpoint.path.name, now - self._wanting_since)
        elif before is Phase.STREAMING and not self.streaming:
            self._wanting_since = now
        match event:
            case StreamEnded() if before is Phase.STREAMING and not self.streaming:
                happening = StreamLost(self._name)
            case KubeletReplaced() if before is not Phase.RETIRING:
                happening = KubeletRestarted(self._name)
            case SocketLost() if self._endpoint is not None and before is not Phase.RETIRING:
                happening = SocketVanished(self._name, self._endpoint.path.name)
            case DialFailed():
                happening = KubeletAwaited(self._name, event.reason)
            case BindFailed():
                happening = SocketNotMade(self._name, str(self._terms.value.config.kubelet_socket.parent), event.reason)
            case Refused():
                happening = RegistrationRefused(self._name, event.reason)
            case Unanswered():
                happening = RegistrationUnanswered(self._name, event.reason)
            case Due() if before is Phase.EXPECTING:
                happening = StreamMissing(self._name)
            case _:
                pass
        # A trouble that lasts is told once.
        if happening is not None and happening != self._said:
            self._said = happening
            self._publish(happening)


_News = Callable[[], Event | None]

_ACTIONS: Mapping[Command, Callable[[_Registrar], None]] = {
    Command.DIAL: _Registrar._dial,  # noqa: SLF001  # the class's own table
    Command.ANNOUNCE: _Registrar._announce,  # noqa: SLF001
    Command.REPEAT: _Registrar._register,  # noqa: SLF001
    Command.RETIRE: _Registrar._retire,  # noqa: SLF001
}
