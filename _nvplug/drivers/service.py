"""One session with the driver: its tasks, and how they stay out of each other's way.

A call that is late is not given up. Its lane is out, the rest is published without it after ``Pace.patience``, and
its answer is used when it comes. (Abandoned after a deadline and asked again, a GPU that needs a little longer each
time would never be listed.) The tasks of a session live in one nursery, so that what was asked in one session cannot
be answered into the next: no number has to tell them apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import pynvml
import trio

from _nvplug.drivers.crew import Crew
from _nvplug.drivers.ears import Ears
from _nvplug.drivers.lanes import Lanes, Ledger, Pace, hop, patiently
from _nvplug.drivers.readings import Census, Failure, Listing, Reading, link_table, pair, settle
from _nvplug.drivers.vitals import NEEDS_RESET
from _nvplug.errors import DriverError
from _nvplug.happenings import DriverFound, GpuEventsMissing, GpuLate, GpuLeftOut, GpuReleased, GpuTakenUp, XidUnplaced
from _nvplug.hardware import GpuEvent, Hardware, PciPath, Sign
from _nvplug.latest import Latest

if TYPE_CHECKING:
    from _nvplug.drivers.device_nodes import DeviceNodes
    from _nvplug.drivers.outside import Outside
    from _nvplug.drivers.session import Session

__all__ = ["Service", "Station"]

# The library, or the kernel module behind it, is not the one that this session began with.
_SESSION_OVER: Final = frozenset(
    {
        pynvml.NVML_ERROR_UNINITIALIZED,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
    }
)


@dataclass(slots=True)
class Station:
    """What outlives sessions.

    Attributes:
        pace: how long things take.
        nodes: looks for those that GPUs share, and makes them.
        hardware: what is published.
        report: takes events.
        ledger: takes what is worth a line.
        outside: what is seen without the driver.
        released: UUIDs of the GPUs that wait for a repair.
        crew: looks at GPUs that are known.
        lanes: who may be inside the library.
        listing: the GPUs there are. One that is slow to be read again is not dropped meanwhile.
        let_go: UUIDs of those that nvplug holds nothing of.
        heard: when the driver last answered for a GPU, by UUID.
        trial_delay: before GPUs that were let go of are looked at again.
    """

    pace: Pace
    nodes: DeviceNodes
    hardware: Latest[Hardware]
    report: Callable[[GpuEvent], None]
    ledger: Ledger
    outside: Outside
    released: Latest[frozenset[str]]
    crew: Crew
    lanes: Lanes = field(default_factory=Lanes)
    listing: Listing = field(default_factory=Listing)
    let_go: frozenset[str] = frozenset()
    heard: dict[str, float] = field(default_factory=dict)
    trial_delay: float = 0.0

    @property
    def to_let_go(self) -> frozenset[str]:
        """The GPUs that are known and wait for a repair: of others nothing is held anyway."""
        return self.released.value & {reading.gpu.uuid for reading in self.listing.readings}

    def changes_hands(self, apart: frozenset[str]) -> None:
        """Says which GPUs were let go of or taken up, since nothing is held of these any more."""
        for reading in self.listing.readings:
            uuid, index = reading.gpu.uuid, reading.gpu.index
            if uuid in apart - self.let_go:
                self.ledger.publish(GpuReleased(uuid, index))
            elif uuid in self.let_go - apart:
                self.ledger.publish(GpuTakenUp(uuid, index))
                self.heard[uuid] = trio.current_time()
        if apart != self.let_go:
            self.trial_delay = self.pace.trial_first
        self.let_go = apart


class Service:
    """The tasks of one session."""

    def __init__(self, session: Session, station: Station, apart: frozenset[str]) -> None:
        """Takes the session over.

        Args:
            session: just opened, without attaching GPUs if any is to be left alone.
            station: what outlives it.
            apart: UUIDs of the GPUs to be left alone. Others are then found by their addresses, as known.
        """
        self.wants_trial = False
        """After ``run``: whether the next session should leave no GPU alone, and see which ones there are."""
        self._session = session
        self._station = station
        self._apart = apart
        self._census = Latest(Census())
        # How often all GPUs were to be looked at, and how often an event asked for it.
        self._rounds = Latest(0)
        self._events = Latest(0)
        self._paths: dict[frozenset[str], PciPath] = {}
        self._composed = trio.Event()
        # The GPUs, by index, whose first answer was reported.
        self._reported: Latest[frozenset[int]] = Latest(frozenset())
        self._noticed = trio.Event()
        self._ears = Ears(session, station.lanes, station.pace, station.ledger, self._hear, self._look_again)
        self._trouble: DriverError | None = None

    async def run(self) -> None:
        """Serves until the session is of no use, and closes it.

        Returns when a new session may find GPUs where this one has none, since the library looks for GPUs only when
        it is initialised; and when others are to be left alone.

        Raises:
            DriverError: the library cannot be used any more.
        """
        pace = self._station.pace
        try:
            async with trio.open_nursery() as nursery:
                scope = nursery.cancel_scope
                nursery.start_soon(self._ears.listen, self._census)
                nursery.start_soon(self._compose)
                nursery.start_soon(self._look_after_events)
                nursery.start_soon(self._mind_release, scope)
                if self._apart:
                    nursery.start_soon(self._mind_trial, scope)
                # A GPU's events are to be registered before anyone is told of the GPU.
                with trio.move_on_after(pace.patience):
                    await self._ears.ready.wait()
                await self._sweep(nursery)
                scope.cancel()
        finally:
            self._session.end()
        await self._station.lanes.alone(self._session.close, pace.slice + pace.patience)
        for event in self._session.late:
            if not isinstance(event, XidUnplaced):
                self._station.report(event)
        if self._trouble is not None:
            raise self._trouble

    async def _sweep(self, nursery: trio.Nursery) -> None:
        """Counts the GPUs, sees to it that each has a task, and has them looked at, again and again."""
        station = self._station
        count_gpus = partial(
            patiently,
            partial(station.crew.do, station.lanes.library, self._session.count),
            "nvmlDeviceGetCount",
            station.pace.attach,
            station.ledger,
        )
        scopes: dict[int, trio.CancelScope] = {}
        station.outside.has_new_gpu()
        while self._trouble is None:
            try:
                asked = self._slots(await count_gpus())
            except DriverError as error:
                self._trouble = error
                return
            new = asked - scopes.keys()
            for index in new:
                scopes[index] = await nursery.start(self._attend, index)
            for index in scopes.keys() - asked:
                scopes.pop(index).cancel()
            nodes = await station.nodes.look([reading.gpu for reading in station.listing.present], len(asked))
            answers = {index: one for index, one in self._census.value.answers.items() if index in asked}
            self._census.set(Census(asked, answers, nodes))
            if new:
                self._begin_round(asked)
            await trio.sleep(station.pace.sweep)
            if station.outside.has_new_gpu():
                self.wants_trial = True
                return
            if self._session.is_outdated or not (asked or self._apart):
                return
            # Those that are known are looked at together with the count, for the price of one hop.
            self._begin_round(asked)

    def _begin_round(self, asked: frozenset[int]) -> None:
        self._look_outside()
        self._name_the_late(asked)
        self._look_again()

    def _slots(self, count: int) -> frozenset[int]:
        """The indices to ask about. Where some GPUs are left alone, an index that is not known may be one of theirs."""
        if not self._apart:
            return frozenset(range(count))
        return frozenset(
            reading.gpu.index for reading in self._station.listing.present if reading.gpu.uuid not in self._apart
        )

    def _look_outside(self) -> None:
        for sign in self._station.outside.look([reading.gpu for reading in self._station.listing.readings]):
            self._station.report(sign)
            if sign.uuid in self._apart:
                self._noticed.set()

    def _name_the_late(self, asked: frozenset[int]) -> None:
        for index in asked:
            reading, lane = self._station.listing.at(index), self._station.lanes.gpus.get(index)
            if reading is None:
                continue
            if lane is not None and lane.borrowed_tokens:
                self._station.ledger.say(f"GPU {index} is late", GpuLate(reading.gpu.uuid, index))
            else:
                self._station.ledger.forget(f"GPU {index} is late")

    def _look_again(self) -> None:
        self._rounds.set(self._rounds.value + 1)

    def _hear(self, event: GpuEvent) -> None:
        self._station.report(event)
        self._events.set(self._events.value + 1)

    async def _look_after_events(self) -> None:
        """Has all GPUs looked at after an event: what the driver wants done is told by a field, not by the event."""
        while True:
            await self._events.newer_than(self._events.version)
            self._look_again()
            await trio.sleep(self._station.pace.after_event)

    async def _attend(self, index: int, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
        """One GPU's task: looks at it in each round. If it hangs in there, so does this, and nothing else."""
        station = self._station
        lane = station.lanes.of_gpu(index)
        known: Reading | None = None
        expected = station.listing.at(index)
        pci = expected.gpu.pci if expected is not None and self._apart else ""
        with trio.CancelScope() as scope:
            version = self._rounds.version
            task_status.started(scope)
            while True:
                await self._rounds.newer_than(version)
                version = self._rounds.version
                look = partial(self._session.look, index, known, pci)
                try:
                    # To be read in full takes long, with the driver cold: then each has a thread.
                    answer, checkup = await (hop(lane, look) if known is None else station.crew.do(lane, look))
                except DriverError as error:
                    self._trouble = error
                    return
                if answer is None:
                    continue
                if isinstance(answer, Reading):
                    known = expected = answer
                else:
                    expected = station.listing.at(index) or expected
                if expected is not None:
                    station.heard[expected.gpu.uuid] = trio.current_time()
                if isinstance(answer, Failure):
                    self._report_failure(answer, expected)
                census = self._census.value
                if census.answers.get(index) is not answer:
                    self._census.set(replace(census, answers={**census.answers, index: answer}))
                # Whoever hears of a GPU can look it up.
                if not self._composed.is_set():
                    await self._composed.wait()
                    # Life begins with the first look at the outside.
                    self._look_outside()
                if checkup is not None and isinstance(answer, Reading):
                    station.report(replace(checkup, life=station.outside.life(answer.gpu.uuid)))
                if index not in self._reported.value:
                    self._reported.set(self._reported.value | {index})

    def _report_failure(self, failure: Failure, expected: Reading | None) -> None:
        if failure.code in _SESSION_OVER:
            self._trouble = DriverError(failure.reason, remedy=failure.remedy)
        if expected is not None:
            lost = failure.code in NEEDS_RESET
            self._station.report(Sign(expected.gpu.uuid, "answer", failure.reason, failure.remedy, ends_in_reset=lost))

    async def _mind_release(self, scope: trio.CancelScope) -> None:
        """Ends the session when other GPUs are to be left alone than it does leave alone."""
        station = self._station
        # Each GPU is looked at once first: one on trial may be well.
        await self._composed.wait()
        with trio.move_on_after(station.pace.patience):
            while (self._census.value.asked or frozenset()) - self._reported.value:
                await self._reported.newer_than(self._reported.version)
        while True:
            version = station.released.version
            if station.to_let_go != self._apart:
                break
            station.changes_hands(self._apart)
            await station.released.newer_than(version)
        await trio.sleep(station.pace.settle)
        scope.cancel()

    async def _mind_trial(self, scope: trio.CancelScope) -> None:
        """Ends the session when the GPUs that it leaves alone should be tried: at times, and when they reappear."""
        station = self._station
        with trio.move_on_after(station.trial_delay) as delay:
            await self._noticed.wait()
        while all(station.outside.is_away(uuid) for uuid in self._apart):
            self._noticed = trio.Event()
            await self._noticed.wait()
        pace = station.pace
        station.trial_delay = (
            min(2 * station.trial_delay, pace.trial_last) if delay.cancelled_caught else pace.trial_first
        )
        self.wants_trial = True
        scope.cancel()

    async def _compose(self) -> None:
        """Makes Hardware of what the GPUs' tasks found, when all have answered or had their time."""
        station = self._station
        late: frozenset[int] = frozenset()
        version = self._census.version
        while True:
            await self._census.newer_than(version)
            with trio.move_on_after(station.pace.patience):
                while self._census.value.missing - late:
                    await self._census.newer_than(self._census.version)
            version, census = self._census.version, self._census.value
            late = census.missing
            if census.asked is None:
                continue
            listing = settle(census, station.listing, self._apart)
            with trio.move_on_after(station.pace.patience):
                # A handle from an older session must not be used in this one.
                await self._measure([one for one in listing.present if census.answers.get(one.gpu.index) is one])
            station.listing = listing
            for reading in listing.gone:
                station.report(
                    Sign(
                        reading.gpu.uuid,
                        "listed",
                        "the driver does not list it any more",
                        "look for it with lspci; if it was taken out on purpose, restart nvplug",
                        ends_in_reset=True,
                    )
                )
            self._publish(
                Hardware(
                    gpus=tuple(reading.gpu for reading in listing.readings),
                    links=link_table(listing.readings, self._paths),
                    control_nodes=census.control_nodes,
                    left_out=listing.left_out,
                    driver_version=self._session.version,
                )
            )
            self._composed.set()

    def _publish(self, new: Hardware) -> None:
        ledger, old = self._station.ledger, self._station.hardware.value
        if [gpu.uuid for gpu in old.gpus] != [gpu.uuid for gpu in new.gpus]:
            ledger.forget("driver")
        for index in {one.index for one in old.left_out} - {one.index for one in new.left_out}:
            ledger.forget(f"GPU {index}")
        for one in new.left_out:
            ledger.say(f"GPU {one.index}", GpuLeftOut(one.index, one.reason))
        for reading in self._station.listing.present:
            topic = f"events of GPU {reading.gpu.index}"
            if trouble := reading.registration.trouble:
                ledger.say(topic, GpuEventsMissing(reading.gpu.uuid, reading.gpu.index, trouble))
            else:
                ledger.forget(topic)
        ledger.say("driver", DriverFound("nvml", new.driver_version, len(new.gpus)))
        self._station.hardware.set(new)

    async def _measure(self, readings: list[Reading]) -> None:
        """Asks how GPUs meet, where that is not known yet: each in its own lane, about those after it."""

        async def ask(one: Reading, others: list[Reading]) -> None:
            paths = await hop(self._station.lanes.gpus[one.gpu.index], partial(self._session.paths, one, others))
            self._paths.update((key, path) for key, path in paths.items() if path is not PciPath.UNKNOWN)

        async with trio.open_nursery() as nursery:
            for position, one in enumerate(readings):
                others = [other for other in readings[position + 1 :] if pair(one, other) not in self._paths]
                if others:
                    nursery.start_soon(ask, one, others)
