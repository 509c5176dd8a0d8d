from __future__ import annotations

import os
import signal
import sysconfig
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
import trio
from bench.processes import cpu_seconds
from conftest import Measure
from node import GPUS, MACHINE, Node
from peer.kubelet import kubelet_in
from peer.program import Program, program

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

# Bytes; the limit of the whole program.
LARGEST_SHARE: Final = 40 << 20


@asynccontextmanager
async def node(binary: Path, directory: Path, temporary: Path) -> AsyncGenerator[Node, None]:
    """A node on which the executable has listed its devices."""
    async with (
        kubelet_in(directory) as kubelet,
        program(kubelet.socket, MACHINE, command=(str(binary), "run"), env={"TMPDIR": str(temporary)}) as nvplug,
    ):
        await kubelet.await_allocatable(GPUS)
        yield Node(kubelet, nvplug)


def family(pid: int) -> Iterator[int]:
    """A process and all that descend from it."""
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from family(int(child))


def field(pid: int, name: str) -> int:
    """A figure of smaps_rollup, in bytes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


async def ends_serving(nvplug: Program, sockets: list[Path]) -> None:
    """Checks that within 2 s there is neither a process nor anybody who answers."""
    with trio.fail_after(2):
        await nvplug.wait()
        while nvplug.left_processes():  # noqa: ASYNC110  # nobody tells when a process is gone
            await trio.sleep(0.01)
    for path in sockets:
        with pytest.raises(OSError, match=r".+"):
            await trio.open_unix_socket(str(path))


async def test_it_is_one_process_under_its_own_name(binary: Path, disk: Path, tmp_path: Path) -> None:
    """ps, pidof and /proc show the executable, not a launcher or an interpreter, and no file is unpacked to."""
    async with node(binary, disk, tmp_path) as running:
        pid = running.nvplug.pid

        assert list(family(pid)) == [pid]
        assert Path(f"/proc/{pid}/exe").readlink() == binary
        assert Path(f"/proc/{pid}/comm").read_text().strip() == "nvplug"
        assert Path(f"/proc/{pid}/cmdline").read_bytes().startswith(os.fsencode(binary) + b"\0run\0")
        assert not list(tmp_path.iterdir())
        await running.serves()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
async def test_a_signal_ends_it_cleanly(binary: Path, disk: Path, tmp_path: Path, signum: signal.Signals) -> None:
    """The first process is the program: it is told, tidies up, and nothing is left anywhere."""
    async with node(binary, disk, tmp_path) as running:
        ended = await running.nvplug.stop(signum)

        assert ended.code == 0, running.nvplug.log()
        assert ended.seconds < 2
        assert not running.kubelet.plugin_sockets()
        assert not list(tmp_path.iterdir())


async def test_sighup_ends_nothing(binary: Path, disk: Path, tmp_path: Path) -> None:
    """It goes on in the same process, and on the same stream."""
    async with node(binary, disk, tmp_path) as running:
        streams = len(running.kubelet.streams)
        os.kill(running.nvplug.pid, signal.SIGHUP)
        await running.serves()

        assert running.nvplug.code is None
        assert len(running.kubelet.streams) == streams


async def test_sigkill_leaves_nothing_serving(binary: Path, disk: Path, tmp_path: Path) -> None:
    """Of whichever of its processes; and again and again leaves nothing that grows."""
    async with kubelet_in(disk) as kubelet:
        for _ in range(10):
            async with program(
                kubelet.socket, MACHINE, command=(str(binary), "run"), env={"TMPDIR": str(tmp_path)}
            ) as nvplug:
                await kubelet.await_allocatable(GPUS)
                sockets = list(kubelet.plugin_sockets())
                victim = list(family(nvplug.pid))[-1]
                nvplug.killed = True
                os.kill(victim, signal.SIGKILL)
                await ends_serving(nvplug, sockets)
            assert not list(tmp_path.iterdir())
        # What the last one left; those before it were removed by their successors.
        assert len(kubelet.plugin_sockets()) <= 1


async def test_it_starts_fast(binary: Path, disk: Path, tmp_path: Path, measure: Measure) -> None:
    """From the start of the process to the devices on the kubelet's side."""
    async with kubelet_in(disk) as kubelet:
        for _ in range(5):
            async with program(
                kubelet.socket, MACHINE, command=(str(binary), "run"), env={"TMPDIR": str(tmp_path)}
            ) as nvplug:
                await kubelet.await_allocatable(GPUS)
                cpu = cpu_seconds(nvplug.pid)
                measure("executable: start to devices listed", kubelet.lists[-1].at - nvplug.started, 0.35)
                # Whatever else the machine does meanwhile.
                measure("executable: CPU time of that", cpu, 0.35)


async def test_what_makes_classes_was_compiled_at_build_time(binary: Path, disk: Path, tmp_path: Path) -> None:
    """Of what dataclasses and attrs write nothing is compiled at a start, which would break nothing, and take longer.

    That depends on how the two go about it: a new version of either, or of Python, may be the end of it.
    """
    library = tmp_path / "audit.so"
    command = ["cc", "-shared", "-fPIC", f"-I{sysconfig.get_path('include')}", "-o", str(library)]
    await trio.run_process([*command, str(Path(__file__).with_name("audit.c"))])
    preloaded = {"LD_PRELOAD": str(library)}
    async with program(disk / "kubelet.sock", MACHINE, command=(str(binary), "run"), env=preloaded) as nvplug:
        await nvplug.wait_for_line("waiting for the kubelet")
        compiled = [line for line in nvplug.lines if line.startswith("audit: compile ")]

        assert not [line for line in compiled if "<attrs " in line or "__create_fn__" in line]
        # Both would have been heard: what was compiled before, and what namedtuple writes, which is compiled as ever.
        assert nvplug.lines.count("audit: exec <generated>") > 100
        assert any("lambda _cls, " in line for line in compiled)


async def test_it_is_small_in_memory(binary: Path, disk: Path, tmp_path: Path) -> None:
    """All its processes together: proportional share, and what of the unpacked files nothing has mapped besides."""
    async with node(binary, disk, tmp_path) as running:
        share = sum(field(pid, "Pss") for pid in family(running.nvplug.pid))

        assert share < LARGEST_SHARE
