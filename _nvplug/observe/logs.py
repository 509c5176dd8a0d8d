"""What happened, as lines on stderr: a time, a level, some words, and the fields."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import fields

from _nvplug import happenings
from _nvplug.happenings import Happening

__all__ = ["line", "log", "set_up_logging"]

logger = logging.getLogger("nvplug")

# Lines that may wait for whoever reads stderr, and seconds that the end of the program waits for them.
MOST_LINES = 1000
FLUSHED_WITHIN = 0.5

_LINES: Mapping[type[Happening], tuple[int, str]] = {
    happenings.Allocated: (logging.INFO, "allocated"),
    happenings.AllocationRefused: (logging.WARNING, "refused an allocation"),
    happenings.ConfigApplied: (logging.INFO, "the new configuration is in force"),
    happenings.ConfigKeysObeyed: (logging.WARNING, "NVIDIA's plugin ignores some keys of the file that nvplug obeys"),
    happenings.ConfigRedundant: (logging.INFO, "a part of the configuration could be left out"),
    happenings.ConfigRefused: (logging.ERROR, "the new configuration cannot be obeyed; the one before stands"),
    happenings.ConfigUnmet: (logging.WARNING, "a part of the configuration does not fit this node"),
    happenings.ConfigWaits: (logging.WARNING, "an option changed that only a restart of nvplug can change"),
    happenings.Deregistered: (logging.INFO, "ended the registration"),
    happenings.DeviceExcluded: (logging.INFO, "a GPU is excluded"),
    happenings.DeviceNodesMade: (logging.INFO, "made device nodes that were missing"),
    happenings.DeviceNodesMissing: (logging.WARNING, "device nodes are missing; containers do without them"),
    happenings.DeviceNotOffered: (logging.WARNING, "a device is not offered"),
    happenings.DevicesListed: (logging.INFO, "listed devices"),
    happenings.DevicesNotDescribed: (
        logging.WARNING,
        "devices are missing in the CDI document, since a device node of theirs is; no container can be given them",
    ),
    happenings.DirectoryDead: (
        logging.ERROR,
        "the kubelet's directory was deleted behind our mount of it; a new process is needed",
    ),
    happenings.DocumentNotWritten: (
        logging.ERROR,
        "the CDI documents are not up to date, so containers may not be given their devices; trying again",
    ),
    happenings.DocumentRemoved: (logging.INFO, "removed a CDI document"),
    happenings.DocumentWritten: (logging.INFO, "wrote a CDI document"),
    happenings.DriverFilesFound: (logging.INFO, "found the driver's files for containers"),
    happenings.DriverFound: (logging.INFO, "found GPUs"),
    happenings.DriverTrouble: (logging.WARNING, "the driver cannot be used; trying again"),
    happenings.EventsLost: (logging.WARNING, "errors of GPUs cannot be heard; trying again"),
    happenings.EventsRegained: (logging.INFO, "errors of GPUs are heard again"),
    happenings.GpuEventsMissing: (logging.WARNING, "errors of a GPU cannot be heard; trying again"),
    happenings.GpuLate: (logging.WARNING, "the driver is late to answer for a GPU; the others are looked at meanwhile"),
    happenings.GpuLeftOut: (logging.WARNING, "a GPU cannot be read and is not offered"),
    happenings.GpuReleased: (logging.INFO, "let go of a GPU, so that it can be repaired"),
    happenings.GpuRestored: (logging.INFO, "a GPU is healthy again"),
    happenings.GpuTakenUp: (logging.INFO, "took up a GPU again"),
    happenings.GpuUnhealthy: (logging.ERROR, "a GPU is unhealthy"),
    happenings.HealthForgotten: (logging.WARNING, "verdicts from before the start do not stand"),
    happenings.HealthNotKept: (logging.WARNING, "verdicts cannot be kept for the next start"),
    happenings.HealthPolicyInForce: (logging.INFO, "health policy"),
    happenings.HealthPolicyMalformed: (logging.WARNING, "a part of the health policy makes no sense and is left out"),
    happenings.HealthRemembered: (logging.WARNING, "verdicts from before the start stand"),
    happenings.KubeletAwaited: (logging.INFO, "waiting for the kubelet"),
    happenings.KubeletRestarted: (logging.INFO, "the kubelet has a new socket; registering anew"),
    happenings.ListRefused: (logging.ERROR, "cannot send a device list; the one before stands"),
    happenings.LivingSocketsFound: (
        logging.WARNING,
        "another plugin offers the same resource; the kubelet will mix up their devices",
    ),
    happenings.ProbesNotAnswered: (logging.WARNING, "nvplug health cannot be answered; trying again"),
    happenings.Registered: (logging.INFO, "registered"),
    happenings.RegistrationRefused: (logging.WARNING, "the kubelet refuses the registration; trying again"),
    happenings.RegistrationUnanswered: (
        logging.WARNING,
        "the kubelet does not answer the registration; serving on and trying again",
    ),
    happenings.RemapPending: (logging.INFO, "a GPU remaps memory at its next reset, and serves on"),
    happenings.SocketNotMade: (logging.WARNING, "cannot make our socket; trying again"),
    happenings.SocketVanished: (logging.WARNING, "our socket vanished; registering anew"),
    happenings.StaleSocketRemoved: (logging.INFO, "removed a socket of an earlier life"),
    happenings.StreamLost: (logging.INFO, "the kubelet ended its stream; registering anew"),
    happenings.StreamMissing: (
        logging.WARNING,
        "the kubelet accepted the registration and does not call ListAndWatch; registering again",
    ),
    happenings.XidUnplaced: (logging.WARNING, "a critical error belongs to no known GPU"),
}


def set_up_logging() -> logging.Handler:
    """Sends lines to stderr, where systemd and container runtimes expect them; libraries' warnings as well.

    Returns:
        What writes them, from a thread; ``flush`` waits for it.
    """
    handler = _Writer(sys.stderr.fileno())
    formatter = logging.Formatter("%(asctime)s.%(msecs)03dZ %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logger.setLevel(logging.INFO)
    return handler


def log(happening: Happening) -> None:
    """Publishes a happening as a line."""
    level, _ = _LINES[type(happening)]
    logger.log(level, "%s", line(happening))


def line(happening: Happening) -> str:
    """The words for a happening, followed by its fields."""
    _, words = _LINES[type(happening)]
    values = ((field.name, getattr(happening, field.name)) for field in fields(happening))
    return " ".join([words, *(f"{name}={_written(value)}" for name, value in values if value != "")])


def _written(value: object) -> str:
    if isinstance(value, float):
        # Durations, in seconds.
        return f"{value:.3f}s"
    text = str(value)
    if text.isprintable() and not set(text) & set(' "='):
        return text
    # One happening is one line, and each of its fields is one, whatever an exception says.
    return json.dumps(text, ensure_ascii=not text.isprintable())


class _Writer(logging.Handler):
    """Writes lines from a thread of its own: a stderr that nobody reads must not keep the kubelet waiting.

    (O_NONBLOCK would do without a thread, but it would be set for everyone who shares the open file.)
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lines: queue.Queue[str] = queue.Queue(MOST_LINES)
        self._dropped = 0
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Takes a record; when too many wait, drops it and counts."""
        try:
            self._lines.put_nowait(self.format(record) + "\n")
        except queue.Full:
            self._dropped += 1

    def flush(self) -> None:
        """Waits until everything is written, but not for long: at the end of the program it may never be."""
        deadline = time.monotonic() + FLUSHED_WITHIN
        while self._lines.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.001)

    def _write(self) -> None:
        while True:
            text = self._lines.get()
            if self._dropped:
                dropped, self._dropped = self._dropped, 0
                text += f"{dropped} lines were lost, since nobody read them\n"
            data = text.encode(errors="backslashreplace")
            with contextlib.suppress(OSError):
                while data:
                    data = data[os.write(self._descriptor, data) :]
            self._lines.task_done()
