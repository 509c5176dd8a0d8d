"""One session with the driver: its tasks, and how they stay out of each other's way.

Everything done inside libnvidia-ml.so.1 is done in worker threads, and any call may hang for ever. So each GPU
has a lane of its own, a limiter of one thread: while a call for a GPU is out, no other is made for it, and no other
GPU waits. The library as a whole has a lane, and so has the wait for events. Trio's default limiter is not used:
forty calls that hang would fill it, and with it every other use of threads in the program.

A call that is late is not given up. Its lane is out, the rest is published without it after ``Pace.patience``, and
its answer is used when it comes. (Abandoned after a deadline and asked again, a GPU that needs a little longer each
time would never be listed.) The tasks of a session live in one nursery, so that what was asked in one session cannot
be answered into the next: no number has to tell them apart.

nvmlShutdown and nvmlEventSetFree are deadly while a thread is inside the library. They wait for all lanes, and are
left undone if those do not come back.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import trio

from _nvplug.drivers.readings import Census, Reading, link_table, pair, settle
from _nvplug.errors import DriverCallError, DriverError
from _nvplug.happenings import (
    DriverFound,
    DriverTrouble,
    EventsLost,
    EventsRegained,
    GpuEventsMissing,
    GpuLeftOut,
    Happening,
    Publish,
    XidUnplaced,
)
from _nvplug.hardware import GpuEvent, Hardware, PciPath
from _nvplug.latest import Latest

if TYPE_CHECKING:
    from pathlib import Path

    from _nvplug.drivers.session import Session

__all__ = ["Lanes", "Ledger", "Pace", "Service", "patiently"]

T = TypeVar("T")

# What a container is given besides its GPUs, in the reference's order.
_CONTROL_NODES: Final = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")


@dataclass(frozen=True, slots=True)
class Pace:
    """How long things take, in seconds.

    Attributes:
        patience: for a slow GPU, before the others are published without it.
        sweep: between two looks at all GPUs.
        attach: for nvmlInit, before that is called trouble. A minute is normal with many GPUs and a cold driver.
        retry_first: before the second attempt to attach; doubles up to ``retry_last``.
        retry_last: see there.
        events_first: before the second attempt to hear events; doubles up to ``events_last``.
        events_last: see there.
    """

    patience: float = 2.0
    sweep: float = 5.0
    attach: float = 60.0
    retry_first: float = 1.0
    retry_last: float = 5.0
    events_first: float = 0.1
    events_last: float = 5.0


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


async def _hop(lane: trio.CapacityLimiter, work: Callable[[], T]) -> T:
    """Does something that blocks in a thread of this lane. When cancelled, the thread and the lane stay out."""
    return await trio.to_thread.run_sync(work, limiter=lane, abandon_on_cancel=True)


async def patiently(lane: trio.CapacityLimiter, work: Callable[[], T], name: str, limit: float, ledger: Ledger) -> T:
    """Does something that blocks in a thread. Late after ``limit`` seconds, publishes trouble and goes on waiting."""

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
            answer = await _hop(lane, work)
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
        gpus: by index, made when needed.
    """

    def __init__(self) -> None:
        self.library = trio.CapacityLimiter(1)
        self.events = trio.CapacityLimiter(1)
        self.gpus: dict[int, trio.CapacityLimiter] = {}
        self._ending = trio.CapacityLimiter(1)

    async def alone(self, work: Callable[[], None], patience: float) -> None:
        """Does something while no thread is in any lane; leaves it undone if that takes longer than ``patience``."""
        held: list[trio.CapacityLimiter] = []
        try:
            with trio.move_on_after(patience):
                for lane in (self.library, self.events, *self.gpus.values()):
                    await lane.acquire_on_behalf_of(self)
                    held.append(lane)
                # What cannot be given up properly counts as given up.
                with contextlib.suppress(DriverCallError):
                    await _hop(self._ending, work)
        finally:
            for lane in held:
                lane.release_on_behalf_of(self)


class Service:
    """The tasks of one session."""

    def __init__(
        self,
        session: Session,
        lanes: Lanes,
        pace: Pace,
        dev: Path,
        known: dict[int, Reading],
        hardware: Latest[Hardware],
        report: Callable[[GpuEvent], None],
        ledger: Ledger,
    ) -> None:
        """Takes everything over; ``known`` is handed from session to session, and changed in place."""
        self._session = session
        self._lanes = lanes
        self._pace = pace
        self._dev = dev
        self._known = known
        self._hardware = hardware
        self._report = report
        self._ledger = ledger
        self._census = Latest(Census())
        # How often all GPUs were to be looked at.
        self._rounds = Latest(0)
        self._paths: dict[frozenset[str], PciPath] = {}
        self._listening = trio.Event()

    async def run(self) -> None:
        """Serves until the session is of no use, and closes it.

        Returns when a new session may find GPUs where this one has none: the library looks for GPUs only when it is
        initialised.

        Raises:
            DriverError: the library cannot even count GPUs any more.
        """
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._listen)
                nursery.start_soon(self._compose)
                # A GPU's events are to be registered before anyone is told of the GPU.
                with trio.move_on_after(self._pace.patience):
                    await self._listening.wait()
                trouble = await self._sweep(nursery)
                nursery.cancel_scope.cancel()
        finally:
            self._session.end()
        await self._lanes.alone(self._session.close, self._pace.patience)
        if trouble is not None:
            raise trouble

    async def _sweep(self, nursery: trio.Nursery) -> DriverError | None:
        """Counts the GPUs, sees to it that each has a task, and has them looked at, again and again."""
        count_gpus = partial(
            patiently,
            self._lanes.library,
            self._session.count,
            "nvmlDeviceGetCount",
            self._pace.attach,
            self._ledger,
        )
        scopes: list[trio.CancelScope] = []
        while True:
            try:
                count = await count_gpus()
            except DriverError as error:
                return error
            while len(scopes) < count:
                scopes.append(await nursery.start(self._attend, len(scopes)))
            while len(scopes) > count:
                scopes.pop().cancel()
            answers = {i: answer for i, answer in self._census.value.answers.items() if i < count}
            # By access(2), which never raises.
            nodes = [f"/dev/{name}" for name in _CONTROL_NODES if os.access(self._dev / name, os.F_OK)]
            self._census.set(Census(count, answers, tuple(nodes)))
            self._look_again()
            await trio.sleep(self._pace.sweep)
            if count == 0:
                return None

    def _look_again(self) -> None:
        self._rounds.set(self._rounds.value + 1)

    async def _attend(self, index: int, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
        """One GPU's task: reads it in each round. If it hangs in there, so does this, and nothing else."""
        lane = self._lanes.gpus.setdefault(index, trio.CapacityLimiter(1))
        known: Reading | None = None
        with trio.CancelScope() as scope:
            version = self._rounds.version
            task_status.started(scope)
            while True:
                await self._rounds.newer_than(version)
                version = self._rounds.version
                answer = await _hop(lane, partial(self._session.read, index, known))
                if isinstance(answer, Reading):
                    known = answer
                census = self._census.value
                self._census.set(replace(census, answers={**census.answers, index: answer}))

    async def _compose(self) -> None:
        """Makes Hardware of what the GPUs' tasks found, when all have answered or had their time."""
        late: frozenset[int] = frozenset()
        version = self._census.version
        while True:
            await self._census.newer_than(version)
            with trio.move_on_after(self._pace.patience):
                while self._census.value.missing - late:
                    await self._census.newer_than(self._census.version)
            version, census = self._census.version, self._census.value
            late = census.missing
            if census.count is None:
                continue
            readings, left_out = settle(census, self._known)
            with trio.move_on_after(self._pace.patience):
                # A handle from an older session must not be used in this one.
                await self._measure([one for one in readings if census.answers.get(one.gpu.index) is one])
            self._known.clear()
            self._known.update((reading.gpu.index, reading) for reading in readings)
            self._publish(
                Hardware(
                    gpus=tuple(reading.gpu for reading in readings),
                    links=link_table(readings, self._paths),
                    control_nodes=census.control_nodes,
                    left_out=left_out,
                    driver_version=self._session.version,
                )
            )

    def _publish(self, new: Hardware) -> None:
        old = self._hardware.value
        if [gpu.uuid for gpu in old.gpus] != [gpu.uuid for gpu in new.gpus]:
            self._ledger.forget("driver")
        for index in {one.index for one in old.left_out} - {one.index for one in new.left_out}:
            self._ledger.forget(f"GPU {index}")
        for one in new.left_out:
            self._ledger.say(f"GPU {one.index}", GpuLeftOut(one.index, one.reason))
        for index, reading in self._known.items():
            topic = f"events of GPU {index}"
            if trouble := reading.registration.trouble:
                self._ledger.say(topic, GpuEventsMissing(reading.gpu.uuid, index, trouble))
            else:
                self._ledger.forget(topic)
        self._ledger.say("driver", DriverFound("nvml", new.driver_version, len(new.gpus)))
        self._hardware.set(new)

    async def _measure(self, readings: list[Reading]) -> None:
        """Asks how GPUs meet, where that is not known yet: each in its own lane, about those after it."""

        async def ask(one: Reading, others: list[Reading]) -> None:
            paths = await _hop(self._lanes.gpus[one.gpu.index], partial(self._session.paths, one, others))
            self._paths.update((key, path) for key, path in paths.items() if path is not PciPath.UNKNOWN)

        async with trio.open_nursery() as nursery:
            for position, one in enumerate(readings):
                others = [other for other in readings[position + 1 :] if pair(one, other) not in self._paths]
                if others:
                    nursery.start_soon(ask, one, others)

    async def _listen(self) -> None:
        """Waits for events and reports XIDs; when that fails, backs off and makes a new event set.

        The thread that waits comes back for an event or an error only: a wake-up a second is what an idle process
        would spend most of its time on.
        """
        delay, failed_at = self._pace.events_first, -math.inf
        # They may have been lost in the session before.
        number, lost = 0, self._ledger.has_said("events")
        while True:
            try:
                if not self._session.event_set:
                    number += 1
                    await _hop(self._lanes.events, partial(self._session.create_event_set, number))
                    self._listening.set()
                    await self._registered(number)
                event = await _hop(self._lanes.events, partial(self._session.wait, once=lost))
            except DriverCallError as error:
                lost = True
                self._ledger.say("events", EventsLost(str(error), error.remedy))
                self._listening.set()
                # A moment's luck is no reason to begin with short delays, and lines in the log, anew.
                if trio.current_time() - failed_at > 2 * self._pace.events_last:
                    delay = self._pace.events_first
                await trio.sleep(delay)
                failed_at, delay = trio.current_time(), min(2 * delay, self._pace.events_last)
                if self._session.event_set:
                    await self._lanes.alone(self._session.free_event_set, self._pace.patience)
                continue
            if lost:
                lost = False
                self._ledger.forget("events")
                self._ledger.publish(EventsRegained())
            if isinstance(event, XidUnplaced):
                self._ledger.say("unplaced", event)
            elif event is not None:
                self._report(event)

    async def _registered(self, event_set: int) -> None:
        """Has every GPU registered with a new event set; returns when one has events and none is to be waited for."""
        self._look_again()

        def registrations() -> list[int]:
            answers = self._census.value.answers.values()
            return [a.registration.event_set for a in answers if isinstance(a, Reading)]

        def heard() -> bool:
            answers = self._census.value.answers.values()
            return any(isinstance(a, Reading) and a.registration.heard for a in answers)

        with trio.move_on_after(self._pace.patience):
            while self._census.value.missing or set(registrations()) != {event_set}:
                await self._census.newer_than(self._census.version)
        while not heard():
            await self._census.newer_than(self._census.version)
