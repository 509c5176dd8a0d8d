from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from _nvplug.happenings import GpuRestored, GpuUnhealthy, Happening, Publish
from _nvplug.hardware import Fault, Gpu, GpuEvent, Hardware, Restored, Xid
from _nvplug.health import APPLICATION_XIDS, Health, judge, watch
from _nvplug.latest import Latest

uuids = st.sampled_from(["GPU-0", "GPU-1", "GPU-2"])
fatal = st.builds(Xid, uuids, st.integers(0, 200).filter(lambda code: code not in APPLICATION_XIDS))
harmless = st.builds(Xid, uuids, st.sampled_from(sorted(APPLICATION_XIDS)))
faults = st.builds(Fault, uuids, st.text(min_size=1), st.text())
restored = st.builds(Restored, uuids, st.text())
events = st.one_of(fatal, harmless, faults, restored)


def after(history: Sequence[GpuEvent]) -> Health:
    """The health at the end."""
    return reduce(judge, history, Health())


@given(st.lists(events), restored)
def test_a_restored_gpu_is_healthy(history: list[GpuEvent], event: Restored) -> None:
    """Whatever was wrong with a GPU, once it was seen to work it is healthy; other GPUs stay as they are."""
    before = after(history)

    health = judge(before, event)

    assert health.of(event.uuid) is None
    assert {**before.unhealthy, event.uuid: None} == {**health.unhealthy, event.uuid: None}


@given(st.lists(events), harmless)
def test_errors_of_programs_change_nothing(history: list[GpuEvent], event: Xid) -> None:
    """An XID that is a program's fault leaves the health as it is: the same object."""
    before = after(history)

    assert judge(before, event) is before


@given(st.lists(events), st.one_of(fatal, faults))
def test_the_first_reason_stands(history: list[GpuEvent], event: Xid | Fault) -> None:
    """A fault makes a healthy GPU unhealthy; of an unhealthy one it changes nothing, as it is a consequence."""
    before = after(history)

    health = judge(before, event)

    if before.of(event.uuid) is None:
        verdict = health.of(event.uuid)
        assert verdict is not None
        assert verdict.reason == (event.reason if isinstance(event, Fault) else f"XID {event.code}")
    else:
        assert health is before


@given(st.lists(events))
def test_gpus_are_judged_apart(history: list[GpuEvent]) -> None:
    """What becomes of one GPU is decided by its own events alone."""
    health = after(history)

    for uuid in ("GPU-0", "GPU-1", "GPU-2"):
        assert health.of(uuid) == after([event for event in history if event.uuid == uuid]).of(uuid)


@given(st.lists(events), events)
def test_judging_leaves_the_past_alone(history: list[GpuEvent], event: GpuEvent) -> None:
    """A health is a value: judging the next event does not change it."""
    before = after(history)

    judge(before, event)

    assert before == after(history)


@pytest.mark.parametrize("code", sorted(APPLICATION_XIDS))
def test_the_ignored_errors_are_those_of_the_reference(code: int) -> None:
    """13, 31, 43, 45, 68 and 109, as in NVIDIA's plugin."""
    assert code in {13, 31, 43, 45, 68, 109}
    assert len(APPLICATION_XIDS) == 6


class ScriptedDriver:
    """Has one GPU, and reports what it was given."""

    def __init__(self, *script: GpuEvent) -> None:
        self._script = script

    async def run(self, hardware: Latest[Hardware], report: Callable[[GpuEvent], None], _publish: Publish) -> None:
        """Reports, and returns."""
        hardware.set(Hardware((Gpu(3, "GPU-a", "", "", None, None, 0),)))
        for event in self._script:
            report(event)


async def told(*script: GpuEvent) -> tuple[list[Happening], Health]:
    """What an operator reads, and the health at the end."""
    happenings: list[Happening] = []
    health = Latest(Health())
    await watch(ScriptedDriver(*script), Latest(Hardware()), health, happenings.append)
    return happenings, health.value


async def test_what_changes_is_told_once() -> None:
    """A GPU that breaks is told with its first reason, and once; so is its recovery, with the evidence."""
    happenings, health = await told(
        Xid("GPU-a", 79), Xid("GPU-a", 48), Xid("GPU-a", 13), Restored("GPU-a", "it was reset"), Restored("GPU-a", "")
    )

    assert [type(happening) for happening in happenings] == [GpuUnhealthy, GpuRestored]
    broken, restored = happenings
    assert isinstance(broken, GpuUnhealthy)
    assert (broken.uuid, broken.index, broken.reason) == ("GPU-a", 3, "XID 79")
    assert "XID 79" in broken.remedy
    assert restored == GpuRestored("GPU-a", 3, "it was reset")
    assert health == Health()


async def test_a_gpu_that_is_not_listed_is_judged_all_the_same() -> None:
    """An event may come before the snapshot that has its GPU, or after the last one that had it."""
    happenings, health = await told(Fault("GPU-b", "it fell off the bus", "reboot the node"))

    assert happenings == [GpuUnhealthy("GPU-b", -1, "it fell off the bus", "reboot the node")]
    assert health.of("GPU-b") is not None
