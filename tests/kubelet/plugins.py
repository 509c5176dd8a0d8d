"""What the tests against the real kubelet share: nvplug and another plugin beside it, and what is expected of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio
from peer.program import ROOT, Program, program

from _nvplug.drivers.machines import find_machine
from kubelet import other_plugin

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from kubelet.device_manager import DeviceManager

__all__ = ["BACK", "GPU", "STOPPED", "UUIDS", "nvplug", "other", "sockets", "started", "stop", "write"]

GPU: Final = "nvidia.com/gpu"
UUIDS: Final = tuple(find_machine("8xH100").gpu(index).uuid for index in range(8))
"""In index order."""

STOPPED: Final = 1.0
"""Seconds within which a kubelet must know that nvplug has ended."""

BACK: Final = 2.5
"""Seconds within which nvplug must be back; the aim is a tenth of it."""


def nvplug(
    kubelet: DeviceManager, gpus: str | Path = "8xH100", *arguments: str, under: Sequence[str] = ()
) -> AbstractAsyncContextManager[Program]:
    """``nvplug run`` with GPUs on paper; ``under`` another command, if any."""
    return started(kubelet.socket, gpus, *arguments, under=under)


def started(
    kubelet_socket: Path, gpus: str | Path, *arguments: str, under: Sequence[str] = ()
) -> AbstractAsyncContextManager[Program]:
    """The same where there is no kubelet yet."""
    # What test_mutants.py has spoilt, or this checkout.
    script = os.environ.get("NVPLUG_PROGRAM", str(ROOT / "nvplug.py"))
    return program(
        kubelet_socket,
        "--device-discovery-strategy",
        f"simulated:{gpus}",
        *arguments,
        command=(sys.executable, script, "run"),
        under=under,
    )


@asynccontextmanager
async def other(kubelet: DeviceManager, resource: str, *ids: str) -> AsyncGenerator[Callable[[], object], None]:
    """Another plugin; what is yielded tells it to end."""
    process = await trio.lowlevel.open_process(
        [sys.executable, other_plugin.__file__, str(kubelet.directory), resource, *ids],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}"},
    )
    try:
        yield process.terminate
        process.terminate()
        with trio.fail_after(10):
            await process.wait()
    finally:
        with trio.CancelScope(shield=True):
            process.kill()
            await process.wait()


def write(path: Path, description: Mapping[str, object]) -> None:
    """Puts a description of GPUs where nvplug looks for it, in one step."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(description))
    unfinished.rename(path)


async def stop(kubelet: DeviceManager, plugin: Program) -> None:
    """Ends nvplug and sees that the kubelet knows."""
    await plugin.stop()
    await kubelet.await_allocatable(GPU, 0, within=STOPPED)


def sockets(kubelet: DeviceManager) -> set[Path]:
    """Those of plugins."""
    return {path for path in kubelet.directory.glob("*.sock") if path != kubelet.socket}
