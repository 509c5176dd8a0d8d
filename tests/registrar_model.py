"""What carries out the commands of registration.py, on paper: as registrar.py does it, in virtual time.

Every step of it takes as long as the node says. What must hold at every moment is asserted here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from kubelet_model import KUBELET_SOCK, Connection, File, Listener, Node, Stream

from _nvplug.kubelet.registration import (
    Accepted,
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
from _nvplug.kubelet.sockets import AT_LEAST, BRISK, QUIET

__all__ = ["Registrar"]

REGISTER_WITHIN = 15.0
FRESH_AFTER = 0.2
FRESH_FOR = 10.0
FRESH_AFTER_MAX = 5.0
SPEAK_WITHIN = 5.0
KUBELET_CLOSES_WITHIN = 0.05


@dataclass(eq=False, slots=True)
class _Dial:
    """A DIAL under way."""

    began: float
    connections: list[Connection] = field(default_factory=list)


class _Endpoint:
    """A socket of ours: what the kubelet meets, see kubelet_model.Endpoint."""

    def __init__(self, name: str, registrar: Registrar) -> None:
        self.name = name
        self.listener = Listener(open=True)
        self.file: File | None = None
        self.streams: list[Stream] = []
        self.strangers = 0
        self.retiring = False
        self._registrar = registrar

    def watch(self, stream: Stream) -> None:
        if self.retiring:
            stream.end()
        else:
            self.streams.append(stream)
            self._registrar.take(StreamOpened(self._registrar.all_strangers))

    def watched_no_more(self, stream: Stream) -> None:
        if not self.retiring and stream in self.streams:
            self.streams.remove(stream)
            self._registrar.take(StreamEnded(self._registrar.all_strangers))


class Registrar:
    """One resource's.

    Args:
        node: where it runs.
        doorbell: whether changes of the directory are told at once, and not only at the poller's next tick.
        all_strangers: whether the kubelet's streams come from another process than its listener's.

    Attributes:
        state: of the machine.
        endpoint: what is bound, if anything is.
        dials: when a connection to kubelet.sock was tried.
        registers: when Register was called.
        names: how many sockets there have been.
    """

    def __init__(self, node: Node, *, doorbell: bool = True, all_strangers: bool = False) -> None:
        self.node = node
        self.all_strangers = all_strangers
        self.state = Registration(due=node.agenda.now)
        self.endpoint: _Endpoint | None = None
        self.dials: list[float] = []
        self.registers: list[float] = []
        self.names = 0
        self._stopped = False
        self._inbox: list[Event] = []
        self._taking = False
        self._steps = itertools.count()
        self._step = next(self._steps)
        self._dial: _Dial | None = None
        self._connection: Connection | None = None
        self._call: Connection | None = None
        self._retiring = False
        self._kubelet_seen = node.files.get(KUBELET_SOCK)
        self._looked = -math.inf
        if doorbell:
            node.on_change.append(lambda: node.agenda.after(AT_LEAST, self._look))
        self._arm()
        self._tick()

    def stop(self) -> None:
        """SIGTERM: ends the endpoint, and does nothing more."""
        self._stopped = True
        self._drop_dial()
        if self.endpoint is not None and not self.endpoint.retiring:
            self._retire()

    def stranger(self, seconds: float) -> None:
        """A process that is not the kubelet calls ListAndWatch, for a while."""
        endpoint = self.endpoint
        if endpoint is None or endpoint.retiring:
            return

        def leave() -> None:
            endpoint.strangers -= 1
            if not endpoint.retiring:
                self.take(StreamEnded(stranger=True))

        endpoint.strangers += 1
        self.take(StreamOpened(stranger=True))
        self.node.agenda.after(seconds, leave)

    # --- the inbox

    def take(self, event: Event) -> None:
        """Something happened."""
        if self._stopped:
            return
        self._inbox.append(event)
        if self._taking:
            return
        self._taking = True
        while self._inbox:
            self._take(self._inbox.pop(0))
        self._taking = False

    def _take(self, event: Event) -> None:
        now = self.node.agenda.now
        self.state, commands = step(self.state, event, now=now, luck=self.node.chance())
        for command in commands:
            _ACTIONS[command](self)
        if self.state.phase not in {Phase.DIALLING, Phase.REDIALLING}:
            self._drop_dial()
            self._drop_connection()
        self._arm()
        self._check()

    def _arm(self) -> None:
        armed = self._step = next(self._steps)
        if math.isfinite(self.state.due):
            seconds = self.state.due - self.node.agenda.now
            self.node.agenda.after(seconds, lambda: self.take(Due()), unless=lambda: armed != self._step)

    def _check(self) -> None:
        """Every phase has a way out, and streams are what the machine takes them for."""
        state = self.state
        match state.phase:
            case Phase.WAITING | Phase.HOLDING | Phase.EXPECTING:
                assert math.isfinite(state.due), state
            case Phase.DIALLING | Phase.REDIALLING:
                assert self._dial is not None, state
            case Phase.REGISTERING:
                assert self._call is not None or self._inbox, state
            case Phase.STREAMING:
                assert self.endpoint is not None, state
                assert self.endpoint.streams or self.endpoint.strangers or self._inbox, state
            case Phase.RETIRING:
                assert self._retiring, state
        served = state.phase not in {Phase.WAITING, Phase.DIALLING, Phase.RETIRING}
        assert served == (self.endpoint is not None and not self.endpoint.retiring) or self._inbox, state

    # --- the poller

    def _tick(self) -> None:
        interval = QUIET if self.state.phase is Phase.STREAMING else BRISK
        if self.node.agenda.now - self._looked >= interval - 0.001:
            self._look()
        self.node.agenda.after(BRISK, self._tick)

    def _look(self) -> None:
        self._looked = self.node.agenda.now
        events: list[Event] = []
        kubelet = self.node.files.get(KUBELET_SOCK)
        if kubelet is not self._kubelet_seen:
            self._kubelet_seen = kubelet
            if kubelet is not None:
                events.append(KubeletReplaced())
        endpoint = self.endpoint
        watched = endpoint is not None and not endpoint.retiring and endpoint.file is not None
        if endpoint is not None and watched and self.node.files.get(endpoint.name) is not endpoint.file:
            endpoint.file = None
            events.append(SocketLost())
        if self.node.chance() < 0.5:
            events.reverse()
        for event in events:
            self.take(event)

    # --- DIAL

    def _start_dial(self) -> None:
        self._drop_dial()
        dial = self._dial = _Dial(self.node.agenda.now)
        self._attempt(dial, FRESH_AFTER)

    def _attempt(self, dial: _Dial, pause: float) -> None:
        if dial is not self._dial:
            return
        agenda = self.node.agenda
        self.dials.append(agenda.now)
        file = self.node.files.get(KUBELET_SOCK)
        if file is None or not file.listener.open or file.listener.kubelet is None:
            refused = DialFailed("refused")
            agenda.after(self.node.pause(), lambda: self.take(refused), unless=lambda: dial is not self._dial)
            return
        connection = Connection(
            file.listener.kubelet,
            greeted=lambda: self._greeted(dial, connection),
            broken=lambda: None,
        )
        dial.connections.append(connection)
        file.listener.kubelet.connect(connection)
        if agenda.now - dial.began > FRESH_FOR:
            pause = min(2 * pause, FRESH_AFTER_MAX)
        agenda.after(pause, lambda: self._attempt(dial, pause))
        agenda.after(SPEAK_WITHIN, connection.close, unless=lambda: connection not in dial.connections)

    def _greeted(self, dial: _Dial, connection: Connection) -> None:
        if dial is not self._dial:
            return
        self._look()
        if dial is not self._dial or not connection.open:
            return
        dial.connections.remove(connection)
        self._connection = connection
        self.take(Connected())

    def _drop_dial(self) -> None:
        dial, self._dial = self._dial, None
        if dial is not None:
            for connection in dial.connections:
                connection.close()

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    # --- ANNOUNCE, REPEAT

    def _announce(self) -> None:
        self.names += 1
        assert self.endpoint is None, "an endpoint is bound while another is served"
        endpoint = _Endpoint(f"nvplug-{self.names}.sock", self)
        self.endpoint = endpoint
        endpoint.file = self.node.bind(endpoint.name, endpoint.listener)
        if endpoint.file is None:
            endpoint.listener.open = False
            self.endpoint = None
            self.take(BindFailed("no space"))
        else:
            self._register()

    def _register(self) -> None:
        connection, self._connection = self._connection, None
        endpoint = self.endpoint
        assert connection is not None
        assert endpoint is not None
        self._drop_call()
        self._call = connection
        self.registers.append(self.node.agenda.now)

        def report(event: Event) -> None:
            if connection is self._call:
                self._drop_call()
                self.take(event)

        def replied(error: str | None, final: bool) -> None:
            report(Accepted() if error is None else Refused(error, final))

        connection.broken = lambda: report(Unanswered("the kubelet hung up"))
        connection.register(endpoint, replied)
        self.node.agenda.after(REGISTER_WITHIN, lambda: report(Unanswered("no reply within 15 s")))

    def _drop_call(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.close()

    # --- RETIRE

    def _retire(self) -> None:
        endpoint = self.endpoint
        assert endpoint is not None
        assert not self._retiring, "an endpoint is retired while another still is"
        self._retiring = endpoint.retiring = True
        self._drop_call()
        for stream in endpoint.streams:
            stream.end()
        self._close_when_noticed(endpoint, self.node.agenda.now + KUBELET_CLOSES_WITHIN)

    def _close_when_noticed(self, endpoint: _Endpoint, limit: float) -> None:
        agenda = self.node.agenda
        if agenda.now < limit and not all(stream.noticed for stream in endpoint.streams):
            agenda.after(0.001, lambda: self._close_when_noticed(endpoint, limit))
            return
        endpoint.listener.open = False
        agenda.after(self.node.pause(), lambda: self._unlink(endpoint))

    def _unlink(self, endpoint: _Endpoint) -> None:
        self.node.unlink(endpoint.name)
        self._retiring = False
        self.endpoint = None
        self.take(Retired())


_ACTIONS: dict[Command, Callable[[Registrar], None]] = {
    Command.DIAL: Registrar._start_dial,  # noqa: SLF001  # the class's own table
    Command.ANNOUNCE: Registrar._announce,  # noqa: SLF001
    Command.REPEAT: Registrar._register,  # noqa: SLF001
    Command.RETIRE: Registrar._retire,  # noqa: SLF001
}
