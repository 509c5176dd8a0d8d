"""Device nodes that are missing, and a stand-in for nvidia-modprobe in a root of its own."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
import trio
from needs import lacking

from _nvplug.drivers.device_nodes import DeviceNodes
from _nvplug.drivers.lanes import Ledger
from _nvplug.happenings import DeviceNodesMade, DeviceNodesMissing, Happening
from _nvplug.hardware import Gpu, MigDevice

UVM: Final = ("/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
GPU: Final = Gpu(0, "GPU-0", "", "", 5, None, 0)
CUT: Final = replace(
    GPU,
    mig_devices=(MigDevice(1, "MIG-1", 7, 0, 0, 1, 1, 4864, gpu_instance_minor=66, compute_instance_minor=67),),
)


class Host:
    """A node: its /dev as nvplug sees it, and the root of its driver."""

    def __init__(self, directory: Path) -> None:
        self.dev = directory / "dev"
        self.root = directory / "driver-root"
        for place in (self.dev, self.root / "dev" / "nvidia-caps", self.root / "usr" / "bin"):
            place.mkdir(parents=True)
        self.said: list[Happening] = []

    def nodes(self, *, within: float = 5.0, again: float = 0.0) -> DeviceNodes:
        """What looks after its nodes."""
        return DeviceNodes(self.dev, str(self.root), Ledger(self.said.append), within=within, again=again)

    def calls(self) -> list[str]:
        """How nvidia-modprobe was called."""
        log = self.root / "log"
        return log.read_text().splitlines() if log.exists() else []

    @property
    def missing(self) -> DeviceNodesMissing:
        """What was said last, which must be that something is missing."""
        last = self.said[-1]
        assert isinstance(last, DeviceNodesMissing)
        return last


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A node without nvidia-modprobe."""
    return Host(tmp_path)


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, which needs nothing of the root that it runs in."""
    made = tmp_path_factory.mktemp("modprobe") / "nvidia-modprobe"
    source = Path(__file__).with_name("modprobe.c")
    subprocess.run(["cc", "-static", "-Wall", "-Werror", "-o", made, source], check=True, timeout=60)
    return made


@pytest.fixture
def equipped(host: Host, stand_in: Path) -> Host:
    """A node with nvidia-modprobe."""
    if os.geteuid():
        lacking("changing the root of a process needs root")
    (host.root / "usr" / "bin" / "nvidia-modprobe").hardlink_to(stand_in)
    return host


async def test_what_is_there_is_not_made(host: Host) -> None:
    """In the reference's order; in our own /dev or in that of the driver's root."""
    (host.dev / "nvidia-modeset").touch()
    (host.dev / "nvidia-uvm").touch()
    (host.root / "dev" / "nvidia-uvm-tools").touch()
    (host.dev / "nvidiactl").touch()

    assert await host.nodes().look([GPU], 1) == ("/dev/nvidiactl", *UVM, "/dev/nvidia-modeset")
    assert host.said == []


async def test_without_a_gpu_nothing_is_missed(host: Host) -> None:
    """A node whose driver has no GPU needs no nodes for them."""
    assert await host.nodes().look([], 0) == ()
    assert host.said == []


async def test_what_cannot_be_made_is_named_once(host: Host) -> None:
    """With the remedy; again when something else is missing, or when it is gone a second time."""
    nodes = host.nodes()
    for _ in range(3):
        await nodes.look([GPU], 1)
    assert host.said == [
        DeviceNodesMissing(
            ",".join(UVM),
            f"there is no nvidia-modprobe in {host.root}",
            "make them at every boot, before the kubelet starts: nvidia-modprobe -u -c=0",
        )
    ]
    await nodes.look([CUT], 1)
    assert host.missing.remedy.endswith(
        "nvidia-modprobe -u -c=0; nvidia-modprobe -f /proc/driver/nvidia/capabilities/gpu5/mig/gi7/access"
        " -f /proc/driver/nvidia/capabilities/gpu5/mig/gi7/ci0/access"
    )
    for name in UVM:
        (host.root / name[1:]).touch()
    await nodes.look([GPU], 1)
    (host.root / "dev" / "nvidia-uvm").unlink()
    await nodes.look([GPU], 1)

    assert [one.nodes for one in host.said if isinstance(one, DeviceNodesMissing)][2:] == ["/dev/nvidia-uvm"]


@pytest.mark.process
async def test_what_is_missing_is_made_in_the_drivers_root(equipped: Host) -> None:
    """By the driver's own program, with nothing of our environment, before the first answer."""
    assert await equipped.nodes().look([], 1) == UVM
    assert equipped.said == [DeviceNodesMade(",".join(UVM))]
    assert equipped.calls() == ["-u -c=0 PATH=/usr/sbin:/usr/bin:/sbin:/bin "]


@pytest.mark.process
async def test_nodes_of_mig_instances_are_made(equipped: Host) -> None:
    """One command makes them all; what is there is not made anew."""
    nodes = equipped.nodes()
    await nodes.look([], 1)
    await nodes.look([CUT], 1)
    await nodes.look([CUT], 1)

    assert equipped.said[1:] == [DeviceNodesMade("/dev/nvidia-caps/nvidia-cap66,/dev/nvidia-caps/nvidia-cap67")]
    assert len(equipped.calls()) == 2


@pytest.mark.process
async def test_a_failure_is_told_in_its_own_words(equipped: Host) -> None:
    """In one line, once; it is tried again, but not at every look."""
    (equipped.root / "fail").touch()
    nodes = equipped.nodes(again=3600.0)
    for _ in range(3):
        await nodes.look([GPU], 1)

    assert len(equipped.said) == len(equipped.calls()) == 1
    assert equipped.missing.reason == (
        "/usr/bin/nvidia-modprobe -u -c=0 ended with 3: modprobe: FATAL: Module nvidia-uvm not found"
    )
    (equipped.root / "fail").unlink()
    assert await equipped.nodes().look([GPU], 1) == UVM


@pytest.mark.process
async def test_success_is_judged_by_the_nodes(equipped: Host) -> None:
    """Not by the status of the program."""
    (equipped.root / "idle").touch()
    await equipped.nodes().look([GPU], 1)

    assert equipped.missing.reason == "nvidia-modprobe ended well, and they are not there"


@pytest.mark.process
async def test_a_program_that_hangs_is_ended(equipped: Host) -> None:
    """And holds up nothing for longer than its time."""
    (equipped.root / "hang").touch()
    with trio.fail_after(10):
        await equipped.nodes(within=0.2).look([GPU], 1)

    assert "timed out" in equipped.missing.reason
