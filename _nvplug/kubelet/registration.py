"""How one resource becomes the kubelet's, and stays so: a table-driven state machine without I/O.

Theory of operation
===================

The kubelet never looks for a plugin. A plugin binds a socket in the kubelet's directory and calls Register on
kubelet.sock; the kubelet dials back *inside* that call (1.25 and later), asks for the options, and then calls
ListAndWatch, once. While that stream lives, the resource's devices can be allocated. When it ends, for whatever reason,
they can not, and the kubelet does nothing about it. So there is one thing to achieve, a stream, and one thing to react
to, its end. What is between them obeys these rules:

1. *A stream is success*, the reply to Register is not. It may come before that reply, and it may come from a Register
   that we had given up waiting for.

2. *Dial, then bind, then Register, over one connection.* A starting kubelet empties its directory before it listens.
   What is bound after a kubelet answered is not wiped by it; what is bound before may be.

3. *An endpoint*, that is a socket that was bound and named in a Register, *is served until it is retired*: until its
   stream ended, its file vanished, or the kubelet was replaced. A kubelet that is frozen is waited for, however long
   (the caller sees to that). Only when one that is awake leaves a Register without an answer, or its connection breaks,
   is it repeated, and with the same name. Up to 1.36 a kubelet knows clients by the resource's name: a Register that
   fails late (the kubelet's dial of a vanished socket takes 10 s to fail) deletes the client that a newer Register had
   made.

4. *Two endpoints never overlap.* Retiring ends the stream, the connections, the listener and the file, in this order,
   and only then is a kubelet dialled for the next one. Up to 1.36 the end of the older stream would otherwise
   disconnect the newer.

5. *Never give up, never spin.* Every phase has an event or a time that leads out of it.

A retired endpoint may leave a Register behind that is still unanswered, if its file vanished under it, say. Rule 3's
late failure would then befall our next stream, and unseen: the kubelet forgets the client but leaves the stream open.
So the machine remembers that, and registers once more when the next stream has lived so long that the failure must have
come. The time counts from that stream, not from the loss: a kubelet that was frozen begins its dial when it continues.

Some callers of ListAndWatch are not the kubelet: a person with grpcurl, a monitor. The caller's process is compared
with the listener of kubelet.sock, where the kernel tells both; another process is a *stranger*. A stranger's stream
counts only when the kubelet accepted the Register and nobody else came (a kubelet whose parts are several processes),
and its end means nothing while the kubelet's own stream lives.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

__all__ = [
    "Accepted",
    "BindFailed",
    "Command",
    "Connected",
    "DialFailed",
    "Due",
    "Event",
    "KubeletReplaced",
    "Phase",
    "Refused",
    "Registration",
    "Retired",
    "SocketLost",
    "StreamEnded",
    "StreamOpened",
    "Unanswered",
    "step",
]

# Seconds between dials of a kubelet.sock that is absent or refuses: the poller's tick. A kubelet between bind() and
# listen() refuses, for a moment.
DIAL_INTERVAL = 0.1

# Seconds to wait after a stream or a socket that was lost early, before the first attempt to get another.
SHORT_STREAM_DELAY = 0.1

# Seconds from a Register that was refused or left unanswered to the next. They count from its call, not from its
# failure: a kubelet that was stuck may recover in a pause that we make, and would find nobody waiting.
RETRY_DELAY = 0.2

# Seconds of trouble after which these delays double with every attempt, up to the second figure.
PATIENCE = 10.0
RETRY_DELAY_MAX = 5.0

# A kubelet that rejects our version or the resource's name does so for ever. It is asked again all the same: it may
# have been upgraded in a way that we cannot see.
REJECTED_DELAY = 60.0

# A kubelet that accepted a Register calls ListAndWatch within milliseconds [measured: 2]. It is asked again after this.
STREAM_EXPECTED_WITHIN = 5.0

# A stream that lived this long was no part of the trouble before it ...
STREAM_WORKED_AFTER = 1.0

# ... and after this long its end is the first sign of something new: it is answered at once.
STREAM_PROVEN_AFTER = 10.0

# The kubelet's dial of a vanished socket gives up after 10 s, and it began before the next stream did.
LATE_FAILURE_WITHIN = 12.0


class Phase(enum.Enum):
    """Where a resource's registration stands."""

    WAITING = "waiting to dial the kubelet; nothing is bound"
    DIALLING = "dialling the kubelet; nothing is bound"
    REGISTERING = "an endpoint is served, Register is under way"
    EXPECTING = "an endpoint is served, Register was accepted, its stream has not come yet"
    STREAMING = "the kubelet watches our devices"
    HOLDING = "an endpoint is served, Register was refused or unanswered and will be repeated"
    REDIALLING = "as HOLDING, while dialling the kubelet for the repetition"
    RETIRING = "the endpoint is being ended"


class Command(enum.Enum):
    """What is to be done. A new DIAL replaces one that is under way."""

    DIAL = "connect to kubelet.sock, and wait until its listener speaks"
    ANNOUNCE = "bind a socket under a fresh name, serve it, and Register it over the connection just made"
    REPEAT = "Register the endpoint that is served once more, over the connection just made"
    RETIRE = "end the endpoint: stream, connections, listener, file"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to this registration."""


@dataclass(frozen=True, slots=True)
class Due(Event):
    """The time in ``Registration.due`` has come."""


@dataclass(frozen=True, slots=True)
class Connected(Event):
    """DIAL succeeded: a kubelet answers."""


@dataclass(frozen=True, slots=True)
class DialFailed(Event):
    """DIAL failed: kubelet.sock is absent, or nobody listens."""

    reason: str


@dataclass(frozen=True, slots=True)
class BindFailed(Event):
    """ANNOUNCE could not make its socket. Nothing is bound, and nothing was sent."""

    reason: str


@dataclass(frozen=True, slots=True)
class Accepted(Event):
    """The kubelet replied to Register that all is well."""


@dataclass(frozen=True, slots=True)
class Refused(Event):
    """The kubelet replied to Register with an error; ``final`` if the same request can never succeed."""

    reason: str
    final: bool = False


@dataclass(frozen=True, slots=True)
class Unanswered(Event):
    """Register had no reply: its time was up, or the connection broke. It may still be at work in the kubelet."""

    reason: str


@dataclass(frozen=True, slots=True)
class StreamOpened(Event):
    """ListAndWatch was called on our endpoint."""

    stranger: bool = False


@dataclass(frozen=True, slots=True)
class StreamEnded(Event):
    """A stream that had been opened is no more, and not because we ended it."""

    stranger: bool = False


@dataclass(frozen=True, slots=True)
class KubeletReplaced(Event):
    """kubelet.sock is another file than before, or has appeared: a kubelet has (re)started to listen."""


@dataclass(frozen=True, slots=True)
class SocketLost(Event):
    """The file of our endpoint has vanished or is not ours any more: no kubelet can reach us there."""


@dataclass(frozen=True, slots=True)
class Retired(Event):
    """RETIRE is done: nothing of the endpoint is left."""


@dataclass(frozen=True, slots=True)
class Registration:
    """The whole state of the machine. Times are seconds on the caller's clock.

    Attributes:
        phase: see there.
        due: when to hand in a Due event, if nothing happens before.
        resume: while RETIRING, when to dial afterwards.
        streams: how many streams of the kubelet's are open on the endpoint.
        strangers: how many of other processes.
        opened: when the phase became STREAMING.
        tried: when Register was last called.
        unanswered: how many Registers of this endpoint have had no reply.
        haunted: whether a Register of an earlier endpoint may still fail in the kubelet and take our client along.
        troubled: since when attempts have been failing; None while all is well.
        delay: the last delay that was chosen because of it.
    """

    phase: Phase = Phase.WAITING
    due: float = 0.0
    resume: float = 0.0
    streams: int = 0
    strangers: int = 0
    opened: float = 0.0
    tried: float = 0.0
    unanswered: int = 0
    haunted: bool = False
    troubled: float | None = None
    delay: float = 0.0


Outcome = tuple[Registration, tuple[Command, ...]]


def step(state: Registration, event: Event, *, now: float, luck: float = 0.5) -> Outcome:
    """Takes one event in.

    An event that has no meaning in the present phase changes nothing: the reply to a Register whose stream came
    already, say.

    Args:
        state: the state before.
        event: what happened.
        now: the time, on any clock that does not jump.
        luck: a random number in [0, 1), so that the plugins of many nodes do not retry in step.

    Returns:
        The state after, and what is to be done, in order.
    """
    moment = _Moment(now, luck)
    transition = _TABLE[state.phase].get(type(event))
    return (state, ()) if transition is None else transition(state, event, moment)


@dataclass(frozen=True, slots=True)
class _Moment:
    now: float
    luck: float


_Transition = Callable[[Registration, Event, _Moment], Outcome]


# --- towards an endpoint


def _dial(state: Registration, _event: Event, _moment: _Moment) -> Outcome:
    return replace(state, phase=Phase.DIALLING, due=math.inf), (Command.DIAL,)


def _dial_anew(state: Registration, event: Event, moment: _Moment) -> Outcome:
    state, _ = _forget_kubelet(state, event, moment)
    return _dial(state, event, moment)


def _wait_for_kubelet(state: Registration, _event: Event, moment: _Moment) -> Outcome:
    return replace(state, phase=Phase.WAITING, due=moment.now + DIAL_INTERVAL), ()


def _announce(state: Registration, _event: Event, moment: _Moment) -> Outcome:
    return _register(state, moment), (Command.ANNOUNCE,)


def _wait_for_directory(state: Registration, _event: Event, moment: _Moment) -> Outcome:
    state = _in_trouble(state, moment, RETRY_DELAY)
    return replace(state, phase=Phase.WAITING, due=moment.now + state.delay, unanswered=0), ()


def _register(state: Registration, moment: _Moment) -> Registration:
    unanswered = state.unanswered + 1
    return replace(state, phase=Phase.REGISTERING, due=math.inf, tried=moment.now, unanswered=unanswered)


# --- from an endpoint to a stream


def _expect(state: Registration, event: Event, moment: _Moment) -> Outcome:
    state, _ = _answered(state, event, moment)
    if state.streams or state.strangers:
        return _stream(state, moment)
    return replace(state, phase=Phase.EXPECTING, due=moment.now + STREAM_EXPECTED_WITHIN), ()


def _hold(state: Registration, event: Event, moment: _Moment) -> Outcome:
    state = _in_trouble(state, moment, RETRY_DELAY)
    due = max(moment.now, state.tried + state.delay)
    if isinstance(event, Refused):
        state, _ = _answered(state, event, moment)
        due = moment.now + REJECTED_DELAY if event.final else due
    return replace(state, phase=Phase.HOLDING, due=due), ()


def _redial(state: Registration, _event: Event, _moment: _Moment) -> Outcome:
    return replace(state, phase=Phase.REDIALLING, due=math.inf), (Command.DIAL,)


def _hold_for_kubelet(state: Registration, _event: Event, moment: _Moment) -> Outcome:
    return replace(state, phase=Phase.HOLDING, due=moment.now + DIAL_INTERVAL), ()


def _repeat(state: Registration, _event: Event, moment: _Moment) -> Outcome:
    return _register(state, moment), (Command.REPEAT,)


def _answered(state: Registration, _event: Event, _moment: _Moment) -> Outcome:
    # One that had no reply in time is never answered: what became of it stays unknown.
    return replace(state, unanswered=state.unanswered - 1), ()


# --- streams


def _opened(state: Registration, event: Event, moment: _Moment) -> Outcome:
    assert isinstance(event, StreamOpened)
    if not event.stranger:
        return _stream(replace(state, streams=state.streams + 1), moment)
    state = replace(state, strangers=state.strangers + 1)
    return _stream(state, moment) if state.phase is Phase.EXPECTING else (state, ())


def _stream(state: Registration, moment: _Moment) -> Outcome:
    if state.phase is Phase.STREAMING:
        return state, ()
    due = moment.now + LATE_FAILURE_WITHIN if state.haunted else math.inf
    return replace(state, phase=Phase.STREAMING, opened=moment.now, due=due), ()


def _ended(state: Registration, event: Event, moment: _Moment) -> Outcome:
    assert isinstance(event, StreamEnded)
    if event.stranger:
        state = replace(state, strangers=max(0, state.strangers - 1))
        if state.phase is not Phase.STREAMING or state.streams or state.strangers:
            return state, ()
    elif not state.streams:
        return state, ()
    return _lost(state, event, moment)


# --- towards the next endpoint


def _kubelet_replaced(state: Registration, _event: Event, moment: _Moment) -> Outcome:
    # What the old kubelet had in hand died with it, and its refusals say nothing about the new one. A kubelet that
    # lives and makes its socket anew does so a second after its listener died, and has nothing in hand either.
    return _retire(replace(_well_again(state), unanswered=0, haunted=False), moment, resume=moment.now)


def _forget_kubelet(state: Registration, _event: Event, moment: _Moment) -> Outcome:
    return replace(_well_again(state), due=moment.now, unanswered=0, haunted=False), ()


def _forget_kubelet_meanwhile(state: Registration, _event: Event, moment: _Moment) -> Outcome:
    return replace(_well_again(state), resume=moment.now, haunted=False), ()


def _lost(state: Registration, _event: Event, moment: _Moment) -> Outcome:
    lived = _lived(state, moment)
    if lived >= STREAM_WORKED_AFTER:
        state = _well_again(state)
    if lived >= STREAM_PROVEN_AFTER:
        return _retire(state, moment, resume=moment.now)
    state = _in_trouble(state, moment, SHORT_STREAM_DELAY)
    return _retire(state, moment, resume=moment.now + state.delay)


def _exorcise(state: Registration, event: Event, moment: _Moment) -> Outcome:
    return _lost(replace(state, haunted=False), event, moment)


def _retire(state: Registration, moment: _Moment, *, resume: float) -> Outcome:
    left_behind = state.unanswered > 0 and _lived(state, moment) < LATE_FAILURE_WITHIN
    haunted = state.haunted or left_behind
    return replace(state, phase=Phase.RETIRING, due=math.inf, resume=resume, haunted=haunted), (Command.RETIRE,)


def _lived(state: Registration, moment: _Moment) -> float:
    return moment.now - state.opened if state.phase is Phase.STREAMING else 0.0


def _retired(state: Registration, event: Event, moment: _Moment) -> Outcome:
    state = replace(state, phase=Phase.WAITING, due=state.resume, streams=0, strangers=0, unanswered=0)
    return _dial(state, event, moment) if state.due <= moment.now else (state, ())


# --- pacing


def _in_trouble(state: Registration, moment: _Moment, first: float) -> Registration:
    since = moment.now if state.troubled is None else state.troubled
    if moment.now - since < PATIENCE:
        return replace(state, troubled=since, delay=first)
    delay = min(RETRY_DELAY_MAX, 2 * max(state.delay, first)) * (0.75 + moment.luck / 4)
    return replace(state, troubled=since, delay=delay)


def _well_again(state: Registration) -> Registration:
    return replace(state, troubled=None, delay=0.0)


_SERVED: Mapping[type[Event], _Transition] = {
    StreamOpened: _opened,
    StreamEnded: _ended,
    KubeletReplaced: _kubelet_replaced,
    SocketLost: _lost,
}
"""What holds wherever an endpoint is served."""

_TABLE: Mapping[Phase, Mapping[type[Event], _Transition]] = {
    Phase.WAITING: {Due: _dial, KubeletReplaced: _forget_kubelet},
    Phase.DIALLING: {Connected: _announce, DialFailed: _wait_for_kubelet, KubeletReplaced: _dial_anew},
    Phase.REGISTERING: {
        **_SERVED,
        BindFailed: _wait_for_directory,
        Accepted: _expect,
        Refused: _hold,
        Unanswered: _hold,
    },
    Phase.EXPECTING: {**_SERVED, Due: _hold},
    Phase.STREAMING: {**_SERVED, Accepted: _answered, Refused: _answered, Due: _exorcise},
    Phase.HOLDING: {**_SERVED, Due: _redial},
    Phase.REDIALLING: {**_SERVED, Connected: _repeat, DialFailed: _hold_for_kubelet},
    Phase.RETIRING: {Retired: _retired, KubeletReplaced: _forget_kubelet_meanwhile},
}
