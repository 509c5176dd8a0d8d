from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pynvml
import pytest
import trio
from nvml.driven import QUICK, UNKNOWN, Driven, let_move
from nvml.standin import NOT_SUPPORTED, Control, refuse_soname
from nvml.waiting import loaded, open_files, until

from _nvplug import happenings
from _nvplug.drivers.nvml import Pace
from _nvplug.health import Health, health_policy, watch
from _nvplug.health.policy import Damping
from _nvplug.latest import Latest

pytestmark = pytest.mark.process

PACE = replace(QUICK, silence=0.5, after_event=0.02, trial_first=0.1, trial_last=0.2)


class Ward(Driven):
    """A driver that runs, and the health that is made of what it reports."""

    def __init__(self, control: Control, tmp_path: Path) -> None:
        super().__init__(control, tmp_path)
        self.health = Latest(Health())

    async def play(self, *, pace: Pace = PACE, disable: str = "", enable: str = "") -> None:
        """The driver task."""
        # Nobody waits ten seconds in a test.
        policy = replace(health_policy(disable, enable), damping=Damping(quiet=0.1, falls=100))
        await watch(self.driver(pace), self.hardware, self.health, self.said.append, policy=Latest(policy))

    def reason(self, index: int) -> str:
        """Why a GPU is unhealthy; "" if it is not."""
        uuid = f"GPU-00000000-0000-4000-8000-{index:012}"
        verdict = self.health.value.of(uuid)
        return verdict.reason if verdict else ""

    async def rounds(self, count: int = 3) -> None:
        """Waits until all GPUs that answer were looked at so often."""
        calls = self.control.calls().get("nvmlDeviceGetCount_v2", 0) + count
        await until(lambda: self.control.calls()["nvmlDeviceGetCount_v2"] > calls)


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Control]:
    """A driver of three GPUs that know the recovery action."""
    refuse_soname(monkeypatch)
    control = let_move(Control(tmp_path, gpus=3), monkeypatch)
    for index in range(3):
        control.plug(index)
        control.gpu(index, action=0, rows="0 0")
    control.install()
    yield control
    # Threads that hang come back, find their session over, and end.
    control.heal_all()


@pytest.fixture
def ward(control: Control, tmp_path: Path) -> Ward:
    """The same, and what becomes of it."""
    return Ward(control, tmp_path)


async def test_the_policy_is_printed_once(ward: Ward, nursery: trio.Nursery) -> None:
    """One line at the start says what takes a GPU away, and one what was written in vain."""
    nursery.start_soon(lambda: ward.play(disable="all,x", enable="79"))
    await until(lambda: ward.hardware.value.gpus)

    assert ward.said[:2] == [
        happenings.HealthPolicyInForce("no XID takes a GPU away but 79; checks are off"),
        happenings.HealthPolicyMalformed(
            "'x' in DP_DISABLE_HEALTHCHECKS", "write XIDs, xids or all, separated by commas"
        ),
    ]


async def test_disabled_and_enabled_xids(ward: Ward, nursery: trio.Nursery) -> None:
    """DP_DISABLE_HEALTHCHECKS=all with DP_ENABLE_HEALTHCHECKS=79: 79 counts, 48 and a failed remap do not."""
    nursery.start_soon(lambda: ward.play(disable="all", enable="79"))
    await until(lambda: ward.hardware.value.gpus)
    ward.control.gpu(0, rows="1 0")
    ward.control.xid(1, 48)
    ward.control.xid(2, 79)
    await until(lambda: ward.all_said(happenings.GpuUnhealthy))

    assert [one.index for one in ward.all_said(happenings.GpuUnhealthy)] == [2]


@pytest.mark.parametrize("action", [0, 1])
async def test_xid_154(ward: Ward, nursery: trio.Nursery, action: int) -> None:
    """It is judged by the action that the driver then has, none included."""
    nursery.start_soon(ward.play)
    await until(lambda: ward.hardware.value.gpus)
    await ward.rounds()
    ward.control.gpu(1, action=action)
    ward.control.xid(1, 154)
    await ward.rounds(5)
    if action:
        await until(lambda: ward.reason(1))

    assert ward.reason(1) == ("the driver asks for a reset of the GPU" if action else "")


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (pynvml.nvmlEventTypeFatalPoisonError, "fatal poison error"),
        (pynvml.nvmlEventTypeGpuUnavailableError, "GPU unavailable"),
        (pynvml.nvmlEventTypeDramRetirementFailure, "DRAM retirement failure"),
        (pynvml.nvmlEventTypeDoubleBitEccError, "double-bit ECC error"),
    ],
)
async def test_events_besides_xids(ward: Ward, nursery: trio.Nursery, event: int, reason: str) -> None:
    """Where a GPU supports them they are registered, heard, and judged; another GPU does without."""
    ward.control.gpu(1, events=0xFFFF, action=1)
    nursery.start_soon(lambda: ward.play(disable="", enable=""))
    await until(lambda: ward.hardware.value.gpus)
    ward.control.gpu(1, events=0xFFFF, action=0)
    await until(lambda: not ward.reason(1))
    await ward.rounds()
    ward.control.notice(1, event)
    await until(lambda: ward.reason(1))

    assert ward.reason(1) == reason
    assert not ward.all_said(happenings.GpuEventsMissing)


@pytest.mark.parametrize(
    ("bad", "good", "reason"),
    [
        ({"rows": "1 0"}, {"rows": "0 0"}, "a row of its memory could not be remapped"),
        ({"action": 2}, {"action": 0}, "the driver asks for a reboot of the node"),
        ({"ecc": 3}, {"ecc": 3}, "uncorrectable ECC errors"),
        ({"mig": "0 1"}, {"mig": "1 1"}, "a change of its MIG mode waits for a reset"),
    ],
    ids=["rows", "action", "ecc", "mig"],
)
async def test_what_a_look_finds(
    ward: Ward, nursery: trio.Nursery, bad: dict[str, str | int], good: dict[str, str | int], reason: str
) -> None:
    """What needs no event takes the GPU away, alone, and its end brings it back."""
    nursery.start_soon(ward.play)
    await until(lambda: ward.hardware.value.gpus)
    await ward.rounds()
    ward.control.gpu(1, **bad)
    await until(lambda: ward.reason(1))
    broken = [ward.reason(index) for index in range(3)]
    ward.control.gpu(1, **good)
    await until(lambda: not ward.reason(1))

    assert broken == ["", reason, ""]
    assert [one.index for one in ward.all_said(happenings.GpuUnhealthy)] == [1]
    assert [one.index for one in ward.all_said(happenings.GpuRestored)] == [1]
    assert ward.control.crimes() == {}


async def test_pages(ward: Ward, nursery: trio.Nursery) -> None:
    """A GPU that retires pages instead of remapping rows is judged by how many they are."""
    ward.control.gpu(0, rows="", pages=63)
    ward.control.gpu(1, rows="", pages=64)
    nursery.start_soon(ward.play)
    await until(lambda: ward.reason(1))

    assert ward.reason(1) == "64 pages of its memory are retired"
    assert ward.reason(0) == ""


async def test_a_pending_remap_is_shown(ward: Ward, nursery: trio.Nursery) -> None:
    """It is a line in the log, once, and no reason."""
    ward.control.gpu(1, rows="0 1")
    nursery.start_soon(ward.play)
    await until(lambda: ward.all_said(happenings.RemapPending))
    await ward.rounds()

    assert [one.index for one in ward.all_said(happenings.RemapPending)] == [1]
    assert ward.reason(1) == ""


@pytest.mark.parametrize("code", [NOT_SUPPORTED, 13, UNKNOWN])
@pytest.mark.parametrize(
    "function",
    [
        "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetRemappedRows",
        "nvmlDeviceGetRetiredPages",
        "nvmlDeviceGetTotalEccErrors",
        "nvmlDeviceGetMigMode",
    ],
)
async def test_each_check_fails_alone(ward: Ward, nursery: trio.Nursery, function: str, code: int) -> None:
    """A question that a GPU does not answer takes nothing away: neither the GPU nor the other questions."""
    ward.control.error(function, code)
    nursery.start_soon(ward.play)
    await until(lambda: ward.hardware.value.gpus)
    await ward.rounds()
    well = [ward.reason(index) for index in range(3)]
    found = {"action": 1} if function != "nvmlDeviceGetFieldValues" else {"rows": "1 0"}
    ward.control.gpu(1, **found)
    await until(lambda: ward.reason(1))

    assert well == ["", "", ""]


async def test_lost_and_found(ward: Ward, nursery: trio.Nursery) -> None:
    """A GPU that the driver calls lost is unhealthy within a moment, let go of, and back when it answers anew."""
    nursery.start_soon(ward.play)
    await until(lambda: ward.hardware.value.gpus)
    ward.control.lose(1)
    await until(lambda: ward.reason(1))
    reason = ward.reason(1)
    await until(lambda: ward.control.attached() == {0, 2})
    ward.control.heal("*", 1)
    await until(lambda: not ward.reason(1))

    assert reason == "nvmlDeviceGetHandleByIndex: GPU is lost (15)"
    assert ward.reason(0) == ward.reason(2) == ""
    assert [gpu.index for gpu in ward.hardware.value.gpus] == [0, 1, 2]
    assert ward.control.crimes() == {}


async def test_the_only_gpu(ward: Ward, nursery: trio.Nursery) -> None:
    """A node whose only GPU is let go of goes on trying it, and holds nothing meanwhile."""
    ward.control.gpus(1)
    nursery.start_soon(lambda: ward.play(pace=replace(PACE, trial_first=0.3, trial_last=0.3)))
    await until(lambda: ward.hardware.value.gpus)
    ward.control.lose(0)
    await until(lambda: ward.all_said(happenings.GpuReleased))
    inits = ward.control.calls()["nvmlInitWithFlags"]
    await ward.rounds(5)
    few = ward.control.calls()["nvmlInitWithFlags"] - inits
    ward.control.heal("*", 0)
    await until(lambda: not ward.reason(0))
    await until(lambda: ward.all_said(happenings.GpuTakenUp))

    assert few <= 3
    assert ward.control.attached() == {0}


async def test_a_gpu_is_added_while_another_is_gone(ward: Ward, nursery: trio.Nursery) -> None:
    """That one GPU is let go of keeps no other from being found."""
    nursery.start_soon(ward.play)
    await until(lambda: ward.hardware.value.gpus)
    await ward.rounds()
    ward.control.remove(1)
    await until(lambda: ward.all_said(happenings.GpuReleased))
    await ward.rounds()
    ward.control.gpus(4)
    ward.control.plug(3)
    await until(lambda: len(ward.hardware.value.gpus) == 4)
    await until(lambda: ward.control.attached() == {0, 2, 3})
    with trio.fail_after(20):
        # One that comes while it is being registered is heard by nobody.
        while not ward.reason(3):
            ward.control.xid(3, 48)
            await ward.rounds(1)

    assert ward.reason(1)
    assert ward.control.crimes() == {}


async def test_a_flood_of_harmless_errors(ward: Ward, nursery: trio.Nursery) -> None:
    """Programs that fail all the time cause no line, no verdict, and few looks."""
    nursery.start_soon(lambda: ward.play(pace=replace(PACE, sweep=60, silence=60, after_event=1)))
    await until(lambda: ward.hardware.value.gpus)
    before = ward.control.calls()["nvmlDeviceGetUUID"]
    for _ in range(200):
        ward.control.xid(1, 31)
    ward.control.xid(2, 48)
    await until(lambda: ward.all_said(happenings.GpuUnhealthy))

    assert [one.index for one in ward.all_said(happenings.GpuUnhealthy)] == [2]
    assert ward.control.calls()["nvmlDeviceGetUUID"] - before < 60


async def test_silent(ward: Ward, nursery: trio.Nursery) -> None:
    """A GPU that does not answer becomes a line, then unhealthy; the others are served, and its answer ends it."""
    nursery.start_soon(ward.play)
    await until(lambda: ward.hardware.value.gpus)
    await ward.rounds()
    threads = threading.active_count()
    ward.control.hang("*", 1)
    await until(lambda: ward.reason(1))
    ward.control.xid(2, 48)
    ward.control.gpu(2, action=0)
    await until(lambda: ward.all_said(happenings.GpuUnhealthy)[-1].index == 2)
    reasons = [ward.reason(index) for index in range(2)]
    ward.control.heal("*", 1)
    await until(lambda: not ward.reason(1))

    assert reasons == ["", "it has not answered for 0.5 s"]
    # On a busy machine others are late for a moment, too.
    assert [one.index for one in ward.all_said(happenings.GpuLate)].count(1) == 1
    assert threading.active_count() <= threads + 2


async def test_everything_silent(ward: Ward, nursery: trio.Nursery) -> None:
    """A driver that goes away takes all GPUs with it, which stay listed, and brings them back."""
    nursery.start_soon(ward.play)
    await until(lambda: ward.hardware.value.gpus)
    ward.control.error("nvmlDeviceGetCount_v2", 9)
    ward.control.error("nvmlInitWithFlags", 9)
    await until(lambda: all(ward.reason(index) for index in range(3)))
    listed = len(ward.hardware.value.gpus)
    ward.control.heal_all()
    await until(lambda: not any(ward.reason(index) for index in range(3)))

    assert listed == 3


async def test_device_node(ward: Ward, nursery: trio.Nursery) -> None:
    """A device node that was there and is no more takes its GPU away; the GPU returns with it."""
    for index in (0, 1):
        (ward.dev / f"nvidia{index}").touch()
    nursery.start_soon(ward.play)
    await until(lambda: ward.hardware.value.gpus)
    await ward.rounds()
    (ward.dev / "nvidia1").unlink()
    await until(lambda: ward.reason(1))
    reasons = [ward.reason(index) for index in range(3)]
    (ward.dev / "nvidia1").touch()
    await until(lambda: not ward.reason(1))

    assert reasons == ["", "its device node /dev/nvidia1 is gone", ""]


async def test_off_the_bus_and_back(ward: Ward, nursery: trio.Nursery) -> None:
    """A GPU that leaves the bus stays listed, unhealthy, while those after it move up; it returns by itself."""
    nursery.start_soon(ward.play)
    await until(lambda: ward.hardware.value.gpus)
    await ward.rounds()
    uuids = [gpu.uuid for gpu in ward.hardware.value.gpus]
    ward.control.remove(1)
    await until(lambda: ward.reason(1))
    await until(lambda: ward.control.attached() == {0, 2})
    await ward.rounds(10)
    gone = [ward.reason(index) for index in range(3)]
    listed = {gpu.uuid for gpu in ward.hardware.value.gpus}
    ward.control.put_back(1)
    await until(lambda: not any(ward.reason(index) for index in range(3)))
    await until(lambda: [gpu.uuid for gpu in ward.hardware.value.gpus] == uuids)

    assert gone[0] == gone[2] == ""
    assert listed == set(uuids)
    assert ward.control.crimes() == {}


async def test_another_gpu_at_its_address(ward: Ward, nursery: trio.Nursery) -> None:
    """A GPU that was replaced is listed no more, and the new one is healthy, without a restart."""
    nursery.start_soon(ward.play)
    await until(lambda: ward.hardware.value.gpus)
    await ward.rounds()
    ward.control.remove(1)
    await until(lambda: ward.reason(1))
    ward.control.gpu(1, uuid="GPU-new")
    ward.control.put_back(1)
    await until(lambda: [gpu.uuid for gpu in ward.hardware.value.gpus][1] == "GPU-new")

    assert len(ward.hardware.value.gpus) == 3
    assert ward.health.value.of("GPU-new") is None


async def test_a_gpu_that_is_plugged_in(ward: Ward, nursery: trio.Nursery) -> None:
    """The library does not see a new GPU by itself; sysfs does, and the library is initialised anew."""
    nursery.start_soon(ward.play)
    await until(lambda: ward.hardware.value.gpus)
    await ward.rounds()
    before = ward.control.calls()["nvmlInitWithFlags"]
    ward.control.plug(3)
    await until(lambda: ward.control.calls()["nvmlInitWithFlags"] > before)
    ward.control.gpus(4)
    await until(lambda: len(ward.hardware.value.gpus) == 4)


async def test_nothing_is_held_of_a_gpu_that_waits_for_a_reset(ward: Ward, nursery: trio.Nursery) -> None:
    """XID 95 with GPU_RESET: neither device file nor registration is held, the others are heard; reset, it returns."""
    nursery.start_soon(lambda: ward.play(pace=replace(PACE, trial_first=60, trial_last=60)))
    await until(lambda: ward.hardware.value.gpus)
    await ward.rounds()
    before = ward.control.attached()
    ward.control.gpu(1, action=1)
    ward.control.xid(1, 95)
    await until(lambda: ward.all_said(happenings.GpuReleased))
    held = set()
    registered = ward.control.calls()["nvmlDeviceRegisterEvents"]
    for _ in range(20):
        await ward.rounds(1)
        held |= ward.control.attached()
    ward.control.xid(2, 48)
    await until(lambda: ward.reason(2))
    assert ward.control.calls()["nvmlDeviceRegisterEvents"] > registered - 3
    # It was reset: the kernel made its entry on the bus anew.
    ward.control.gpu(1, action=0)
    ward.control.remove(1)
    await ward.rounds(3)
    ward.control.put_back(1)
    await until(lambda: not ward.reason(1))
    await until(lambda: 1 in ward.control.attached())
    await until(lambda: [one.index for one in ward.all_said(happenings.GpuTakenUp)][:1] == [1])

    assert before == {0, 1, 2}
    assert held == {0, 2}
    assert next(one.index for one in ward.all_said(happenings.GpuReleased)) == 1
    assert ward.control.crimes() == {}


async def test_a_reset_in_place_is_noticed(ward: Ward, nursery: trio.Nursery) -> None:
    """Where nothing on the bus shows the reset, the GPU is looked at now and then, and taken up when it is well."""
    nursery.start_soon(ward.play)
    await until(lambda: ward.hardware.value.gpus)
    await ward.rounds()
    ward.control.gpu(1, action=1)
    ward.control.xid(1, 95)
    await until(lambda: ward.all_said(happenings.GpuReleased))
    inits = ward.control.calls()["nvmlInitWithFlags"] + 4
    # It is tried, and let go of again.
    await until(lambda: ward.control.calls()["nvmlInitWithFlags"] > inits)
    still = ward.reason(1)
    ward.control.gpu(1, action=0)
    await until(lambda: not ward.reason(1))
    await until(lambda: ward.all_said(happenings.GpuTakenUp))

    assert still in {"the driver asks for a reset of the GPU", "XID 95"}
    assert ward.reason(0) == ward.reason(2) == ""
    assert ward.control.crimes() == {}


async def test_descriptors_do_not_pile_up(ward: Ward, nursery: trio.Nursery) -> None:
    """However often a GPU is tried in vain, files and threads stay as many as they were."""
    nursery.start_soon(ward.play)
    await until(lambda: ward.hardware.value.gpus)
    ward.control.lose(1)
    await until(lambda: ward.all_said(happenings.GpuReleased))

    async def tried(times: int) -> None:
        inits = ward.control.calls()["nvmlInitWithFlags"] + times
        await until(lambda: ward.control.calls()["nvmlInitWithFlags"] > inits)

    await tried(4)
    files, threads = open_files(), threading.active_count()
    await tried(20)

    assert open_files() <= files + 3
    assert threading.active_count() <= threads + 2
    assert ward.control.crimes() == {}


async def test_a_new_library_is_loaded(ward: Ward, nursery: trio.Nursery) -> None:
    """A driver that is upgraded under us, without any call failing, is noticed by its file."""
    nursery.start_soon(ward.play)
    await until(lambda: ward.hardware.value.gpus)
    ward.control.driver("580.1")
    old = ward.control.libraries / "libnvidia-ml.so.570.86.15"
    ward.control.install()
    old.unlink()
    await until(lambda: ward.hardware.value.driver_version == "580.1")

    assert loaded(ward.control.libraries / "libnvidia-ml.so.580.1")
    assert not any(ward.reason(index) for index in range(3))


async def test_a_gpu_that_vanishes_breaks_no_other(ward: Ward, nursery: trio.Nursery) -> None:
    """The GPUs after it move up, and the last index is none any more: that is no fault of the GPU that had it."""
    nursery.start_soon(ward.play)
    await until(lambda: ward.hardware.value.gpus)
    for _ in range(5):
        ward.control.remove(1)
        # Looked at without being counted before.
        ward.control.xid(0, 13)
        await until(lambda: ward.reason(1))
        await ward.rounds()
        ward.control.put_back(1)
        await until(lambda: not ward.reason(1))

    assert {one.index for one in ward.all_said(happenings.GpuUnhealthy)} == {1}
