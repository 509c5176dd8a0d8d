from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kubelet_model import Node
from registrar_model import Registrar

# One of each kind, see kubelet_model.
MINORS = (24, 34, 36, 37)


# --- against a kubelet that misbehaves once


def in_service(minor: int, *, for_seconds: float, doorbell: bool = True) -> tuple[Node, Registrar]:
    """A kubelet and a plugin that has been streaming for so long."""
    node = Node(minor)
    node.start()
    node.agenda.run(0.1)
    registrar = Registrar(node, doorbell=doorbell)
    node.agenda.run(for_seconds)

    assert node.allocatable
    return node, registrar


def back_after(node: Node, since: float) -> float:
    """Seconds from then until the device was allocatable, and remained so."""
    at, allocatable = node.history[-1]

    assert allocatable
    return max(0.0, at - since)


def restart(node: Node, *, down: float, wipe: bool = True) -> None:
    """The kubelet dies, and another starts so much later."""
    node.kubelet.die()
    node.agenda.run(down)
    node.start(wipe=wipe)


Trouble = Callable[[Node], float]
"""Makes trouble; returns when it was over."""


def wiped(node: Node) -> float:
    """The kubelet restarts, and wipes its directory"""
    restart(node, down=0.7)
    node.agenda.run(0.1)
    return node.answers_since


def not_wiped(node: Node) -> float:
    """The kubelet restarts, and wipes nothing"""
    restart(node, down=0.7, wipe=False)
    node.agenda.run(0.1)
    return node.answers_since


def replaced(node: Node) -> float:
    """kubelet.sock is replaced, and nothing else happens"""
    node.kubelet.serve_again(cut=False)
    node.agenda.run(1.1)
    return node.answers_since


def replaced_and_cut(node: Node) -> float:
    """kubelet.sock is replaced, and all connections end"""
    node.kubelet.serve_again(cut=True)
    node.agenda.run(1.1)
    return node.answers_since


def touched(node: Node) -> float:
    """kubelet.sock is relabelled"""
    node.touch()
    node.changed()
    return node.agenda.now


def cut(node: Node) -> float:
    """The kubelet cuts the stream"""
    node.kubelet.cut()
    return node.agenda.now


def cut_every_two_seconds(node: Node) -> float:
    """The kubelet cuts the stream again and again"""
    for _ in range(20):
        node.kubelet.cut()
        node.agenda.run(2.0)

        assert node.allocatable
    return cut(node)


def nobody_listens(node: Node) -> float:
    """For a while nobody listens behind kubelet.sock"""
    restart(node, down=8.0)
    node.agenda.run(0.1)
    return node.answers_since


def silent(node: Node) -> float:
    """A kubelet accepts connections and is silent, for a while"""
    restart(node, down=0.1)
    node.kubelet.silent = True
    node.agenda.run(40.0)
    node.kubelet.speak()
    return node.agenda.now


def stuck(node: Node) -> float:
    """A kubelet does not return from Register, for a while"""
    restart(node, down=0.1)
    node.kubelet.stuck = True
    node.agenda.run(8.0)
    node.kubelet.speak()
    return node.agenda.now


def long_stuck(node: Node) -> float:
    """A kubelet does not return from Register, for longer than that is waited for"""
    restart(node, down=0.1)
    node.kubelet.stuck = True
    # The worst moment is just after a Register's time is up.
    node.agenda.run(45.2)
    node.kubelet.speak()
    return node.agenda.now


def frozen(node: Node) -> float:
    """A kubelet is frozen with a Register in hand, and continues"""
    restart(node, down=0.1)
    node.agenda.run(0.02)
    node.kubelet.frozen = True
    node.agenda.run(30.0)
    node.kubelet.thaw()
    return node.agenda.now


def superseded(node: Node) -> float:
    """A kubelet is frozen, and another starts and wipes nothing"""
    node.kubelet.frozen = True
    node.start(wipe=False)
    node.agenda.run(0.1)
    return node.answers_since


def restarted_after_silence(node: Node) -> float:
    """A kubelet accepts connections and is silent until it restarts"""
    restart(node, down=0.1, wipe=False)
    node.kubelet.silent = True
    node.agenda.run(42.0)
    node.start(wipe=False)
    node.agenda.run(0.1)
    return node.answers_since


def restarted_after_cuts(node: Node) -> float:
    """A kubelet cuts every stream at once until it restarts"""
    for _ in range(6000):
        node.kubelet.cut()
        node.agenda.run(0.01)
    return wiped(node)


def twenty_restarts(node: Node) -> float:
    """The kubelet restarts twenty times within some seconds"""
    for _ in range(20):
        restart(node, down=0.05)
        node.agenda.run(0.13)
    return node.answers_since


def refused(node: Node) -> float:
    """Register is refused for 6 s"""
    restart(node, down=0.1)
    node.kubelet.refusal = "not now"
    node.agenda.run(6.0)
    node.kubelet.refusal = None
    return node.agenda.now


def refused_for_good_until_restart(node: Node) -> float:
    """Register is refused for good, and then another kubelet starts"""
    restart(node, down=0.1)
    node.kubelet.refusal, node.kubelet.refuses_for_good = "invalid", True
    node.agenda.run(20.0)
    return wiped(node)


def socket_deleted(node: Node) -> float:
    """Somebody deletes our socket"""
    for name in tuple(node.files):
        if name.startswith("nvplug-"):
            node.unlink(name)
    return node.agenda.now


def directory_replaced(node: Node) -> float:
    """The whole directory is deleted, and a kubelet makes another"""
    node.remove_directory()
    node.kubelet.serve_again(cut=False)
    node.agenda.run(1.1)
    return node.answers_since


SINGLE_TROUBLES: tuple[tuple[Trouble, float], ...] = (
    (wiped, 0.25),
    (not_wiped, 0.25),
    (replaced, 0.25),
    (replaced_and_cut, 0.25),
    (touched, 0.25),
    (cut, 0.25),
    (cut_every_two_seconds, 0.25),
    (nobody_listens, 0.25),
    (silent, 0.25),
    (stuck, 0.25),
    (long_stuck, 0.25),
    (frozen, 0.25),
    (superseded, 0.25),
    (restarted_after_silence, 0.25),
    (restarted_after_cuts, 0.25),
    (twenty_restarts, 0.25),
    (refused, 0.5),
    (refused_for_good_until_restart, 0.25),
    (socket_deleted, 0.75),
    (directory_replaced, 0.75),
)


@pytest.mark.parametrize("minor", MINORS)
@pytest.mark.parametrize(
    ("trouble", "limit"),
    SINGLE_TROUBLES,
    ids=[(trouble.__doc__ or "").replace(" ", "-") for trouble, _ in SINGLE_TROUBLES],
)
def test_back_after_a_single_trouble(trouble: Trouble, limit: float, minor: int) -> None:
    """After each kind of trouble the device is allocatable again in time, stays so, and stops being so with nvplug"""
    # The trouble falls differently into the poller's ticks each time.
    for offset in (0.0, 0.03, 0.06, 0.09):
        node, registrar = in_service(minor, for_seconds=60.0 + offset)
        over = trouble(node)
        node.agenda.run(2.0)

        assert back_after(node, over) <= limit
        changes = len(node.history)
        node.agenda.run(120.0)
        assert len(node.history) == changes
        registrar.stop()
        node.agenda.run(1.0)
        assert not node.allocatable
        assert not any(name.startswith("nvplug-") for name in node.files)


@pytest.mark.parametrize("minor", MINORS)
def test_started_before_the_kubelet(minor: int) -> None:
    """A kubelet that starts long after nvplug has the device within 250 ms"""
    node = Node(minor)
    Registrar(node)
    node.agenda.run(100.0)
    node.start()
    node.agenda.run(1.0)

    assert back_after(node, node.answers_since) <= 0.25


@pytest.mark.parametrize("minor", MINORS)
@pytest.mark.parametrize("how", ["silent", "stuck", "frozen"])
@given(lasts=st.floats(0.0, 90.0, width=32), begins=st.sampled_from((0.0, 0.003, 0.006, 0.009, 0.015, 0.025)))
@settings(deadline=None, max_examples=12)
def test_back_after_a_kubelet_that_did_not_answer(how: str, minor: int, lasts: float, begins: float) -> None:
    """However long a starting kubelet did not answer, and wherever it stopped: the device is back within 250 ms"""
    node, _ = in_service(minor, for_seconds=60.0)
    restart(node, down=0.1)
    node.agenda.run(begins)
    setattr(node.kubelet, how, True)
    node.agenda.run(lasts)
    if how == "frozen":
        node.kubelet.thaw()
    else:
        node.kubelet.speak()
    # It may not have come to listening.
    over = node.agenda.now + 0.02
    node.agenda.run(5.0)

    assert back_after(node, over) <= 0.25


@pytest.mark.parametrize("minor", MINORS)
@pytest.mark.parametrize("frozen_for", [1.0, 9.0, 14.0, 16.0, 60.0])
def test_a_register_that_fails_late(frozen_for: float, minor: int) -> None:
    """When our socket vanishes while a frozen kubelet has a Register in hand, no dead plugin stays allocatable for it

    Up to 1.34 the kubelet's dial of the vanished socket fails 10 s after it continued, and makes it forget the client
    that has registered meanwhile. The device stays allocatable then, whatever becomes of the plugin.
    """
    node, registrar = in_service(minor, for_seconds=60.0)
    calls = len(registrar.registers)
    restart(node, down=0.1)
    while len(registrar.registers) == calls:
        node.agenda.run(0.001)
    node.kubelet.frozen = True
    node.agenda.run(0.5)
    socket_deleted(node)
    node.agenda.run(frozen_for)
    node.kubelet.thaw()
    node.agenda.run(30.0)

    assert node.allocatable
    registrar.stop()
    node.agenda.run(1.0)
    assert not node.allocatable


# --- against a kubelet that misbehaves in every way


@dataclass(frozen=True)
class Strike:
    """One trouble.

    Attributes:
        gap: seconds since the one before.
        kind: see strike.
        lasts: seconds, if it lasts.
    """

    gap: float
    kind: str
    lasts: float


KINDS = (
    "restart",
    "restart without a wipe",
    "another kubelet starts",
    "another kubelet starts without a wipe",
    "freeze",
    "be silent",
    "be stuck",
    "refuse",
    "refuse for good",
    "cut",
    "delete our socket",
    "delete the directory",
    "serve again",
    "serve again and cut",
    "touch",
    "stranger",
    "full disk",
)


def strike(what: Strike, node: Node, registrar: Registrar) -> None:
    """Lets one trouble loose."""
    kubelet, after = node.kubelet, node.agenda.after

    def start(*, wipe: bool) -> None:
        node.kubelet.die()
        node.start(wipe=wipe)

    match what.kind:
        case "restart" | "restart without a wipe":
            kubelet.die()
            after(what.lasts, lambda: start(wipe=what.kind == "restart"))
        case "another kubelet starts" | "another kubelet starts without a wipe":
            # The old one lives on behind its back, frozen or not.
            node.start(wipe=what.kind == "another kubelet starts")
        case "freeze":
            kubelet.frozen = True
            after(what.lasts, kubelet.thaw)
        case "be silent":
            kubelet.silent = True
            after(what.lasts, kubelet.speak)
        case "be stuck":
            kubelet.stuck = True
            after(what.lasts, kubelet.speak)
        case "refuse" | "refuse for good":
            kubelet.refusal = "no"
            kubelet.refuses_for_good = what.kind == "refuse for good"
            after(what.lasts, lambda: setattr(kubelet, "refusal", None))
        case "cut":
            kubelet.cut()
        case "delete our socket":
            socket_deleted(node)
        case "delete the directory":
            node.remove_directory()
            kubelet.die()
            after(what.lasts, lambda: start(wipe=True))
        case "serve again" | "serve again and cut":
            kubelet.serve_again(cut=what.kind == "serve again and cut")
        case "touch":
            node.touch()
        case "stranger":
            registrar.stranger(what.lasts)
        case "full disk":
            node.full = True
            after(what.lasts, lambda: setattr(node, "full", False))
        case _:
            raise AssertionError(what.kind)


DURATIONS = st.sampled_from((0.0, 0.001, 0.004, 0.011, 0.03, 0.1, 0.25, 0.6, 1.5, 4.0, 9.0, 11.0, 14.9, 15.1, 25.0))

STRIKES = st.lists(st.builds(Strike, gap=DURATIONS, kind=st.sampled_from(KINDS), lasts=DURATIONS), max_size=12)


@dataclass(frozen=True)
class World:
    """How a play begins, see Node and Registrar."""

    minor: int
    chance: list[float]
    started: bool
    doorbell: bool
    all_strangers: bool

    def begin(self) -> tuple[Node, Registrar]:
        """A kubelet, perhaps, and a plugin that has just started."""
        node = Node(self.minor, self.chance, slowness=0.02)
        if self.started:
            node.start()
        return node, Registrar(node, doorbell=self.doorbell, all_strangers=self.all_strangers)


WORLDS = st.builds(
    World,
    minor=st.sampled_from(MINORS),
    chance=st.lists(st.floats(0, 1, exclude_max=True, width=16), min_size=1, max_size=16),
    started=st.booleans(),
    doorbell=st.booleans(),
    all_strangers=st.booleans(),
)


def play(strikes: Iterable[Strike], node: Node, registrar: Registrar) -> None:
    """Lets the troubles loose, and time pass until the last of them is over."""
    over = 0.0
    for each in strikes:
        node.agenda.run(each.gap)
        over = max(over, node.agenda.now + each.lasts)
        strike(each, node, registrar)
    node.agenda.run(max(0.0, over - node.agenda.now))
    if not node.kubelet.alive:
        node.start()
    # Whatever was begun comes to its end.
    node.agenda.run(2.0)


def off(node: Node, since: float) -> list[float]:
    """How long the device was not allocatable, each time since then."""
    changes = [*node.history, (node.agenda.now, not node.history[-1][1])]
    return [
        until - max(at, since)
        for (at, allocatable), (until, _) in itertools.pairwise(changes)
        if not allocatable and until > since
    ]


@given(world=WORLDS, strikes=STRIKES)
@settings(max_examples=8 * settings().max_examples)
def test_allocatable_once_the_kubelet_behaves(world: World, strikes: list[Strike]) -> None:
    """Whatever happened, once the kubelet behaves the device becomes allocatable, stays so, and goes with nvplug

    It is allowed one gap of half a second: where a Register of an endpoint that vanished may have failed late in the
    kubelet, nvplug registers once more.
    """
    node, registrar = world.begin()
    play(strikes, node, registrar)
    node.agenda.run(61.0 if any(each.kind == "refuse for good" for each in strikes) else 12.0)
    since = node.agenda.now
    node.agenda.run(120.0)

    assert node.allocatable
    gaps = off(node, since)
    assert len(gaps) <= 1
    assert sum(gaps) < 0.5
    assert node.kubelet.endpoint is registrar.endpoint
    registrar.stop()
    node.agenda.run(1.0)
    assert not node.allocatable
    assert not any(name.startswith("nvplug-") for name in node.files)


def most_within(seconds: float, times: list[float]) -> int:
    """The largest number of times in any span so long."""
    return max((sum(start <= at < start + seconds for at in times) for start in times), default=0)


@given(world=WORLDS, strikes=STRIKES)
@settings(max_examples=3 * settings().max_examples)
def test_never_spins(world: World, strikes: list[Strike]) -> None:
    """In no second are there more than 11 dials, or Registers, and two more for each trouble and new kubelet.sock"""
    node, registrar = world.begin()
    play(strikes, node, registrar)
    extra = 2 * (len(node.replacements) + len(strikes))

    assert most_within(1.0, registrar.dials) <= 11 + extra
    assert most_within(1.0, registrar.registers) <= 11 + extra


def always_refused(node: Node) -> None:
    """Every Register is refused"""
    node.kubelet.refusal = "no"


def always_cut(node: Node) -> None:
    """Every stream is cut at once"""
    node.kubelet.cut()
    node.agenda.after(0.001, lambda: always_cut(node))


def always_deleted(node: Node) -> None:
    """Every socket of ours is deleted at once"""
    socket_deleted(node)
    node.agenda.after(0.001, lambda: always_deleted(node))


def never_there(node: Node) -> None:
    """No kubelet listens"""
    node.kubelet.die()


@pytest.mark.parametrize(
    ("trouble", "registers", "dials"),
    [(always_refused, 17, 17), (always_cut, 17, 17), (always_deleted, 17, 17), (never_there, 0, 600)],
    ids=["refused", "cut", "deleted", "absent"],
)
def test_never_spins_for_ever(trouble: Callable[[Node], None], registers: int, dials: int) -> None:
    """A kubelet that never behaves gets a Register every 4 or 5 s in the end; one that is absent, ten dials a second"""
    node, registrar = in_service(34, for_seconds=60.0)
    trouble(node)
    node.agenda.run(60.0)
    begun = len(registrar.registers), len(registrar.dials)
    node.agenda.run(60.0)

    assert len(registrar.registers) - begun[0] <= registers
    assert len(registrar.dials) - begun[1] <= dials
