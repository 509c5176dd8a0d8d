"""Where hardware and its events come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from _nvplug.happenings import Publish
    from _nvplug.hardware import GpuEvent, Hardware
    from _nvplug.latest import Latest

__all__ = ["Driver", "Releasing"]


class Driver(Protocol):
    """A source of hardware: the real one, or GPUs on paper."""

    async def run(self, hardware: Latest[Hardware], report: Callable[[GpuEvent], None], publish: Publish) -> None:
        """Keeps ``hardware`` up to date and reports events, until cancelled.

        No trouble with a driver or a GPU ends it: it publishes what is wrong, once per change, and tries again.
        ``report`` and ``publish`` are synchronous, never fail, and are called in the Trio thread only.
        """


@runtime_checkable
class Releasing(Protocol):
    """A driver that holds GPUs open, and so may stand in the way of a repair."""

    def release(self, uuids: frozenset[str]) -> None:
        """Says which GPUs wait for a repair, all of them.

        They are let go of, looked at now and then, and taken up when they are named no more. Synchronous, never
        fails, and is called in the Trio thread only.
        """
