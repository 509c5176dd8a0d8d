"""How the driver's events are heard: one event set, one waiting thread, and what to do when that fails."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import trio

from _nvplug.drivers.lanes import Lanes, Ledger, Pace, hop
from _nvplug.drivers.readings import Census, Reading
from _nvplug.errors import DriverError
from _nvplug.happenings import EventsLost, EventsRegained, XidUnplaced
from _nvplug.hardware import GpuEvent
from _nvplug.latest import Latest

if TYPE_CHECKING:
    from _nvplug.drivers.session import Session

__all__ = ["Ears"]


class Ears:
    """Hears the events of one session.

    Attributes:
        ready: set when there is an event set, or none can be had at present.
    """

    def __init__(
        self,
        session: Session,
        lanes: Lanes,
        pace: Pace,
        ledger: Ledger,
        hear: Callable[[GpuEvent], None],
        register: Callable[[], None],
    ) -> None:
        """Sets up.

        Args:
            session: whose events.
            lanes: who may be inside the library.
            pace: how long things take.
            ledger: takes what is worth a line.
            hear: takes events.
            register: has every GPU registered with the event set that there is.
        """
        self.ready = trio.Event()
        self._session = session
        self._lanes = lanes
        self._pace = pace
        self._ledger = ledger
        self._hear = hear
        self._register = register

    async def listen(self, census: Latest[Census]) -> None:
        """Waits for events and hands them on; when that fails, backs off and makes a new event set.

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
                    await hop(self._lanes.events, partial(self._session.create_event_set, number))
                    self.ready.set()
                    await self._registered(number, census)
                seconds = self._pace.glance if lost else self._pace.slice
                event = await hop(self._lanes.events, partial(self._session.wait, seconds, once=lost))
            except DriverError as error:
                lost = True
                self._ledger.say("events", EventsLost(str(error), error.remedy))
                self.ready.set()
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
                self._hear(event)

    async def _registered(self, event_set: int, census: Latest[Census]) -> None:
        """Has every GPU registered with a new event set; returns when one has events and none is to be waited for."""
        self._register()

        def registrations() -> list[int]:
            answers = census.value.answers.values()
            return [answer.registration.event_set for answer in answers if isinstance(answer, Reading)]

        def heard() -> bool:
            answers = census.value.answers.values()
            return any(isinstance(answer, Reading) and answer.registration.heard for answer in answers)

        with trio.move_on_after(self._pace.patience):
            while census.value.missing or set(registrations()) != {event_set}:
                await census.newer_than(census.version)
        while not heard():
            await census.newer_than(census.version)
