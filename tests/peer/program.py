"""``nvplug run`` as a process under test."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

__all__ = ["ROOT", "Ended", "Program", "program"]

ROOT: Final = Path(__file__).parents[2]
"""The checkout."""

_DEADLINE: Final = 20.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How the process ended. ``code`` is negative for a signal; ``seconds`` since it was told to."""

    code: int
    seconds: float


@asynccontextmanager
async def program(
    kubelet_socket: Path,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    command: Sequence[str] = (sys.executable, str(ROOT / "nvplug.py"), "run"),
    under: Sequence[str] = (),
) -> AsyncGenerator[Program, None]:
    """Runs nvplug for as long as the block; at the end stops it if it still runs.

    Then nothing may be left of it: no process of its group, and no socket in the kubelet's directory that was
    made meanwhile and on which nobody listens (after ``kill`` there may be sockets).

    Args:
        kubelet_socket: the value of ``--kubelet-socket``.
        arguments: further ones.
        env: variables on top of those of this process, which are cleared of all that nvplug reads.
        command: what to run instead of this checkout.
        under: a command that runs its arguments by exec, such as ``("unshare", "-m", "sh", "-c", 'exec "$@"',
            "sh")``.
    """
    before = _dead_sockets(kubelet_socket)
    # Whatever the developer's own shell exports must not change a test.
    inherited = {name: os.environ[name] for name in ("HOME", "LANG", "PATH", "TMPDIR") if name in os.environ}
    at = time.monotonic()
    process = await trio.lowlevel.open_process(
        [*under, *command, "--kubelet-socket", str(kubelet_socket), *arguments],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        # Each has its own name for probes: others may run beside it.
        env={
            **inherited,
            "PYTHONUNBUFFERED": "1",
            "HEALTH_SOCKET": f"@nvplug-test-{secrets.token_hex(8)}",
            **(env or {}),
        },
        # A group of its own, so that what it leaves behind can be found.
        start_new_session=True,
    )
    running = Program(process, at)
    # A nursery around the yield of a context manager, not of a generator: it is entered and left by the same
    # task.
    async with trio.open_nursery() as nursery:
        nursery.start_soon(running._read)  # noqa: SLF001  # half of this function, kept where the state is
        try:
            yield running
            if running.code is None:
                await running.stop()
        finally:
            # Where the test has failed already, a stop that takes long would only hide why.
            with trio.CancelScope(shield=True):
                await running.kill()
    assert not running.left_processes(), f"processes of its group are left\n{running.log()}"
    if not running.killed:
        left = _dead_sockets(kubelet_socket) - before
        assert not left, f"sockets are left: {left}\n{running.log()}"


class Program:
    """Made by :func:`program`.

    Attributes:
        started: CLOCK_MONOTONIC in seconds, just before the process was made.
        lines: of its stderr, so far.
        killed: whether it was ended in a way that leaves it no time to clean up.
    """

    def __init__(self, process: trio.Process, started: float) -> None:
        self.started = started
        self.lines: list[str] = []
        self.killed = False
        self._process = process
        self._changed = trio.Event()
        self._read_all = False

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """How it ended, None while it runs."""
        return self._process.poll()

    def log(self) -> str:
        """All of its stderr so far, to be shown when an assertion fails."""
        return "\n".join(self.lines)

    async def wait_for_line(self, regex: str, *, skip: int = 0, timeout: float = _DEADLINE) -> re.Match[str]:
        """Waits for a line of stderr in which the expression is found, also among those already written.

        Args:
            regex: searched for in each line.
            skip: how many lines not to look at; ``len(program.lines)`` for new ones only.
            timeout: in seconds.

        Raises:
            AssertionError: it did not come in time, or the process ended without it.
        """
        with trio.move_on_after(timeout):
            while True:
                for line in self.lines[skip:]:
                    if found := re.search(regex, line):
                        return found
                skip = max(skip, len(self.lines))
                if self._read_all:
                    break
                await self._changed.wait()
        raise AssertionError(f"no line with {regex!r}; exit code {self.code}\n{self.log()}")

    async def wait(self, *, timeout: float = _DEADLINE) -> int:
        """Waits until it ends by itself; returns the exit code."""
        with trio.fail_after(timeout):
            return await self._process.wait()

    def send(self, signum: signal.Signals) -> None:
        """Sends the signal."""
        self._process.send_signal(signum)

    async def stop(self, signum: signal.Signals = signal.SIGTERM, *, timeout: float = _DEADLINE) -> Ended:
        """Sends the signal and waits for the end."""
        at = time.monotonic()
        self._process.send_signal(signum)
        with trio.move_on_after(timeout):
            code = await self._process.wait()
            return Ended(code, time.monotonic() - at)
        raise AssertionError(f"still runs {timeout} s after {signum.name}\n{self.log()}")

    async def kill(self) -> None:
        """SIGKILL, to it and what it has started; nothing if it has ended."""
        if self.code is not None and not self.left_processes():
            return
        self.killed = True
        os.killpg(self.pid, signal.SIGKILL)
        await self._process.wait()

    def left_processes(self) -> bool:
        """Whether processes of its group are alive."""
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def descriptors(self) -> int:
        """How many file descriptors it has open."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))  # noqa: PTH208  # /proc, where only the count matters

    def threads(self) -> int:
        """How many threads it has."""
        return len(os.listdir(f"/proc/{self.pid}/task"))  # noqa: PTH208  # the same

    async def _read(self) -> None:
        stderr, rest = self._process.stderr, b""
        assert stderr is not None
        async with stderr:
            async for chunk in stderr:
                *lines, rest = (rest + chunk).split(b"\n")
                self.lines += [line.decode(errors="replace") for line in lines]
                self._announce()
        if rest:
            self.lines.append(rest.decode(errors="replace"))
        self._read_all = True
        self._announce()

    def _announce(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()


def _dead_sockets(kubelet_socket: Path) -> set[tuple[str, int]]:
    """The sockets beside kubelet.sock on which nobody listens, as name and inode number."""
    dead = set()
    directory = kubelet_socket.parent
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.is_socket() and path != kubelet_socket:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(1.0)
                try:
                    probe.connect(str(path))
                except ConnectionRefusedError:
                    dead.add((path.name, path.stat().st_ino))
    return dead
