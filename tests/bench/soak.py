"""Hours in minutes: everything that can befall GPUs, again and again, and what nvplug holds meanwhile.

    python -m tests.bench --soak MINUTES

prints a line after each trouble, which is over then: every GPU is allocatable again. What matters is that the figures
do not grow. It takes a minute or so for each trouble, since nvplug waits for evidence that a GPU is well.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio
from peer.kubelet import KubeletError

from bench.node import GPUS, MissedError, Node, Plugin, node_in
from bench.processes import cpu_seconds, memory

__all__ = ["TROUBLES", "Row", "grown", "soak"]

# Seconds for all GPUs to be back: a flapping GPU is held for five minutes at most.
_BACK: Final = 400.0

# What a process that leaks nothing may hold more than after the first rounds: threads that are about to end, files
# that are just open, memory that the allocator keeps.
_SLACK: Final = {"threads": GPUS + 2, "descriptors": 4, "resident": 8 << 20}

_UNKNOWN: Final = 999


@dataclass(frozen=True, slots=True)
class Row:
    """What a process held after a trouble. ``resident`` in bytes, ``seconds`` since the start, ``cpu`` in seconds."""

    seconds: float
    trouble: str
    threads: int
    descriptors: int
    resident: int
    cpu: float
    lines: int

    def __str__(self) -> str:
        return (
            f"{self.seconds / 60:6.1f} min  {self.trouble:<28} {self.threads:4} threads  {self.descriptors:4} files"
            f"  {self.resident / 1e6:6.1f} MB  {self.cpu:7.2f} s CPU  {self.lines:5} lines"
        )


def grown(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """What grew: for each figure and trouble, the last row against the first of the same trouble."""
    found = []
    for name in names:
        ours = [row for row in rows if row.trouble == name]
        for what, slack in _SLACK.items():
            if ours and getattr(ours[-1], what) > getattr(ours[0], what) + slack:
                found.append(
                    f"{what} after {name!r}: {getattr(ours[0], what)}, and in the end {getattr(ours[-1], what)}"
                )
    return found


# --- what befalls them: each ends with the trouble taken back


async def _xids(node: Node, gpu: int) -> None:
    """A fatal one, and those of applications, for all GPUs."""
    for index in range(GPUS):
        node.control.xid(index, 31)
    node.control.xid(gpu, 79)
    await node.kubelet.await_allocatable(GPUS - 1)


async def _failing_wait(node: Node, _gpu: int) -> None:
    """The wait for events fails at once, as often as it is called: 30,000 times a second for who does not wait."""
    before = node.control.calls()["nvmlEventSetWait_v2"]
    node.control.error("nvmlEventSetWait_v2", _UNKNOWN)
    await trio.sleep(20)
    node.control.heal("nvmlEventSetWait_v2")
    tried = node.control.calls()["nvmlEventSetWait_v2"] - before
    if tried > 200:
        raise MissedError(f"no back-off: the wait was called {tried} times in 20 s")


async def _hang(node: Node, gpu: int) -> None:
    """A GPU hangs in every call until it counts as broken."""
    node.control.hang("*", gpu)
    await node.kubelet.await_allocatable(GPUS - 1, timeout=60)
    node.control.heal("*", gpu)


async def _hanging_library(node: Node, _gpu: int) -> None:
    """What is about no GPU in particular hangs for longer than a look takes."""
    node.control.hang("nvmlDeviceGetCount_v2")
    await trio.sleep(12)
    node.control.heal("nvmlDeviceGetCount_v2")


async def _vanish(node: Node, gpu: int) -> None:
    """A GPU is gone from the driver's list, and returns."""
    node.control.remove(gpu)
    await node.kubelet.await_allocatable(GPUS - 1, timeout=60)
    node.control.put_back(gpu)


async def _lose(node: Node, gpu: int) -> None:
    """A GPU answers that it is lost, is let go of, and is taken up again."""
    node.control.lose(gpu)
    await node.kubelet.await_allocatable(GPUS - 1, timeout=60)
    await trio.sleep(8)
    node.control.heal("*", gpu)


async def _new_kubelet(node: Node, _gpu: int) -> None:
    """The kubelet is killed, three times."""
    for _ in range(3):
        await node.kubelet.crash()
        await node.kubelet.await_allocatable(GPUS)


TROUBLES: Final[dict[str, Callable[[Node, int], Awaitable[None]]]] = {
    "XIDs": _xids,
    "event wait fails": _failing_wait,
    "GPU hangs": _hang,
    "library hangs": _hanging_library,
    "GPU vanishes": _vanish,
    "GPU lost": _lose,
    "kubelet killed": _new_kubelet,
}


async def soak(scratch: Path, plugin: Plugin, minutes: float) -> int:
    """Makes troubles for so long; returns the exit status: 0 if nothing grew."""
    rows: list[Row] = []
    end = time.monotonic() + 60 * minutes
    async with _node(scratch, plugin) as node:
        began, turn, (leader, *_) = time.monotonic(), 0, sorted(node.processes())
        while time.monotonic() < end:
            for name, make in TROUBLES.items():
                # Another GPU each time, so that none flaps.
                try:
                    await make(node, turn % GPUS)
                    await node.kubelet.await_allocatable(GPUS, timeout=_BACK)
                except (KubeletError, MissedError) as error:
                    sys.stdout.write(f"{name}: {error}\n{node.log()[-4000:]}")
                    return 1
                # Idle threads end after ten seconds.
                await trio.sleep(12)
                turn += 1
                rows.append(_row(node, leader, name, began))
                sys.stdout.write(f"{rows[-1]}\n")
                sys.stdout.flush()
        crimes = node.control.crimes()
    bad = [*grown(rows, list(TROUBLES)), *(f"{name}: {count}" for name, count in crimes.items())]
    sys.stdout.write("\n".join(bad or ["nothing grew"]) + "\n")
    return int(bool(bad))


@asynccontextmanager
async def _node(scratch: Path, plugin: Plugin) -> AsyncGenerator[Node, None]:
    async with node_in(scratch / plugin.name, plugin, in_namespace=False) as node:
        for index in range(GPUS):
            node.control.plug(index)
            # As drivers of 2025 answer: by the recovery action a GPU returns without a reset.
            node.control.gpu(index, action=0, rows="0 0", energy=1)
        await node.ready()
        yield node


def _row(node: Node, pid: int, trouble: str, began: float) -> Row:
    return Row(
        time.monotonic() - began,
        trouble,
        threads=len(os.listdir(f"/proc/{pid}/task")),  # noqa: PTH208 - /proc, where only the count matters
        descriptors=len(os.listdir(f"/proc/{pid}/fd")),  # noqa: PTH208 - the same
        resident=memory([pid]).resident,
        cpu=cpu_seconds(pid),
        lines=node.log().count("\n"),
    )
