from __future__ import annotations

import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
import trio

from _nvplug.drivers.crew import Crew
from _nvplug.errors import DriverError

# Threads on a busy machine.
PATIENCE = 20.0


@asynccontextmanager
async def working(late: float) -> AsyncGenerator[Crew, None]:
    """A crew, and the end of it."""
    crew = Crew(late)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(crew.run)
        with trio.fail_after(PATIENCE):
            yield crew
        nursery.cancel_scope.cancel()


async def asked_together(crew: Crew, lanes: list[trio.CapacityLimiter]) -> list[str]:
    """The names of the threads in which one thing was done in each lane."""
    names: dict[int, str] = {}

    async def ask(number: int, lane: trio.CapacityLimiter) -> None:
        names[number] = await crew.do(lane, lambda: threading.current_thread().name)

    async with trio.open_nursery() as nursery:
        for number, lane in enumerate(lanes):
            nursery.start_soon(ask, number, lane)
    return [names[number] for number in range(len(lanes))]


async def test_what_is_asked_together_is_done_in_one_thread() -> None:
    """Sixteen GPUs cost one hop."""
    lanes = [trio.CapacityLimiter(1) for _ in range(16)]
    async with working(late=PATIENCE) as crew:
        names = await asked_together(crew, lanes)

    assert len(set(names)) == 1
    assert all(lane.available_tokens == 1 for lane in lanes)


async def test_what_hangs_delays_nobody() -> None:
    """A GPU that hangs has its lane, and one thread; those behind it are done meanwhile, and again and again."""
    hung, others = trio.CapacityLimiter(1), [trio.CapacityLimiter(1) for _ in range(3)]
    back = threading.Event()
    async with working(late=0.02) as crew, trio.open_nursery() as nursery:
        nursery.start_soon(crew.do, hung, back.wait)
        for _ in range(3):
            await asked_together(crew, others)

        assert hung.available_tokens == 0
        assert all(lane.available_tokens == 1 for lane in others)
        back.set()

    assert hung.available_tokens == 1


async def test_the_lane_stays_out_for_as_long_as_the_call() -> None:
    """Whoever does not wait for a hung GPU any more does not let others in to it."""
    lane, back = trio.CapacityLimiter(1), threading.Event()
    async with working(late=PATIENCE) as crew:
        with trio.move_on_after(0.02):
            await crew.do(lane, back.wait)

        assert lane.available_tokens == 0
        back.set()
        assert await crew.do(lane, lambda: 7) == 7


async def test_an_error_reaches_only_who_asked_for_it() -> None:
    """The others of the same round have their answers."""
    lanes = [trio.CapacityLimiter(1) for _ in range(3)]
    told: list[str] = []

    def fail() -> None:
        raise DriverError("the driver is gone", remedy="")

    async with working(late=PATIENCE) as crew:

        async def expect_failure() -> None:
            with pytest.raises(DriverError, match="the driver is gone"):
                await crew.do(lanes[1], fail)
            told.append("failed")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(crew.do, lanes[0], lambda: None)
            nursery.start_soon(expect_failure)
            nursery.start_soon(crew.do, lanes[2], lambda: None)

    assert told == ["failed"]
    assert all(lane.available_tokens == 1 for lane in lanes)


async def test_no_thread_to_be_had_is_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a thread that will not come, and the next round is tried anew."""
    lanes = [trio.CapacityLimiter(1) for _ in range(2)]
    refused: list[DriverError] = []

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async with working(late=PATIENCE) as crew:

        async def ask(lane: trio.CapacityLimiter) -> None:
            try:
                await crew.do(lane, lambda: None)
            except DriverError as error:
                refused.append(error)

        with monkeypatch.context() as patched:
            patched.setattr("trio._core._thread_cache.THREAD_CACHE._idle_workers", {})
            patched.setattr(threading.Thread, "start", refuse)
            async with trio.open_nursery() as nursery:
                for lane in lanes:
                    nursery.start_soon(ask, lane)

        assert len(refused) == 2
        assert await crew.do(lanes[0], lambda: 7) == 7
