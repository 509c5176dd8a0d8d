"""The asyncio loop that grpclib needs, as a guest of Trio."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import trio_asyncio

__all__ = ["open_loop"]

logger = logging.getLogger("nvplug.kubelet")

# What accept() says when there is nothing left to accept with.
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


@asynccontextmanager
async def open_loop() -> AsyncIterator[None]:
    """Runs an asyncio loop for as long as the context lasts.

    trio-asyncio ends its loop on any exception in a callback, and one connection that a file descriptor is missing for,
    or one odd byte of a peer, is enough for that. asyncio itself has already dropped the connection at fault by the time
    it tells of the exception, so there is nothing to do but to say so.
    """
    async with trio_asyncio.open_loop() as loop:
        loop.set_exception_handler(_tell)
        yield


def _tell(_loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in _EXHAUSTED:
        logger.warning("no more connections for a moment: %s", error)
    elif "transport" in context:
        logger.warning("dropped a connection: %r", error)
    else:
        logger.error("%s", context.get("message"), exc_info=error)
