# ruff: noqa: ASYNC110, ASYNC221, ASYNC240 - what is waited for has no event, and small files
"""``nvplug run`` against a kubelet that makes every trouble it can: each time it is back, soon, and nothing is left."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
import trio
from conftest import Measure
from needs import lacking
from node import GPUS, MACHINE, Footprint, Node, node_in, overlaps, settles
from peer.kubelet import Kubelet, kubelet_in
from peer.program import program

from _nvplug.config import read_config
from _nvplug.container.facts import Terms
from _nvplug.drivers.description import simulate
from _nvplug.drivers.machines import find_machine
from _nvplug.health import Health
from _nvplug.kubelet.loop import open_loop
from _nvplug.kubelet.registrar import keep_registered
from _nvplug.latest import Latest
from _nvplug.placement import Plan
from _nvplug.resources import Offer, next_offer

pytestmark = pytest.mark.process


@dataclass(frozen=True, slots=True)
class Trouble:
    """What a kubelet does to a plugin.

    Attributes:
        make: does it, and returns the time from which on the kubelet answers.
        limit: seconds from then until the plugin must be back.
    """

    make: Callable[[Kubelet], Awaitable[float]]
    limit: float


async def nobody_listens(kubelet: Kubelet, seconds: float) -> float:
    """kubelet.sock is bound, and refuses for a while."""
    await kubelet.stop()
    await kubelet.bind()
    await trio.sleep(seconds)
    return await kubelet.listen()


async def starts_mute(kubelet: Kubelet, how: Literal["backlog", "silent", "handler"], seconds: float) -> float:
    """A new kubelet lets connect() succeed, and does not answer for a while."""
    await kubelet.stop()
    await kubelet.start(mute=how)
    await trio.sleep(seconds)
    return await kubelet.unmute()


async def freezes(kubelet: Kubelet, seconds: float) -> float:
    """The kubelet is stopped while our socket is deleted, so that its next Register waits for the kernel to go on."""
    kubelet.freeze()
    kubelet.delete_plugin_sockets()
    await trio.sleep(seconds)
    return kubelet.thaw()


async def refuses(kubelet: Kubelet, seconds: float) -> float:
    """A new kubelet refuses every Register for a while."""
    await kubelet.stop()
    await kubelet.refuse("not now")
    await kubelet.start()
    await trio.sleep(seconds)
    return await kubelet.accept()


async def deletes_our_socket(kubelet: Kubelet) -> float:
    """Somebody removes our socket; the stream lives on."""
    return kubelet.delete_plugin_sockets()


TROUBLES: Mapping[str, Trouble] = {
    "restart": Trouble(Kubelet.restart, 0.25),
    "restart without a wipe": Trouble(partial(Kubelet.restart, wipe=False), 0.25),
    "crash": Trouble(Kubelet.crash, 0.25),
    "crash without a wipe": Trouble(partial(Kubelet.crash, wipe=False), 0.25),
    "kubelet.sock replaced, stream cut": Trouble(partial(Kubelet.replace_socket, cut=True), 0.25),
    "kubelet.sock replaced, stream lives": Trouble(partial(Kubelet.replace_socket, cut=False), 0.25),
    "stream cut": Trouble(Kubelet.cut, 0.25),
    "dead kubelet.sock for 1 s": Trouble(partial(Kubelet.restart, down=1.0), 0.25),
    "bound kubelet.sock for 1 s": Trouble(partial(nobody_listens, seconds=1.0), 0.25),
    "our socket deleted": Trouble(deletes_our_socket, 0.75),
    "directory replaced": Trouble(Kubelet.replace_directory, 0.75),
    "directory away for 1 s": Trouble(partial(Kubelet.replace_directory, down=1.0), 0.75),
    "frozen for 2 s": Trouble(partial(freezes, seconds=2.0), 0.25),
}

LONG_TROUBLES: Mapping[str, Trouble] = {
    **{
        f"mute ({how}) for {seconds} s": Trouble(partial(starts_mute, how=how, seconds=seconds), 0.25)
        for how in ("backlog", "silent", "handler")
        for seconds in (3, 12)
    },
    "frozen for 17 s": Trouble(partial(freezes, seconds=17.0), 0.25),
    "dead kubelet.sock for 12 s": Trouble(partial(Kubelet.restart, down=12.0), 0.25),
    "refused for 6 s": Trouble(partial(refuses, seconds=6.0), 0.5),
}


async def overcome(node: Node, name: str, trouble: Trouble, measure: Measure) -> None:
    """Makes the trouble and checks that the plugin is back as if there had been none."""
    before = Footprint.of(node.nvplug)
    at = await trouble.make(node.kubelet)
    back = await node.kubelet.await_back(GPUS, after=at)
    await node.serves()
    await settles(node.nvplug, before)

    measure(f"back after: {name}", back - at, trouble.limit)
    assert len(node.kubelet.live_streams()) == 1
    assert len(node.kubelet.plugin_sockets()) == 1


@pytest.mark.parametrize("name", TROUBLES)
async def test_it_is_back_after_a_trouble(disk: Path, name: str, measure: Measure) -> None:
    """The devices are allocatable again, on one stream, and nothing is left over."""
    async with node_in(disk) as node:
        await overcome(node, name, TROUBLES[name], measure)


@pytest.mark.slow
@pytest.mark.parametrize("minor", [32, 36, 37])
async def test_it_is_back_after_one_trouble_upon_another(place: Path, minor: int, measure: Measure) -> None:
    """So it is for every version of the kubelet, on a disk as in memory, and whatever happened before."""
    async with node_in(place, minor=minor) as node:
        for name, trouble in TROUBLES.items():
            await overcome(node, name, trouble, measure)


@pytest.mark.slow
@pytest.mark.parametrize("minor", [34, 37])
@pytest.mark.parametrize("name", LONG_TROUBLES)
async def test_it_is_back_after_a_long_trouble(disk: Path, minor: int, name: str, measure: Measure) -> None:
    """However long the kubelet was away, it is not kept waiting when it is back."""
    async with node_in(disk, minor=minor) as node:
        await overcome(node, name, LONG_TROUBLES[name], measure)


@pytest.mark.parametrize("directory_is_there", [False, True])
async def test_it_may_be_started_before_the_kubelet(disk: Path, directory_is_there: bool, measure: Measure) -> None:
    """It waits, makes no directory of its own, and registers as soon as a kubelet listens."""
    if directory_is_there:
        disk.mkdir()
    async with kubelet_in(disk, start=False) as kubelet, program(kubelet.socket, MACHINE) as nvplug:
        await nvplug.wait_for_line("waiting for the kubelet")

        assert disk.is_dir() == directory_is_there
        assert not directory_is_there or not list(disk.iterdir())
        at = await kubelet.start()
        measure("back after: started before the kubelet", await kubelet.await_back(GPUS, after=at) - at, 0.25)


@pytest.mark.parametrize("minor", [34, pytest.param(37, marks=pytest.mark.slow)])
async def test_it_is_back_after_twenty_restarts(disk: Path, minor: int, measure: Measure) -> None:
    """A kubelet that crashes again and again gets a registration from every life that lasts."""
    async with node_in(disk, minor=minor) as node:
        before = Footprint.of(node.nvplug)
        at = 0.0
        for life in range(20):
            # Each life is cut off at another moment of the registration.
            await trio.sleep(0.01 * (life % 10))
            at = await node.kubelet.restart()
        measure("back after: twenty restarts", await node.kubelet.await_back(GPUS, after=at) - at, 0.25)
        await node.serves()
        await settles(node.nvplug, before)

        assert len(node.kubelet.plugin_sockets()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["restart", "stream cut", "kubelet.sock replaced, stream lives", "our socket deleted"])
async def test_a_trouble_that_is_repeated_leaves_nothing_behind(disk: Path, name: str) -> None:
    """After the twentieth time the process holds what it held after the first."""
    async with node_in(disk) as node:
        before = None
        for _ in range(20):
            at = await TROUBLES[name].make(node.kubelet)
            await node.kubelet.await_back(GPUS, after=at)
            before = before or Footprint.of(node.nvplug)
        await settles(node.nvplug, before or Footprint.of(node.nvplug))

        assert len(node.kubelet.plugin_sockets()) == 1


async def test_no_task_is_left_behind(disk: Path) -> None:
    """The kubelet task in this process: after many troubles there are as many tasks as after the first ones."""

    def tasks() -> int:
        return trio.lowlevel.current_statistics().tasks_living + len(asyncio.all_tasks(loop))

    config = read_config([f"--kubelet-socket={disk / 'kubelet.sock'}", MACHINE], {})
    offer = next_offer(Offer(), simulate(find_machine("8xH100")).hardware, Health())
    async with open_loop(), kubelet_in(disk) as kubelet, trio.open_nursery() as nursery:
        loop = asyncio.get_event_loop()
        nursery.start_soon(
            keep_registered, Latest(offer), Latest(Plan()), Latest(Terms(config)), lambda _happening: None
        )
        await kubelet.await_allocatable(GPUS)
        before = 0
        for _ in range(5):
            for name in ("stream cut", "restart", "kubelet.sock replaced, stream lives", "our socket deleted"):
                at = await TROUBLES[name].make(kubelet)
                await kubelet.await_back(GPUS, after=at)
            before = before or tasks()
        with trio.fail_after(10):
            while tasks() > before:
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()


async def test_a_frozen_kubelet_keeps_its_stream(disk: Path) -> None:
    """A kubelet that stands still for a moment is no reason to register anew."""
    async with node_in(disk) as node:
        node.kubelet.freeze()
        await trio.sleep(1)
        node.kubelet.thaw()
        await node.serves()

        assert len(node.kubelet.streams) == 1
        assert len(node.kubelet.registrations) == 1


@pytest.mark.slow
async def test_it_ends_where_only_a_new_process_can_help(disk: Path) -> None:
    """A bind mount of a deleted directory is dead for ever: after 30 s it says so in one line, and exits with 4.

    A new process, which mounts the new directory, serves.
    """
    mounted = disk.with_name("mounted")
    for directory in (disk, mounted):
        directory.mkdir()
    under = ("unshare", "-m", "sh", "-c", f'mount --bind "{disk}" "{mounted}" && exec "$@"', "sh")
    if subprocess.run([*under, "true"], capture_output=True, check=False).returncode != 0:
        lacking("mounting needs root, and a container that may")
    async with kubelet_in(disk) as kubelet:
        async with program(mounted / "kubelet.sock", MACHINE, under=under) as nvplug:
            await kubelet.await_allocatable(GPUS)
            told = len(nvplug.lines)
            await kubelet.replace_directory()
            code = await nvplug.wait(timeout=45)

            assert code == 4
            after = nvplug.lines[told:]
            assert len([line for line in after if "deleted behind our mount" in line and " ERROR " in line]) == 1
            assert after[-1].startswith("nvplug: ")
            assert "start this process anew" in after[-1]
            assert "Traceback" not in nvplug.log()
        async with program(mounted / "kubelet.sock", MACHINE, under=under):
            await kubelet.await_allocatable(GPUS)

        assert not overlaps(kubelet)
