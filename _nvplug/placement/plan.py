"""What placement knows of a node, made ready whenever its GPUs change, so that no question has to wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

import trio

from _nvplug.hardware import Gpu, Hardware, Link
from _nvplug.latest import Latest
from _nvplug.placement.bandwidth import LARGEST, Layout, layout_of
from _nvplug.placement.table import MOST, Table

__all__ = ["Plan", "keep_plan"]

# Up to so many GPUs the table takes a millisecond.
QUICK: Final = 8

# Seconds after which a larger one is made: when the devices have been listed, and the start is over.
LATER: Final = 1.0


class Plan(NamedTuple):
    """How to choose among the GPUs of a node.

    Attributes:
        layout: which GPUs are near each other.
        table: which sets of them are best; None for more than there is a table for, and until it is there.
    """

    layout: Layout = Layout()
    table: Table | None = None


async def keep_plan(hardware: Latest[Hardware], plan: Latest[Plan]) -> None:
    """The placement task: whenever the GPUs or their links change, ``plan`` follows, and nobody waits for it."""
    # By a limiter of its own, as the driver's. A thread that is abandoned at the end lives on for 0.1 s at most.
    run = partial(trio.to_thread.run_sync, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1))
    wiring = Latest[tuple[Sequence[Gpu], Sequence[Sequence[Link]]]](((), ()))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(hardware.follow, lambda node: wiring.set(_wiring(node)))
        version = 0
        while True:
            await wiring.newer_than(version)
            version = wiring.version
            layout = await run(layout_of, *wiring.value)
            plan.set(Plan(layout))
            if len(layout.uuids) > QUICK:
                with trio.move_on_after(LATER):
                    await wiring.newer_than(version)
            if wiring.version == version and 0 < len(layout.uuids) <= MOST:
                plan.set(Plan(layout, await run(Table, layout)))


def _wiring(node: Hardware) -> tuple[Sequence[Gpu], Sequence[Sequence[Link]]]:
    """The GPUs and their links, without what does not matter here and may change more often."""
    if len(node.gpus) > LARGEST:
        return (), ()
    return tuple(replace(gpu, mig_enabled=False, mig_devices=()) for gpu in node.gpus), node.links
