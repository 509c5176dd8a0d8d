from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import trio
import trio.testing

from _nvplug.config.model import XidRule
from _nvplug.happenings import (
    GpuRestored,
    GpuUnhealthy,
    Happening,
    HealthForgotten,
    HealthNotKept,
    HealthPolicyInForce,
    HealthRemembered,
    Publish,
)
from _nvplug.hardware import Checkup, Fault, Gpu, GpuEvent, Hardware, MigDevice, Restored, Xid
from _nvplug.health import Health, Memory, Policy, health_policy, watch
from _nvplug.health.policy import Damping
from _nvplug.latest import Latest

GPU = Gpu(3, "GPU-a", "", "", None, None, 0)
OLD = Checkup("GPU-a", life="boot/1/1", energy=100)


Step = GpuEvent | float | Hardware | Callable[[], bool]
"""What is reported, seconds to let pass, hardware to show, and a condition to wait for."""


class ScriptedDriver:
    """Has one GPU, and does what it was given."""

    def __init__(self, *script: Step) -> None:
        self._script = script
        self.released: list[frozenset[str]] = []

    async def run(self, hardware: Latest[Hardware], report: Callable[[GpuEvent], None], _publish: Publish) -> None:
        """Reports, and returns."""
        hardware.set(Hardware((GPU,)))
        await trio.testing.wait_all_tasks_blocked()
        for event in self._script:
            if isinstance(event, Hardware):
                hardware.set(event)
                await trio.testing.wait_all_tasks_blocked()
            elif isinstance(event, int | float):
                await trio.sleep(event)
            elif callable(event):
                with trio.fail_after(20):
                    while not event():  # noqa: ASYNC110 - a thread brings it about, and cannot tell
                        await trio.sleep(0.002)
            else:
                report(event)

    def release(self, uuids: frozenset[str]) -> None:
        """Notes what is to be let go of."""
        self.released.append(uuids)


async def told(
    *script: Step, memory: Memory | None = None, forget: bool = False, policy: Policy | None = None
) -> tuple[list[Happening], Health]:
    """What an operator reads, and the health at the end."""
    happenings: list[Happening] = []
    health = Latest(Health())
    await watch(
        ScriptedDriver(*script),
        Latest(Hardware()),
        health,
        happenings.append,
        memory=memory,
        forget=forget,
        policy=Latest(policy) if policy else None,
    )
    return happenings, health.value


def kinds(happenings: Sequence[Happening]) -> list[type[Happening]]:
    """What kinds they are of."""
    return [type(happening) for happening in happenings]


async def test_what_changes_is_told_once() -> None:
    """A GPU that breaks is told with its first reason, and once; so is its recovery, with the evidence."""
    happenings, health = await told(
        Xid("GPU-a", 79), Xid("GPU-a", 48), Xid("GPU-a", 13), Restored("GPU-a", "it was reset"), Restored("GPU-a", "")
    )

    assert kinds(happenings) == [GpuUnhealthy, GpuRestored]
    broken, restored = happenings
    assert isinstance(broken, GpuUnhealthy)
    assert (broken.uuid, broken.index, broken.reason) == ("GPU-a", 3, "XID 79")
    assert "fallen off the bus" in broken.remedy
    assert restored == GpuRestored("GPU-a", 3, "it was reset")
    assert health == Health()


async def test_a_gpu_that_is_not_listed_is_judged_all_the_same() -> None:
    """An event may come before the snapshot that has its GPU, or after the last one that had it."""
    happenings, health = await told(Fault("GPU-b", "it fell off the bus", "reboot the node"))

    assert happenings == [GpuUnhealthy("GPU-b", -1, "it fell off the bus", "reboot the node")]
    assert health.of("GPU-b") is not None


async def test_evidence_is_told(autojump_clock: trio.testing.MockClock) -> None:
    """The line about a GPU that is back says how that is known."""
    happenings, _ = await told(
        OLD, Xid("GPU-a", 119), 60, Checkup("GPU-a", life="boot/2/1"), Checkup("GPU-a", life="boot/2/1", action=0)
    )

    assert happenings[1:] == [GpuRestored("GPU-a", 3, "it was reset")]
    assert autojump_clock.current_time() < 100


async def test_what_waits_for_a_repair_is_released(autojump_clock: trio.testing.MockClock) -> None:
    """The driver is told whenever other GPUs are to be let go of; a MIG device's error is no reason to."""
    driver = ScriptedDriver(
        OLD, Xid("GPU-a", 95, 1), Xid("GPU-a", 119), Xid("GPU-a", 48), 60, Checkup("GPU-a", life="boot/2/1"), OLD
    )
    await watch(driver, Latest(Hardware()), Latest(Health()), list[Happening]().append)

    assert driver.released == [{"GPU-a"}, frozenset()]
    assert autojump_clock.current_time() < 100


async def test_mig_devices_that_were_cut_anew() -> None:
    """The verdict of a MIG device goes with it, and stays as long as it is there."""

    def cut(*instances: tuple[int, int]) -> Hardware:
        devices = tuple(MigDevice(j, f"MIG-{gi}-{ci}", gi, ci, 0, 1, 1, 0) for j, (gi, ci) in enumerate(instances))
        return Hardware((Gpu(3, "GPU-a", "", "", None, None, 0, mig_enabled=True, mig_devices=devices),))

    before, both = cut((1, 0), (1, 1), (2, 0)), [Xid("GPU-a", 95, 1, 0), Xid("GPU-a", 95, 2)]

    _, kept = await told(before, *both, cut((1, 0), (2, 0)))
    _, rest = await told(before, *both, cut((1, 1), (2, 0)))

    assert kept.of("GPU-a", 1, 0)
    assert rest.of("GPU-a", 1, 0) is None
    assert rest.of("GPU-a", 2, 0)


async def test_verdicts_survive_a_restart(tmp_path: Path) -> None:
    """What only an event told is kept, with what is needed to see a reset meanwhile; what a look finds is not."""
    memory = Memory(tmp_path / "run" / "health.json", "this boot")

    def written() -> bool:
        return memory.file.exists() and memory.file.read_text().count("key") == 2

    _, health = await told(OLD, Xid("GPU-a", 119), Xid("GPU-a", 95, 2, 1), written, memory=memory)
    happenings, again = await told(memory=memory)

    assert again == health
    assert kinds(happenings) == [HealthRemembered, GpuUnhealthy, GpuUnhealthy]
    # A reload of the driver while nvplug was not there.
    reloaded = Checkup("GPU-a", life="boot/2/1", energy=1)
    _, restored = await told(reloaded, memory=memory)
    assert restored == health, "evidence counts when it is younger than the start by the quiet period"


async def test_evidence_from_before_the_start(tmp_path: Path) -> None:
    """A GPU that was reset while nvplug was not running returns; one that was not stays out."""
    one, other = (Memory(tmp_path / name, "this boot") for name in ("one", "other"))
    for memory in (one, other):
        memory.file.write_text(kept())

    at_once = Policy(damping=Damping(quiet=0))
    said, reset = await told(Checkup("GPU-a", life="another"), memory=one, policy=at_once)
    _, same = await told(OLD, memory=other, policy=at_once)

    assert reset == Health()
    assert kinds(said) == [HealthPolicyInForce, HealthRemembered, GpuUnhealthy, GpuRestored]
    assert same.of("GPU-a") is not None


def kept(boot: str = "this boot", version: int = 1) -> str:
    """A file with one verdict."""
    complaint = {
        "key": "XID 119",
        "reason": "XID 119",
        "remedy": "reset it",
        "back": "RESET",
        "since": 1.5,
        "place": [None, None],
        "frees": True,
    }
    gpu = {"life": "boot/1/1", "uncorrectable": None, "energy": 100, "complaints": [complaint]}
    return json.dumps({"version": version, "boot": boot, "gpus": {"GPU-a": gpu}})


@pytest.mark.parametrize("content", [kept("another boot"), kept("this boot", 2)])
async def test_another_boot_begins_anew(tmp_path: Path, content: str) -> None:
    """A reboot clears what was kept; so does a format that this version does not write."""
    file = tmp_path / "health.json"
    file.write_text(content)

    assert await told(memory=Memory(file, "this boot")) == ([], Health())


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, kept().encode()[:-20]]
    + [kept().replace(old, new).encode() for old, new in [('"RESET"', '"X"'), ("1.5", "[]"), ("[null, null]", "1")]],
)
async def test_a_damaged_file(tmp_path: Path, content: bytes) -> None:
    """It is a line in the log, and the start goes on without it."""
    file = tmp_path / "health.json"
    file.write_bytes(content)
    happenings, health = await told(memory=Memory(file, "this boot"))

    assert kinds(happenings) == [HealthForgotten]
    assert health == Health()


async def test_forgetting(tmp_path: Path) -> None:
    """--forget-health: what was kept is dropped, from the file as well."""
    memory = Memory(tmp_path / "health.json", "this boot")
    memory.file.write_text(kept())
    happenings, health = await told(memory=memory, forget=True)

    assert kinds(happenings) == [HealthForgotten]
    assert health == Health()
    assert memory.load(0) == Health()


async def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    """It is a line in the log with what to do, and everything else goes on."""
    (tmp_path / "file").touch()
    memory = Memory(tmp_path / "file" / "health.json", "this boot")
    happenings: list[Happening] = []
    health = Latest(Health())

    def said() -> bool:
        return HealthNotKept in kinds(happenings)

    driver = ScriptedDriver(Xid("GPU-a", 119), said, Restored("GPU-a", ""), Xid("GPU-a", 119))
    await watch(driver, Latest(Hardware()), health, happenings.append, memory=memory)

    assert health.value.of("GPU-a") is not None


def test_the_boot_id(tmp_path: Path) -> None:
    """The memory is of this boot; where that cannot be told, nothing from before is believed."""
    assert Memory.at(str(tmp_path)).boot
    assert Memory.at(str(tmp_path), proc=str(tmp_path)).boot == ""
    (tmp_path / "health.json").write_text(kept(""))

    assert Memory.at(str(tmp_path), proc=str(tmp_path)).load(0) == Health()


async def test_the_policy_is_told_first() -> None:
    """One line at the start."""
    happenings: list[Happening] = []
    await watch(
        ScriptedDriver(),
        Latest(Hardware()),
        Latest(Health()),
        happenings.append,
        policy=Latest(health_policy("all", "")),
    )

    assert happenings == [HealthPolicyInForce("no XID takes a GPU away; checks are off")]


async def test_another_policy_is_obeyed_from_then_on() -> None:
    """It is told in one line; an error from before keeps its GPU out until there is evidence, the same now does not."""
    happenings: list[Happening] = []
    policy, health = Latest(health_policy("", "")), Latest(Health())

    def edit() -> bool:
        policy.set(health_policy("", "", [XidRule(79, "ignore"), XidRule(63, "reset")]))
        return len(happenings) > 2

    script = (Xid("GPU-a", 79), edit, Xid("GPU-b", 79), Xid("GPU-c", 63))
    await watch(ScriptedDriver(*script), Latest(Hardware()), health, happenings.append, policy=policy)

    assert kinds(happenings) == [HealthPolicyInForce, GpuUnhealthy, HealthPolicyInForce, GpuUnhealthy]
    assert health.value.unhealthy.keys() == {"GPU-a", "GPU-c"}
