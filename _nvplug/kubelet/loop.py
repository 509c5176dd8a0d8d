"""The asyncio loop that grpclib needs, as a guest of Trio."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import trio_asyncio
from grpclib.exceptions import StreamTerminatedError
from h2.exceptions import ProtocolError

__all__ = ["come_round", "open_loop"]

logger = logging.getLogger("nvplug.kubelet")

# What accept() says when there is nothing left to accept with.
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


# Seconds between two lines about connections. There may be a thousand in one.
QUIET_FOR = 10.0


@asynccontextmanager
async def open_loop() -> AsyncIterator[None]:
    """Runs an asyncio loop for as long as the context lasts.

    trio-asyncio ends its loop on any exception in a callback, and one connection that a file descriptor is missing for,
    or one odd byte of a peer, is enough for that. asyncio itself has already dropped the connection at fault by the
    time it tells of the exception, so there is nothing to do but to say so.
    """
    logging.getLogger("grpclib.server").addFilter(_is_our_fault)
    async with trio_asyncio.open_loop() as loop:
        loop.set_exception_handler(_Teller().tell)
        yield


class _Teller:
    """Says what went wrong in a callback: our own faults each time, others' faults now and then."""

    def __init__(self) -> None:
        self._quiet_until = -math.inf
        self._left_out = 0

    def tell(self, loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        """See asyncio's ``set_exception_handler``."""
        error = context.get("exception")
        exhausted = isinstance(error, OSError) and error.errno in _EXHAUSTED
        if not exhausted and "transport" not in context:
            logger.error("%s", context.get("message"), exc_info=error)
        elif loop.time() < self._quiet_until:
            self._left_out += 1
        else:
            words = "no more connections for a moment" if exhausted else "dropped a connection"
            since = f"; {self._left_out} more such troubles since the last line" if self._left_out else ""
            logger.warning("%s: %r%s", words, error, since)
            self._quiet_until, self._left_out = loop.time() + QUIET_FOR, 0


async def come_round() -> None:
    """Returns when the loop has come round once, and so lives. For a task inside ``open_loop``."""
    await trio_asyncio.aio_as_trio(asyncio.sleep)(0)


def _is_our_fault(record: logging.LogRecord) -> bool:
    """Whether grpclib logs an exception of ours; it logs callers, too, that go away while they are being answered."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, ProtocolError | StreamTerminatedError | None)
