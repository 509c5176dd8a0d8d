"""The one way a value travels between tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NoReturn, TypeVar

import trio

__all__ = ["Latest"]

T = TypeVar("T")


class Latest(Generic[T]):
    """A cell that holds the newest of a series of immutable values.

    One task writes; any number read, each remembering the version it used last. A reader that falls behind skips
    what it missed and sees the newest: for device lists that is the wanted meaning, and why this is not a channel.
    (A channel has one reader per message, or one queue per reader to fill up when that reader hangs.)

    Everything here belongs to the Trio thread. asyncio callbacks that trio-asyncio runs are in that thread, too.
    """

    def __init__(self, value: T) -> None:
        self._value = value
        self._version = 0
        self._changed = trio.Event()

    @property
    def value(self) -> T:
        """The newest value."""
        return self._value

    @property
    def version(self) -> int:
        """How often the value has changed: 0 for the first."""
        return self._version

    def set(self, value: T) -> None:
        """Replaces the value and wakes every reader; an equal value is no news."""
        if value == self._value:
            return
        self._value = value
        self._version += 1
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    async def newer_than(self, version: int) -> T:
        """Waits until there has been a change since ``version``, and returns the newest value. Always a checkpoint.

        Read ``version`` right after, before any other ``await``, to know which one it is.
        """
        if self._version > version:
            await trio.lowlevel.checkpoint()
        while self._version <= version:
            await self._changed.wait()
        return self._value

    async def follow(self, take: Callable[[T], None]) -> NoReturn:
        """Hands the value to ``take``, and every newer one, until cancelled."""
        while True:
            version = self._version
            take(self._value)
            await self.newer_than(version)
