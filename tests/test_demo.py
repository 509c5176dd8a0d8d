from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

pytestmark = pytest.mark.process

ROOT: Final = Path(__file__).parents[1]

TITLES: Final = (
    "A kubelet listens",
    "1. nvplug registers",
    "2. A pod asks for two GPUs",
    "3. GPU 3 breaks",
    "4. GPU 3 works again",
    "5. The kubelet restarts",
    "6. nvplug is told to stop",
)

DEADLINE: Final = 60.0


@pytest.fixture
def scratch() -> Generator[Path]:
    """Where temporary directories are made; its path is short, as sockets need it, and unlike any other."""
    with tempfile.TemporaryDirectory(prefix="nv", dir="/tmp") as directory:
        yield Path(directory)


@contextmanager
def demo(scratch: Path, tree: Path = ROOT, *, pause: float, patience: float = 20.0) -> Generator[Demo]:
    """``nvplug demo`` from a checkout, at another pace."""
    code = f"""
import trio
from _nvplug.commands.demo import run_demo
raise SystemExit(trio.run(run_demo, {pause}, {patience}))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tree,
        env={**os.environ, "TMPDIR": str(scratch), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE)


Demo = subprocess.Popen[str]


def processes(scratch: Path) -> list[str]:
    """The command lines of all processes that have to do with the directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(scratch) in line:
            found.append(line)
    return found


def read_to(process: Demo, text: str) -> None:
    """Reads its output up to a line that contains the text."""
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"{text!r} was never said")


def test_the_demo_tells_all_of_its_story_and_leaves_nothing(scratch: Path) -> None:
    """Every step succeeds, and no process and no file is left."""
    with demo(scratch, pause=0.0) as process:
        output, errors = process.communicate(timeout=DEADLINE)

    assert (process.returncode, errors) == (0, "")
    assert [title for title in TITLES if title not in output] == []
    assert "\033" not in output
    assert output.endswith("stream closed, sockets left: 0\n")
    assert list(scratch.iterdir()) == []
    assert processes(scratch) == []


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("kubelet/api/v1beta1/__init__.py", "    health:", "    state:"),
        ("kubelet/api/v1beta1/__init__.py", "    devices_ids:", "    device_ids:"),
        ("kubelet/api/v1beta1/__init__.py", "    resource_name:", "    resource:"),
        ("container/answers.py", '"NVIDIA_VISIBLE_DEVICES"', '"VISIBLE_DEVICES"'),
    ],
)
def test_the_demo_fails_when_a_field_has_another_name(scratch: Path, file: str, old: str, new: str) -> None:
    """What it shows comes from the wire: it cannot tell of what the program does not send."""
    tree = scratch / "tree"
    shutil.copytree(ROOT / "_nvplug", tree / "_nvplug", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "nvplug.py", tree)
    module = tree / "_nvplug" / file
    source = module.read_text()

    assert old in source

    module.write_text(source.replace(old, new))
    with demo(scratch, tree, pause=0.0, patience=3.0) as process:
        _, errors = process.communicate(timeout=DEADLINE)

    assert process.returncode == 1
    assert "nvplug demo: " in errors
    assert list(scratch.iterdir()) == [tree]
    assert processes(scratch) == []


@pytest.mark.parametrize(
    ("title", "signum"),
    list(zip(TITLES, itertools.cycle([signal.SIGINT, signal.SIGTERM]), strict=False)),
)
def test_a_signal_at_any_moment_leaves_nothing(scratch: Path, title: str, signum: signal.Signals) -> None:
    """Whatever step it is at, a signal to all of its group ends the demo, and all that it has started."""
    with demo(scratch, pause=0.3) as process:
        read_to(process, title)
        os.killpg(process.pid, signum)
        _, errors = process.communicate(timeout=DEADLINE)

    assert (process.returncode, errors) == (128 + signum, "")
    assert list(scratch.iterdir()) == []
    assert processes(scratch) == []


def test_a_reader_who_leaves_ends_the_demo(scratch: Path) -> None:
    """As with ``| head``: the demo has nobody to tell its story to, and says nothing about that either."""
    with demo(scratch, pause=0.3) as process:
        read_to(process, TITLES[0])
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
        _, errors = process.communicate(timeout=DEADLINE)

    assert (process.returncode, errors) == (1, "")
    assert list(scratch.iterdir()) == []
    assert processes(scratch) == []


def test_a_second_signal_does_not_interrupt_the_tidying_up(scratch: Path) -> None:
    """Someone who presses Ctrl-C over and over again has nothing left behind either."""
    with demo(scratch, pause=30.0) as process:
        read_to(process, TITLES[1])
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(0.001)

    assert list(scratch.iterdir()) == []
    assert processes(scratch) == []


def test_a_killed_demo_takes_its_processes_with_it(scratch: Path) -> None:
    """SIGKILL leaves it no time to end them, and yet they end."""
    with demo(scratch, pause=30.0) as process:
        read_to(process, "8 of 8")
        running = processes(scratch)
        process.kill()
        deadline = time.monotonic() + DEADLINE
        while processes(scratch) and time.monotonic() < deadline:
            time.sleep(0.01)

    assert len(running) == 2
    assert processes(scratch) == []
