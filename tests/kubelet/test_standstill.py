from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import trio

from kubelet.device_manager import running
from kubelet.plugins import GPU, nvplug, sockets, stop

pytestmark = pytest.mark.conformance


async def test_nvplug_is_stopped_and_goes_on(kdm: Path, directory: Path) -> None:
    """Stopped by SIGSTOP over a crash of the kubelet, and a short time after it, nvplug is back once it goes on."""
    async with running(kdm, directory) as kubelet, nvplug(kubelet) as plugin:
        await kubelet.await_allocatable(GPU, 8)
        os.kill(plugin.pid, signal.SIGSTOP)
        await kubelet.crash()
        await kubelet.start()
        os.kill(plugin.pid, signal.SIGCONT)
        await kubelet.await_allocatable(GPU, 8)

        os.kill(plugin.pid, signal.SIGSTOP)
        await trio.sleep(3)
        os.kill(plugin.pid, signal.SIGCONT)
        await kubelet.stays_allocatable(GPU, 8, seconds=0.5)
        assert len((await kubelet.admit("pod", {GPU: 8}))["main"].device_ids[GPU]) == 8

        await stop(kubelet, plugin)


@pytest.mark.parametrize("crashes", [0, 50])
@pytest.mark.parametrize("where", ["Got registration request", "Connected to new client"])
async def test_the_kubelet_is_frozen_during_register(kdm: Path, directory: Path, where: str, crashes: int) -> None:
    """A kubelet that stands still for 20 s inside Register gets the GPUs, and loses them once nvplug has ended.

    What nvplug does meanwhile must not make the kubelet forget the client whose stream it reads: it would go on
    offering the devices of a plugin that is gone. Looked at at once and 12 s later, when a dial of the kubelet that
    leads nowhere has failed.
    """

    async def play(place: Path, later: float) -> None:
        async with running(kdm, place) as kubelet, nvplug(kubelet) as plugin:
            await kubelet.await_allocatable(GPU, 8)
            for _ in range(crashes):
                await kubelet.crash()
                await kubelet.start()
                await kubelet.await_allocatable(GPU, 8)
            await plugin.stop()
            await kubelet.await_allocatable(GPU, 0)
            await kubelet.freeze_at(where)
            async with nvplug(kubelet) as frozen:
                await kubelet.frozen()
                await trio.sleep(20)
                kubelet.thaw()
                await kubelet.await_allocatable(GPU, 8, within=20)
                await trio.sleep(later)
                await kubelet.await_allocatable(GPU, 8)
                await stop(kubelet, frozen)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(play, directory.with_name("a"), 0)
        nursery.start_soon(play, directory.with_name("b"), 12)


async def test_our_socket_is_deleted_while_the_kubelet_is_frozen(kdm: Path, directory: Path) -> None:
    """A Register whose socket is gone fails late in the kubelet, and does no harm to the one that came after it.

    The kubelet dials the vanished socket for 10 s. Up to 1.36 it then forgets the client that it has meanwhile, whose
    stream it goes on reading: nothing shows until nvplug ends, and the kubelet goes on offering its devices.
    """
    async with running(kdm, directory) as kubelet:
        await kubelet.freeze_at("Got registration request")
        async with nvplug(kubelet) as plugin:
            await kubelet.frozen()
            (lost,) = sockets(kubelet)
            lost.unlink()
            # Before the kubelet goes on nvplug has to know that the file is gone.
            await plugin.wait_for_line(f"vanished.*{lost.name}")
            kubelet.thaw()
            await kubelet.await_allocatable(GPU, 8)
            await trio.sleep(15)
            await kubelet.await_allocatable(GPU, 8)

            assert lost not in sockets(kubelet)

            await stop(kubelet, plugin)
