"""A node's kubelet on paper, in virtual time: what a device plugin meets, and what becomes allocatable of it.

Written from the contract (kubelet-contract.md 1.2, 1.3, 1.5, 1.6 and other-device-plugins.md 0), flaws included, and
from no plugin. It knows one resource with one device. There are four kinds of kubelet:

- up to 1.24, Register only checks the request; the plugin is dialled afterwards, and known by that dial;
- up to 1.34, the plugin is dialled inside Register, and known by the *resource's name*: a dial that fails, or a stream
  that ends, takes away whoever holds the name by then;
- up to 1.36, as before, but the plugin's end of a Register call is the end of the dial inside it, too;
- from 1.37 on, a plugin is known by its socket's name, and a second Register with the same name is refused.

Three things are assumed of every kubelet: one that runs notices within 20 ms what reaches it; one that was frozen takes
in first what came first; and when kubelet.sock looks like another file, no living kubelet has a Register in hand.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

__all__ = [
    "ALREADY_CONNECTED",
    "Agenda",
    "Connection",
    "Endpoint",
    "File",
    "Kubelet",
    "Listener",
    "Node",
    "Stream",
]

KUBELET_SOCK = "kubelet.sock"
ALREADY_CONNECTED = "device plugin already connected"
DIAL_SECONDS = 10.0

# More than this cannot happen at one moment.
AT_ONCE = 1000

# Seconds after which a kubelet whose listener has died makes another (other-device-plugins.md 0).
SERVE_AGAIN_AFTER = 1.0


class Agenda:
    """Virtual time, and what is to happen in it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None], Callable[[], bool]]] = []
        self._count = itertools.count()

    def after(self, seconds: float, action: Callable[[], None], *, unless: Callable[[], bool] = lambda: False) -> None:
        """Has ``action`` called that much later, unless something holds then.

        What falls together happens in the order of asking.
        """
        heapq.heappush(self._heap, (self.now + max(0.0, seconds), next(self._count), action, unless))

    def run(self, seconds: float) -> None:
        """Lets time pass."""
        until = self.now + seconds
        at_once = 0
        while self._heap and self._heap[0][0] <= until:
            before = self.now
            self.now, _, action, unless = heapq.heappop(self._heap)
            if unless():
                continue
            action()
            at_once = at_once + 1 if self.now == before else 0
            assert at_once < AT_ONCE, "something happens again and again, and no time passes"
        self.now = until


@dataclass(eq=False, slots=True)
class Listener:
    """A socket that was bound; ``open`` once somebody listens on it."""

    kubelet: Kubelet | None = None
    open: bool = False


@dataclass(eq=False, slots=True)
class File:
    """A socket's file. To lstat, another object is another file."""

    listener: Listener


class Endpoint(Protocol):
    """What a kubelet meets of a plugin."""

    @property
    def name(self) -> str:
        """Of its socket."""

    @property
    def listener(self) -> Listener:
        """Of its socket."""

    def watch(self, stream: Stream) -> None:
        """ListAndWatch is called; the list is sent."""

    def watched_no_more(self, stream: Stream) -> None:
        """That call was ended by the kubelet, or by its death."""


class Node:
    """A kubelet's directory and the kubelets that come and go.

    Args:
        minor: of every kubelet's version, 1.``minor``.
        chance: numbers in [0, 1) that settle whatever can go one way or another, used in a circle.
        slowness: the longest that a step of anybody's takes, in seconds.
    """

    def __init__(self, minor: int, chance: Sequence[float] = (0.5,), slowness: float = 0.004) -> None:
        self.minor = minor
        self.agenda = Agenda()
        self.files: dict[str, File] = {}
        self.exists = True
        self.full = False
        self.on_change: list[Callable[[], None]] = []
        # When allocatable changed, and to what; and when a kubelet last began to answer.
        self.history: list[tuple[float, bool]] = [(0.0, False)]
        self.answers_since = 0.0
        self.replacements: list[float] = []
        self._chance = itertools.cycle(chance)
        self._slowness = slowness
        self.kubelet = Kubelet(self)
        self.kubelet.die()

    def chance(self) -> float:
        """The next of the numbers."""
        return next(self._chance)

    def pause(self) -> float:
        """How long the next step takes."""
        return self.chance() * self._slowness

    @property
    def allocatable(self) -> bool:
        """Whether the scheduler would be offered the device."""
        return self.kubelet.alive and self.kubelet.healthy

    def note(self) -> None:
        """Puts a change of allocatable down."""
        if self.allocatable != self.history[-1][1]:
            self.history.append((self.agenda.now, self.allocatable))

    def changed(self) -> None:
        """Tells that a file was made or removed."""
        for tell in tuple(self.on_change):
            tell()

    def bind(self, name: str, listener: Listener) -> File | None:
        """Makes a file; None if that fails."""
        if self.full or not self.exists:
            return None
        file = self.files[name] = File(listener)
        self.changed()
        return file

    def unlink(self, name: str) -> None:
        """Removes a file, if it is there."""
        if self.files.pop(name, None) is not None:
            self.changed()

    def start(self, *, wipe: bool = True) -> None:
        """A kubelet starts. One that was there before lives on behind its back, if it got as far as its socket."""
        if not self.kubelet.bound:
            self.kubelet.die()
        self.kubelet = Kubelet(self)
        self.note()
        self.kubelet.start(wipe=wipe)

    def remove_directory(self) -> None:
        """Deletes the directory with all that is in it."""
        self.files.clear()
        self.exists = False
        self.changed()

    def touch(self) -> None:
        """Changes the inode of kubelet.sock as chmod, chown and relabelling do: it looks like another file."""
        if (file := self.files.get(KUBELET_SOCK)) is not None and not self.kubelet.busy:
            self.files[KUBELET_SOCK] = File(file.listener)
            self.replacements.append(self.agenda.now)


@dataclass(eq=False, slots=True)
class _Client:
    """A kubelet's side of one endpoint."""

    endpoint: Endpoint
    stream: Stream | None = None
    closed: bool = False
    over: bool = False


class Stream:
    """One ListAndWatch call."""

    def __init__(self, kubelet: Kubelet, client: _Client) -> None:
        self.open = True
        self._kubelet = kubelet
        self._client = client

    def end(self) -> None:
        """The plugin returns from it."""
        if self.open:
            self.open = False
            self._kubelet.stream_ended(self._client)

    @property
    def noticed(self) -> bool:
        """Whether the kubelet has taken its end in."""
        return self._client.over or not self._kubelet.alive


@dataclass(eq=False, slots=True)
class _Register:
    """One Register call."""

    connection: Connection
    endpoint: Endpoint
    replied: Callable[[str | None, bool], None]
    began: float
    client: _Client | None = None
    cancelled: bool = False


class Connection:
    """A plugin's connection to kubelet.sock: accepted by the kernel, which says nothing about the kubelet.

    Args:
        kubelet: whose.
        greeted: called when the kubelet's SETTINGS have come.
        broken: called when the kubelet closed it, or died.
    """

    def __init__(self, kubelet: Kubelet, greeted: Callable[[], None], broken: Callable[[], None]) -> None:
        self.open = True
        self.greeted = greeted
        self.broken = broken
        self._kubelet = kubelet

    def register(self, endpoint: Endpoint, replied: Callable[[str | None, bool], None]) -> None:
        """Calls Register; ``replied`` is told the error, and whether the same request can never succeed."""
        self._kubelet.register(self, endpoint, replied)

    def close(self) -> None:
        """The plugin closes it."""
        if self.open:
            self.open = False
            self._kubelet.hung_up(self)


@dataclass(eq=False)
class Kubelet:
    """One process, from its start to its death.

    Attributes:
        healthy: whether it holds the device for healthy: what is allocatable while it is alive.
        frozen: SIGSTOP. The kernel goes on accepting connections and keeps what is sent; time passes.
        silent: connections are accepted, and not answered.
        stuck: Register is not answered.
        refusal: what every Register is refused with.
        refuses_for_good: whether that is said to be final.
    """

    node: Node
    healthy: bool = False
    alive: bool = True
    frozen: bool = False
    silent: bool = False
    stuck: bool = False
    refusal: str | None = None
    refuses_for_good: bool = False
    # Whose Allocate would be called; None before the first registration.
    endpoint: Endpoint | None = None
    _known: _Client | None = None
    _clients: dict[str, _Client] = field(default_factory=dict)
    _streams: list[tuple[Stream, _Client]] = field(default_factory=list)
    _connections: list[Connection] = field(default_factory=list)
    _listener: Listener = field(default_factory=Listener)
    _asleep: list[Callable[[], None]] = field(default_factory=list)
    _ungreeted: list[Connection] = field(default_factory=list)
    _held: list[_Register] = field(default_factory=list)
    _in_hand: list[_Register] = field(default_factory=list)

    # --- its life

    def start(self, *, wipe: bool) -> None:
        """Makes the directory, wipes it file by file, binds, and listens a moment later."""
        self.node.exists = True
        names = sorted(self.node.files) if wipe else [KUBELET_SOCK]
        if names and self.node.chance() < 0.5:
            names.reverse()

        def wipe_next() -> None:
            if names:
                self.node.unlink(names.pop())
                self._soon(wipe_next)
            else:
                self._bind()

        self._soon(wipe_next)

    def die(self) -> None:
        """SIGKILL: connections end, files stay."""
        self.alive = False
        self._listener.open = False
        for stream, client in self._streams:
            if stream.open:
                stream.open = False
                self._tell(partial(client.endpoint.watched_no_more, stream))
        self._break_connections()
        self.node.note()

    def thaw(self) -> None:
        """SIGCONT: everything that came meanwhile is taken in, the oldest first."""
        self.frozen = False
        asleep, self._asleep = self._asleep, []
        for action in asleep:
            action()

    def speak(self) -> None:
        """Ends being silent and stuck."""
        self.silent = self.stuck = False
        ungreeted, self._ungreeted = self._ungreeted, []
        for connection in ungreeted:
            self._greet(connection)
        held, self._held = self._held, []
        for call in held:
            self._take(call)

    def cut(self) -> None:
        """Closes its connections to the plugin."""
        if self.frozen:
            return
        for stream, client in tuple(self._streams):
            if stream.open:
                self._close(client)
                self._soon(partial(self._run_ended, client))

    def serve_again(self, *, cut: bool) -> None:
        """Its listener dies, and it makes another with a new kubelet.sock; nothing is wiped, nobody is forgotten.

        What it has in hand is done before: that takes milliseconds, or 10 s where a dial fails.

        Args:
            cut: whether all connections end with the listener.
        """
        if self.frozen:
            return
        self._listener.open = False
        if cut:
            self.cut()
            self._break_connections()
        self._later(SERVE_AGAIN_AFTER, self._bind_when_idle)

    @property
    def bound(self) -> bool:
        """Whether it has made its socket."""
        return self._listener.kubelet is self

    @property
    def busy(self) -> bool:
        """Whether it has a Register in hand."""
        return bool(self._in_hand)

    def _bind_when_idle(self) -> None:
        if self.node.kubelet is not self:
            return
        if self.busy:
            self._later(0.1, self._bind_when_idle)
        else:
            self.node.exists = True
            self._bind()

    def _bind(self) -> None:
        self._listener = Listener(self)
        self.node.files[KUBELET_SOCK] = File(self._listener)
        self.node.replacements.append(self.node.agenda.now)
        self.node.changed()
        self._soon(self._listen)

    def _listen(self) -> None:
        self._listener.open = True
        self.node.answers_since = self.node.agenda.now

    # --- Register

    def connect(self, connection: Connection) -> None:
        """The kernel queues a connection."""
        self._connections.append(connection)
        self._soon(lambda: self._greet(connection))

    def _greet(self, connection: Connection) -> None:
        if self.silent:
            self._ungreeted.append(connection)
        else:
            self._tell(connection.greeted, unless=lambda: not connection.open)

    def register(self, connection: Connection, endpoint: Endpoint, replied: Callable[[str | None, bool], None]) -> None:
        """A Register call is sent."""
        call = _Register(connection, endpoint, replied, self.node.agenda.now)
        self._in_hand.append(call)
        self._soon(lambda: self._take(call))

    def hung_up(self, connection: Connection) -> None:
        """The plugin's end of a connection is closed."""
        self._connections.remove(connection)
        for call in self._in_hand:
            if call.connection is connection and self.node.minor >= 35:
                call.cancelled = True
                self._soon(partial(self._fail, call, "context canceled"))

    def _take(self, call: _Register) -> None:
        if self.silent or self.stuck:
            self._held.append(call)
            return
        call.began = self.node.agenda.now
        if self.refusal is not None:
            self._reply(call, self.refusal, final=self.refuses_for_good)
            return
        key = self._key(call.endpoint)
        if self.node.minor >= 37 and key in self._clients:
            self._reply(call, ALREADY_CONNECTED)
            return
        call.client = _Client(call.endpoint)
        if self.node.minor < 25:
            self._reply(call)
        else:
            self._clients[key] = call.client
        if call.cancelled:
            self._fail(call, "context canceled")
        elif self._reaches(call.endpoint):
            self._soon(lambda: self._connected(call))
        else:
            self._later(DIAL_SECONDS, lambda: self._fail(call, "context deadline exceeded"))

    def _connected(self, call: _Register) -> None:
        assert call.client is not None
        if call.cancelled:
            return
        if not call.endpoint.listener.open:
            # It is gone again: the dial goes on, for the rest of its time.
            elapsed = self.node.agenda.now - call.began
            self._later(DIAL_SECONDS - elapsed, lambda: self._fail(call, "context deadline exceeded"))
            return
        self._known = call.client
        self.endpoint = call.endpoint
        self._reply(call)
        client = call.client
        self._soon(lambda: self._run(client))

    def _fail(self, call: _Register, why: str) -> None:
        if call.client is None or call not in self._in_hand:
            return
        # By key, whoever it is by now.
        self._clients.pop(self._key(call.endpoint), None)
        self._reply(call, f"failed to dial device plugin: {why}")

    def _reply(self, call: _Register, error: str | None = None, *, final: bool = False) -> None:
        if call in self._in_hand:
            self._in_hand.remove(call)
            self._tell(lambda: call.replied(error, final), unless=lambda: not call.connection.open)

    # --- ListAndWatch

    def _run(self, client: _Client) -> None:
        # Over the connection of the dial: the file may have gone since.
        if client.closed or not client.endpoint.listener.open:
            self._run_ended(client)
            return
        stream = client.stream = Stream(self, client)
        self._streams.append((stream, client))
        self._soon(lambda: self._receive(client))
        self._tell(lambda: client.endpoint.watch(stream), unless=lambda: not stream.open)

    def _receive(self, client: _Client) -> None:
        if not client.over and not client.closed:
            self.healthy = True
            self.node.note()

    def stream_ended(self, client: _Client) -> None:
        """The plugin ended a stream."""
        self._soon(lambda: self._run_ended(client))

    def _run_ended(self, client: _Client) -> None:
        if client.over:
            return
        client.over = True
        if self.node.minor < 25:
            if self._known is client:
                self._mark_unhealthy()
            return
        # By key, whoever it is by now. If nobody: forgotten, and the device goes on being held for healthy.
        found = self._clients.pop(self._key(client.endpoint), None)
        if found is None:
            return
        self._close(found)
        if self.node.minor < 37 or not any(stream.open for stream, _ in self._streams):
            self._mark_unhealthy()

    def _close(self, client: _Client) -> None:
        client.closed = True
        stream = client.stream
        if stream is not None and stream.open:
            stream.open = False
            self._tell(lambda: client.endpoint.watched_no_more(stream))
            self._soon(lambda: self._run_ended(client))

    def _mark_unhealthy(self) -> None:
        self.healthy = False
        self.node.note()

    # --- how things happen

    def _soon(self, action: Callable[[], None]) -> None:
        self._later(self.node.pause(), action)

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        def act() -> None:
            if self.frozen:
                self._asleep.append(act)
            elif self.alive:
                action()

        self.node.agenda.after(seconds, act)

    def _tell(self, action: Callable[[], None], *, unless: Callable[[], bool] = lambda: False) -> None:
        self.node.agenda.after(self.node.pause(), action, unless=unless)

    def _break_connections(self) -> None:
        connections, self._connections = self._connections, []
        for connection in connections:
            connection.open = False
            self._tell(connection.broken)

    def _reaches(self, endpoint: Endpoint) -> bool:
        file = self.node.files.get(endpoint.name)
        return file is not None and file.listener is endpoint.listener and endpoint.listener.open

    def _key(self, endpoint: Endpoint) -> str:
        return endpoint.name if self.node.minor >= 37 else "the resource"
