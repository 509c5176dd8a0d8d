"""How tests wait for what threads and other processes bring about, and see what is left of it in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import trio

__all__ = ["loaded", "open_files", "until"]


async def until(condition: Callable[[], object]) -> None:
    """Waits for what threads and other processes bring about, and cannot tell."""
    with trio.fail_after(20):
        while not condition():  # noqa: ASYNC110 - see there
            await trio.sleep(0.002)


def loaded(library: Path) -> bool:
    """Whether this process has a library in memory."""
    return str(library) in Path("/proc/self/maps").read_text()


def open_files() -> int:
    """How many descriptors this process has."""
    return len(list(Path("/proc/self/fd").iterdir()))
