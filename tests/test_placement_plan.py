"""What placement makes ready of a node, and when."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

import trio
from topologies import Node, gpu, machine

from _nvplug.hardware import Hardware, Link, MigDevice, PciPath
from _nvplug.latest import Latest
from _nvplug.placement import Plan, keep_plan


def hardware(node: Node) -> Hardware:
    """As a driver shows it."""
    return Hardware(node.gpus, node.links)


@asynccontextmanager
async def keeping(first: Hardware) -> AsyncGenerator[tuple[Latest[Hardware], Latest[Plan]]]:
    """The task at work, and the cells before and behind it."""
    shown, plan = Latest(first), Latest(Plan())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_plan, shown, plan)
        with trio.fail_after(30):
            yield shown, plan
        nursery.cancel_scope.cancel()


async def ready(plan: Latest[Plan], *, gpus: int) -> Plan:
    """Waits for a table of so many GPUs."""
    while plan.value.table is None or len(plan.value.layout.uuids) != gpus:
        await plan.newer_than(plan.version)
    return plan.value


async def test_a_table_follows_the_gpus() -> None:
    """At once for eight GPUs, a while later for more; a GPU that comes or goes is in the next one."""
    async with keeping(hardware(machine("8xH100"))) as (shown, plan):
        first = await ready(plan, gpus=8)

        assert first.table is not None
        shown.set(hardware(machine("16xA100")))
        await ready(plan, gpus=16)
        shown.set(hardware(machine("4xA100")))
        await ready(plan, gpus=4)


async def test_a_link_that_dies_makes_another_plan() -> None:
    """The matrix counts, not only which GPUs there are."""
    node = machine("8xV100")
    async with keeping(hardware(node)) as (shown, plan):
        before = await ready(plan, gpus=8)
        dead = [list(row) for row in node.links]
        dead[2][3] = dead[3][2] = Link(PciPath.ONE_SWITCH)
        shown.set(Hardware(node.gpus, tuple(map(tuple, dead))))
        while plan.value.layout is before.layout:
            await plan.newer_than(plan.version)
        after = await ready(plan, gpus=8)

        assert (before.layout.direct[2][3], after.layout.direct[2][3]) == (52, 12)


async def test_what_does_not_matter_makes_no_plan() -> None:
    """MIG devices that come and go move no GPU: the table is not made anew."""
    node = machine("8xV100")
    async with keeping(hardware(node)) as (shown, plan):
        await ready(plan, gpus=8)
        version = plan.version
        mig = MigDevice(0, "MIG-0", 1, 0, 0, 1, 1, 4864)
        gpus = (replace(node.gpus[0], mig_enabled=True, mig_devices=(mig,)), *node.gpus[1:])
        shown.set(Hardware(gpus, node.links))
        with trio.move_on_after(0.1):
            await plan.newer_than(version)

        assert plan.version == version


async def test_more_gpus_than_there_is_a_table_for() -> None:
    """They are laid out, and searched; those of no real node are not."""
    everyone = range(100)
    links = tuple(tuple(Link(PciPath.NUMA_NODE) for _ in everyone) for _ in everyone)
    async with keeping(Hardware(tuple(gpu(each, 0) for each in everyone), links)) as (shown, plan):
        shown.set(Hardware(tuple(gpu(each, 0) for each in range(20)), tuple(row[:20] for row in links[:20])))
        while len(plan.value.layout.uuids) != 20:
            await plan.newer_than(plan.version)

        assert plan.value.table is None
        shown.set(Hardware())
        while plan.value.layout.uuids:
            await plan.newer_than(plan.version)
