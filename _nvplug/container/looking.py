"""The task that looks at the node for what answers need, before anybody can ask."""

from __future__ import annotations

from functools import partial
from typing import Final, NoReturn

import trio

from _nvplug.config import Config
from _nvplug.container.facts import NodeFacts, Terms, gather, needs_a_look
from _nvplug.happenings import ConfigUnmet, Happening, Publish
from _nvplug.hardware import Hardware
from _nvplug.latest import Latest

__all__ = ["keep_terms"]

# Seconds between two looks, where there is something to look for: while something is missed, and while nothing is. The
# driver's files take 13 ms to find among 3,000 others.
INTERVAL: Final = 5.0
CALM: Final = 60.0

# Seconds for the driver's file system to answer.
ANSWERED_WITHIN: Final = 5.0


async def keep_terms(
    hardware: Latest[Hardware],
    config: Latest[Config],
    terms: Latest[Terms],
    publish: Publish,
    *,
    root: str = "/",
    interval: float = INTERVAL,
) -> NoReturn:
    """Keeps ``terms`` up to date.

    Args:
        hardware: what the driver has.
        config: what is asked for.
        terms: by what answers are made.
        publish: told each remark once for as long as it holds.
        root: the root of this process.
        interval: seconds between two looks, while something is missed.
    """
    # Of its own: a look that never returns takes no threads from others, and only one.
    lane = trio.CapacityLimiter(1)
    said: set[Happening] = set()
    while True:
        versions = hardware.version, config.version
        seen, asked, before = hardware.value, config.value, terms.value
        facts = await _look(partial(gather, asked, seen.driver_version, root), asked, lane)
        if facts is not None:
            after, remarks = Terms(asked, facts, seen), facts.remarks
        else:
            # What was known stands: a file system that hangs takes no GPU away that was there before.
            after, remarks = before._replace(hardware=seen if before.hardware else None), (_LATE,)
        # Nor does a channel. A container that cannot be served as it must be is refused by itself.
        if before.hardware is None and not after.met:
            after = after._replace(hardware=None)
        terms.set(after)
        for remark in remarks:
            if remark not in said:
                publish(remark)
        said = {*remarks}
        missed = any(isinstance(remark, ConfigUnmet) for remark in remarks)
        with trio.move_on_after((interval if missed else CALM) if needs_a_look(asked) else float("inf")):
            await _changed(hardware, config, versions)


_LATE: Final = ConfigUnmet("driver-root", f"its file system has not answered for {ANSWERED_WITHIN:g} s")


async def _look(work: partial[NodeFacts], config: Config, lane: trio.CapacityLimiter) -> NodeFacts | None:
    if not needs_a_look(config):
        await trio.lowlevel.checkpoint()
        return work()
    with trio.move_on_after(ANSWERED_WITHIN):
        return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=lane)
    return None


async def _changed(found: Latest[Hardware], config: Latest[Config], versions: tuple[int, int]) -> None:
    """Returns when either is newer than it was."""
    async with trio.open_nursery() as nursery:

        async def wait(cell: Latest[Hardware] | Latest[Config], version: int) -> None:
            await cell.newer_than(version)
            nursery.cancel_scope.cancel()

        nursery.start_soon(wait, found, versions[0])
        nursery.start_soon(wait, config, versions[1])
