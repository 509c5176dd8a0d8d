from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

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


def steps(state: Registration, *events: tuple[float, Event]) -> tuple[Registration, list[Command]]:
    """Takes events in, each with its time; returns the last state and all commands."""
    commands: list[Command] = []
    for now, event in events:
        state, more = step(state, event, now=now)
        commands.extend(more)
    return state, commands


def registering(now: float = 0.0) -> Registration:
    """The state just after the first Register was called."""
    return steps(Registration(due=now), (now, Due()), (now, Connected()))[0]


def streaming(now: float = 0.0) -> Registration:
    """The state just after the stream came."""
    return steps(registering(now), (now, Accepted()), (now, StreamOpened()))[0]


def refusals(*, until: float, luck: float, final: bool = False) -> list[float]:
    """The pauses between Registers of which each is refused at once."""
    state, now, pauses = registering(), 0.0, list[float]()
    while now < until:
        state, _ = step(state, Refused("no", final), now=now, luck=luck)
        pauses.append(state.due - now)
        now = state.due
        state, _ = steps(state, (now, Due()), (now, Connected()))
    return pauses


def test_the_way_to_a_stream() -> None:
    """Dial, bind and Register over that connection, in this order, and nothing more until the stream ends"""
    state, commands = steps(Registration(), (0.0, Due()), (0.1, Connected()), (0.2, Accepted()), (0.3, StreamOpened()))

    assert commands == [Command.DIAL, Command.ANNOUNCE]
    assert state.phase is Phase.STREAMING
    assert state.due == math.inf


def test_a_stream_is_success_before_the_reply() -> None:
    """When the stream comes first, the reply to Register changes nothing that can be seen"""
    state, _ = steps(registering(), (0.1, StreamOpened()))
    for reply in (Accepted(), Refused("already connected"), Unanswered("no reply within 15 s")):
        after, commands = steps(state, (0.2, reply))

        assert replace(after, unanswered=state.unanswered) == state
        assert not commands


def test_an_endpoint_is_kept_while_a_register_may_be_at_work() -> None:
    """A Register without an answer, or without a stream, is repeated with the endpoint that is served"""
    for fate in (Unanswered("no reply within 15 s"), Refused("failed to dial"), Accepted()):
        state, commands = steps(registering(), (15.0, fate))
        state, more = steps(state, (state.due, Due()))
        if state.phase is Phase.HOLDING:
            state, more = steps(state, (state.due, Due()))
        _, last = steps(state, (state.due, Connected()))

        assert [*commands, *more, *last] == [Command.DIAL, Command.REPEAT]


def test_an_endpoint_ends_before_the_next_is_begun() -> None:
    """Whatever ends an endpoint, no kubelet is dialled for another until nothing is left of it"""
    for end in (StreamEnded(), SocketLost(), KubeletReplaced()):
        state, commands = steps(streaming(), (60.0, end), (60.1, Due()), (60.1, Connected()), (60.1, StreamOpened()))

        assert commands == [Command.RETIRE]
        assert steps(state, (60.2, Retired()))[1] == [Command.DIAL]


@pytest.mark.parametrize("luck", [0.0, 0.5, 0.999])
def test_pauses_between_refusals(luck: float) -> None:
    """They are 0.2 s for 10 s, then double up to 5 s; up to a quarter is taken off at random"""
    pauses = refusals(until=200.0, luck=luck)
    for pause, following in itertools.pairwise(pauses[50:]):
        assert min(5.0, 2 * pause) * 0.749 <= following <= min(5.0, 2 * pause)

    assert pauses[:50] == pytest.approx([0.2] * 50)
    assert pauses[51] > 0.2
    assert 5.0 * 0.749 <= pauses[-1] <= 5.0


def test_pauses_between_final_refusals() -> None:
    """A kubelet that rejects the name or the version is asked again every 60 s, for ever"""
    assert refusals(until=600.0, luck=0.5, final=True) == [60.0] * 10


@pytest.mark.parametrize("final", [False, True])
def test_a_new_kubelet_sock_ends_the_pause(final: bool) -> None:
    """However long refusals have lasted, a new kubelet.sock is dialled at once, and its refusals are counted anew"""
    state = registering()
    for now in range(100):
        state, _ = steps(state, (now, Refused("no", final)), (now + 0.9, Due()), (now + 0.9, Connected()))
    state, commands = steps(state, (100.0, Refused("no", final)), (100.1, KubeletReplaced()), (100.2, Retired()))
    state, _ = steps(state, (100.3, Connected()), (100.3, Refused("no")))

    assert commands == [Command.RETIRE, Command.DIAL]
    assert state.due == pytest.approx(100.5)


def test_an_absent_kubelet_is_dialled_at_every_tick() -> None:
    """While kubelet.sock is absent or refuses, it is dialled 0.1 s after each failure, for ever"""
    held, _ = steps(registering(), (0.0, Refused("no")))
    for state in (Registration(), held):
        now = state.due
        for _ in range(1000):
            dialling, commands = steps(state, (now, Due()))
            assert commands == [Command.DIAL]
            state, _ = steps(dialling, (now, DialFailed("refused")))  # noqa: PLW2901  # it goes on from there
            assert state.due == pytest.approx(now + 0.1)
            now = state.due


def test_after_a_stream() -> None:
    """The first attempt after a stream that lived 10 s is immediate; after a shorter one it comes 0.1 s later"""
    _, commands = steps(streaming(), (10.0, StreamEnded()), (10.01, Retired()))
    short, none = steps(streaming(), (9.0, StreamEnded()), (9.01, Retired()))

    assert commands == [Command.RETIRE, Command.DIAL]
    assert none == [Command.RETIRE]
    assert short.due == pytest.approx(9.1)


@pytest.mark.parametrize("lost", [StreamEnded(), SocketLost()], ids=lambda event: type(event).__name__)
def test_losses_that_follow_each_other(lost: Event) -> None:
    """Streams that hardly live come ever more seldom; one that lived a second is no part of that"""
    now, pauses = 0.0, list[float]()
    state = streaming()
    for _ in range(200):
        state, _ = steps(state, (now, lost), (now, Retired()))
        pauses.append(state.due - now)
        now = state.due
        state, _ = steps(state, (now, Due()), (now, Connected()), (now, Accepted()), (now, StreamOpened()))
    state, _ = steps(state, (now + 1.0, lost), (now + 1.0, Retired()))

    assert pauses[:100] == pytest.approx([0.1] * 100)
    assert min(pauses[-50:]) > 3.0
    assert state.due == pytest.approx(now + 1.1)


def test_a_socket_cannot_be_made() -> None:
    """Without an endpoint there is nothing to keep: all is begun anew, at the pace of refusals"""
    state, commands = steps(registering(), (0.0, BindFailed("no space")), (0.2, Due()))

    assert commands == [Command.DIAL]
    assert state.phase is Phase.DIALLING


def test_a_stranger_is_not_the_kubelet() -> None:
    """A stranger's stream is neither success before Register was accepted nor, when it ends, a loss"""
    early, _ = steps(registering(), (0.1, StreamOpened(stranger=True)))
    late, _ = steps(streaming(), (0.1, StreamOpened(stranger=True)), (60.0, StreamEnded(stranger=True)))

    assert early.phase is Phase.REGISTERING
    assert late == streaming()


def test_a_kubelet_in_several_processes() -> None:
    """When Register was accepted and nobody else came, the stream of another process counts, and so does its end"""
    state, _ = steps(registering(), (0.1, Accepted()), (0.1, StreamOpened(stranger=True)))
    _, commands = steps(state, (60.0, StreamEnded(stranger=True)))

    assert state.phase is Phase.STREAMING
    assert commands == [Command.RETIRE]


def test_a_register_whose_time_is_up_is_repeated_at_once() -> None:
    """A kubelet that answers nothing for 15 s has had its pause, however long the trouble has lasted"""
    state, now = registering(), 0.0
    for _ in range(20):
        now += 15.0
        state, _ = steps(state, (now, Unanswered("no reply within 15 s")))
        assert state.due == now
        state, _ = steps(state, (now, Due()), (now, Connected()))


@pytest.mark.parametrize("phase", [Phase.EXPECTING, Phase.HOLDING, Phase.REDIALLING], ids=lambda phase: phase.name)
def test_a_stream_is_success_whichever_register_it_comes_from(phase: Phase) -> None:
    """A stream counts wherever an endpoint is served, also after its Register was given up"""
    state, commands = steps(SAMPLES[phase], (0.3, StreamOpened()))

    assert state.phase is Phase.STREAMING
    assert not commands


GIVEN_UP = Unanswered("no reply within 15 s")
ASKED_AGAIN: tuple[tuple[float, Event], ...] = ((15.0, GIVEN_UP), (15.0, Due()), (15.1, Connected()))
ENDED: tuple[tuple[float, Event], ...] = (*ASKED_AGAIN, (15.2, Accepted()), (15.3, StreamOpened()))


@pytest.mark.parametrize(
    ("before", "once_more"),
    [
        (((0.1, SocketLost()),), True),
        (((0.1, Accepted()), (0.1, SocketLost())), False),
        (((0.1, Refused("no")), (0.1, SocketLost())), False),
        ((*ASKED_AGAIN, (15.2, SocketLost())), True),
        ((*ENDED, (16.0, SocketLost())), True),
        ((*ENDED, (16.0, StreamEnded())), True),
        ((*ENDED, (27.4, StreamEnded())), False),
        ((*ENDED, (16.0, KubeletReplaced())), False),
        (((0.1, SocketLost()), (0.1, KubeletReplaced())), False),
    ],
)
def test_a_register_left_behind(before: tuple[tuple[float, Event], ...], once_more: bool) -> None:
    """After an endpoint whose Register may still fail in a living kubelet, the next stream is renewed once, after 12 s

    Not so when every Register was answered, when a stream outlived the failure, or when the kubelet was replaced.
    """
    again: tuple[tuple[float, Event], ...] = (
        (50.0, Retired()),
        (50.1, Due()),
        (50.1, Connected()),
        (50.1, Accepted()),
        (50.2, StreamOpened()),
    )
    state, _ = steps(registering(), *before, *again)

    assert state.phase is Phase.STREAMING
    assert state.due == (pytest.approx(62.2) if once_more else math.inf)
    if once_more:
        state, commands = steps(state, (62.2, Due()), *((now + 20, event) for now, event in again))
        assert commands == [Command.RETIRE, Command.DIAL, Command.ANNOUNCE]
        assert state.due == math.inf


def test_a_new_kubelet_sock_while_retiring() -> None:
    """It is dialled as soon as nothing is left of the endpoint, whatever pause was due"""
    _, commands = steps(streaming(), (0.1, StreamEnded()), (0.11, KubeletReplaced()), (0.12, Retired()))

    assert commands == [Command.RETIRE, Command.DIAL]


SAMPLES: dict[Phase, Registration] = {
    Phase.WAITING: Registration(due=1.0),
    Phase.DIALLING: steps(Registration(), (0.0, Due()))[0],
    Phase.REGISTERING: registering(),
    Phase.EXPECTING: steps(registering(), (0.0, Accepted()))[0],
    Phase.STREAMING: streaming(),
    Phase.HOLDING: steps(registering(), (0.0, Refused("no")))[0],
    Phase.REDIALLING: steps(registering(), (0.0, Refused("no")), (0.2, Due()))[0],
    Phase.RETIRING: steps(streaming(), (0.0, StreamEnded()))[0],
}

MEANINGLESS: dict[Phase, tuple[Event, ...]] = {
    Phase.WAITING: (Connected(), DialFailed(""), SocketLost(), Retired()),
    Phase.DIALLING: (Due(), SocketLost(), Retired()),
    Phase.REGISTERING: (Due(), Connected(), DialFailed(""), Retired()),
    Phase.EXPECTING: (Connected(), DialFailed(""), BindFailed(""), Accepted(), Refused(""), Unanswered(""), Retired()),
    Phase.STREAMING: (Connected(), DialFailed(""), BindFailed(""), Unanswered(""), Retired()),
    Phase.HOLDING: (Connected(), DialFailed(""), BindFailed(""), Accepted(), Refused(""), Unanswered(""), Retired()),
    Phase.REDIALLING: (Due(), BindFailed(""), Accepted(), Refused(""), Unanswered(""), Retired()),
    Phase.RETIRING: (Due(), Connected(), DialFailed(""), SocketLost(), StreamOpened(), StreamEnded()),
}


@pytest.mark.parametrize("phase", Phase, ids=lambda phase: phase.name)
def test_meaningless_events(phase: Phase) -> None:
    """What has no meaning in a phase changes nothing: neither the state, nor what is done"""
    before = SAMPLES[phase]
    unheard = () if phase is Phase.STREAMING else (StreamEnded(), StreamEnded(stranger=True))

    assert before.phase is phase
    for event in (*MEANINGLESS[phase], *unheard):
        assert steps(before, (0.3, event)) == (before, []), event
