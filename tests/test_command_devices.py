# ruff: noqa: ARG001 - pytest-trio takes the clock from the parameters of a test
from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from _nvplug.commands.devices import main, show, table
from _nvplug.config import Config
from _nvplug.config.model import NamingRule, Selection, Selector, SharedResource, TimeSlicing
from _nvplug.drivers.simulated import SimulatedDriver, parse_simulated
from _nvplug.errors import DriverError
from _nvplug.happenings import DriverFound, DriverTrouble
from _nvplug.hardware import Fault, Gpu, Hardware, LeftOut, MigDevice, Restored, Xid
from _nvplug.health import Health, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from _nvplug.happenings import Publish
    from _nvplug.hardware import GpuEvent
    from _nvplug.latest import Latest

GPU = Gpu(0, "GPU-0", "Tesla T4", "0000:18:00.0", 10, 1, 15360 * 2**20)
BARE = Gpu(10, "GPU-10", "NVIDIA H100 80GB HBM3", "", None, None, 0)


class ScriptedDriver:
    """Says what it is told to, then waits."""

    def __init__(self, *script: Hardware | GpuEvent | DriverFound | DriverTrouble | float) -> None:
        self._script = script
        self.ended = False

    async def run(self, hardware: Latest[Hardware], report: Callable[[GpuEvent], None], publish: Publish) -> None:
        """Plays the script."""
        try:
            for step in self._script:
                if isinstance(step, Hardware):
                    hardware.set(step)
                elif isinstance(step, DriverFound | DriverTrouble):
                    publish(step)
                elif isinstance(step, float):
                    await trio.sleep(step)
                else:
                    report(step)
            await trio.sleep_forever()
        finally:
            self.ended = True


def test_a_table_is_aligned_and_shows_what_is_unknown() -> None:
    """Columns line up, numbers to the right, and an unknown value is a dash."""
    assert table(Hardware((GPU, BARE)), Health(), Config()).splitlines() == [
        "INDEX  UUID    NAME                      MEMORY  NUMA  PCI           DEVICE-NODE    RESOURCE        HEALTH",
        "    0  GPU-0   Tesla T4               15360 MiB     1  0000:18:00.0  /dev/nvidia10  nvidia.com/gpu  Healthy",
        "   10  GPU-10  NVIDIA H100 80GB HBM3          -     -  -             -              nvidia.com/gpu  Healthy",
    ]


def test_a_table_tells_what_is_wrong_with_a_gpu() -> None:
    """The last column has the reason why a GPU is unhealthy."""
    health = Health({"GPU-0": Verdict("XID 79", "Reset"), "GPU-10": Verdict("fell off the bus", "Reset")})
    lines = table(Hardware((GPU, BARE)), health, Config()).splitlines()

    assert lines[1].endswith("Unhealthy (XID 79)")
    assert lines[2].endswith("Unhealthy (fell off the bus)")


def test_a_table_tells_what_the_configuration_makes_of_the_gpus() -> None:
    """Names and replicas stand in the row; what is left out, and what cannot be had, below with the reason."""
    config = Config(
        gpu_names=(NamingRule("*T4", "nvidia.com/t4"),),
        time_slicing=TimeSlicing((SharedResource("nvidia.com/t4", 3, ("0", "7"), "nvidia.com/t4.shared"),)),
        selection=Selection(exclude=(Selector("index", "12"),)),
    )
    lines = table(Hardware((GPU, BARE, replace(GPU, index=12, uuid="GPU-12"))), Health(), config).splitlines()

    assert "nvidia.com/t4.shared (3 replicas)" in lines[1]
    assert lines[4:] == [
        "",
        "Left out:",
        "  GPU 12: selection.exclude has index: 12",
        "  GPU 10: its name 'NVIDIA H100 80GB HBM3' matches no pattern of resources.gpus",
        "",
        "Asked for, and not to be had here:",
        "  sharing.timeSlicing.resources[0].devices: nvidia.com/t4 has no device 7",
    ]


def test_mig_devices_stand_below_their_gpu() -> None:
    """Each with its profile for a name, its own resource, and what is wrong with its GPU."""
    mig = MigDevice(0, "MIG-0", 7, 0, 0, 1, 1, 4864)
    gpu = replace(GPU, memory=40536 * 2**20, mig_enabled=True, mig_devices=(mig,))
    health = Health({"GPU-0": Verdict("XID 79", "Reset")})
    lines = table(Hardware((gpu,)), health, Config(mig_strategy="mixed")).splitlines()

    assert lines[2].split()[:5] == ["0:0", "MIG-0", "1g.5gb", "4864", "MiB"]
    assert lines[2].endswith("nvidia.com/mig-1g.5gb  Unhealthy (XID 79)")


def test_gpus_left_out_stand_below_with_their_reasons() -> None:
    """What is not offered is listed all the same, even when nothing else is."""
    left_out = (LeftOut(1, "GPU is lost"), LeftOut(3, "no UUID"))

    assert table(Hardware((GPU,), left_out=left_out), Health(), Config()).endswith(
        "\n\nLeft out:\n  GPU 1: GPU is lost\n  GPU 3: no UUID\n"
    )
    assert table(Hardware(left_out=left_out), Health(), Config()).startswith(
        "There is no GPU to offer.\n\nLeft out:\n  GPU 1"
    )


async def test_faults_reported_with_the_snapshot_are_shown() -> None:
    """An event counts if it comes with the first snapshot, and so does its end."""
    driver = ScriptedDriver(
        Hardware((GPU, BARE)), Xid("GPU-0", 79), Fault("GPU-10", "lost", "Reset"), Restored("GPU-10", "found")
    )

    lines = (await show(driver, Config())).splitlines()

    assert lines[1].endswith("Unhealthy (XID 79)")
    assert lines[2].endswith("Healthy")
    assert driver.ended


async def test_trouble_is_raised_as_the_driver_told_it(autojump_clock: trio.testing.MockClock) -> None:
    """Trouble before a snapshot ends the command at once, with its reason and remedy."""
    driver = ScriptedDriver(1.0, DriverTrouble("no library", "install the driver"))
    with pytest.raises(DriverError, match="no library") as caught:
        await show(driver, Config())

    assert caught.value.remedy == "install the driver"
    assert autojump_clock.current_time() == 1
    assert driver.ended


async def test_trouble_after_the_snapshot_is_not_in_the_way(autojump_clock: trio.testing.MockClock) -> None:
    """Once GPUs are known, they are shown."""
    driver = ScriptedDriver(Hardware((GPU,)), DriverTrouble("events", "Wait"))

    assert "GPU-0" in await show(driver, Config())


async def test_a_driver_that_never_answers_is_given_up(autojump_clock: trio.testing.MockClock) -> None:
    """After the deadline the error says how long it was."""
    driver = ScriptedDriver()
    with pytest.raises(DriverError, match="10 s"):
        await show(driver, Config())

    assert autojump_clock.current_time() == 10
    assert driver.ended


async def test_a_driver_without_gpus_has_answered() -> None:
    """No GPU is an answer, though a snapshot of nothing is no news."""
    driver = ScriptedDriver(Hardware(), DriverFound("nvml", "580.65", 0))

    assert await show(driver, Config()) == "There is no GPU to offer.\n"


def test_main_prints_the_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The table is on stdout, one line per GPU, faults included, and the exit status is 0."""
    file = tmp_path / "gpus.json"
    file.write_text('{"faults": {"7": {"xid": 79}}}')

    status = main(SimulatedDriver(parse_simulated(f"simulated:{file}")), Config())

    written = capsys.readouterr()
    lines = written.out.splitlines()
    assert status == 0
    assert [line.split()[0] for line in lines] == ["INDEX", *map(str, range(8))]
    assert [line for line in lines if "XID 79" in line] == [lines[8]]
    assert written.err == ""


def test_main_explains_trouble(capsys: pytest.CaptureFixture[str]) -> None:
    """Trouble is on stderr with its remedy, and the exit status is not 0."""
    status = main(ScriptedDriver(DriverTrouble("no library", "install the driver")), Config())

    assert status == 1
    assert capsys.readouterr() == ("", "nvplug devices: no library; install the driver\n")
