"""The real driver: GPUs as libnvidia-ml.so.1 tells of them.

Simulated runs never import this module: it brings ``pynvml``, 40 ms and some megabytes.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from _nvplug.drivers.service import Lanes, Ledger, Pace, Service, patiently
from _nvplug.drivers.session import Session
from _nvplug.errors import DriverError
from _nvplug.happenings import DriverTrouble, Publish

if TYPE_CHECKING:
    from collections.abc import Callable

    from _nvplug.drivers.readings import Reading
    from _nvplug.hardware import GpuEvent, Hardware
    from _nvplug.latest import Latest

__all__ = ["NvmlDriver", "Pace"]


class NvmlDriver:
    """NVIDIA's driver as a ``Driver``: its GPUs, and their XIDs.

    A GPU is read in full once, and from then on only recognised, until another is in its place or the driver was
    initialised anew. What was once put into ``hardware`` stays there while the driver is in trouble.
    """

    def __init__(
        self,
        root: str = "/driver-root",
        *,
        dev: str = "/dev",
        sysfs: str = "/sys",
        library_path: str | None = None,
        pace: Pace | None = None,
    ) -> None:
        """Sets up; nothing is touched before ``run``.

        Args:
            root: where this process sees the driver's root directory, which need not exist.
            dev: where it sees /dev.
            sysfs: where it sees /sys.
            library_path: directories that may hold the library, by colons; LD_LIBRARY_PATH if None.
            pace: another than usual, for tests.
        """
        self._root = root
        self._dev = Path(dev)
        self._sysfs = sysfs
        self._library_path = os.environ.get("LD_LIBRARY_PATH", "") if library_path is None else library_path
        self._pace = pace or Pace()

    async def run(self, hardware: Latest[Hardware], report: Callable[[GpuEvent], None], publish: Publish) -> None:
        """See ``Driver.run``."""
        ledger = Ledger(publish)
        lanes = Lanes()
        # From session to session: a GPU that is slow to be read again is not dropped meanwhile.
        known: dict[int, Reading] = {}
        attach = partial(Session.open, self._root, self._library_path, sysfs=self._sysfs)
        delay = self._pace.retry_first
        while True:
            try:
                session = await patiently(lanes.library, attach, "nvmlInit", self._pace.attach, ledger)
                await Service(session, lanes, self._pace, self._dev, known, hardware, report, ledger).run()
                delay = self._pace.retry_first
            except DriverError as error:
                ledger.say("driver", DriverTrouble(str(error), error.remedy))
                await trio.sleep(delay)
                delay = min(2 * delay, self._pace.retry_last)
