# ruff: noqa: ASYNC240 - small files
"""What nvplug does with what it finds in the kubelet's directory when it starts."""

from __future__ import annotations

import socket
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from node import GPUS, MACHINE
from peer.kubelet import kubelet_in
from peer.program import program

pytestmark = pytest.mark.process


@contextmanager
def living(path: Path) -> Generator[None]:
    """A socket on which somebody listens."""
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
        bound.listen()
        yield


def dead(path: Path) -> None:
    """A socket on which nobody listens any more."""
    with living(path):
        pass


async def test_dead_sockets_of_ours_are_removed(disk: Path) -> None:
    """Of our naming, and refusing: they are of earlier lives, whatever the resource was called."""
    async with kubelet_in(disk) as kubelet:
        dead(disk / "nvplug-gpu-00000000.sock")
        dead(disk / "nvplug-mig-1g.5gb-12345678.sock")
        async with program(kubelet.socket, MACHINE) as nvplug:
            await kubelet.await_allocatable(GPUS)

            assert len(kubelet.plugin_sockets()) == 1
            assert kubelet.plugin_sockets()[0].name == kubelet.streams[0].endpoint
            assert len([line for line in nvplug.lines if " INFO removed a socket" in line]) == 2


async def test_living_sockets_are_named_in_one_warning(disk: Path) -> None:
    """Another nvplug's and another plugin's for the same resource are left alone; their operator has to decide."""
    names = ["nvidia-gpu.sock", "nvidiaGPU-1.sock", "nvplug-gpu-00000000.sock"]
    async with kubelet_in(disk) as kubelet:
        with living(disk / names[0]), living(disk / names[1]), living(disk / names[2]):
            async with program(kubelet.socket, MACHINE) as nvplug:
                await kubelet.await_allocatable(GPUS)
                warnings = [line for line in nvplug.lines if " WARNING " in line]

                assert len(warnings) == 1
                assert all(name in warnings[0] for name in names)
            assert {path.name for path in kubelet.plugin_sockets()} == set(names)


async def test_what_is_not_ours_stays(disk: Path) -> None:
    """Dead sockets of others, files, links and directories, also under our names: none of them is touched."""
    async with kubelet_in(disk) as kubelet:
        dead(disk / "nvidia-gpu.sock")
        dead(disk / "other.sock")
        (disk / "kubelet_internal_checkpoint").write_text("{}")
        (disk / "nvplug-gpu-1.sock").write_text("not a socket")
        (disk / "nvplug-gpu-2.sock").mkdir()
        (disk / "nvplug-gpu-3.sock").symlink_to(disk / "other.sock")
        before = {path.name for path in disk.iterdir()}
        async with program(kubelet.socket, MACHINE) as nvplug:
            await kubelet.await_allocatable(GPUS)
            during = {path.name for path in disk.iterdir()}

            assert during - before == {kubelet.streams[0].endpoint}
            assert before <= during
            assert not [line for line in nvplug.lines if " WARNING " in line]


async def test_a_directory_that_is_not_there_is_waited_for(disk: Path) -> None:
    """Not even its parents are made; and what is said about it names the path, once."""
    missing = disk / "not" / "yet"
    async with program(missing / "kubelet.sock", MACHINE) as nvplug:
        await nvplug.wait_for_line("waiting for the kubelet")

        assert not disk.exists()
        async with kubelet_in(missing) as kubelet:
            await kubelet.await_allocatable(GPUS)
            awaited = [line for line in nvplug.lines if "waiting for the kubelet" in line]

            assert len(awaited) == 1
            assert str(missing / "kubelet.sock") in awaited[0]


async def test_a_path_that_is_too_long_is_an_error_at_once(disk: Path) -> None:
    """No socket could ever be made there: exit status 2, the flag and the reason."""
    async with program(disk / ("x" * 80) / "kubelet.sock", MACHINE) as nvplug:
        code = await nvplug.wait()

        assert code == 2
        assert "--kubelet-socket" in nvplug.log()
        assert "too long" in nvplug.log()
        assert "Traceback" not in nvplug.log()


async def test_nothing_is_registered_without_a_gpu(disk: Path) -> None:
    """A node without GPUs gets no ``nvidia.com/gpu: 0``; with the first one it is registered, and stays so."""
    disk.mkdir()
    description = disk / "gpus.json"
    description.write_text('{"count": 0}')
    async with (
        kubelet_in(disk) as kubelet,
        program(kubelet.socket, f"--device-discovery-strategy=simulated:{description}") as nvplug,
    ):
        await nvplug.wait_for_line("found GPUs.* gpus=0")

        assert not kubelet.connections
        description.write_text('{"count": 2}')
        await kubelet.await_allocatable(2)
        description.write_text('{"count": 0}')
        await kubelet.await_allocatable(0)
        at = await kubelet.restart()
        await kubelet.await_back(0, after=at)

        assert len(kubelet.registrations) == 2
