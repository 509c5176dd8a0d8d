from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from nvml.standin import Control, refuse_soname
from nvml.waiting import until

from _nvplug.drivers.nvml import NvmlDriver, Pace
from _nvplug.drivers.partitions import capability_minors
from _nvplug.hardware import GpuEvent, Hardware, MigDevice, Xid
from _nvplug.health import Health, judge
from _nvplug.latest import Latest

pytestmark = pytest.mark.process

PACE = Pace(settle=0.0, sweep=0.05, slice=0.05, after_event=0.02)

# UUID, GPU instance, compute instance, profile, slices of the one and the other, MiB.
PLAIN = "MIG-a 7 0 0 1 1 9728"
MEDIA = "MIG-b 8 0 7 1 1 9728"
HALF = "MIG-c 2 0 2 3 1 40192"
OTHER_HALF = "MIG-d 2 1 2 3 2 40192"

MINORS = """\
config 1
monitor 2
gpu0/gi7/access 30
gpu0/gi7/ci0/access 31
gpu0/gi2/access 40
gpu0/gi2/ci1/access 42
gpu00/gi8/access 5
gpu1/gi8/access 6
"""


class Cut:
    """A driver of two GPUs, one of them cut, and what it says."""

    def __init__(self, control: Control, tmp_path: Path) -> None:
        self.control = control
        self.proc = tmp_path / "proc"
        self.hardware = Latest(Hardware())
        self.health = Health()

    async def play(self) -> None:
        """The driver's run."""
        driver = NvmlDriver(
            str(self.control.root),
            dev="/nonexistent",
            sysfs=str(self.control.sysfs),
            proc=str(self.proc),
            library_path="",
            pace=PACE,
        )
        await driver.run(self.hardware, self._report, lambda _: None)

    def _report(self, event: GpuEvent) -> None:
        if isinstance(event, Xid):
            self.health = judge(self.health, event)

    @property
    def devices(self) -> tuple[MigDevice, ...]:
        """Of GPU 0."""
        return self.hardware.value.gpus[0].mig_devices if self.hardware.value.gpus else ()

    async def until_uuids(self, *uuids: str) -> None:
        """Waits until GPU 0 is cut into these."""
        await until(lambda: self.hardware.value.gpus and tuple(mig.uuid for mig in self.devices) == uuids)


@pytest.fixture
def cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cut]:
    """A driver of two GPUs, the first in MIG mode."""
    refuse_soname(monkeypatch)
    control = Control(tmp_path)
    for name, value in control.environment.items():
        monkeypatch.setenv(name, value)
    control.install()
    control.cut(0, PLAIN, MEDIA, HALF, OTHER_HALF)
    yield Cut(control, tmp_path)
    control.heal_all()


async def test_every_attribute_is_read(cut: Cut, nursery: trio.Nursery) -> None:
    """Mixed profiles, and two compute instances in one GPU instance, with the capabilities that /proc has."""
    minors = cut.proc / "driver" / "nvidia-caps" / "mig-minors"
    minors.parent.mkdir(parents=True)
    minors.write_text(MINORS)
    nursery.start_soon(cut.play)
    await cut.until_uuids("MIG-a", "MIG-b", "MIG-c", "MIG-d")

    assert cut.devices == (
        MigDevice(0, "MIG-a", 7, 0, 0, 1, 1, 9728, 30, 31),
        MigDevice(1, "MIG-b", 8, 0, 7, 1, 1, 9728, None, None),
        MigDevice(2, "MIG-c", 2, 0, 2, 3, 1, 40192, 40, None),
        MigDevice(3, "MIG-d", 2, 1, 2, 3, 2, 40192, 40, 42),
    )
    assert [gpu.mig_enabled for gpu in cut.hardware.value.gpus] == [True, False]
    assert cut.hardware.value.gpus[1].mig_devices == ()


async def test_the_layout_changes(cut: Cut, nursery: trio.Nursery) -> None:
    """What is cut anew is seen while nvplug runs; so is a GPU in MIG mode without any device."""
    nursery.start_soon(cut.play)
    await cut.until_uuids("MIG-a", "MIG-b", "MIG-c", "MIG-d")
    cut.control.cut(0, HALF)
    await cut.until_uuids("MIG-c")
    cut.control.cut(0)
    await cut.until_uuids()

    assert cut.hardware.value.gpus[0].mig_enabled
    assert cut.control.crimes() == {}


@pytest.mark.parametrize("function", ["nvmlDeviceGetGpuInstanceById", "nvmlDeviceGetGpuInstanceProfileInfo"])
async def test_a_profile_that_cannot_be_read(cut: Cut, nursery: trio.Nursery, function: str) -> None:
    """Without the right to read it, the plain profile of so many slices is taken."""
    cut.control.error(function, 4)
    nursery.start_soon(cut.play)
    await cut.until_uuids("MIG-a", "MIG-b", "MIG-c", "MIG-d")

    assert [mig.gpu_instance_profile for mig in cut.devices] == [0, 0, 2, 2]


@pytest.mark.parametrize(
    ("instances", "broken"),
    [((), {"MIG-a", "MIG-b", "MIG-c", "MIG-d"}), ((2,), {"MIG-c", "MIG-d"}), ((2, 1), {"MIG-d"}), ((8,), {"MIG-b"})],
)
async def test_an_event_falls_where_it_belongs(
    cut: Cut, nursery: trio.Nursery, instances: tuple[int, ...], broken: set[str]
) -> None:
    """An XID of the GPU falls on all its MIG devices, one of a GPU or compute instance on those in it."""
    nursery.start_soon(cut.play)
    await cut.until_uuids("MIG-a", "MIG-b", "MIG-c", "MIG-d")
    cut.control.xid(0, 95, *instances)
    await until(lambda: cut.health != Health())
    uuid = cut.hardware.value.gpus[0].uuid

    assert {mig.uuid for mig in cut.devices if cut.health.of(uuid, mig.gpu_instance, mig.compute_instance)} == broken


def test_capability_minors() -> None:
    """Only the lines of this GPU count, and only those of instances."""
    assert capability_minors(MINORS, 0) == {"gi7": 30, "gi7/ci0": 31, "gi2": 40, "gi2/ci1": 42}
    assert capability_minors("", 0) == capability_minors("rubbish\ngpu0/gi/access x", 0) == {}
