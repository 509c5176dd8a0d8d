"""What is wrong with a GPU, and when it is well again: a fold over what a driver reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from _nvplug.drivers import Driver
from _nvplug.happenings import GpuRestored, GpuUnhealthy, Publish
from _nvplug.hardware import Fault, GpuEvent, Hardware, Restored, Xid
from _nvplug.latest import Latest

__all__ = ["APPLICATION_XIDS", "Health", "Verdict", "judge", "watch"]

# Errors of the program that used the GPU, after which the GPU serves the next one: NVIDIA's catalogue, "Analyzing Xid
# Errors". 13 graphics engine exception, 31 page fault, 43 reset of a channel after a fault of its program, 45
# preemptive cleanup after other errors, 68 video processor exception, 109 context switch timeout: the list that
# NVIDIA's plugin ignores as well.
APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a GPU is unhealthy, and what a person can do about it."""

    reason: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Health:
    """The unhealthy GPUs of a node, by UUID."""

    unhealthy: Mapping[str, Verdict] = field(default_factory=lambda: MappingProxyType({}))

    def of(self, uuid: str) -> Verdict | None:
        """What is wrong with a GPU, or None."""
        return self.unhealthy.get(uuid)


def judge(health: Health, event: GpuEvent) -> Health:
    """Takes one event in, and returns the health after it: the same object if it changes nothing.

    The first reason stands until the GPU is restored: what follows a fault is usually its consequence.
    """
    match event:
        case Xid() if event.code in APPLICATION_XIDS:
            return health
        case Xid():
            verdict = Verdict(
                f"XID {event.code}", f"look up XID {event.code} in NVIDIA's catalogue and in the kernel log"
            )
        case Fault():
            verdict = Verdict(event.reason, event.remedy)
        case Restored() if event.uuid in health.unhealthy:
            rest = {uuid: verdict for uuid, verdict in health.unhealthy.items() if uuid != event.uuid}
            return Health(MappingProxyType(rest))
        case Restored():
            return health
    if event.uuid in health.unhealthy:
        return health
    return Health(MappingProxyType({**health.unhealthy, event.uuid: verdict}))


async def watch(driver: Driver, hardware: Latest[Hardware], health: Latest[Health], publish: Publish) -> None:
    """The driver task: runs the driver, and keeps ``health`` by what it reports."""

    def report(event: GpuEvent) -> None:
        before = health.value.of(event.uuid)
        health.set(judge(health.value, event))
        after = health.value.of(event.uuid)
        index = next((gpu.index for gpu in hardware.value.gpus if gpu.uuid == event.uuid), -1)
        if after is not None and before is None:
            publish(GpuUnhealthy(event.uuid, index, after.reason, after.remedy))
        elif before is not None and after is None:
            assert isinstance(event, Restored)
            publish(GpuRestored(event.uuid, index, event.evidence))

    await driver.run(hardware, report, publish)
