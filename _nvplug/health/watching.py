"""The driver task: runs the driver, and keeps Health by what it reports."""

from __future__ import annotations

import time
from functools import partial
from typing import Final

import trio

from _nvplug.drivers import Driver, Releasing
from _nvplug.happenings import (
    GpuRestored,
    GpuUnhealthy,
    HealthForgotten,
    HealthNotKept,
    HealthPolicyInForce,
    HealthPolicyMalformed,
    HealthRemembered,
    Publish,
    RemapPending,
)
from _nvplug.hardware import Checkup, GpuEvent, Hardware
from _nvplug.health.chart import Place
from _nvplug.health.judging import Health, Verdict, forget_instances, judge
from _nvplug.health.policy import Policy
from _nvplug.health.remembering import Memory, as_text, lasting
from _nvplug.latest import Latest

__all__ = ["watch"]

# Seconds for a small file on tmpfs.
_FILE_DEADLINE: Final = 5.0


async def watch(
    driver: Driver,
    hardware: Latest[Hardware],
    health: Latest[Health],
    publish: Publish,
    *,
    policy: Latest[Policy] | None = None,
    memory: Memory | None = None,
    forget: bool = False,
) -> None:
    """Runs the driver, and keeps ``health`` by what it reports, until cancelled or the driver returns.

    Args:
        driver: where hardware and events come from.
        hardware: what the driver keeps up to date.
        health: what this keeps up to date.
        publish: for each change of a verdict, and what else is worth a line.
        policy: what the operator wants, now and later; the table as it is if None, and not a word about it.
        memory: where verdicts survive a restart; nowhere if None.
        forget: whether those from before the start are to be dropped.
    """
    watcher = _Watcher(driver, hardware, health, publish)
    if policy is not None:
        watcher.obey(policy.value, at_start=True)
    if memory is not None:
        await watcher.remember(memory, forget=forget)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hardware.follow, watcher.see)
        if policy is not None:
            nursery.start_soon(policy.follow, watcher.obey)
        if memory is not None:
            nursery.start_soon(watcher.keep, memory)
        await driver.run(hardware, watcher.report, publish)
        nursery.cancel_scope.cancel()


class _Watcher:
    """The one writer of Health."""

    def __init__(self, driver: Driver, hardware: Latest[Hardware], health: Latest[Health], publish: Publish) -> None:
        self._driver = driver
        self._hardware = hardware
        self._cell = health
        # The cell keeps the older of two healths with the same verdicts, and so loses charts.
        self._health = health.value
        self._publish = publish
        self._policy = Policy()
        self._lasting = Latest(lasting(self._health))
        self._waiting: frozenset[str] = frozenset()
        self._instances: dict[str, frozenset[Place]] = {}
        self._pending: frozenset[str] = frozenset()
        self._not_kept = ""

    def obey(self, policy: Policy, *, at_start: bool = False) -> None:
        """Judges by this policy from now on. What was judged before stands, until its evidence."""
        if policy == self._policy and not at_start:
            return
        self._policy = policy
        self._publish(HealthPolicyInForce(policy.summary))
        for item in policy.malformed:
            self._publish(HealthPolicyMalformed(item, "write XIDs, xids or all, separated by commas"))

    def report(self, event: GpuEvent) -> None:
        """Takes one event in."""
        if isinstance(event, Checkup):
            self._show_remap(event)
        before = self._health
        after = judge(before, event, policy=self._policy, now=trio.current_time(), wall=time.time())
        if event.uuid in before.charts and before.charts[event.uuid].complaints == after.charts[event.uuid].complaints:
            # Most checkups find what the last one found.
            self._health = after
        else:
            self._set(after)

    def see(self, hardware: Hardware) -> None:
        """Takes a snapshot in: MIG devices that are no more have no health."""
        found: dict[str, frozenset[Place]] = {
            gpu.uuid: frozenset((mig.gpu_instance, mig.compute_instance) for mig in gpu.mig_devices)
            for gpu in hardware.gpus
        }
        for uuid, before in self._instances.items():
            there = found.get(uuid, before)
            gone: set[Place] = set(before - there)
            gone |= {(gi, None) for gi, _ in before} - {(gi, None) for gi, _ in there}
            if gone:
                now, wall = trio.current_time(), time.time()
                self._set(
                    forget_instances(self._health, uuid, frozenset(gone), policy=self._policy, now=now, wall=wall)
                )
        self._instances = found

    async def remember(self, memory: Memory, *, forget: bool) -> None:
        """Takes over the verdicts that were kept."""
        file = str(memory.file)
        if forget:
            self._publish(HealthForgotten(file, "as asked for"))
            await self._write(memory)
            return
        try:
            with trio.fail_after(_FILE_DEADLINE):
                kept = await trio.to_thread.run_sync(memory.load, trio.current_time(), abandon_on_cancel=True)
        except (OSError, ValueError, trio.TooSlowError) as error:
            self._publish(HealthForgotten(file, f"it cannot be read: {str(error) or 'no answer'}"))
            return
        if kept.charts:
            self._publish(HealthRemembered(", ".join(kept.charts), file))
            self._set(kept)

    async def keep(self, memory: Memory) -> None:
        """Writes verdicts down whenever those change that only an event told."""
        while True:
            version = self._lasting.version
            await self._lasting.newer_than(version)
            await self._write(memory)

    async def _write(self, memory: Memory) -> None:
        store = partial(memory.store, as_text(self._health, memory.boot))
        try:
            with trio.fail_after(_FILE_DEADLINE):
                await trio.to_thread.run_sync(store, abandon_on_cancel=True)
            self._not_kept = ""
        except (OSError, trio.TooSlowError) as error:
            reason = str(error) or "no answer"
            if reason != self._not_kept:
                self._not_kept = reason
                remedy = f"let this process write to {memory.file.parent}; in a container, mount it from the host"
                self._publish(HealthNotKept(str(memory.file), reason, remedy))

    def _set(self, health: Health) -> None:
        before, self._health = self._health, health
        if before is health:
            return
        self._cell.set(health)
        self._tell(before, health)
        self._lasting.set(lasting(health))
        if (waiting := health.waiting) != self._waiting:
            self._waiting = waiting
            # GPUs on paper are not in anybody's way.
            if isinstance(self._driver, Releasing):
                self._driver.release(waiting)

    def _tell(self, before: Health, after: Health) -> None:
        """One line for each verdict that came, changed or went."""
        if before == after:
            return
        old, new = _verdicts(before), _verdicts(after)
        indices = {gpu.uuid: gpu.index for gpu in self._hardware.value.gpus}
        for key in old.keys() | new.keys():
            uuid = key[0]
            if key not in new:
                self._publish(GpuRestored(uuid, indices.get(uuid, -1), after.charts[uuid].evidence))
            elif old.get(key) != new[key]:
                self._publish(GpuUnhealthy(uuid, indices.get(uuid, -1), new[key].reason, new[key].remedy))

    def _show_remap(self, event: Checkup) -> None:
        if bool(event.remap_pending) == (event.uuid in self._pending):
            return
        self._pending ^= {event.uuid}
        if event.remap_pending:
            index = next((gpu.index for gpu in self._hardware.value.gpus if gpu.uuid == event.uuid), -1)
            self._publish(RemapPending(event.uuid, index, "reset the GPU when it is convenient"))


def _verdicts(health: Health) -> dict[tuple[str, int | None, int | None], Verdict]:
    return {**{(uuid, None, None): verdict for uuid, verdict in health.unhealthy.items()}, **health.parts}
