from __future__ import annotations

import ast
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from nvml.driven import QUICK, UNKNOWN, Driven, let_move
from nvml.standin import NOT_SUPPORTED, Control, refuse_soname
from nvml.waiting import loaded, until

from _nvplug import happenings
from _nvplug.drivers.nvml import Pace
from _nvplug.happenings import Happening
from _nvplug.hardware import Checkup, Gpu, GpuEvent, Hardware, LeftOut, Link, PciPath, Sign, Xid

pytestmark = pytest.mark.process
# Nothing happens twice within a test.
SLOW = Pace(settle=0.0, patience=5, sweep=60)

OPTIONAL = [
    "nvmlSystemGetDriverVersion",
    "nvmlDeviceGetName",
    "nvmlDeviceGetPciInfo_v3",
    "nvmlDeviceGetMinorNumber",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetTopologyCommonAncestor",
    "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetNvLinkRemotePciInfo_v2",
    "nvmlEventSetCreate",
    "nvmlDeviceGetSupportedEventTypes",
    "nvmlDeviceRegisterEvents",
    "nvmlEventSetWait_v2",
    "nvmlEventSetFree",
]


class Stage(Driven):
    """A driver that runs, and what it reports."""

    def __init__(self, control: Control, tmp_path: Path) -> None:
        super().__init__(control, tmp_path)
        for name in ("nvidia-uvm", "nvidia-uvm-tools"):
            (self.dev / name).touch()
        # Those that are news, and how the GPUs were all along.
        self.events: list[GpuEvent] = []
        self.checkups: list[Checkup] = []

    async def play(self, *, pace: Pace = QUICK, library_path: str = "") -> None:
        """The driver's run, with this stage's ends of it."""
        await self.driver(pace, library_path).run(self.hardware, self._report, self._say)

    def _say(self, happening: Happening) -> None:
        # On a busy machine every GPU is late now and then, as rounds follow each other so fast here.
        if not isinstance(happening, happenings.GpuLate):
            self.said.append(happening)

    def _report(self, event: GpuEvent) -> None:
        if isinstance(event, Checkup):
            self.checkups.append(event)
        elif not isinstance(event, Sign):
            self.events.append(event)

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """Those listed."""
        return self.hardware.value.gpus

    @property
    def indices(self) -> list[int]:
        """Of those listed."""
        return [gpu.index for gpu in self.gpus]


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows whenever a search for the library was in vain."""
    return refuse_soname(monkeypatch)


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, searches: list[str]) -> Iterator[Control]:
    """A driver of two GPUs, not yet installed."""
    assert not searches
    control = let_move(Control(tmp_path), monkeypatch)
    yield control
    # Threads that hang come back, find their session over, and end.
    control.heal_all()


@pytest.fixture
def stage(control: Control, tmp_path: Path) -> Stage:
    """The same, installed."""
    control.install()
    return Stage(control, tmp_path)


async def test_everything_read(stage: Stage, nursery: trio.Nursery) -> None:
    """A GPU that answers every question is described in full."""
    stage.control.gpu(1, pci="00010000:1B:00.0", name="Some GPU", memory=7, minor=9)
    stage.control.numa(0, "1\n")
    for name in ("nvidia-modeset", "nvidiactl", "nvidia0"):
        (stage.dev / name).touch()
    nursery.start_soon(stage.play)
    await until(lambda: stage.gpus)

    assert stage.hardware.value == Hardware(
        gpus=(
            Gpu(
                0,
                "GPU-00000000-0000-4000-8000-000000000000",
                "NVIDIA H100 80GB HBM3",
                "0000:10:00.0",
                0,
                1,
                80 << 30,
            ),
            Gpu(1, "GPU-00000000-0000-4000-8000-000000000001", "Some GPU", "10000:1b:00.0", 9, None, 7),
        ),
        links=((Link(), Link(PciPath.SYSTEM)), (Link(PciPath.SYSTEM), Link())),
        control_nodes=("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"),
        driver_version="570.86.15",
    )
    assert stage.said == [happenings.DriverFound("nvml", "570.86.15", 2)]


@pytest.mark.parametrize("text", ["-1\n", "", "rubbish"])
async def test_no_numa_node(stage: Stage, nursery: trio.Nursery, text: str) -> None:
    """What sysfs has as a NUMA node is None where it is no number of a node, -1 included."""
    stage.control.numa(0, text)
    nursery.start_soon(stage.play)
    await until(lambda: stage.gpus)

    assert [gpu.numa for gpu in stage.gpus] == [None, None]


async def test_library_path(control: Control, tmp_path: Path, nursery: trio.Nursery) -> None:
    """LD_LIBRARY_PATH leads to the library where the root does not."""
    soname = control.install()
    stage = Stage(control, tmp_path)
    elsewhere = tmp_path / "elsewhere"
    soname.parent.rename(elsewhere)
    nursery.start_soon(lambda: stage.play(library_path=str(elsewhere)))
    await until(lambda: stage.indices == [0, 1])


@pytest.mark.parametrize("code", [NOT_SUPPORTED, UNKNOWN])
@pytest.mark.parametrize("function", OPTIONAL)
async def test_optional_functions(stage: Stage, nursery: trio.Nursery, function: str, code: int) -> None:
    """Whatever optional function fails, and however, the GPUs are listed; the rest of them is read."""
    stage.control.links(0, "0000:11:00.0")
    stage.control.links(1, "0000:10:00.0")
    stage.control.error(function, code)
    nursery.start_soon(stage.play)
    await until(lambda: stage.gpus)
    gpu = stage.gpus[0]
    link = stage.hardware.value.links[0][1]
    unknown = {
        "nvmlSystemGetDriverVersion": stage.hardware.value.driver_version == "",
        "nvmlDeviceGetName": gpu.name == "",
        "nvmlDeviceGetPciInfo_v3": gpu.pci == "",
        "nvmlDeviceGetMinorNumber": gpu.minor is None,
        "nvmlDeviceGetMemoryInfo": gpu.memory == 0,
        "nvmlDeviceGetTopologyCommonAncestor": link.path is PciPath.UNKNOWN,
        "nvmlDeviceGetNvLinkState": link.nvlinks == 0,
        "nvmlDeviceGetNvLinkRemotePciInfo_v2": link.nvlinks == 0,
    }
    lost = {name for name, is_unknown in unknown.items() if is_unknown}

    assert stage.indices == [0, 1]
    assert lost - {"nvmlDeviceGetNvLinkState", "nvmlDeviceGetNvLinkRemotePciInfo_v2"} == {function} & {
        *list(unknown)[:6]
    }
    # Without an address no NVLink is known to lead here either.
    assert (link.nvlinks == 0) == (function in {"nvmlDeviceGetPciInfo_v3", *list(unknown)[6:]})
    assert stage.hardware.value.left_out == ()
    assert stage.all_said(happenings.DriverTrouble) == []


async def test_all_optional_functions_fail(stage: Stage, nursery: trio.Nursery) -> None:
    """Two GPUs of which only the UUIDs can be read are two GPUs."""
    for function in OPTIONAL:
        stage.control.error(function, UNKNOWN)
    nursery.start_soon(stage.play)
    await until(lambda: stage.gpus)

    assert stage.gpus == tuple(Gpu(i, f"GPU-00000000-0000-4000-8000-{i:012}", "", "", None, None, 0) for i in (0, 1))
    assert stage.hardware.value.links[0][1] == Link()


async def test_old_library(control: Control, tmp_path: Path, nursery: trio.Nursery) -> None:
    """A library that lacks every optional function, and nvmlInitWithFlags, is served."""
    control.install(without={*OPTIONAL, "nvmlInitWithFlags"})
    stage = Stage(control, tmp_path)
    nursery.start_soon(stage.play)
    await until(lambda: stage.gpus)

    assert stage.indices == [0, 1]
    assert control.calls()["nvmlInit_v2"] == 1


@pytest.mark.parametrize(
    ("function", "name"),
    [("nvmlInitWithFlags", "nvmlInit"), ("nvmlDeviceGetCount_v2", "nvmlDeviceGetCount")],
)
async def test_required_of_the_library(stage: Stage, nursery: trio.Nursery, function: str, name: str) -> None:
    """While the library cannot be used nothing is listed and the reason is said once; then all is well."""
    stage.control.error(function, 9)
    nursery.start_soon(stage.play)
    await until(lambda: stage.control.calls().get(function, 0) > 3)
    before = list(stage.said)
    listed = stage.hardware.version
    stage.control.heal(function)
    await until(lambda: stage.gpus)

    assert listed == 0
    assert before == [
        happenings.DriverTrouble(f"{name}: Driver Not Loaded (9)", "load the driver's kernel module: modprobe nvidia")
    ]
    assert stage.said[1:] == [happenings.DriverFound("nvml", "570.86.15", 2)]
    assert stage.control.crimes() == {}


@pytest.mark.parametrize(
    ("function", "name"),
    [
        ("nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByIndex"),
        ("nvmlDeviceGetUUID", "nvmlDeviceGetUUID"),
    ],
)
async def test_required_of_a_gpu(stage: Stage, nursery: trio.Nursery, function: str, name: str) -> None:
    """A GPU without which the node could do is left out, with the reason, once; and taken in when it is read."""
    stage.control.gpus(3)
    stage.control.error(function, 15, 1)
    nursery.start_soon(stage.play)
    await until(lambda: stage.gpus)
    first = stage.hardware.value
    rounds = stage.control.calls()[function] + 10
    await until(lambda: stage.control.calls()[function] > rounds)
    before = list(stage.said)
    stage.control.heal(function, 1)
    await until(lambda: len(stage.gpus) == 3)

    assert [gpu.index for gpu in first.gpus] == [0, 2]
    assert first.left_out == (LeftOut(1, f"{name}: GPU is lost (15)"),)
    assert before == [
        happenings.GpuLeftOut(1, f"{name}: GPU is lost (15)"),
        happenings.DriverFound("nvml", "570.86.15", 2),
    ]
    assert stage.hardware.value.left_out == ()


async def test_same_uuid(stage: Stage, nursery: trio.Nursery) -> None:
    """Of two GPUs with one UUID, one is offered: to the kubelet they would be one device."""
    stage.control.gpu(1, uuid="GPU-00000000-0000-4000-8000-000000000000")
    nursery.start_soon(stage.play)
    await until(lambda: stage.gpus)

    assert stage.indices == [0]
    assert stage.hardware.value.left_out == (LeftOut(1, "it has the UUID of GPU 0"),)


async def test_unreadable_uuid(stage: Stage, nursery: trio.Nursery) -> None:
    """A UUID that is empty is none."""
    stage.control.gpu(1, uuid="")
    nursery.start_soon(stage.play)
    await until(lambda: stage.gpus)

    assert stage.hardware.value.left_out == (LeftOut(1, "nvmlDeviceGetUUID: the UUID is empty"),)


async def test_nvlinks(stage: Stage, nursery: trio.Nursery) -> None:
    """NVLinks between GPUs are counted, from whichever end can be read; those that end elsewhere are a switch's."""
    stage.control.gpus(5)
    stage.control.links(0, *["00000000:11:00.0"] * 4)
    stage.control.links(1, *["00000000:10:00.0"] * 3)
    stage.control.links(2, *["00000000:C0:00.0"] * 18)
    stage.control.links(3, *["00000000:C1:00.0"] * 12)
    stage.control.path(0, 1, PciPath.ONE_SWITCH)
    stage.control.path(2, 4, 77)
    nursery.start_soon(stage.play)
    await until(lambda: stage.gpus)
    links = stage.hardware.value.links

    assert links[0][1] == links[1][0] == Link(PciPath.ONE_SWITCH, 4)
    assert links[2][3] == links[3][2] == Link(PciPath.SYSTEM, 12, switched=True)
    assert links[0][2] == Link(PciPath.SYSTEM)
    assert links[2][4] == Link(PciPath.UNKNOWN)


async def test_nvlink_to_a_gpu_left_out(stage: Stage, nursery: trio.Nursery) -> None:
    """NVLinks to a GPU that could not be read are not taken for a switch that others share."""
    stage.control.gpus(3)
    stage.control.links(0, "00000000:12:00.0")
    stage.control.links(1, "00000000:12:00.0")
    stage.control.error("nvmlDeviceGetUUID", UNKNOWN, 2)
    stage.control.numa(2, "0")
    (stage.control.sysfs / "bus/pci/devices/0000:12:00.0/class").write_text("0x030200\n")
    nursery.start_soon(stage.play)
    await until(lambda: stage.gpus)

    assert stage.hardware.value.links[0][1] == Link(PciPath.SYSTEM)


@pytest.mark.parametrize(
    "function",
    [
        "nvmlDeviceGetHandleByIndex_v2",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetName",
        "nvmlDeviceGetNvLinkState",
        "nvmlDeviceRegisterEvents",
        "nvmlDeviceGetTopologyCommonAncestor",
    ],
)
async def test_one_gpu_hangs(stage: Stage, function: str) -> None:
    """While the driver does not answer for one GPU, the others are listed and heard, and leaving is prompt."""
    stage.control.gpus(3)
    stage.control.hang(function, 1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stage.play)
        await until(lambda: stage.gpus)
        late = function != "nvmlDeviceGetTopologyCommonAncestor"

        assert stage.indices == ([0, 2] if late else [0, 1, 2])
        assert [lost.index for lost in stage.hardware.value.left_out] == ([1] if late else [])

        stage.control.xid(2, 79)
        await until(lambda: stage.events)
        # In many rounds it was never asked again.
        rounds = stage.control.calls()["nvmlDeviceGetCount_v2"] + 10
        await until(lambda: stage.control.calls()["nvmlDeviceGetCount_v2"] > rounds)

        assert stage.control.crimes() == {}

        left = trio.current_time()
        nursery.cancel_scope.cancel()

    assert trio.current_time() - left < 1


async def test_late_answer(stage: Stage, nursery: trio.Nursery) -> None:
    """The answer of a GPU that was late is used when it comes; the thread was not asked for twice."""
    stage.control.hang("nvmlDeviceGetUUID", 1)
    nursery.start_soon(lambda: stage.play(pace=Pace(settle=0.0, patience=0.2, sweep=60)))
    await until(lambda: stage.gpus)
    first = stage.indices
    stage.control.heal("nvmlDeviceGetUUID", 1)
    await until(lambda: len(stage.gpus) == 2)

    assert first == [0]
    assert stage.control.calls()["nvmlDeviceGetUUID"] == 2


async def test_known_gpu_stays(stage: Stage, nursery: trio.Nursery) -> None:
    """A GPU that was listed and can no longer be read, or no longer answers, is not dropped for that."""
    nursery.start_soon(stage.play)
    await until(lambda: stage.gpus)
    stage.control.error("nvmlDeviceGetUUID", 15, 0)
    stage.control.hang("nvmlDeviceGetUUID", 1)
    rounds = stage.control.calls()["nvmlDeviceGetCount_v2"] + 10
    await until(lambda: stage.control.calls()["nvmlDeviceGetCount_v2"] > rounds)

    assert stage.hardware.version == 1
    assert stage.indices == [0, 1]


@pytest.mark.parametrize("function", ["nvmlInitWithFlags", "nvmlDeviceGetCount_v2"])
async def test_library_hangs(stage: Stage, function: str) -> None:
    """A library that does not answer at all is called trouble, used when it does, and left promptly if not."""
    stage.control.hang(function)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stage.play)
        await until(lambda: stage.said)
        left = trio.current_time()
        nursery.cancel_scope.cancel()

    assert trio.current_time() - left < 1
    assert "has not returned within 0.2 s" in str(stage.said[0])
    assert stage.control.calls()[function] == 1


async def test_slow_attach(stage: Stage, nursery: trio.Nursery) -> None:
    """An initialisation that was called trouble is used when it succeeds after all."""
    stage.control.hang("nvmlInitWithFlags")
    nursery.start_soon(stage.play)
    await until(lambda: stage.said)
    stage.control.heal("nvmlInitWithFlags")
    await until(lambda: stage.gpus)

    assert [type(one).__name__ for one in stage.said] == ["DriverTrouble", "DriverFound"]


async def test_xid(stage: Stage, nursery: trio.Nursery) -> None:
    """An XID of a GPU that was just listed is reported well within 100 ms, with its instances."""
    nursery.start_soon(lambda: stage.play(pace=SLOW))
    await until(lambda: stage.gpus)
    uuids = [gpu.uuid for gpu in stage.gpus]
    begun = trio.current_time()
    stage.control.xid(1, 79)
    await until(lambda: stage.events)
    took = trio.current_time() - begun
    stage.control.xid(0, 94, 3)
    stage.control.xid(0, 95, 3, 1)
    await until(lambda: len(stage.events) == 3)

    assert stage.events == [Xid(uuids[1], 79), Xid(uuids[0], 94, 3), Xid(uuids[0], 95, 3, 1)]
    # The bound of the issue, ten times over for a busy machine.
    assert took < 1
    assert stage.said == [happenings.DriverFound("nvml", "570.86.15", 2)]


async def test_gpu_without_events(stage: Stage, nursery: trio.Nursery) -> None:
    """A GPU too old for events is listed without a word, and the other is heard."""
    stage.control.gpu(0, events=0)
    nursery.start_soon(stage.play)
    await until(lambda: stage.gpus)
    stage.control.xid(1, 79)
    await until(lambda: stage.events)

    assert stage.said == [happenings.DriverFound("nvml", "570.86.15", 2)]


async def test_gpu_that_cannot_be_registered(stage: Stage, nursery: trio.Nursery) -> None:
    """A GPU whose events cannot be registered is named, once, and heard when they can."""
    stage.control.error("nvmlDeviceRegisterEvents", UNKNOWN, 0)
    nursery.start_soon(stage.play)
    await until(lambda: stage.control.calls().get("nvmlDeviceRegisterEvents", 0) > 5)
    missing = stage.all_said(happenings.GpuEventsMissing)
    stage.control.heal("nvmlDeviceRegisterEvents", 0)
    calls = stage.control.calls()["nvmlDeviceRegisterEvents"]
    await until(lambda: stage.control.calls()["nvmlDeviceRegisterEvents"] > calls)
    # The wait that is on may have begun before: the next one is for this GPU, too.
    with trio.fail_after(10):
        while not stage.events:
            stage.control.xid(0, 79)
            await trio.sleep(0.05)

    assert missing == [
        happenings.GpuEventsMissing(stage.gpus[0].uuid, 0, "nvmlDeviceRegisterEvents: Unknown Error (999)")
    ]


async def test_event_of_nobody(stage: Stage, nursery: trio.Nursery) -> None:
    """An XID that names no GPU is published, and reported of none."""
    nursery.start_soon(stage.play)
    await until(lambda: stage.gpus)
    stage.control.xid("?", 79)
    stage.control.xid("?", 79)
    stage.control.xid(0, 48)
    await until(lambda: stage.events)

    assert stage.events == [Xid(stage.gpus[0].uuid, 48)]
    assert stage.all_said(happenings.XidUnplaced) == [
        happenings.XidUnplaced(79, "nvmlDeviceGetUUID: Invalid Argument (2)")
    ]


@pytest.mark.parametrize("function", ["nvmlEventSetWait_v2", "nvmlEventSetCreate"])
async def test_events_lost_and_regained(stage: Stage, nursery: trio.Nursery, function: str) -> None:
    """When events fail the calls become few, one line tells, the GPUs stay; and it ends by itself."""
    stage.control.error(function, UNKNOWN)
    nursery.start_soon(
        lambda: stage.play(pace=Pace(settle=0.0, patience=0.5, sweep=60, events_first=0.01, events_last=0.64))
    )
    await until(lambda: stage.gpus)
    await until(lambda: stage.all_said(happenings.EventsLost))
    begun, before = time.monotonic(), stage.control.calls()[function]
    await until(lambda: stage.control.calls()[function] >= before + 8)
    seconds = time.monotonic() - begun
    lost = list(stage.said)
    stage.control.heal(function)
    await until(lambda: stage.all_said(happenings.EventsRegained))
    stage.control.xid(1, 79)
    await until(lambda: stage.events)

    # 0.01 + 0.02 + ... + 0.64; a call or two may have come before the first look.
    assert seconds > 0.9
    assert len([one for one in lost if isinstance(one, happenings.EventsLost)]) == 1
    assert not stage.all_said(happenings.DriverTrouble)
    assert len(stage.all_said(happenings.EventsRegained)) == 1
    assert stage.indices == [0, 1]
    assert stage.control.crimes() == {}


@pytest.mark.parametrize("function", ["nvmlEventSetCreate", "nvmlEventSetWait_v2"])
async def test_events_hang(stage: Stage, nursery: trio.Nursery, function: str) -> None:
    """A library that hangs over events is served all the same; what it reports afterwards is heard."""
    stage.control.hang(function)
    nursery.start_soon(stage.play)
    await until(lambda: stage.indices == [0, 1])
    stage.control.heal(function)
    with trio.fail_after(20):
        while not stage.events:
            stage.control.xid(0, 79)
            await trio.sleep(0.05)


@pytest.mark.parametrize("function", ["nvmlEventSetFree", "nvmlShutdown"])
async def test_giving_up_hangs(stage: Stage, nursery: trio.Nursery, function: str) -> None:
    """A thread that hangs while it gives something up holds up neither GPUs nor events for long."""
    nursery.start_soon(stage.play)
    await until(lambda: stage.gpus)
    stage.control.hang(function)
    stage.control.error("nvmlEventSetWait_v2" if function == "nvmlEventSetFree" else "nvmlDeviceGetCount_v2", UNKNOWN)
    await until(lambda: function in stage.control.calls())
    stage.control.heal("nvmlEventSetWait_v2")
    stage.control.heal("nvmlDeviceGetCount_v2")
    stage.control.gpus(3)
    await until(lambda: stage.indices == [0, 1, 2])
    with trio.fail_after(20):
        while not stage.events:
            stage.control.xid(0, 79)
            await trio.sleep(0.05)


async def test_events_regained_in_another_session(stage: Stage, nursery: trio.Nursery) -> None:
    """Events that were lost in one session and are heard in the next are said to be back."""
    stage.control.error("nvmlEventSetWait_v2", UNKNOWN)
    nursery.start_soon(stage.play)
    await until(lambda: stage.gpus and stage.all_said(happenings.EventsLost))
    stage.control.error("nvmlDeviceGetCount_v2", UNKNOWN)
    await until(lambda: stage.all_said(happenings.DriverTrouble))
    stage.control.heal_all()
    await until(lambda: stage.all_said(happenings.EventsRegained))

    assert len(stage.all_said(happenings.EventsLost)) == 1


async def test_event_set_is_kept_while_a_thread_is_inside(stage: Stage, nursery: trio.Nursery) -> None:
    """No event set is freed under a thread that hangs, and events recover nevertheless."""
    nursery.start_soon(lambda: stage.play(pace=Pace(settle=0.0, patience=0.1, sweep=0.05, events_last=0.1)))
    await until(lambda: stage.gpus)
    stage.control.hang("nvmlDeviceGetUUID", 0)
    calls = stage.control.calls()["nvmlDeviceGetUUID"] + 3
    await until(lambda: stage.control.calls()["nvmlDeviceGetUUID"] > calls)
    stage.control.error("nvmlEventSetWait_v2", UNKNOWN)
    await until(lambda: stage.all_said(happenings.EventsLost))
    tries = stage.control.calls()["nvmlEventSetWait_v2"] + 3
    await until(lambda: stage.control.calls()["nvmlEventSetWait_v2"] > tries)
    stage.control.heal("nvmlEventSetWait_v2")
    await until(lambda: stage.all_said(happenings.EventsRegained))
    stage.control.xid(1, 79)
    await until(lambda: stage.events)

    assert stage.control.calls()["nvmlEventSetCreate"] == 1
    assert "nvmlEventSetFree" not in stage.control.calls()
    assert stage.control.crimes() == {}


async def test_library_appears_later(
    control: Control, searches: list[str], tmp_path: Path, nursery: trio.Nursery
) -> None:
    """A driver that is installed later is found; until then one line says every path tried, and nothing is listed."""
    stage = Stage(control, tmp_path)
    nursery.start_soon(stage.play)
    await until(lambda: len(searches) > 3)
    before, listed = list(stage.said), stage.hardware.version
    control.install()
    await until(lambda: stage.gpus)

    assert listed == 0
    assert len(before) == 1
    assert str(control.root) in str(before[0])
    assert [type(one).__name__ for one in stage.said] == ["DriverTrouble", "DriverFound"]


async def test_gpus_appear_and_go(stage: Stage, nursery: trio.Nursery) -> None:
    """GPUs that appear after the start, from none or from some, are found; those no longer counted stay listed."""
    stage.control.gpus(0)
    nursery.start_soon(stage.play)
    await until(lambda: stage.control.calls().get("nvmlInitWithFlags", 0) > 2)
    empty = stage.hardware.value
    stage.control.gpus(4)
    await until(lambda: stage.indices == [0, 1, 2, 3])
    stage.control.gpus(6)
    await until(lambda: stage.indices == [0, 1, 2, 3, 4, 5])
    stage.control.gpus(3)
    calls = stage.control.calls()["nvmlDeviceGetCount_v2"] + 5
    await until(lambda: stage.control.calls()["nvmlDeviceGetCount_v2"] > calls)
    stage.control.xid(2, 79)
    await until(lambda: stage.events)

    assert stage.indices == [0, 1, 2, 3, 4, 5]
    assert empty == Hardware(control_nodes=empty.control_nodes, driver_version="570.86.15")
    assert stage.control.calls()["nvmlShutdown"] > 1
    assert [one.gpus for one in stage.all_said(happenings.DriverFound)] == [0, 4, 6]
    assert stage.hardware.value.links[2][0] == Link(PciPath.SYSTEM)
    assert stage.control.crimes() == {}


async def test_gpu_replaced(stage: Stage, nursery: trio.Nursery) -> None:
    """Another GPU in the place of one is read anew, and said."""
    nursery.start_soon(stage.play)
    await until(lambda: stage.gpus)
    stage.control.gpu(1, uuid="GPU-new", name="Other")
    await until(lambda: stage.gpus[1].uuid == "GPU-new")

    assert stage.gpus[1].name == "Other"
    assert len(stage.all_said(happenings.DriverFound)) == 2


async def test_control_nodes_appear(stage: Stage, nursery: trio.Nursery) -> None:
    """A device node that is made later is seen without a GPU having changed."""
    nursery.start_soon(stage.play)
    await until(lambda: stage.gpus)
    (stage.dev / "nvidia-modeset").touch()
    await until(lambda: stage.hardware.value.control_nodes[2:] == ("/dev/nvidia-modeset",))


async def test_session_lost(stage: Stage, nursery: trio.Nursery) -> None:
    """A library that stops counting is initialised anew; the GPUs stay listed all the while."""
    nursery.start_soon(stage.play)
    await until(lambda: stage.gpus)
    stage.control.error("nvmlDeviceGetCount_v2", 1)
    await until(lambda: stage.all_said(happenings.DriverTrouble))
    await until(lambda: stage.control.calls()["nvmlInitWithFlags"] > 2)
    listed = stage.hardware.version
    stage.control.heal("nvmlDeviceGetCount_v2")
    await until(lambda: isinstance(stage.said[-1], happenings.DriverFound))
    stage.control.xid(1, 79)
    await until(lambda: stage.events)

    assert listed == stage.hardware.version == 1
    assert stage.control.crimes() == {}


async def test_driver_upgraded(stage: Stage, nursery: trio.Nursery) -> None:
    """After the session was lost to an upgrade, the new library is loaded, not the old one again."""
    nursery.start_soon(stage.play)
    await until(lambda: stage.gpus)
    stage.control.error("nvmlDeviceGetCount_v2", 18)
    await until(lambda: stage.all_said(happenings.DriverTrouble))
    stage.control.driver("580.1")
    stage.control.install()
    stage.control.heal("nvmlDeviceGetCount_v2")
    await until(lambda: stage.hardware.value.driver_version == "580.1")

    assert loaded(stage.control.libraries / "libnvidia-ml.so.580.1")


async def test_threads_do_not_pile_up(stage: Stage, nursery: trio.Nursery) -> None:
    """However long a GPU hangs, and events fail meanwhile, the number of threads stays what it was."""
    nursery.start_soon(
        lambda: stage.play(pace=Pace(settle=0.0, patience=0.02, sweep=0.01, events_first=0.01, events_last=0.01))
    )
    await until(lambda: stage.gpus)
    stage.control.hang("nvmlDeviceGetUUID", 0)
    stage.control.error("nvmlEventSetWait_v2", UNKNOWN)
    rounds = stage.control.calls()["nvmlDeviceGetCount_v2"] + 20
    await until(lambda: stage.control.calls()["nvmlDeviceGetCount_v2"] > rounds)
    before = threading.active_count()
    rounds += 100
    await until(lambda: stage.control.calls()["nvmlDeviceGetCount_v2"] > rounds)

    assert threading.active_count() <= before + 1


LEAVING = """
import sys, time, trio
from pathlib import Path
from _nvplug.drivers.nvml import NvmlDriver
from _nvplug.hardware import Hardware
from _nvplug.latest import Latest

async def main():
    hardware = Latest(Hardware())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(NvmlDriver(sys.argv[1]).run, hardware, lambda _: None, lambda _: None)
        await hardware.newer_than(0)
        nursery.cancel_scope.cancel()
        print([gpu.index for gpu in hardware.value.gpus])
    print(time.monotonic())
trio.run(main)
"""


async def test_process_ends_while_threads_hang(stage: Stage) -> None:
    """A process whose threads are stuck in the library, one of them for ever, ends at once all the same."""
    stage.control.hang("nvmlDeviceGetUUID", 1)
    with trio.fail_after(60):
        done = await trio.run_process(
            [sys.executable, "-c", LEAVING, str(stage.control.root)],
            capture_stdout=True,
            env={**stage.control.environment, "PYTHONPATH": str(Path(__file__).parents[1])},
        )
    ended = time.monotonic()
    listed, left = (ast.literal_eval(line) for line in done.stdout.decode().splitlines()[-2:])

    assert listed == [0]
    assert ended - left < 1


def test_simulated_runs_do_not_pay() -> None:
    """Nothing that the program always imports brings pynvml."""
    code = "import sys, _nvplug.drivers, _nvplug.hardware, _nvplug.happenings; assert 'pynvml' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])
