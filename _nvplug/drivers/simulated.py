"""GPUs on paper: for the demo, for tests, and for clusters without hardware.

``--device-discovery-strategy simulated:8xH100`` takes a machine from the table in `machines`, and nothing
about it ever changes. ``simulated:FILE`` reads a JSON file, as `description` has it, and reads it again whenever
it changes while nvplug runs. What is in the file is what is so: a fault breaks its GPU for as long as the file
lists it.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from _nvplug.drivers.description import Simulation, decode, simulate
from _nvplug.drivers.machines import MACHINES_ALLOWED, Machine, find_machine
from _nvplug.errors import OptionError
from _nvplug.happenings import DriverFound, DriverTrouble
from _nvplug.hardware import Fault, Gpu, Hardware, Restored, Xid

if TYPE_CHECKING:
    from collections.abc import Callable

    from _nvplug.happenings import Publish
    from _nvplug.hardware import GpuEvent
    from _nvplug.latest import Latest

__all__ = ["SimulatedDriver", "SimulatedFile", "parse_simulated"]

POLL_INTERVAL = 0.1
"""Seconds between two looks at the file."""


@dataclass(frozen=True, slots=True)
class SimulatedFile:
    """A path whose content describes the GPUs."""

    path: str


def parse_simulated(strategy: str) -> Machine | SimulatedFile:
    """What ``simulated:…``, a value of ``--device-discovery-strategy``, stands for.

    A file is read once, so that one that says nothing sensible is found at start.

    Raises:
        OptionError: neither a known machine nor a file that can be read and understood.
    """
    _, _, what = strategy.partition(":")
    try:
        return find_machine(what)
    except OptionError as error:
        if "/" not in what and not what.endswith(".json") and not os.path.isfile(what):  # noqa: PTH113 - a long name is no error
            raise OptionError(
                f"--device-discovery-strategy={strategy}: there is no such file, and {error}",
                remedy=f"name {MACHINES_ALLOWED}, or the path of a JSON file that describes the GPUs",
            ) from None
    content = _Watched(what).news() or b""
    decode(content, what)
    return SimulatedFile(what)


class SimulatedDriver:
    """A `Driver` whose hardware is on paper."""

    def __init__(self, source: Machine | SimulatedFile) -> None:
        self._source = source

    async def run(self, hardware: Latest[Hardware], report: Callable[[GpuEvent], None], publish: Publish) -> None:
        """See `Driver.run`. The first snapshot is there before the first wait."""
        stage = _Stage(hardware, report, publish)
        if isinstance(self._source, Machine):
            stage.show(simulate(self._source))
            await trio.sleep_forever()
        file = _Watched(self._source.path)
        while True:
            try:
                content = file.news()
                if content is not None:
                    stage.show(decode(content, self._source.path))
            except OptionError as error:
                stage.trouble(str(error), error.remedy)
            await trio.sleep(POLL_INTERVAL)


class _Stage:
    """Turns one simulation after another into snapshots, and the differences between them into events."""

    def __init__(self, hardware: Latest[Hardware], report: Callable[[GpuEvent], None], publish: Publish) -> None:
        self._hardware = hardware
        self._report = report
        self._publish = publish
        self._shown: tuple[Gpu, ...] | None = None
        self._faults: dict[str, Xid | Fault] = {}
        self._trouble: str | None = None

    def show(self, simulation: Simulation) -> None:
        gpus = simulation.hardware.gpus
        # The snapshot first: a report is about a GPU that its reader can look up.
        self._hardware.set(simulation.hardware)
        if gpus != self._shown or self._trouble is not None:
            self._publish(DriverFound(driver="simulated", version="", gpus=len(gpus)))
        self._shown = gpus
        self._trouble = None
        # A GPU that is gone is not restored: it must be there, and well. Until then its fault is remembered.
        present = {gpu.uuid for gpu in gpus} if self._faults else set()
        for uuid, fault in list(self._faults.items()):
            if uuid in present and simulation.faults.get(uuid) != fault:
                del self._faults[uuid]
                self._report(Restored(uuid, evidence=f"the description no longer lists its {_named(fault)}"))
        for uuid, fault in simulation.faults.items():
            if uuid not in self._faults:
                self._faults[uuid] = fault
                self._report(fault)

    def trouble(self, reason: str, remedy: str) -> None:
        if reason != self._trouble:
            self._trouble = reason
            self._publish(DriverTrouble(reason, remedy))


def _named(fault: Xid | Fault) -> str:
    return f"XID {fault.code}" if isinstance(fault, Xid) else f"fault ({fault.reason})"


_Signature = tuple[int, int, int, int]


class _Watched:
    """A file that may be replaced, rewritten in place, missing or half-written.

    It is looked at in the Trio thread, at the cost of one stat(2). A thread for each look would cost a
    hundred times as much, and nobody keeps such a file on a file system that hangs.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._signature: _Signature | None = None
        self._content: bytes | None = None
        self._settled = False

    def news(self) -> bytes | None:
        """The content if it is not what the last call saw, else None.

        Raises:
            OptionError: there is no file, or it cannot be read.
        """
        try:
            # Time stamps are as coarse as a kernel tick, up to 10 ms: two writes of equal length within one
            # look alike. So what is new is read once more at the next look, when a later write has a later
            # tick.
            found = _read(self._path, unless=self._signature if self._settled else None)
        except OptionError:
            self._signature, self._content, self._settled = None, None, False
            raise
        if found is None:
            return None
        signature, content = found
        self._settled = signature == self._signature
        self._signature = signature
        if content == self._content:
            return None
        self._content = content
        return content


def _signature(status: os.stat_result) -> _Signature:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _read(path: str, unless: _Signature | None = None) -> tuple[_Signature, bytes] | None:
    """The content of a file and its signature; None if that is ``unless``."""
    remedy = "put a JSON file that describes the GPUs there"
    try:
        if unless is not None and _signature(Path(path).stat()) == unless:
            return None
        # Not blocking, for the path may be a FIFO, whose opening would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OptionError(f"{path} is not a regular file", remedy=remedy)
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                return _signature(status), file.read()
        finally:
            os.close(descriptor)
    except OSError as error:
        raise OptionError(f"cannot read {path}: {error.strerror}", remedy=remedy) from error
