from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from _nvplug.config import INERT, OPTIONS

ROOT: Final = Path(__file__).parents[1]

# Sends itself a signal when a room is imported that `run` needs, long before it serves.
INTERRUPTED: Final = """
import os, signal, sys

def interrupt(event, arguments):
    if event == "import" and arguments[0] == "_nvplug.{room}":
        os.kill(os.getpid(), signal.{signal})

sys.addaudithook(interrupt)
import nvplug
sys.exit(nvplug.main(sys.argv[1:]))
"""


def python(*words: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs Python in the checkout, with no variables but those given."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def nvplug(*words: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs the program from the checkout."""
    return python("nvplug.py", *words, environment=environment)


@pytest.mark.parametrize(
    "words", [["--help"], ["help"], ["-h"], ["run", "-help"], ["devices", "--dev-root=x", "--help"]]
)
def test_help_names_every_command_and_option(words: Sequence[str]) -> None:
    """It is asked for in any of the usual ways, goes to stdout, and leaves nothing out."""
    answer = nvplug(*words)

    assert answer.returncode == 0
    assert answer.stderr == ""
    for name in ("run", "devices", "config show", "config check", "health", "cdi", "demo"):
        assert f" {name}" in answer.stdout or f"[{name}]" in answer.stdout
    for option in (*OPTIONS, *INERT):
        assert all(f"--{flag}" in answer.stdout for flag in option.flags)
        assert all(variable in answer.stdout for variable in option.variables)
        assert option.key in answer.stdout
    assert max(map(len, answer.stdout.splitlines())) <= 120


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["devcies"], "nvplug: there is no command 'devcies'; did you mean devices?"),
        (["frobnicate"], "nvplug: there is no command 'frobnicate'; see nvplug --help"),
        (["--kubelet-soket=/k"], "nvplug: there is no flag '--kubelet-soket'; did you mean --kubelet-socket?"),
        (["--device-discovery-strategy=simulated:2xT5"], "nvplug: --device-discovery-strategy=simulated:2xT5: "),
        (["devices", "all"], "nvplug: 'all' is not a flag"),
        (["demo", "--fast"], "nvplug: "),
    ],
)
def test_what_cannot_be_obeyed_ends_the_program(words: Sequence[str], line: str) -> None:
    """Status 2 and one line on stderr: what was said, and what to do; no traceback, and nothing on stdout."""
    answer = nvplug(*words)

    assert answer.returncode == 2
    assert answer.stdout == ""
    assert answer.stderr.count("\n") == 1
    assert answer.stderr.startswith(line)


def test_run_refuses_before_it_serves() -> None:
    """Options are judged at start, those in variables as well."""
    answer = nvplug(environment={"MIG_STRATEGY": "misxed"})

    assert answer.returncode == 2
    assert answer.stderr.startswith("nvplug: MIG_STRATEGY is 'misxed'")


def test_devices_shows_a_simulated_machine() -> None:
    """A table on stdout, with a line for each GPU."""
    answer = nvplug("devices", environment={"DEVICE_DISCOVERY_STRATEGY": "simulated:2xT4"})

    assert answer.returncode == 0
    header, *rows = answer.stdout.splitlines()
    assert header.split()[:3] == ["INDEX", "UUID", "NAME"]
    assert [row.split()[0] for row in rows] == ["0", "1"]


def test_devices_says_what_is_in_the_way() -> None:
    """Without a driver it fails, and names the library and a way out."""
    answer = nvplug("devices", "--device-discovery-strategy=nvml", "--driver-root-ctr-path=/nonexistent")
    if answer.returncode == 0:
        pytest.skip("this machine has a driver")

    assert answer.returncode == 1
    assert answer.stdout == ""
    assert "libnvidia-ml.so.1" in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("room", ["config", "kubelet.loop"])
def test_a_signal_during_the_start_is_obeyed(room: str, signal: str) -> None:
    """It is neither lost nor fatal: the program ends with status 0 as soon as it has started."""
    answer = python(
        "-c",
        INTERRUPTED.format(room=room, signal=signal),
        "run",
        "--device-discovery-strategy=simulated:1xT4",
        "--kubelet-socket=/nonexistent/kubelet.sock",
    )

    assert answer.returncode == 0, answer.stderr
    assert "Traceback" not in answer.stderr
