"""Where worker threads come from, and what becomes of a driver when there are none."""

from __future__ import annotations

import threading

import pytest
import trio

from _nvplug.drivers.lanes import hop
from _nvplug.errors import DriverError


async def test_no_thread_to_be_had_is_trouble_with_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told with what to do, and tried again, as any other; the lane is free for that."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    lane = trio.CapacityLimiter(1)
    with monkeypatch.context() as patched:
        patched.setattr("trio._core._thread_cache.THREAD_CACHE._idle_workers", {})
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(DriverError, match="can't start new thread") as caught:
            await hop(lane, lambda: None)

    assert "limit on processes" in caught.value.remedy
    assert lane.available_tokens == 1
    assert await hop(lane, lambda: 7) == 7
