"""A node under test: a kubelet that is not ours, and ``nvplug run`` beside it, each a process."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio
from peer.kubelet import Kubelet, kubelet_in
from peer.program import Program, program

__all__ = ["GPUS", "MACHINE", "Footprint", "Node", "node_in", "overlaps", "settles"]

MACHINE: Final = "--device-discovery-strategy=simulated:8xH100"
GPUS: Final = 8


@dataclass(frozen=True, slots=True)
class Node:
    """Both of them, with the devices allocatable."""

    kubelet: Kubelet
    nvplug: Program

    async def serves(self) -> None:
        """Checks that the GPUs can be allocated, and are."""
        await self.kubelet.await_allocatable(GPUS)
        ids = self.kubelet.lists[-1].healthy
        answer = await self.kubelet.allocate(ids[1::-1])

        assert answer.container.envs == {"NVIDIA_VISIBLE_DEVICES": f"{ids[0]},{ids[1]}"}


@asynccontextmanager
async def node_in(
    directory: Path, *arguments: str, minor: int = 34, under: Sequence[str] = (), devices: int = GPUS
) -> AsyncGenerator[Node, None]:
    """A node whose kubelet has this directory, from the first device list on.

    At the end nothing may have been wrong in the kubelet's eyes, and nothing may be left of nvplug.
    """
    async with kubelet_in(directory, minor=minor) as kubelet:
        async with program(kubelet.socket, *(arguments or (MACHINE,)), under=under) as nvplug:
            await kubelet.await_allocatable(devices)
            yield Node(kubelet, nvplug)

        assert not kubelet.complaints, nvplug.log()
        assert not overlaps(kubelet), nvplug.log()
        assert not kubelet.plugin_sockets() or nvplug.killed
        assert "Traceback" not in nvplug.log(), nvplug.log()


def overlaps(kubelet: Kubelet) -> list[str]:
    """Pairs of endpoints of one resource that one life of the kubelet watched at the same time, in words."""
    # The end of a stream that died with its kubelet is noted some time later.
    streams = [stream for stream in kubelet.streams if stream.code != "DEAD"]
    return [
        f"{later.endpoint} was watched while {earlier.endpoint} still was"
        for position, later in enumerate(streams)
        for earlier in streams[:position]
        if later.resource == earlier.resource
        and later.endpoint != earlier.endpoint
        and (earlier.ended or math.inf) > later.at
    ]


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a process holds. ``memory`` is resident, in bytes."""

    descriptors: int
    threads: int
    memory: int

    @classmethod
    def of(cls, nvplug: Program) -> Footprint:
        """The present one."""
        pages = int(Path(f"/proc/{nvplug.pid}/statm").read_text().split()[1])
        return cls(nvplug.descriptors(), nvplug.threads(), pages * 4096)


async def settles(nvplug: Program, before: Footprint, *, growth: int = 8 << 20, timeout: float = 20.0) -> None:
    """Waits until a process holds no more than before: what is being closed takes a moment.

    Args:
        nvplug: the process.
        before: what it held.
        growth: bytes by which its memory may have grown.
        timeout: in seconds.
    """
    allowed = dataclasses.replace(before, memory=before.memory + growth)
    with trio.move_on_after(timeout):
        while True:
            now = Footprint.of(nvplug)
            if (
                now.descriptors <= allowed.descriptors
                and now.threads <= allowed.threads
                and now.memory <= allowed.memory
            ):
                return
            await trio.sleep(0.02)

    raise AssertionError(f"it held {before}, and now {now}\n{nvplug.log()}")
