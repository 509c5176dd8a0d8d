"""The one place where an exception that nobody foresaw is caught."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio

from _nvplug.errors import NewProcessNeededError

__all__ = ["again"]

logger = logging.getLogger("nvplug.supervise")

# Seconds before the first new run, doubling up to the second figure; a run that lasted the third begins anew.
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 30.0
SOUND_AFTER = 60.0


async def again(name: str, run: Callable[[], Awaitable[None]]) -> None:
    """Runs ``run``, and whenever it fails, logs why and runs it anew after a pause; returns when it returns.

    A fault in one resource must not take the node's other GPUs away, nor end the program. Each run is a scope of its
    own: when it raises, everything that it started has been cancelled and cleaned up.

    Args:
        name: what fails, for the log.
        run: one life of it.

    Raises:
        NewProcessNeededError: passes, since running anew in this process cannot help.
    """
    pause = 0.0
    while True:
        started = trio.current_time()
        try:
            return await run()
        except* NewProcessNeededError:
            raise
        except* Exception:
            sound = trio.current_time() - started >= SOUND_AFTER
            pause = min(2 * pause, LONGEST_PAUSE) if pause and not sound else FIRST_PAUSE
            logger.exception("%s failed, which is a fault in nvplug; it is run anew in %.1f s", name, pause)
        await trio.sleep(pause)
