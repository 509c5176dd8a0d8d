from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
import trio
from bench.processes import cpu_seconds
from conftest import Measure
from node import GPUS, MACHINE
from peer.kubelet import kubelet_in
from peer.program import ROOT, program
from test_probe import STRANGER

from frozen.roots import inside

SOURCE: Final = (sys.executable, str(ROOT / "nvplug.py"))

Answer = tuple[int, str, str]


async def ask(command: tuple[str, ...], name: str, *words: str) -> Answer:
    """Status, stdout and stderr of ``nvplug health``."""
    done = await trio.run_process(
        [*command, "health", *words],
        check=False,
        capture_stdout=True,
        capture_stderr=True,
        env={"PATH": os.environ["PATH"], "HEALTH_SOCKET": name},
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


async def ask_both(binary: Path, name: str, *words: str) -> list[Answer]:
    """The answers of the launcher in C and of the command in Python, asked at the same time."""
    answers: dict[tuple[str, ...], Answer] = {}

    async def note(command: tuple[str, ...]) -> None:
        answers[command] = await ask(command, name, *words)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(note, (str(binary),))
        nursery.start_soon(note, SOURCE)
    return [answers[str(binary),], answers[SOURCE]]


@pytest.fixture
def name() -> str:
    """A name that no other test has."""
    return f"@nvplug-test-{secrets.token_hex(8)}"


async def test_the_launcher_answers_as_python_does(binary: Path, disk: Path, name: str) -> None:
    """Word for word, through a whole life: waiting, serving, hanging, gone."""
    kubelet_socket = disk / "kubelet.sock"
    async with program(kubelet_socket, MACHINE, command=(str(binary), "run"), env={"HEALTH_SOCKET": name}) as nvplug:
        await nvplug.wait_for_line("waiting for the kubelet")

        waiting = "nvidia.com/gpu: waiting for the kubelet\n"
        assert await ask_both(binary, name) == [(0, waiting, "")] * 2
        assert await ask_both(binary, name, "--ready") == [(1, waiting, "")] * 2
        async with kubelet_in(disk) as kubelet:
            await kubelet.await_allocatable(GPUS)
            await nvplug.wait_for_line(" registered ")

            serving = f"nvidia.com/gpu: registered, {GPUS} of {GPUS} healthy\n"
            assert await ask_both(binary, name) == [(0, serving, "")] * 2
            assert await ask_both(binary, name, "--ready") == [(0, serving, "")] * 2
        os.kill(nvplug.pid, signal.SIGSTOP)
        hanging = f"nvplug: no answer from {name} within 5 s; nvplug hangs: restart it\n"
        try:
            assert await ask_both(binary, name) == [(1, "", hanging)] * 2
        finally:
            os.kill(nvplug.pid, signal.SIGCONT)
    first, second = await ask_both(binary, name)

    assert first == second
    assert first[0] == 1
    assert first[2].startswith(f"nvplug: nobody answers at {name}; ")


@pytest.mark.parametrize("words", [["--raedy"], ["--help"], ["--ready", "--ready"]])
async def test_other_words_are_pythons_business(binary: Path, name: str, words: list[str]) -> None:
    """Which explains them."""
    first, second = await ask_both(binary, name, *words)

    assert first == second
    assert first[1] or first[2].startswith("nvplug: ")


def test_the_launcher_believes_no_stranger(binary: Path, name: str) -> None:
    """On a host any user can take the name while nvplug does not run."""
    if os.geteuid():
        pytest.skip("only root can become another user")
    with subprocess.Popen([sys.executable, "-c", STRANGER, name], stdout=subprocess.PIPE) as stranger:
        assert stranger.stdout is not None
        stranger.stdout.readline()

        asking = subprocess.run(
            [binary, "health"], check=False, text=True, capture_output=True, env={"HEALTH_SOCKET": name}
        )

    assert asking.returncode == 1
    assert asking.stderr == f"nvplug: what answers at {name} is not nvplug; see who it is: ss -xlp\n"


async def test_it_needs_nothing_and_costs_next_to_nothing(
    binary: Path, empty: Path, disk: Path, name: str, measure: Measure
) -> None:
    """Not even /proc or the same root. Both processes together: 2 ms of CPU a second, where asked every 10 s."""
    async with (
        kubelet_in(disk) as kubelet,
        program(kubelet.socket, MACHINE, command=(str(binary), "run"), env={"HEALTH_SOCKET": name}) as nvplug,
    ):
        await kubelet.await_allocatable(GPUS)
        (status, _, _) = await ask((*inside(empty, ["read-only"]), "/nvplug"), name)

        assert status == 0
        before = cpu_seconds(nvplug.pid)
        asked = 20
        for _ in range(asked):
            pid = os.posix_spawn(  # noqa: ASYNC221  # at once, and for the sake of wait4
                str(binary), [str(binary), "health"], {"HEALTH_SOCKET": name}
            )
            _, status, used = await trio.to_thread.run_sync(os.wait4, pid, 0)

            assert status == 0
            measure("nvplug health: CPU of the one that asks", used.ru_utime + used.ru_stime, 0.005)
        measure("nvplug health: CPU of the one that answers", (cpu_seconds(nvplug.pid) - before) / asked, 0.015)
