"""The real driver: GPUs as libnvidia-ml.so.1 tells of them.

Simulated runs never import this module: it brings ``pynvml``, 40 ms and some megabytes.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from _nvplug.drivers.crew import Crew
from _nvplug.drivers.device_nodes import DeviceNodes
from _nvplug.drivers.lanes import Ledger, Pace, hop, patiently
from _nvplug.drivers.outside import Outside
from _nvplug.drivers.service import Service, Station
from _nvplug.drivers.session import Session
from _nvplug.errors import DriverError
from _nvplug.happenings import DriverTrouble, Publish
from _nvplug.hardware import Sign
from _nvplug.latest import Latest

if TYPE_CHECKING:
    from collections.abc import Callable

    from _nvplug.hardware import GpuEvent, Hardware

__all__ = ["NvmlDriver", "Pace"]


class NvmlDriver:
    """NVIDIA's driver as a ``Driver``: its GPUs, their events, and how they are.

    A GPU is read in full once, and from then on only recognised and asked how it is, until another is in its place or
    the driver was initialised anew. What was once put into ``hardware`` stays there while the driver is in trouble.
    """

    def __init__(
        self,
        root: str = "/driver-root",
        *,
        dev: str = "/dev",
        sysfs: str = "/sys",
        proc: str = "/proc",
        library_path: str | None = None,
        pace: Pace | None = None,
    ) -> None:
        """Sets up; nothing is touched before ``run``.

        Args:
            root: where this process sees the driver's root directory, which need not exist.
            dev: where it sees /dev.
            sysfs: where it sees /sys.
            proc: where it sees /proc.
            library_path: directories that may hold the library, by colons; LD_LIBRARY_PATH if None.
            pace: another than usual, for tests.
        """
        self._root = root
        self._dev = Path(dev)
        self._sysfs = sysfs
        self._proc = proc
        self._library_path = os.environ.get("LD_LIBRARY_PATH", "") if library_path is None else library_path
        self._pace = pace or Pace()
        self._released: Latest[frozenset[str]] = Latest(frozenset())

    def release(self, uuids: frozenset[str]) -> None:
        """See ``Releasing.release``."""
        self._released.set(uuids)

    async def run(self, hardware: Latest[Hardware], report: Callable[[GpuEvent], None], publish: Publish) -> None:
        """See ``Driver.run``."""
        ledger = Ledger(publish)
        station = Station(
            self._pace,
            DeviceNodes(self._dev, self._root, ledger),
            hardware,
            report,
            ledger,
            Outside(Path(self._sysfs), self._dev, Path(self._proc)),
            self._released,
            Crew(self._pace.late),
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(station.crew.run)
            nursery.start_soon(self._mind_silence, station)
            nursery.start_soon(self._serve, station)

    async def _serve(self, station: Station) -> None:
        """One session after another."""
        delay, on_trial = self._pace.retry_first, False
        station.trial_delay = self._pace.trial_first
        while True:
            # A GPU that waits for a repair is left alone, but for a look now and then whether it is well.
            apart = frozenset() if on_trial else station.to_let_go
            attach = partial(
                Session.open, self._root, self._library_path, sysfs=self._sysfs, proc=self._proc, attach=not apart
            )
            try:
                session = await patiently(
                    partial(hop, station.lanes.library, attach), "nvmlInit", self._pace.attach, station.ledger
                )
                if apart:
                    station.changes_hands(apart)
                service = Service(session, station, apart)
                await service.run()
                delay, on_trial = self._pace.retry_first, service.wants_trial
            except DriverError as error:
                on_trial = False
                station.ledger.say("driver", DriverTrouble(str(error), error.remedy))
                await trio.sleep(delay)
                delay = min(2 * delay, self._pace.retry_last)

    async def _mind_silence(self, station: Station) -> None:
        """Reports GPUs for which the driver has not answered for long; the next answer ends that."""
        limit = self._pace.silence
        while True:
            now = trio.current_time()
            oldest = now
            for reading in station.listing.present:
                uuid = reading.gpu.uuid
                heard = station.heard.setdefault(uuid, now)
                if uuid in station.let_go:
                    continue
                if now - heard < limit:
                    oldest = min(oldest, heard)
                    continue
                station.report(
                    Sign(
                        uuid,
                        "answer",
                        f"it has not answered for {limit:g} s",
                        "look for NVRM lines in the kernel log; a driver that hangs often needs a reboot of the node",
                    )
                )
            await trio.sleep(max(oldest + limit - now, limit / 10))
