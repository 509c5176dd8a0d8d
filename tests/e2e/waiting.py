"""Waiting for what another process brings about."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import trio

__all__ = ["LIMIT", "becomes", "holds"]

LIMIT: Final = 60.0
"""Seconds: generous, since a machine may be busy."""

_INTERVAL: Final = 0.05

_T = TypeVar("_T")


async def becomes(look: Callable[[], Awaitable[_T | None]], tell: Callable[[], str]) -> _T:
    """What ``look`` finds, as soon as that is something.

    Raises:
        AssertionError: nothing within LIMIT; its message is what ``tell`` says then.
    """
    with trio.move_on_after(LIMIT):
        while True:
            found = await look()
            if found is not None:
                return found
            await trio.sleep(_INTERVAL)
    raise AssertionError(f"not within {LIMIT:.0f} s\n{tell()}")


async def holds(condition: Callable[[], bool], tell: Callable[[], str]) -> None:
    """Returns as soon as a condition holds; as `becomes` otherwise."""

    async def look() -> bool | None:
        return condition() or None

    await becomes(look, tell)
