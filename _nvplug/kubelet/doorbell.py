"""A hint that something moved in a directory, so that a slow poller need not be late."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import trio

__all__ = ["Doorbell"]

# From <sys/inotify.h>.
_IN_MOVED_FROM, _IN_MOVED_TO, _IN_CREATE, _IN_DELETE = 0x40, 0x80, 0x100, 0x200
_IN_DELETE_SELF, _IN_MOVE_SELF = 0x400, 0x800
_EVENTS = _IN_MOVED_FROM | _IN_MOVED_TO | _IN_CREATE | _IN_DELETE | _IN_DELETE_SELF | _IN_MOVE_SELF


class Doorbell:
    """Rings when a file is made, removed or renamed in a directory.

    It is inotify, with everything that makes inotify unfit to rely on: no watch is left when the user's limit is
    reached or the directory is replaced, and events get lost. So nothing relies on it. What rang is not even looked
    at: it only makes somebody look who would have looked anyway, some tenths of a second later.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        # -1 where there are no instances left: then it never rings.
        self._fd: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)

    def attach(self, directory: Path) -> None:
        """Listens to the directory that is at this path now. The watch on one that was there before ends with it."""
        if self._fd >= 0:
            self._libc.inotify_add_watch(self._fd, os.fsencode(directory), _EVENTS)

    async def rings_within(self, seconds: float) -> bool:
        """Waits until it rings, and for ``seconds`` at most; returns whether it rang."""
        with trio.move_on_after(seconds):
            if self._fd < 0:
                await trio.sleep_forever()
            await trio.lowlevel.wait_readable(self._fd)
            os.read(self._fd, 65536)
            return True
        return False

    def close(self) -> None:
        """Gives the descriptor back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
