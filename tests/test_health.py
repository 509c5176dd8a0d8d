from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from _nvplug.hardware import Checkup, Fault, GpuEvent, Notice, NoticeKind, RecoveryAction, Restored, Sign, Xid
from _nvplug.health import APPLICATION_XIDS, Health, Policy, health_policy, judge
from _nvplug.health.judging import forget_instances

uuids = st.sampled_from(["GPU-0", "GPU-1", "GPU-2"])
fatal = st.builds(Xid, uuids, st.integers(0, 200).filter(lambda code: code not in APPLICATION_XIDS))
harmless = st.builds(Xid, uuids, st.sampled_from(sorted(APPLICATION_XIDS)))
faults = st.builds(Fault, uuids, st.text(min_size=1), st.text())
restored = st.builds(Restored, uuids, st.text())
signs = st.builds(
    Sign, uuids, st.sampled_from(["answer", "bus"]), st.sampled_from(["", "lost"]), ends_in_reset=st.booleans()
)
counters = st.none() | st.integers(0, 3)
checkups = st.builds(
    Checkup,
    uuids,
    st.sampled_from(["", "one", "two"]),
    st.none() | st.integers(-1, 8),
    st.none() | st.booleans(),
    st.none() | st.booleans(),
    st.none() | st.integers(62, 66),
    counters,
    counters,
    st.booleans(),
)
events = st.one_of(
    fatal, harmless, faults, restored, signs, checkups, st.builds(Notice, uuids, st.sampled_from(NoticeKind))
)

GPU = "GPU-0"
WELL = Checkup(GPU, life="boot", action=0, remap_failure=False, uncorrectable=0, energy=100)
# A driver before the recovery action could be asked.
OLD = replace(WELL, action=None)


def after(history: Sequence[GpuEvent], policy: Policy | None = None) -> Health:
    """The health at the end, with a second from event to event."""
    health = Health()
    for now, event in enumerate(history):
        health = judge(health, event, policy=policy or Policy(), now=now)
    return health


def told(history: Iterable[tuple[float, GpuEvent]], start: Health | None = None) -> Health:
    """The health after events at certain times."""
    return reduce(lambda health, step: judge(health, step[1], now=step[0]), history, start or Health())


def reason(health: Health, uuid: str = GPU) -> str:
    """Why a GPU is unhealthy; "" if it is not."""
    verdict = health.of(uuid)
    return verdict.reason if verdict else ""


@given(st.lists(events), restored)
def test_a_restored_gpu_is_healthy(history: list[GpuEvent], event: Restored) -> None:
    """Whatever was wrong with a GPU, once it is reported well it is healthy; other GPUs stay as they are."""
    before = after(history)

    health = judge(before, event)

    assert health.of(event.uuid) is None
    assert {**before.unhealthy, event.uuid: None} == {**health.unhealthy, event.uuid: None}


@given(st.lists(events), harmless)
def test_errors_of_programs_change_nothing(history: list[GpuEvent], event: Xid) -> None:
    """An XID that is a program's fault leaves the health as it is: the same object."""
    before = after(history)

    assert judge(before, event) is before


@given(st.lists(st.one_of(fatal, faults)), st.one_of(fatal, faults))
def test_the_first_reason_stands(history: list[GpuEvent], event: Xid | Fault) -> None:
    """A fault makes a healthy GPU unhealthy; of an unhealthy one it changes no verdict, as it is a consequence."""
    before = after(history)

    health = judge(before, event)

    if before.of(event.uuid) is None:
        assert reason(health, event.uuid) == (event.reason if isinstance(event, Fault) else f"XID {event.code}")
    else:
        assert health == before


@given(st.lists(events))
def test_gpus_are_judged_apart(history: list[GpuEvent]) -> None:
    """What becomes of one GPU is decided by its own events alone, and when they came."""
    health = after(history)

    for uuid in ("GPU-0", "GPU-1", "GPU-2"):
        alone = told((now, event) for now, event in enumerate(history) if event.uuid == uuid)

        assert health.of(uuid) == alone.of(uuid)


@given(st.lists(events), events)
def test_judging_leaves_the_past_alone(history: list[GpuEvent], event: GpuEvent) -> None:
    """A health is a value: judging the next event does not change it."""
    before = after(history)

    judge(before, event)

    assert before == after(history)


@given(st.lists(events))
def test_with_all_disabled_nothing_counts(history: list[GpuEvent]) -> None:
    """DP_DISABLE_HEALTHCHECKS=all: whatever the driver reports or is found, every GPU is offered."""
    found = [event for event in history if not isinstance(event, Fault)]

    assert after(found, health_policy("all", "")) == Health()


def test_a_reset_that_the_driver_asks_for_is_waited_for() -> None:
    """XID 95 with the recovery action still set: out after 150 s and after a day. Cleared: in."""
    asks = replace(WELL, action=RecoveryAction.GPU_RESET)
    broken = told([(0, WELL), (1, Xid(GPU, 95)), (2, asks), (150, asks), (86400, asks)])

    assert reason(broken) == "XID 95"
    assert broken.waiting == {GPU}
    assert told([(86405, WELL)], broken) == Health()
    assert told([(86405, WELL)], broken).waiting == frozenset()


@pytest.mark.parametrize(
    "evidence",
    [replace(OLD, life="boot after reload"), replace(OLD, energy=3)],
    ids=["driver or bus anew", "energy counter began anew"],
)
def test_without_the_field_a_reset_must_be_seen(evidence: Checkup) -> None:
    """A driver that cannot tell the recovery action: no clock brings the GPU back, a reset that was seen does."""
    broken = told([(0, OLD), (1, Xid(GPU, 119)), (50, OLD), (86400, replace(OLD, energy=200))])

    assert reason(broken) == "XID 119"
    assert told([(86405, evidence)], broken).of(GPU) is None


def test_a_gpu_that_was_lost_and_answers_was_reset() -> None:
    """A GPU that fell off the bus and is back on it has been reset, whether or not the driver can tell."""
    broken = told([(0, OLD), (1, Xid(GPU, 79)), (2, Sign(GPU, "answer", "GPU is lost", ends_in_reset=True))])

    assert reason(told([(60, OLD)], broken)) == ""


def test_a_reset_before_the_error_is_no_evidence() -> None:
    """A GPU that breaks again right after its reset, before anybody looked, stays out until the next one."""
    reset = replace(OLD, life="boot after reset")
    lost = Sign(GPU, "answer", "GPU is lost", ends_in_reset=True)
    broken = told([(0, OLD), (1, lost), (6, Xid(GPU, 74)), (6.01, reset), (60, reset), (86400, reset)])

    assert reason(broken) == "XID 74"
    assert told([(86405, OLD)], broken) == Health()


def test_evidence_may_not_be_older_than_the_error() -> None:
    """A checkup right after an XID may still say that all is well; and an XID that comes again counts anew."""
    broken = told([(0, WELL), (1, Xid(GPU, 95)), (2, WELL), (9, Xid(GPU, 95)), (15, WELL)])

    assert reason(broken) == "XID 95"
    assert told([(20, WELL)], broken).of(GPU) is None


@pytest.mark.parametrize("action", sorted(RecoveryAction)[2:])
def test_every_recovery_action_takes_the_gpu_away(action: RecoveryAction) -> None:
    """What the driver asks for is the reason, with a remedy, and is over when it asks for nothing."""
    broken = told([(0, replace(WELL, action=action))])
    verdict = broken.of(GPU)

    assert verdict is not None
    assert "asks for" in verdict.reason
    assert verdict.remedy
    assert told([(1, replace(WELL, action=RecoveryAction.UNREADABLE))], broken) == broken
    assert told([(2, WELL)], broken) == Health()


def test_xid_154_is_judged_by_the_action_it_carries() -> None:
    """It is no verdict by itself where the driver tells the action: none leaves the GPU alone, another does not."""
    asked = told([(0, WELL), (1, Xid(GPU, 154))])

    assert told([(1.1, WELL)], asked) == Health()
    assert reason(told([(1.1, replace(WELL, action=1))], asked)) == "the driver asks for a reset of the GPU"
    assert reason(told([(0, OLD), (1, Xid(GPU, 154))])) == "XID 154"


def test_an_unknown_xid_takes_the_gpu_away() -> None:
    """What the table does not have is treated as NVIDIA's plugin treats it."""
    assert reason(told([(0, Xid(GPU, 4711))])) == "XID 4711"


@pytest.mark.parametrize(
    ("bad", "good"),
    [
        (replace(WELL, remap_failure=True), WELL),
        (replace(WELL, retired_pages=64), replace(WELL, retired_pages=63)),
        (replace(WELL, mig_pending=True), WELL),
    ],
    ids=["row remapping failed", "too many retired pages", "MIG mode change"],
)
def test_what_a_checkup_finds(bad: Checkup, good: Checkup) -> None:
    """A finding takes the GPU away, unknown values leave it at that, and a good value ends it."""
    broken = told([(0, bad)])

    assert broken.of(GPU) is not None
    assert told([(1, bad)], broken) == broken
    assert told([(2, good)], broken) == Health()


def test_pending_remaps_are_no_reason() -> None:
    """A remap that waits for a reset leaves the GPU in use."""
    assert told([(0, replace(WELL, remap_pending=True, retired_pages=3))]) == Health()


def test_more_uncorrectable_errors_are_an_event() -> None:
    """An increase takes the GPU away; where rows are remapped it comes back by itself, elsewhere after a reset."""
    more = replace(OLD, uncorrectable=1)
    pages = replace(OLD, remap_failure=None)
    more_pages = replace(pages, uncorrectable=1)
    rows_broken, pages_broken = told([(0, OLD), (5, more)]), told([(0, pages), (5, more_pages)])

    assert reason(rows_broken) == reason(pages_broken) == "uncorrectable ECC errors"
    assert told([(20, more)], rows_broken) == Health()
    assert reason(told([(86400, more_pages)], pages_broken)) == "uncorrectable ECC errors"
    assert told([(86400, replace(pages, life="boot after reload"))], pages_broken) == Health()
    # At the first look there is nothing to compare with.
    assert told([(0, replace(OLD, uncorrectable=7))]) == Health()


def test_no_answer_and_the_next_good_one() -> None:
    """A GPU that did not answer is healthy at its next good answer, at once."""
    silent = told([(0, WELL), (40, Sign(GPU, "answer", "it has not answered for 30 s"))])

    assert reason(silent) == "it has not answered for 30 s"
    assert told([(41, WELL)], silent) == Health()


def test_a_flapping_gpu_is_damped_and_says_so() -> None:
    """A GPU that broke three times in ten minutes is kept out for a while after it is well, longer each time."""
    flaps: list[tuple[float, GpuEvent]] = []
    for at in (0, 20, 40):
        flaps += [(at, Sign(GPU, "answer", "it has not answered for 30 s")), (at + 10, WELL)]
    damped = told(flaps)

    assert reason(damped) == "it broke 3 times within 600 s, last by it has not answered for 30 s"
    assert told([(79, WELL)], damped) == damped
    assert told([(81, WELL)], damped) == Health()

    again = told([(60, Sign(GPU, "answer", "x")), (61, WELL), (110, WELL)], damped)

    assert reason(again).startswith("it broke 4 times")
    assert told([(122, WELL)], again) == Health()


def test_an_event_falls_where_it_belongs() -> None:
    """One of a GPU instance on all its compute instances, of a compute instance on that, of the GPU on all."""
    part = told([(0, Xid(GPU, 95, 3, 1))])
    instance = told([(0, Xid(GPU, 95, 3))])
    whole = told([(0, Xid(GPU, 95))])
    devices = [(3, 0), (3, 1), (4, 1)]

    assert [part.of(GPU, gi, ci) is not None for gi, ci in devices] == [False, True, False]
    assert [instance.of(GPU, gi, ci) is not None for gi, ci in devices] == [True, True, False]
    assert [whole.of(GPU, gi, ci) is not None for gi, ci in devices] == [True, True, True]
    # Offered as a whole, the GPU contains the part.
    assert reason(part) == "XID 95 (GPU instance 3, compute instance 1)"
    assert reason(instance) == "XID 95 (GPU instance 3)"
    assert part.of("GPU-1", 3, 1) is None
    assert part.waiting == instance.waiting == frozenset()


def test_instances_that_are_no_more_take_their_verdicts_along() -> None:
    """A MIG device that was cut anew starts healthy; the others keep theirs."""
    health = told([(0, Xid(GPU, 95, 3, 1)), (0, Xid(GPU, 95, 4, 0))])

    rest = forget_instances(health, GPU, frozenset({(3, 1)}))

    assert rest.of(GPU, 3, 1) is None
    assert rest.of(GPU, 4, 0) is not None
    assert forget_instances(rest, "GPU-9", frozenset({(3, 1)})) is rest


@pytest.mark.parametrize("kind", NoticeKind)
def test_what_is_reported_besides_xids(kind: NoticeKind) -> None:
    """Fatal poison, an unavailable GPU and the like take it away until a reset; mere news does not."""
    health = told([(0, OLD), (1, Notice(GPU, kind))])
    news = {NoticeKind.DRAM_RETIREMENT, NoticeKind.NON_FATAL_POISON}

    assert reason(health) == ("" if kind in news else kind.value)
