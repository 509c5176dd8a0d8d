"""SIGTERM and SIGINT: whatever nvplug is at, it ends within two seconds, leaves nothing, and takes nothing back."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
import trio
from conftest import Measure
from node import GPUS, MACHINE, node_in
from peer.kubelet import Kubelet, kubelet_in
from peer.program import Program, program

pytestmark = pytest.mark.process

Phase = Callable[[Path], AbstractAsyncContextManager[tuple[Kubelet, Program]]]


@asynccontextmanager
async def streaming(directory: Path) -> AsyncGenerator[tuple[Kubelet, Program], None]:
    """The kubelet watches the devices."""
    async with node_in(directory) as node:
        yield node.kubelet, node.nvplug


@asynccontextmanager
async def waiting_for_a_directory(directory: Path) -> AsyncGenerator[tuple[Kubelet, Program], None]:
    """There has been no kubelet yet."""
    async with kubelet_in(directory, start=False) as kubelet, program(kubelet.socket, MACHINE) as nvplug:
        await nvplug.wait_for_line("waiting for the kubelet")
        yield kubelet, nvplug


@asynccontextmanager
async def waiting_for_a_kubelet(directory: Path) -> AsyncGenerator[tuple[Kubelet, Program], None]:
    """Nobody listens on kubelet.sock."""
    async with node_in(directory) as node:
        await node.kubelet.stop()
        await node.nvplug.wait_for_line("waiting for the kubelet")
        yield node.kubelet, node.nvplug


@asynccontextmanager
async def waiting_for_an_answer(
    directory: Path, *, how: Literal["backlog", "silent", "handler"]
) -> AsyncGenerator[tuple[Kubelet, Program], None]:
    """The kubelet accepts connections and does not answer."""
    async with kubelet_in(directory, start=False) as kubelet, program(kubelet.socket, MACHINE) as nvplug:
        await nvplug.wait_for_line("waiting for the kubelet")
        await kubelet.start(mute=how)
        if how == "handler":
            await kubelet.await_that(lambda: len(kubelet.registrations) == 1, "a Register")
        elif how == "silent":
            await kubelet.await_that(lambda: len(kubelet.connections) >= 1, "a connection")
        yield kubelet, nvplug


@asynccontextmanager
async def waiting_for_the_frozen(directory: Path) -> AsyncGenerator[tuple[Kubelet, Program], None]:
    """The kubelet was stopped by a signal, after which the socket was deleted."""
    async with node_in(directory) as node:
        node.kubelet.freeze()
        node.kubelet.delete_plugin_sockets()
        await node.nvplug.wait_for_line("our socket vanished")
        try:
            yield node.kubelet, node.nvplug
        finally:
            node.kubelet.thaw()


@asynccontextmanager
async def refused(directory: Path) -> AsyncGenerator[tuple[Kubelet, Program], None]:
    """The kubelet refuses every Register."""
    async with kubelet_in(directory) as kubelet:
        await kubelet.refuse("not now")
        async with program(kubelet.socket, MACHINE) as nvplug:
            await nvplug.wait_for_line("refuses the registration")
            yield kubelet, nvplug


PHASES: Mapping[str, Phase] = {
    "streaming": streaming,
    "waiting for a directory": waiting_for_a_directory,
    "waiting for a kubelet": waiting_for_a_kubelet,
    "connecting": partial(waiting_for_an_answer, how="backlog"),
    "connected": partial(waiting_for_an_answer, how="silent"),
    "registering": partial(waiting_for_an_answer, how="handler"),
    "waiting for the frozen": waiting_for_the_frozen,
    "refused": refused,
}


@pytest.mark.parametrize("signum", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
@pytest.mark.parametrize("phase", PHASES)
async def test_a_signal_ends_it_in_every_phase(
    disk: Path, phase: str, signum: signal.Signals, measure: Measure
) -> None:
    """Exit status 0 within 2 s, no socket is left, and the kubelet was never told that there are no devices."""
    async with PHASES[phase](disk) as (kubelet, nvplug):
        ended = await nvplug.stop(signum)

        assert ended.code == 0, nvplug.log()
        # Here without the factor for busy machines: it is ten times what it takes.
        assert ended.seconds < 2.0
        measure(f"stopped while {phase}", ended.seconds, 2.0)
        assert not kubelet.plugin_sockets()
        assert all(len(one.devices) == GPUS for one in kubelet.lists)
        assert "Traceback" not in nvplug.log()


async def test_a_stop_ends_the_stream_with_ok(disk: Path) -> None:
    """The kubelet sees a stream that was returned from, before anything else of the plugin is gone."""
    async with node_in(disk) as node:
        await node.nvplug.stop()
        await node.kubelet.await_allocatable(0)

        assert [stream.code for stream in node.kubelet.streams] == ["OK"]
        assert node.nvplug.lines[-1].split(" INFO ")[1].startswith("ended the registration resource=nvidia.com/gpu")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT], ids=lambda signum: signum.name)
async def test_a_second_signal_changes_nothing(disk: Path, signum: signal.Signals) -> None:
    """Who presses Ctrl-C twice gets the same clean end, whenever the second one comes."""
    async with node_in(disk) as node:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.nvplug.stop, signal.SIGINT)
            while node.nvplug.code is None:
                await trio.sleep(0.005)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(node.nvplug.pid, signum)

        assert node.nvplug.code == 0, node.nvplug.log()
        assert "Traceback" not in node.nvplug.log()


async def test_a_killed_plugin_is_no_burden_to_the_next(disk: Path) -> None:
    """SIGKILL leaves a socket; the next life removes it and serves."""
    async with node_in(disk) as node:
        await node.nvplug.kill()
        left = node.kubelet.plugin_sockets()
        async with program(node.kubelet.socket, MACHINE) as successor:
            await node.kubelet.await_that(lambda: len(node.kubelet.live_streams()) == 1, "a stream")
            await node.serves()

            assert len(left) == 1
            assert not set(left).intersection(node.kubelet.plugin_sockets())
            await successor.wait_for_line(f"INFO removed a socket of an earlier life socket={left[0].name}")
