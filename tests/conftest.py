"""What tests of several rooms share: short directories on file systems of two kinds, and the table of times."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Final, Literal

import pytest
from hypothesis import HealthCheck, settings
from needs import lacking

# Before a test imports grpclib, as in the program.
import _nvplug.kubelet  # noqa: F401

__all__ = ["Measure", "file_system_of"]

# On a busy machine everything is slow now and then, and that fails nothing.
settings.register_profile("nvplug", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("nvplug"), max_examples=20)
settings.load_profile("nvplug")

IN_MEMORY: Final = frozenset({"ramfs", "tmpfs"})

Measure = Callable[[str, float, float], None]
"""Takes what was measured, the seconds it took, and the limit in seconds."""


def file_system_of(path: Path) -> str:
    """The type of the file system that a directory is on, as mount(8) names it."""
    mounts: dict[str, str] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        mounts[before.split()[4]] = after.split()[0]
    real = path.resolve()
    return next(mounts[str(each)] for each in (real, *real.parents) if str(each) in mounts)


@pytest.fixture
def disk() -> Generator[Path]:
    """A place for a kubelet's directory on a disk: there, unlike on tmpfs, inode numbers are used again at once."""
    yield from _place("disk")


@pytest.fixture(params=["disk", "memory"])
def place(request: pytest.FixtureRequest) -> Generator[Path]:
    """The same on a disk, and on tmpfs."""
    yield from _place(request.param)


def _place(kind: Literal["disk", "memory"]) -> Generator[Path]:
    # Not tmp_path: with the name of the test in it, a path is too long for a socket.
    for parent in map(Path, ("/tmp", "/var/tmp", "/dev/shm", "/run")):
        if not os.access(parent, os.W_OK):
            continue
        if (file_system_of(parent) in IN_MEMORY) == (kind == "memory"):
            with tempfile.TemporaryDirectory(prefix="nvplug", dir=parent) as directory:
                yield Path(directory) / "k"
            return
    lacking(f"no directory for temporary files is on a file system of the kind {kind!r}")


@pytest.fixture
def measure(record_property: Callable[[str, object], None]) -> Measure:
    """Notes a time for the table at the end; more than ten times the limit is a failure."""

    def note(what: str, seconds: float, limit: float) -> None:
        record_property("measured", (what, seconds, limit))

        # A busy machine must not fail a test; what is ten times too slow waits for something that it should not.
        assert seconds <= 10 * limit, f"{what}: {seconds:.3f} s; the limit is {limit} s"

    return note


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints what was measured, against the limits."""
    rows = [
        row
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        if report.when == "call"
        for name, row in report.user_properties
        if name == "measured"
    ]
    if rows:
        terminalreporter.section("measured (worst of each)")
    for what in dict.fromkeys(row[0] for row in rows):
        times = sorted(seconds for name, seconds, _ in rows if name == what)
        limit = next(limit for name, _, limit in rows if name == what)
        mark = "  over the limit" if times[-1] > limit else ""
        terminalreporter.write_line(
            f"{what:<64} {times[-1] * 1000:8.1f} ms of {limit * 1000:6.0f}  median {times[len(times) // 2] * 1000:8.1f}"
            f"  of {len(times):3}{mark}"
        )
