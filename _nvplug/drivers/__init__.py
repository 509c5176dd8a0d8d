"""Where hardware and its events come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from _nvplug.happenings import Publish
    from _nvplug.hardware import GpuEvent, Hardware
    from _nvplug.latest import Latest

__all__ = ["Driver"]


class Driver(Protocol):
    """A source of hardware: the real one, or GPUs on paper."""

    async def run(self, hardware: Latest[Hardware], report: Callable[[GpuEvent], None], publish: Publish) -> None:
        """Keeps ``hardware`` up to date and reports events, until cancelled.

        No trouble with a driver or a GPU ends it: it publishes what is wrong, once per change, and tries again.
        ``report`` and ``publish`` are synchronous, never fail, and are called in the Trio thread only.
        """
