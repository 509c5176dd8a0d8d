"""Where worker threads come from, and what becomes of a driver when there are none."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import trio
import trio.testing

from _nvplug.drivers.lanes import Lanes, hop
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


async def test_a_lane_made_while_somebody_wants_to_be_alone_opens_after_that() -> None:
    """A GPU that appears just then is not read while an event set is freed or the library shut down."""
    lanes, order = Lanes(), list[str]()
    inside, leave = trio.Event(), threading.Event()

    def ending() -> None:
        trio.from_thread.run_sync(inside.set)
        leave.wait()
        order.append("ended")

    async with trio.open_nursery() as nursery:
        # One that is made while it waits, and one while it works.
        async with lanes.library:
            nursery.start_soon(lanes.alone, ending, 20.0)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(hop, lanes.of_gpu(0), partial(order.append, "GPU 0"))
            await trio.testing.wait_all_tasks_blocked()
        await inside.wait()
        nursery.start_soon(hop, lanes.of_gpu(1), partial(order.append, "GPU 1"))
        await trio.testing.wait_all_tasks_blocked()
        leave.set()

    assert order[0] == "ended"
    assert sorted(order) == ["GPU 0", "GPU 1", "ended"]
