from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from kubelet.device_manager import running
from kubelet.plugins import BACK, GPU, STOPPED, UUIDS, nvplug, sockets, stop

pytestmark = pytest.mark.conformance


async def test_pods_keep_their_gpus_over_restarts(kdm: Path, directory: Path) -> None:
    """A pod that runs stays admitted over a restart and a crash, and nobody else gets its GPUs, by id or in fact."""
    async with running(kdm, directory) as kubelet, nvplug(kubelet):
        await kubelet.await_allocatable(GPU, 8)
        held = (await kubelet.admit("held", {GPU: 3}))["main"].device_ids
        await kubelet.restart()

        assert kubelet.rejected == {}
        await kubelet.await_allocatable(GPU, 8)
        assert (await kubelet.devices("held"))["main"] == held

        await kubelet.crash()
        await kubelet.start()

        assert kubelet.rejected == {}
        await kubelet.await_allocatable(GPU, 8)
        rest = (await kubelet.admit("rest", {GPU: 5}))["main"]
        assert {*rest.device_ids[GPU]} == {*UUIDS} - {*held[GPU]}
        assert {*rest.envs["NVIDIA_VISIBLE_DEVICES"].split(",")} == {*UUIDS} - {*held[GPU]}


@pytest.mark.parametrize("how", ["restart", "crash"])
async def test_fifty_restarts_in_a_row(
    kdm: Path,
    directory: Path,
    how: str,
    record_property: Callable[[str, object], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In fifty restarts nothing is lost: one Register each brings the GPUs back, and they go when nvplug ends."""
    times, calls = [], 0
    async with running(kdm, directory) as kubelet, nvplug(kubelet) as plugin:
        await kubelet.await_allocatable(GPU, 8)
        for turn in range(50):
            if how == "restart":
                before = await kubelet.registrations(GPU)
                await kubelet.restart()
            else:
                before = 0
                await kubelet.crash()
                if turn % 5 == 0:
                    # Long enough for nvplug to be found waiting, as it is by a whole kubelet, which starts slowly.
                    await trio.sleep(0.4)
                await kubelet.start()
            times.append((await kubelet.await_allocatable(GPU, 8, within=BACK)).since_start)
            calls += await kubelet.registrations(GPU) - before
        left = len(sockets(kubelet))
        await stop(kubelet, plugin)

    record_property("seconds_to_allocatable", times)
    with capsys.disabled():
        spread = f"median {statistics.median(times) * 1000:.0f} ms, longest {max(times) * 1000:.0f} ms"
        print(f"\n{kdm.name}: allocatable again after {how}: {spread}; {calls} Registers")
    assert calls == 50
    assert max(times) < BACK
    assert left == 1


async def test_our_socket_is_deleted(kdm: Path, directory: Path) -> None:
    """With its socket deleted while the stream lives nvplug makes and registers another."""
    async with running(kdm, directory) as kubelet, nvplug(kubelet) as plugin:
        await kubelet.await_allocatable(GPU, 8)
        (lost,) = sockets(kubelet)
        lost.unlink()
        with trio.fail_after(BACK):
            while await kubelet.registrations(GPU) < 2:  # noqa: ASYNC110  # it happens in another process
                await trio.sleep(0.01)
        await kubelet.await_allocatable(GPU, 8)

        (new,) = sockets(kubelet)
        assert new != lost
        await kubelet.stays_allocatable(GPU, 8, seconds=1)
        assert await kubelet.registrations(GPU) == 2
        assert len((await kubelet.admit("pod", {GPU: 2}))["main"].device_ids[GPU]) == 2

        await stop(kubelet, plugin)


async def test_nvplug_is_killed_and_starts_again(kdm: Path, directory: Path) -> None:
    """What a killed nvplug has left behind is cleared away by the next, which is given the GPUs."""
    async with running(kdm, directory) as kubelet:
        async with nvplug(kubelet) as killed:
            await kubelet.await_allocatable(GPU, 8)
            (dead,) = sockets(kubelet)
            await killed.kill()
            await kubelet.await_allocatable(GPU, 0, within=STOPPED)
        async with nvplug(kubelet) as plugin:
            await kubelet.await_allocatable(GPU, 8)

            (alive,) = sockets(kubelet)
            assert alive != dead

            await stop(kubelet, plugin)


async def test_the_directory_is_replaced(kdm: Path, directory: Path) -> None:
    """A kubelet that comes back with a new directory in the place of the old gets the GPUs."""
    async with running(kdm, directory) as kubelet, nvplug(kubelet) as plugin:
        await kubelet.await_allocatable(GPU, 8)
        await kubelet.crash()
        shutil.rmtree(directory)
        await kubelet.start()
        reached = await kubelet.await_allocatable(GPU, 8)

        assert reached.since_start < BACK

        await stop(kubelet, plugin)
