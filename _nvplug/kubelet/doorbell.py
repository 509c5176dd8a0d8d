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
_IN_MASK_ADD = 0x20000000
_EVENTS = _IN_MOVED_FROM | _IN_MOVED_TO | _IN_CREATE | _IN_DELETE | _IN_DELETE_SELF | _IN_MOVE_SELF


class Doorbell:
    """Rings when a file is made, removed or renamed in a directory.

    It is inotify, with everything that makes inotify unfit to rely on: no watch is left when the user's limit is
    reached or the directory is replaced, and events get lost. So nothing relies on it. What rang is not even looked
    at: it only makes somebody look who would have looked anyway, some tenths of a second later, or some seconds later
    where it is ``proven``.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        # -1 where there are no instances left: then it never rings.
        self._fd: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._listens = False
        self._rang = False
        self._owes = False
        self._rang_for_changes = False
        self._was_silent = False

    @property
    def proven(self) -> bool:
        """Whether it listens to this directory, has rung for a change in it, and never was silent about one.

        A single silence is enough: where another machine writes to the directory, say, our own changes ring and
        the kubelet's do not.
        """
        return self._listens and self._rang_for_changes and not self._was_silent

    def attach(self, directory: Path, *, other: bool) -> None:
        """Listens to the directory that is at this path now. The watch on one that was there before ends with it.

        Args:
            directory: the path.
            other: whether it is another directory than before, at which nothing is proven.
        """
        if self._fd < 0:
            return
        self._listens = self._libc.inotify_add_watch(self._fd, os.fsencode(directory), _EVENTS) >= 0
        # That the directory above moves is no event of this one, though it moves along. Added: / is its own parent.
        self._libc.inotify_add_watch(self._fd, os.fsencode(directory.parent), _IN_MOVE_SELF | _IN_MASK_ADD)
        if other:
            self._rang_for_changes = self._owes = False

    def judge(self, *, changed: bool) -> None:
        """Takes in what a look at the directory saw, after each one: whether files came or went since the last."""
        if changed and self._rang:
            self._rang_for_changes = True
        # The change may be younger than the last wait: then its ring is the first thing that the next one hears.
        self._owes = changed and not self._rang
        self._rang = False

    async def rings_within(self, seconds: float) -> bool:
        """Waits until it rings, and for ``seconds`` at most; returns whether it rang."""
        with trio.move_on_after(seconds):
            if self._fd < 0:
                await trio.sleep_forever()
            await trio.lowlevel.wait_readable(self._fd)
            os.read(self._fd, 65536)
            self._rang, self._owes = True, False
            return True
        self._was_silent = self._was_silent or self._owes
        return False

    def close(self) -> None:
        """Gives the descriptor back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
