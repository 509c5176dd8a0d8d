"""The usual look at every GPU, in as few threads as will do.

To ask a GPU how it is costs less than the hop into a thread and back: with sixteen of them, hops were most of what an
idle process did. So a round is one hop, and its thread looks at one GPU after the other. Still no GPU waits for one
that hangs: when a round is late, each GPU that it has not come to gets a thread of its own.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import trio

from _nvplug.drivers.lanes import hop
from _nvplug.errors import DriverError

__all__ = ["Crew"]

T = TypeVar("T")


class _Job:
    """One GPU's part of a round. It holds the lane until the Trio thread knows that it is done."""

    def __init__(self, lane: trio.CapacityLimiter, work: Callable[[], None]) -> None:
        self.is_done = False
        self.over = trio.Event()
        self.trouble: DriverError | None = None
        self._lane = lane
        self._work = work

    def do(self) -> None:
        """In a worker thread."""
        try:
            self._work()
        except DriverError as error:
            self.trouble = error
        self.is_done = True

    def fail(self, error: DriverError) -> None:
        """Instead, where there is no thread for it."""
        self.trouble, self.is_done = error, True

    def tell(self) -> None:
        """In the Trio thread: whoever waits for it goes on, if it is done."""
        if self.is_done and not self.over.is_set():
            self._lane.release_on_behalf_of(self)
            self.over.set()


class Crew:
    """Does in one thread what is asked of it at one time. Outlives sessions, as threads that hang do."""

    def __init__(self, late: float) -> None:
        """Sets up; nothing is done before ``run``.

        Args:
            late: seconds after which what has not begun gets a thread of its own.
        """
        self._late = late
        self._jobs: deque[_Job] = deque()
        self._asked = trio.Event()
        # No bound, as in each of them is a job that holds a lane.
        self._threads = trio.CapacityLimiter(math.inf)

    async def do(self, lane: trio.CapacityLimiter, work: Callable[[], T]) -> T:
        """Does something that blocks. When cancelled, the lane stays out until it is done.

        Args:
            lane: held meanwhile, as by a thread.
            work: what to do.

        Raises:
            DriverError: there is no thread to be had, or what ``work`` raises.
        """
        answers: list[T] = []
        job = _Job(lane, lambda: answers.append(work()))
        try:
            # Most often it is free, and then there is no need to go round the loop for it.
            lane.acquire_on_behalf_of_nowait(job)
        except trio.WouldBlock:
            await lane.acquire_on_behalf_of(job)
        self._jobs.append(job)
        self._asked.set()
        await job.over.wait()
        if job.trouble is not None:
            raise job.trouble
        return answers[0]

    async def run(self) -> None:
        """Works, until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                await self._asked.wait()
                # Once round the loop, all who were woken together have asked.
                await trio.lowlevel.checkpoint()
                self._asked = trio.Event()
                jobs, self._jobs = self._jobs, deque()
                nursery.start_soon(self._play, jobs)

    async def _play(self, waiting: deque[_Job]) -> None:
        """One round."""
        jobs = tuple(waiting)
        over = trio.Event()

        async def in_one_thread() -> None:
            await self._in_thread(waiting, jobs)
            over.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(in_one_thread)
            with trio.move_on_after(self._late):
                await over.wait()
            for job in jobs:
                job.tell()
            while (left := _taken(waiting)) is not None:
                nursery.start_soon(self._in_thread, deque([left]), (left,))

    async def _in_thread(self, waiting: deque[_Job], jobs: tuple[_Job, ...]) -> None:
        """Does what waits, in one thread; others may take of it meanwhile."""

        def work() -> None:
            while (job := _taken(waiting)) is not None:
                job.do()

        try:
            await hop(self._threads, work)
        except DriverError as error:
            while (job := _taken(waiting)) is not None:
                job.fail(error)
        for job in jobs:
            job.tell()


def _taken(waiting: deque[_Job]) -> _Job | None:
    # Threads race for the last one.
    try:
        return waiting.popleft()
    except IndexError:
        return None
