from __future__ import annotations

from pathlib import Path

import pytest
import trio

from kubelet import other_plugin
from kubelet.device_manager import running
from kubelet.plugins import BACK, GPU, UUIDS, nvplug, other, sockets, stop

pytestmark = pytest.mark.conformance


@pytest.mark.parametrize("order", ["first ends, second starts", "second starts, first ends", "both for a while"])
async def test_rolling_upgrade(kdm: Path, directory: Path, order: str) -> None:
    """However an old and a new nvplug follow one another, the GPUs end up allocatable, from the new one."""
    async with running(kdm, directory) as kubelet, nvplug(kubelet) as first:
        await kubelet.await_allocatable(GPU, 8)
        (old,) = sockets(kubelet)
        if order == "first ends, second starts":
            await stop(kubelet, first)
        async with nvplug(kubelet) as second:
            if order != "first ends, second starts":
                await second.wait_for_line("registered")
                if order == "both for a while":
                    await trio.sleep(2)
                await first.stop()
            await kubelet.await_allocatable(GPU, 8)
            # On kubelets up to 1.36 the end of the first takes the second's stream with it.
            await trio.sleep(0.5)
            await kubelet.await_allocatable(GPU, 8, within=BACK)

            (new,) = sockets(kubelet)
            assert new != old
            assert len((await kubelet.admit("pod", {GPU: 8}))["main"].device_ids[GPU]) == 8

            await stop(kubelet, second)


async def test_two_resources_at_once(kdm: Path, directory: Path) -> None:
    """A pod gets GPUs from nvplug and something else from another plugin, in one container."""
    nic = "example.com/nic"
    async with running(kdm, directory) as kubelet, other(kubelet, nic, "nic0", "nic1"), nvplug(kubelet):
        await kubelet.await_allocatable(GPU, 8)
        await kubelet.await_allocatable(nic, 2)
        container = (await kubelet.admit("pod", {GPU: 2, nic: 1}))["main"]

        assert set(container.envs) == {"NVIDIA_VISIBLE_DEVICES", "OTHER_DEVICES"}
        assert {name: len(ids) for name, ids in container.device_ids.items()} == {GPU: 2, nic: 1}
        assert kubelet.directory / other_plugin.SOCKET in sockets(kubelet)

        await kubelet.crash()
        await kubelet.start()
        await kubelet.await_allocatable(GPU, 8)
        await kubelet.await_allocatable(nic, 2)


@pytest.mark.parametrize("beside", [False, True])
async def test_migration_from_another_plugin(kdm: Path, directory: Path, *, beside: bool) -> None:
    """The resource and the device ids of another plugin pass to nvplug, after its end or while it still runs.

    Pods of the other plugin keep what they have.
    """
    async with running(kdm, directory) as kubelet, other(kubelet, GPU, *UUIDS) as end:
        await kubelet.await_allocatable(GPU, 8)
        held = (await kubelet.admit("held", {GPU: 3}))["main"].device_ids
        if not beside:
            end()
            await kubelet.await_allocatable(GPU, 0)
        async with nvplug(kubelet) as plugin:
            if beside:
                await plugin.wait_for_line("registered")
                end()
            await trio.sleep(1)
            await kubelet.await_allocatable(GPU, 8, within=BACK)
            rest = (await kubelet.admit("rest", {GPU: 5}))["main"]

            assert set(rest.envs) == {"NVIDIA_VISIBLE_DEVICES"}
            assert {*rest.device_ids[GPU]} == {*UUIDS} - {*held[GPU]}

            await stop(kubelet, plugin)
