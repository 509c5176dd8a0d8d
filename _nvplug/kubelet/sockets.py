"""What lies in the kubelet's directory: inotify-like events out of lstat, and the sockets of earlier lives.

Why not inotify itself: its watch is on a directory's inode, and dies with it; its queue overflows; its instances run
out on nodes with many pods. A poller that compares identities by path has none of these troubles. But each look wakes
the process, which costs more than the look: 0.4 to 0.9 ms of CPU on an idle machine, for three lstat calls of some
microseconds [measured]. So it looks seldom while all is quiet, and a doorbell, which is inotify and may fail, calls it
earlier. Each look checks the doorbell, too: only one that never was silent about a change lets it look more seldom.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import secrets
import socket
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import trio

from _nvplug.errors import DirectoryDeadError
from _nvplug.happenings import DirectoryDead, LivingSocketsFound, Publish, StaleSocketRemoved
from _nvplug.kubelet.doorbell import Doorbell

__all__ = ["Change", "Identity", "Poller", "change", "clear_leftovers", "identify", "new_socket"]

# Seconds between looks while something is wanted or has just changed; while all is quiet; and while all is quiet and
# the doorbell has proved itself. And the least, in case it does not stop ringing.
BRISK = 0.1
QUIET = 0.6
WATCHED = 3.0
AT_LEAST = 0.01

# Seconds that a change keeps the poller brisk: trouble seldom comes alone.
BRISK_AFTER_CHANGE = 5.0

# Bytes of a socket's path: sun_path has one more, for a zero.
LONGEST_PATH = 107

# Seconds for which the directory must be dead before a new process is asked for.
DEAD_FOR = 30.0


@dataclass(frozen=True, slots=True)
class Identity:
    """What makes a file at a path the same file as before.

    The inode number alone does not: ext4 gives it to the next file at once, 200 of 200 times.
    """

    device: int
    inode: int
    changed_ns: int


class Change(enum.Enum):
    """What became of a path since the last look."""

    APPEARED = "appeared"
    VANISHED = "vanished"
    REPLACED = "replaced"


def change(before: Identity | None, after: Identity | None) -> Change | None:
    """What happened between two looks at one path; None if nothing did."""
    if before == after:
        return None
    if before is None:
        return Change.APPEARED
    return Change.VANISHED if after is None else Change.REPLACED


def identify(path: Path) -> Identity | None:
    """The identity of the file at a path, None if there is none, or none that we may see."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return Identity(found.st_dev, found.st_ino, found.st_ctime_ns)


@dataclass(slots=True, eq=False)
class _Watch:
    path: Path
    seen: Identity | None
    on_change: Callable[[Change], None]


class Poller:
    """Looks at paths of one directory, and tells of their changes.

    Args:
        directory: the kubelet's.
        settled: whether nobody waits for a change; if not, looks are more frequent.
        publish: for what an operator should know.
    """

    def __init__(self, directory: Path, settled: Callable[[], bool], publish: Publish) -> None:
        self._directory = directory
        self._settled = settled
        self._publish = publish
        self._watches: list[_Watch] = []
        self._brisk_until = -1.0
        self._directory_seen: Identity | None = None
        self._modified_ns = 0
        self._dead_since: float | None = None

    def watch(self, path: Path, on_change: Callable[[Change], None]) -> Callable[[], None]:
        """Tells ``on_change`` of every change of ``path`` from now on; returns what ends that."""
        watch = _Watch(path, identify(path), on_change)
        self._watches.append(watch)
        return lambda: self._watches.remove(watch)

    def look(self) -> None:
        """Looks at every path once, and tells of the changes before it returns."""
        for watch in tuple(self._watches):
            # A change that was just told may have ended other watches.
            if watch not in self._watches:
                continue
            now = identify(watch.path)
            what = change(watch.seen, now)
            watch.seen = now
            if what is not None:
                self._brisk_until = trio.current_time() + BRISK_AFTER_CHANGE
                watch.on_change(what)

    async def run(self) -> None:
        """Looks for ever.

        Raises:
            DirectoryDeadError: the directory at our path has been deleted, though we still see it: it is a mount of
                ours (a pod's hostPath) whose source was replaced. No file can be made in it again.
        """
        doorbell = Doorbell()
        try:
            while True:
                # The directory first: what happens after the doorbell is attached rings, and what happened before is
                # seen by the look.
                self._look_at_directory(doorbell)
                self.look()
                brisk = not self._settled() or trio.current_time() < self._brisk_until
                quiet = WATCHED if doorbell.proven else QUIET
                if await doorbell.rings_within(BRISK if brisk else quiet):
                    await trio.sleep(AT_LEAST)
        finally:
            doorbell.close()

    def _look_at_directory(self, doorbell: Doorbell) -> None:
        try:
            found = self._directory.stat()
        except OSError:
            self._directory_seen, self._dead_since = None, None
            return
        before, after = self._directory_seen, Identity(found.st_dev, found.st_ino, found.st_ctime_ns)
        same = before is not None and (before.device, before.inode) == (after.device, after.inode)
        # Not st_ctime, which a new label or owner of the directory changes too, without a ring.
        doorbell.judge(changed=same and found.st_mtime_ns != self._modified_ns)
        self._modified_ns = found.st_mtime_ns
        # A directory made anew may have the inode of the one before, and the watch ended with that. Attached once more
        # whenever something changed in it, which costs a call.
        if before != after:
            self._directory_seen = after
            doorbell.attach(self._directory, other=not same)
            # What happened between the look and a first watch cannot have rung.
            with contextlib.suppress(OSError):
                self._modified_ns = self._directory.stat().st_mtime_ns
        if found.st_nlink:
            self._dead_since = None
        elif self._dead_since is None:
            self._dead_since = trio.current_time()
            self._publish(DirectoryDead(str(self._directory), DEAD_FOR))
        elif trio.current_time() - self._dead_since >= DEAD_FOR:
            raise DirectoryDeadError(
                f"{self._directory} was deleted behind our mount of it, {DEAD_FOR:.0f} s ago",
                remedy="start this process anew, so that it mounts the new directory (a DaemonSet and a unit do)",
            )


def new_socket(directory: Path, resource: str) -> Path:
    """A path for a socket of ours, never the same twice.

    As long as the kernel's sockaddr_un allows: the name of a resource alone may have 63 characters.
    """
    # Random, since a pid is 1 in every container; and never used again: kubelets from 1.37 on know clients by it.
    end = f"-{secrets.token_hex(4)}.sock"
    room = LONGEST_PATH - len(os.fsencode(directory / f"nvplug-{end}"))
    return directory / f"nvplug-{resource.rpartition('/')[2][:room]}{end}"


def clear_leftovers(directory: Path, ours: str, foreign: tuple[str, ...], publish: Publish) -> None:
    """Removes sockets of earlier lives of ours on which nobody listens, and names those on which somebody does.

    Args:
        directory: the kubelet's; it may not exist yet.
        ours: a glob pattern of our socket names.
        foreign: patterns of other plugins' sockets for the same resource. They are never removed.
        publish: for what an operator should know.
    """
    living = []
    for path in sorted(_sockets(directory, ours)):
        if _is_alive(path):
            living.append(path.name)
            continue
        # Where it cannot be removed it does no harm.
        with contextlib.suppress(OSError):
            path.unlink()
            publish(StaleSocketRemoved(path.name))
    for pattern in foreign:
        living.extend(path.name for path in sorted(_sockets(directory, pattern)) if _is_alive(path))
    if living:
        publish(LivingSocketsFound(str(directory), ", ".join(living)))


def _sockets(directory: Path, pattern: str) -> Iterator[Path]:
    for path in directory.glob(pattern):
        try:
            if stat.S_ISSOCK(path.lstat().st_mode):
                yield path
        except OSError:
            continue


def _is_alive(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        # A full backlog (EAGAIN) belongs to a living process, too, and so does what we may not touch.
        return probe.connect_ex(str(path)) not in {errno.ECONNREFUSED, errno.ENOENT}
