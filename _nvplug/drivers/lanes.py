"""Who may be inside libnvidia-ml.so.1, for how long, and what is said about it.

Everything done inside the library is done in worker threads, and any call may hang for ever. So each GPU has a lane
of its own, a limiter of one thread: while a call for a GPU is out, no other is made for it, and no other GPU waits.
The library as a whole has a lane, and so has the wait for events. Trio's default limiter is not used: forty calls
that hang would fill it, and with it every other use of threads in the program.

nvmlShutdown and nvmlEventSetFree are deadly while a thread is inside the library. They wait for all lanes, and are
left undone if those do not come back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import trio

from _nvplug.errors import DriverCallError, DriverError
from _nvplug.happenings import DriverTrouble, Happening, Publish

__all__ = ["Lanes", "Ledger", "Pace", "hop", "patiently"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Pace:
    """How long things take, in seconds.

    Attributes:
        patience: for a slow GPU, before the others are published without it.
        sweep: between two looks at all GPUs.
        late: for one thread to look at them all; then those that it has not come to get threads of their own.
        attach: for nvmlInit, before that is called trouble. A minute is normal with many GPUs and a cold driver.
        retry_first: before the second attempt to attach; doubles up to ``retry_last``.
        retry_last: see there.
        events_first: before the second attempt to hear events; doubles up to ``events_last``.
        events_last: see there.
        slice: after which the thread that waits for events looks up, to see whether it is still wanted. That is most
            of what an idle process does besides looking at GPUs.
        glance: the same, until events that were lost are known to be heard again.
        silence: for a GPU to answer, before that is called a fault of it.
        after_event: between two looks at all GPUs that events ask for.
        settle: after a GPU is to be let go of, before that is done: errors seldom come alone, and those of other GPUs
            would be lost while the session is opened anew.
        trial_first: before the first look at a GPU that was let go of; doubles up to ``trial_last``.
        trial_last: see there.
    """

    patience: float = 2.0
    sweep: float = 5.0
    late: float = 0.1
    attach: float = 60.0
    retry_first: float = 1.0
    retry_last: float = 5.0
    events_first: float = 0.1
    events_last: float = 5.0
    slice: float = 2.5
    glance: float = 0.5
    silence: float = 30.0
    after_event: float = 1.0
    settle: float = 3.0
    trial_first: float = 10.0
    trial_last: float = 60.0


class Ledger:
    """Publishes what is worth a line once, and again only after something else was true of the same topic."""

    def __init__(self, publish: Publish) -> None:
        self.publish = publish
        self._said: dict[str, Happening] = {}

    def say(self, topic: str, happening: Happening) -> None:
        """Publishes, unless that was the last thing said of the topic."""
        if self._said.get(topic) != happening:
            self._said[topic] = happening
            self.publish(happening)

    def has_said(self, topic: str) -> bool:
        """Whether anything was said of the topic since it was last forgotten."""
        return topic in self._said

    def forget(self, topic: str) -> None:
        """Whatever is said next of this topic is news."""
        self._said.pop(topic, None)


async def hop(lane: trio.CapacityLimiter, work: Callable[[], T]) -> T:
    """Does something that blocks in a thread of this lane. When cancelled, the thread and the lane stay out.

    Raises:
        DriverError: there is no thread to be had, or what ``work`` raises.
    """
    try:
        return await trio.to_thread.run_sync(work, limiter=lane, abandon_on_cancel=True)
    except RuntimeError as error:
        # From threading: the limit on processes of the user or the container is reached.
        raise DriverError(str(error), remedy="raise the limit on processes: TasksMax, or pids of the pod") from None


async def patiently(work: Callable[[], Awaitable[T]], name: str, limit: float, ledger: Ledger) -> T:
    """Waits for what is done in a thread. Late after ``limit`` seconds, publishes trouble and goes on waiting."""

    async def complain() -> None:
        await trio.sleep(limit)
        ledger.say(
            "driver",
            DriverTrouble(
                f"{name} has not returned within {limit:g} s",
                "look for NVRM lines in the kernel log; a driver that hangs often needs a reboot of the node",
            ),
        )

    trouble: DriverError | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(complain)
        try:
            answer = await work()
        except DriverError as error:
            # Carried out by hand: a nursery would make a group of it.
            trouble = error
        nursery.cancel_scope.cancel()
    if trouble is not None:
        raise trouble
    return answer


class Lanes:
    """Who may be inside the library: one thread in each lane. Outlives sessions, as threads that hang do.

    Attributes:
        library: for calls about no GPU in particular.
        events: for the wait.
        gpus: by index; made by ``of_gpu``.
    """

    def __init__(self) -> None:
        self.library = trio.CapacityLimiter(1)
        self.events = trio.CapacityLimiter(1)
        self.gpus: dict[int, trio.CapacityLimiter] = {}
        self._ending = trio.CapacityLimiter(1)
        # The lanes that ``alone`` holds; None while nobody wants to be alone.
        self._held: list[trio.CapacityLimiter] | None = None

    def of_gpu(self, index: int) -> trio.CapacityLimiter:
        """A GPU's lane. One that is made while somebody wants to be alone opens after that."""
        lane = self.gpus.get(index)
        if lane is None:
            lane = self.gpus[index] = trio.CapacityLimiter(1)
            if self._held is not None:
                lane.acquire_on_behalf_of_nowait(self)
                self._held.append(lane)
        return lane

    async def alone(self, work: Callable[[], None], patience: float) -> None:
        """Does something while no thread is in any lane; leaves it undone if that takes longer than ``patience``.

        One at a time.
        """
        self._held = held = []
        try:
            with trio.move_on_after(patience):
                for lane in (self.library, self.events, *self.gpus.values()):
                    await lane.acquire_on_behalf_of(self)
                    held.append(lane)
                # What cannot be given up properly counts as given up.
                with contextlib.suppress(DriverCallError):
                    await hop(self._ending, work)
        finally:
            self._held = None
            for lane in held:
                lane.release_on_behalf_of(self)
