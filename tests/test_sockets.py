# ruff: noqa: ASYNC110, ASYNC240, ASYNC251 - what is waited for has no event, and files are what is tested
"""The poller, its doorbell, and what earlier lives have left, in this process and on a real file system."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from _nvplug.errors import DirectoryDeadError
from _nvplug.happenings import Happening, LivingSocketsFound, StaleSocketRemoved
from _nvplug.kubelet.doorbell import Doorbell
from _nvplug.kubelet.sockets import QUIET, Change, Identity, Poller, change, clear_leftovers, identify, new_socket

# Seconds. Time stamps of files are as coarse as a tick of the kernel; no kubelet starts faster.
TICK: Final = 0.011

identities = st.none() | st.builds(
    Identity, device=st.integers(1, 2), inode=st.integers(1, 2), changed_ns=st.integers(1, 2)
)


@given(identities, identities)
def test_a_change_is_what_differs(before: Identity | None, after: Identity | None) -> None:
    """Equal identities are no change; otherwise it appeared, vanished or was replaced, whatever part of it differs."""
    found = change(before, after)

    assert (found is None) == (before == after)
    assert (found is Change.APPEARED) == (before is None and after is not None)
    assert (found is Change.VANISHED) == (before is not None and after is None)
    assert (found is Change.REPLACED) == (None not in {before, after} and before != after)


@given(st.lists(identities, min_size=1))
def test_changes_tell_what_is_there(looks: list[Identity | None]) -> None:
    """Who starts from what was there and follows the changes always knows whether a file is there."""
    there = looks[0] is not None
    for before, after in pairwise(looks):
        found = change(before, after)
        there = there if found is None else found is not Change.VANISHED

        assert there == (after is not None)


def bind(path: Path) -> None:
    """Makes a socket file."""
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


def test_a_socket_that_is_made_again_is_another(place: Path) -> None:
    """Every time, although a disk gives it the same inode number."""
    place.mkdir()
    seen = []
    for _ in range(50):
        bind(place / "s")
        seen.append(identify(place / "s"))
        (place / "s").unlink()
        time.sleep(TICK)

    assert None not in seen
    assert len(set(seen)) == 50
    assert identify(place / "s") is None


def poller_of(directory: Path, *, settled: bool = True) -> Poller:
    """A poller that nobody reads the happenings of."""
    return Poller(directory, lambda: settled, lambda _happening: None)


async def never_rings(_self: Doorbell, seconds: float) -> bool:
    """What a doorbell is that has no inotify instance, a lost event, or a directory that was replaced."""
    await trio.sleep(seconds)
    return False


def remake(directory: Path) -> None:
    """The directory is deleted and made again, with another socket in it."""
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()
    directory.mkdir()
    bind(directory / "s")


def replace_by_rename(directory: Path) -> None:
    """A socket takes the place of another in one step."""
    bind(directory / "new")
    (directory / "new").rename(directory / "s")


STEPS: Mapping[str, tuple[Callable[[Path], object], list[Change]]] = {
    "appears": (lambda directory: bind(directory / "s"), [Change.APPEARED]),
    "vanishes": (lambda directory: (directory / "s").unlink(), [Change.VANISHED]),
    "is replaced": (replace_by_rename, [Change.REPLACED]),
    "is replaced with its directory": (remake, [Change.REPLACED]),
    "vanishes with its directory": (lambda directory: directory.rename(directory.with_name("d")), [Change.VANISHED]),
}


async def tells(directory: Path, name: str, quiet: float) -> None:
    """Checks that the poller tells of a step once, after ``quiet`` seconds in which it had nothing to tell."""
    step, expected = STEPS[name]
    directory.mkdir()
    if expected != [Change.APPEARED]:
        bind(directory / "s")
        time.sleep(TICK)
    poller, changes = poller_of(directory), list[Change]()
    poller.watch(directory / "s", changes.append)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(poller.run)
        await trio.sleep(quiet)

        assert not changes
        step(directory)
        with trio.fail_after(10 * QUIET):
            while not changes:
                await trio.sleep(0.01)
        await trio.sleep(quiet)

        assert changes == expected
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("name", STEPS)
async def test_the_poller_tells_of_every_step(place: Path, name: str) -> None:
    """Once, and of nothing when nothing happens."""
    await tells(place, name, 0.05)


@pytest.mark.parametrize("name", STEPS)
async def test_the_poller_needs_no_doorbell(
    place: Path,
    name: str,
    autojump_clock: trio.testing.MockClock,  # noqa: ARG001  # pytest-trio takes the clock from it
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without one it tells the same, by looking."""
    monkeypatch.setattr(Doorbell, "rings_within", never_rings)
    await tells(place, name, 3 * QUIET)


async def test_a_watch_ends_when_it_is_told_to(disk: Path) -> None:
    """After that no change is told, and other watches go on."""
    disk.mkdir()
    poller, one, other = poller_of(disk), list[Change](), list[Change]()
    unwatch = poller.watch(disk / "s", one.append)
    poller.watch(disk / "s", other.append)
    unwatch()
    bind(disk / "s")
    poller.look()

    assert (one, other) == ([], [Change.APPEARED])


async def test_a_look_survives_watches_that_end_meanwhile(disk: Path) -> None:
    """Whoever hears of a change may end any watch, also one that this look has still to come to."""
    disk.mkdir()
    poller, heard = poller_of(disk), list[str]()
    unwatch: list[Callable[[], None]] = []

    def first(_change: Change) -> None:
        heard.append("first")
        unwatch[1]()

    unwatch.append(poller.watch(disk / "s", first))
    unwatch.append(poller.watch(disk / "s", lambda _change: heard.append("second")))
    bind(disk / "s")
    poller.look()

    assert heard == ["first"]


@pytest.mark.parametrize(("settled", "least", "most"), [(True, 15, 22), (False, 95, 101)])
async def test_the_poller_looks_often_only_where_somebody_waits(
    disk: Path,
    autojump_clock: trio.testing.MockClock,  # noqa: ARG001  # pytest-trio takes the clock from it
    monkeypatch: pytest.MonkeyPatch,
    settled: bool,
    least: int,
    most: int,
) -> None:
    """In ten seconds, by a clock that jumps."""
    monkeypatch.setattr(Doorbell, "rings_within", never_rings)
    disk.mkdir()
    poller, looks = poller_of(disk, settled=settled), 0
    look = poller.look

    def count() -> None:
        nonlocal looks
        looks += 1
        look()

    monkeypatch.setattr(poller, "look", count)
    with trio.move_on_after(10):
        await poller.run()

    assert least <= looks <= most


async def test_a_poller_at_rest_takes_no_time(disk: Path) -> None:
    """Less than 10 ms of CPU in a second: ten times what it may take."""
    disk.mkdir()
    bind(disk / "s")
    poller = poller_of(disk)
    for name in ("s", "t"):
        poller.watch(disk / name, lambda _change: None)
    before = time.thread_time()
    with trio.move_on_after(2):
        await poller.run()

    assert time.thread_time() - before < 0.02


async def test_a_directory_that_is_dead_ends_the_poller(
    disk: Path,
    autojump_clock: trio.testing.MockClock,  # noqa: ARG001  # pytest-trio takes the clock from it
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After 30 s of a directory that is deleted and still seen, and not a moment earlier; it is told at once, once."""
    monkeypatch.setattr(Doorbell, "rings_within", never_rings)
    disk.mkdir()
    # A path to a directory that is deleted, without a mount: through a descriptor of it.
    descriptor = os.open(disk, os.O_RDONLY)
    happenings: list[Happening] = []
    poller = Poller(Path(f"/proc/self/fd/{descriptor}"), lambda: True, happenings.append)
    started = trio.current_time()
    try:
        with trio.move_on_after(60):
            await poller.run()

        assert not happenings
        disk.rmdir()
        started = trio.current_time()
        with pytest.raises(DirectoryDeadError) as caught:
            await poller.run()

        assert caught.value.exit_code == 4
        assert len(happenings) == 1
        assert 30 <= trio.current_time() - started < 31
    finally:
        os.close(descriptor)


RINGS: Mapping[str, Callable[[Path], object]] = {
    "made": lambda directory: bind(directory / "t"),
    "removed": lambda directory: (directory / "s").unlink(),
    "renamed": lambda directory: (directory / "s").rename(directory / "t"),
    "moved away": lambda directory: (directory / "s").rename(directory.with_name("t")),
}


@pytest.mark.parametrize("name", RINGS)
async def test_the_doorbell_rings(place: Path, name: str) -> None:
    """When a file is made, removed or renamed; and it has then rung."""
    place.mkdir()
    bind(place / "s")
    doorbell = Doorbell()
    try:
        doorbell.attach(place, other=True)

        assert not await doorbell.rings_within(0)
        RINGS[name](place)
        assert await doorbell.rings_within(10)
        assert not await doorbell.rings_within(0)
    finally:
        doorbell.close()


@pytest.mark.parametrize("looked", ["before it was heard", "after it was heard"])
@pytest.mark.parametrize("name", RINGS)
async def test_a_doorbell_proves_itself(place: Path, name: str, looked: str) -> None:
    """By ringing for a change, before or just after somebody looked; once for each directory."""
    early = looked == "before it was heard"
    place.mkdir()
    bind(place / "s")
    doorbell = Doorbell()
    try:
        doorbell.attach(place, other=True)
        doorbell.judge(changed=False)
        RINGS[name](place)
        if early:
            doorbell.judge(changed=True)
        assert not doorbell.proven
        assert await doorbell.rings_within(10)
        doorbell.judge(changed=not early)
        assert doorbell.proven != early
        assert not await doorbell.rings_within(0)

        bind(place / "u")
        assert await doorbell.rings_within(10)
        doorbell.judge(changed=True)
        assert doorbell.proven
        doorbell.attach(place, other=False)
        assert doorbell.proven
        doorbell.attach(place, other=True)
        assert not doorbell.proven
    finally:
        doorbell.close()


async def test_the_doorbell_rings_when_the_directory_above_moves(place: Path) -> None:
    """A whole /var/lib/kubelet that is moved away takes the plugins' directory along, which hears nothing of it."""
    inner = place / "device-plugins"
    inner.mkdir(parents=True)
    doorbell = Doorbell()
    try:
        doorbell.attach(inner, other=True)
        place.rename(place.with_name("old"))
        assert await doorbell.rings_within(10)
    finally:
        doorbell.close()


async def test_a_doorbell_that_was_silent_once_is_never_proven_again(disk: Path) -> None:
    """However often it rings later, and in whatever directory: what it told nothing of may happen again."""
    disk.mkdir()
    doorbell = Doorbell()
    try:
        doorbell.attach(disk, other=True)
        bind(disk / "s")
        assert await doorbell.rings_within(10)
        doorbell.judge(changed=True)
        assert doorbell.proven
        doorbell.judge(changed=True)
        assert doorbell.proven, "the ring may still be on its way"
        assert not await doorbell.rings_within(0.01)
        assert not doorbell.proven
        doorbell.attach(disk, other=True)
        for name in "abc":
            bind(disk / name)
            assert await doorbell.rings_within(10)
            doorbell.judge(changed=True)
            assert not doorbell.proven
    finally:
        doorbell.close()


def deafen() -> None:
    """Ends every watch of this process, as a kernel that forgets them would. It rings, once."""
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if entry.readlink() == Path("anon_inode:inotify"):
                for watch in range(1, 10):
                    ctypes.CDLL(None).inotify_rm_watch(int(entry.name), watch)


async def test_a_proven_doorbell_lets_the_poller_rest(
    disk: Path,
    autojump_clock: trio.testing.MockClock,  # noqa: ARG001  # pytest-trio takes the clock from it
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It looks every 3 s instead of every 0.6 s, and a change without a ring is seen all the same, and remembered."""
    disk.mkdir()
    poller, looks, told = poller_of(disk), 0, list[Change]()
    poller.watch(disk / "s", told.append)
    look = poller.look

    def count() -> None:
        nonlocal looks
        looks += 1
        look()

    async def looks_in(seconds: float) -> int:
        await trio.sleep(10)
        before = looks
        await trio.sleep(seconds)
        return looks - before

    monkeypatch.setattr(poller, "look", count)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(poller.run)

        assert 45 <= await looks_in(30) <= 55, "nothing is proven while nothing happened"
        time.sleep(TICK)
        bind(disk / "s")
        assert 9 <= await looks_in(30) <= 11
        time.sleep(TICK)
        # A new label or owner of the directory is no change that one rings for.
        disk.chmod(0o700)
        assert 9 <= await looks_in(30) <= 11
        deafen()
        await trio.sleep(1)
        time.sleep(TICK)
        (disk / "s").unlink()
        before = trio.current_time()
        while len(told) < 2:
            await trio.sleep(0.01)
        assert trio.current_time() - before < 3.1
        assert 45 <= await looks_in(30) <= 55
        nursery.cancel_scope.cancel()

    assert told == [Change.APPEARED, Change.VANISHED]


async def test_a_doorbell_may_be_dumb(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the user has no inotify instances left, or there is no directory, it does not ring, and that is all."""
    doorbells = []
    with_limit = Path("/proc/sys/fs/inotify/max_user_instances")
    limit = int(with_limit.read_text()) if with_limit.exists() else 0
    if not 0 < limit <= 4096:
        monkeypatch.setattr("_nvplug.kubelet.doorbell.os.O_CLOEXEC", -1)
        limit = 0
    try:
        for _ in range(limit + 1):
            doorbells.append(Doorbell())
            doorbells[-1].attach(disk, other=True)

        doorbells[-1].judge(changed=True)
        assert not await doorbells[-1].rings_within(0.01)
        assert not doorbells[-1].proven
    finally:
        for doorbell in doorbells:
            doorbell.close()


def clear(directory: Path) -> list[Happening]:
    """Clears the leftovers of a directory, as the program does, and returns what was told."""
    told: list[Happening] = []
    clear_leftovers(directory, "nvplug-*.sock", ("other-*.sock",), told.append)
    return told


def test_leftovers_are_removed_once(disk: Path) -> None:
    """Dead sockets of ours go; the second time there is nothing to tell."""
    disk.mkdir()
    for name in ("nvplug-1.sock", "nvplug-2.sock", "other-1.sock", "third.sock"):
        bind(disk / name)

    assert clear(disk) == [StaleSocketRemoved("nvplug-1.sock"), StaleSocketRemoved("nvplug-2.sock")]
    assert clear(disk) == []
    assert {path.name for path in disk.iterdir()} == {"other-1.sock", "third.sock"}


def test_a_full_queue_is_a_sign_of_life(disk: Path) -> None:
    """A plugin that does not accept at the moment is not removed."""
    disk.mkdir()
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(disk / "nvplug-1.sock"))
        bound.listen(0)
        waiting = []
        try:
            for _ in range(3):
                waiting.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
                waiting[-1].connect_ex(str(disk / "nvplug-1.sock"))

            assert clear(disk) == [LivingSocketsFound(str(disk), "nvplug-1.sock")]
        finally:
            for each in waiting:
                each.close()


def test_a_directory_that_is_not_there_has_no_leftovers(disk: Path) -> None:
    """And is not made."""
    assert clear(disk) == []
    assert not disk.exists()


@given(st.integers(1, 69), st.text("ab.-_", min_size=1, max_size=63))
def test_a_new_socket_has_a_path_that_a_socket_can_have(length: int, name: str) -> None:
    """However long the names of the directory and the resource; never the same twice, and found at the next start."""
    directory = Path("/" + "d" * length)
    one, other = (new_socket(directory, f"nvidia.com/{name}") for _ in range(2))

    assert len(os.fsencode(one)) <= 107
    assert one.parent == directory
    assert one != other
    assert one.match("nvplug-*.sock")


def test_a_leftover_that_cannot_be_removed_is_left(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system that is read-only, say: it does no harm, and is no reason to end."""

    def refuse(path: Path, *, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, f"read-only: {path.name}, {missing_ok}")

    disk.mkdir()
    bind(disk / "nvplug-1.sock")
    monkeypatch.setattr(Path, "unlink", refuse)

    assert clear(disk) == []


async def test_the_doorbell_rings_in_a_directory_made_anew(disk: Path) -> None:
    """Also where it has the inode of the one before, with which the watch has ended."""
    told: list[Change] = []
    disk.mkdir()
    poller = Poller(disk, lambda: True, lambda _happening: None)
    poller.watch(disk / "s", told.append)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(poller.run)
        with trio.fail_after(20):
            for turn in range(1, 4):
                bind(disk / "s")
                while len(told) < 2 * turn - 1:
                    await trio.sleep(0.01)
                (disk / "s").unlink()
                disk.rmdir()
                disk.mkdir()
                while len(told) < 2 * turn:
                    await trio.sleep(0.01)
        nursery.cancel_scope.cancel()

    assert told == [Change.APPEARED, Change.VANISHED] * 3
