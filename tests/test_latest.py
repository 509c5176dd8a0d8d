from __future__ import annotations

from itertools import pairwise

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from _nvplug.latest import Latest


@given(st.lists(st.integers(0, 2)))
def test_the_version_counts_changes(values: list[int]) -> None:
    """A value that equals the one before makes no version; every other one does, also one that was there earlier."""
    cell = Latest(0)
    for value in values:
        cell.set(value)

    history = [0, *values]
    assert cell.value == history[-1]
    assert cell.version == sum(before != after for before, after in pairwise(history))


async def test_a_reader_waits_for_news() -> None:
    """A reader of the newest version sleeps until there is another, and is not woken by an equal value."""
    cell = Latest("a")
    got: list[str] = []

    async def read() -> None:
        got.append(await cell.newer_than(cell.version))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        cell.set("a")
        await trio.testing.wait_all_tasks_blocked()
        assert not got

        cell.set("b")

    assert got == ["b"]


async def test_a_reader_that_falls_behind_sees_the_newest() -> None:
    """What a reader missed it never sees, and it does not wait for what is there already."""
    cell = Latest(0)
    version = cell.version
    for value in range(1, 6):
        cell.set(value)

    assert await cell.newer_than(version) == 5
    assert cell.version == 5


async def test_changes_while_a_reader_wakes_are_not_lost() -> None:
    """A value set after a reader was woken and before it ran is the one that it gets."""
    cell = Latest(0)
    got: list[int] = []

    async def read() -> None:
        got.append(await cell.newer_than(0))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        cell.set(1)
        cell.set(2)

    assert got == [2]


async def test_every_reader_is_woken() -> None:
    """Readers share nothing: each gets the value, however many there are and whatever becomes of the others."""
    cell = Latest(0)
    got: list[int] = []

    async def read() -> None:
        got.append(await cell.newer_than(0))

    async def read_for_a_while(scope: trio.CancelScope) -> None:
        with scope:
            await read()

    leaving = trio.CancelScope()
    async with trio.open_nursery() as nursery:
        for _ in range(100):
            nursery.start_soon(read)
        nursery.start_soon(read_for_a_while, leaving)
        await trio.testing.wait_all_tasks_blocked()
        leaving.cancel()
        await trio.testing.wait_all_tasks_blocked()
        cell.set(1)

    assert got == [1] * 100


async def test_a_follower_takes_every_version_it_can() -> None:
    """It begins with the value that is there, goes on with each newer one, and ends when cancelled."""
    cell = Latest(0)
    taken: list[int] = []

    async with trio.open_nursery() as nursery:
        nursery.start_soon(cell.follow, taken.append)
        for value in (1, 1, 2):
            await trio.testing.wait_all_tasks_blocked()
            cell.set(value)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()

    assert taken == [0, 1, 2]


async def test_a_follower_may_write_what_it_follows() -> None:
    """A value set from within ``take`` is taken next."""
    cell = Latest(0)
    taken: list[int] = []

    def take(value: int) -> None:
        taken.append(value)
        cell.set(min(value + 1, 3))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(cell.follow, take)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()

    assert taken == [0, 1, 2, 3]


async def test_reading_is_a_checkpoint() -> None:
    """A reader can be cancelled even where it never has to wait, as Trio promises of every async function."""
    cell = Latest(0)
    cell.set(1)

    with trio.testing.assert_checkpoints():
        await cell.newer_than(0)
    with trio.CancelScope() as scope:
        scope.cancel()
        await cell.newer_than(0)
        pytest.fail("a cancelled reader went on")
