"""The benchmark: what it makes of samples, and that it gets them, from nvplug and from a plugin that is not ours."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Final

import pytest
from bench.figures import (
    CPU,
    MEGABYTES,
    MILLISECONDS,
    Figure,
    Missed,
    Sample,
    cell,
    median,
    percentile,
    ratio,
    table,
    worst,
)
from bench.processes import cpu_seconds, family, memory
from bench.soak import Row, grown
from bench.trials import TRIALS, schedule
from nvml.standin import NOT_SUPPORTED, Control

ROOT: Final = Path(__file__).parents[1]

BACK: Final = Figure("back", MILLISECONDS, 0.25)
HELD: Final = Figure("held", MEGABYTES)
LATE: Final = Missed("not within 10 s")


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 1.0), (1, 1.0), (50, 50.0), (50.1, 51.0), (99, 99.0), (99.5, 100.0), (100, 100.0)]
)
def test_a_percentile_is_a_value_that_was_measured(percent: float, expected: float) -> None:
    """Whatever the order, by nearest rank."""
    assert percentile([float(n) for n in range(100, 0, -1)], percent) == expected
    assert percentile([7.0], percent) == 7.0


@pytest.mark.parametrize(
    ("samples", "middle", "last"),
    [
        ([3.0], 3.0, 3.0),
        ([3.0, 1.0, 2.0], 2.0, 3.0),
        ([4.0, 1.0, 2.0, 9.0], 3.0, 9.0),
        ([LATE, 1.0, 2.0], 2.0, LATE),
        ([1.0, LATE], LATE, LATE),
        ([LATE], LATE, LATE),
    ],
)
def test_what_was_missed_took_longest(samples: list[Sample], middle: Sample, last: Sample) -> None:
    """A median is one of nothing only where that is true of half of all."""
    assert median(samples) == middle
    assert worst(samples) == last


@pytest.mark.parametrize(
    ("figure", "samples", "expected"),
    [
        (BACK, [], "-"),
        (BACK, [0.0123], "12.3 ms"),
        (BACK, [0.25], "250 ms"),
        (BACK, [0.2501], "250 ms!"),
        (BACK, [0.1, 0.3, 0.2], "200 ms (300 ms!)"),
        (BACK, [0.1, LATE, 0.2], "200 ms (not within 10 s!)"),
        (BACK, [LATE, LATE], "not within 10 s!"),
        (HELD, [45e6, 1e12], "500022 MB (1000000 MB)"),
        (HELD, [9.96e6], "10.0 MB"),
        (Figure("idle", CPU, 1e-3), [0.00052], "0.52 ms/s"),
    ],
)
def test_a_cell_marks_what_exceeds_the_limit(figure: Figure, samples: list[Sample], expected: str) -> None:
    """Median and worst, each by itself; the limit itself is allowed."""
    assert cell(figure, samples) == expected


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ([1.0, 3.0], [3.0, 5.0], "2.00 x"),
        ([4.0], [1.0], "0.25 x"),
        ([1.0], [250.0, LATE, 250.0], "250 x"),
        ([1.0], [LATE], "-"),
        ([LATE], [1.0], "-"),
        ([0.0], [1.0], "-"),
        ([1.0], [], "-"),
    ],
)
def test_a_ratio_is_one_of_medians_or_none(ours: list[Sample], theirs: list[Sample], expected: str) -> None:
    """What did not happen is not compared."""
    assert ratio(ours, theirs) == expected


def test_a_table_has_a_row_for_each_figure_and_its_columns_are_straight() -> None:
    """Also for those that were not measured; the peer's columns only where there is a peer."""
    alone = table([BACK, HELD], {BACK: [0.1]}).splitlines()
    both = table([BACK, HELD], {BACK: [0.1], HELD: [4e7]}, {BACK: [0.2], HELD: [LATE]}).splitlines()

    assert [re.split(r" {2,}", line) for line in alone[2:]] == [["back", "250 ms", "100 ms"], ["held", "-", "-"]]
    assert [re.split(r" {2,}", line) for line in both[2:]] == [
        ["back", "250 ms", "100 ms", "200 ms", "2.00 x"],
        ["held", "-", "40.0 MB", "not within 10 s", "-"],
    ]
    assert len({len(line) for line in both}) == 1


def test_a_schedule_spreads_the_runs() -> None:
    """Each trial has all its runs, never two of them side by side; or one if it has to be quick."""
    runs = schedule(TRIALS, repeat=True)

    assert all(runs.count(trial) == trial.runs for trial in TRIALS)
    assert all(one is not later for one, later in itertools.pairwise(runs))
    assert schedule(TRIALS, repeat=False) == list(TRIALS)


def test_no_two_rows_have_one_name() -> None:
    """Samples of two figures would be mixed up."""
    names = [figure.name for trial in TRIALS for figure in trial.figures]

    assert len(set(names)) == len(names)


def test_all_processes_of_a_plugin_are_found() -> None:
    """Its children, and a child of a child that has made itself a session of its own."""
    script = "sleep 60 & setsid sh -c 'sleep 60; :' & echo; wait"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True) as leader:
        deadline = time.monotonic() + 20
        while len(family(leader.pid)) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        found = family(leader.pid)
        held = memory(found)
        for pid in found:
            # A shell ends by itself when what it waits for is dead.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)

    assert len(found) == 4
    assert leader.pid in found
    assert os.getpid() not in found
    assert 0 < held.proportional <= held.resident


def test_cpu_time_is_known_to_less_than_a_tick() -> None:
    """Of any process, and nothing else of it counts."""
    before, mine = cpu_seconds(os.getpid()), time.process_time()
    while time.process_time() - mine < 0.003:
        pass

    assert cpu_seconds(os.getpid()) - before == pytest.approx(time.process_time() - mine, abs=0.002)


def test_growth_is_seen_against_the_same_trouble() -> None:
    """Threads, files and memory after the last round, against the first; a little is no matter, and nor is another."""

    def row(trouble: str, threads: int, resident: int) -> Row:
        return Row(0.0, trouble, threads, 20, resident, 0.0, 0)

    rows = [row("a", 4, 40 << 20), row("b", 40, 40 << 20), row("a", 5, 41 << 20), row("b", 90, 60 << 20)]

    assert grown(rows, ["a", "c"]) == []
    assert [each.partition(":")[0] for each in grown(rows, ["a", "b"])] == ["threads after 'b'", "resident after 'b'"]


def test_what_a_driver_answers_is_noted(tmp_path: Path) -> None:
    """Every question that nvplug asks is answered or refused in the notes, each with its time, and they are JSON."""
    control = Control(tmp_path, gpus=2)
    control.install()
    control.gpu(0, action=0, rows="0 1")
    done = subprocess.run(
        [sys.executable, "tests/bench/real_gpu.py", "--root", str(control.root)],
        cwd=ROOT,
        env={**os.environ, **control.environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    notes = json.loads(done.stdout)
    first, second = (gpu["questions"] for gpu in notes["gpus"])

    assert notes["driver"] == "570.86.15"
    assert first["nvmlDeviceGetRemappedRows()"]["answer"] == [0, 0, 1, 0]
    assert second["nvmlDeviceGetRemappedRows()"]["error"] == NOT_SUPPORTED
    assert all("ms" in answer for answer in (*first.values(), *second.values()))
    assert notes["gpus"][0]["checkup"]["remap_pending"] is True
    asked = {name.partition("(")[0] for name in first}
    assert {name for name in control.calls() if name.startswith("nvmlDeviceGet")} <= {
        *(f"{name}{version}" for name in asked for version in ("", "_v2", "_v3")),
        "nvmlDeviceGetCount_v2",
        "nvmlDeviceGetHandleByIndex_v2",
        "nvmlDeviceGetTopologyCommonAncestor",
    }


def quick(peer: str, scratch: Path) -> subprocess.CompletedProcess[str]:
    """The benchmark, as little of it as there can be, with a peer."""
    return subprocess.run(
        [sys.executable, "-m", "tests.bench", "--quick", "--peer", peer],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(scratch)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def traces(scratch: Path) -> list[str]:
    """What is in the directory, and the processes that were told of it."""
    found = [str(path) for path in scratch.iterdir()]
    for name in ("cmdline", "environ"):
        for path in Path("/proc").glob(f"[0-9]*/{name}"):
            with contextlib.suppress(OSError):
                if os.fsencode(scratch) in path.read_bytes():
                    found.append(str(path))
    return found


@pytest.fixture
def scratch() -> Generator[Path]:
    """Not tmp_path: with the name of the test in it, a path is too long for a socket."""
    with tempfile.TemporaryDirectory(prefix="nv", dir="/tmp") as directory:
        yield Path(directory)


@pytest.mark.slow
def test_it_measures_nvplug_beside_another_plugin(scratch: Path) -> None:
    """One table: every figure of nvplug's, what the other cannot do in words, and ratios. Nothing is left over."""
    plugin = ROOT / "tests" / "kubelet" / "other_plugin.py"
    ids = " ".join(f"GPU-{index}" for index in range(8))
    done = quick(
        f'env PYTHONPATH="{ROOT}/tests" "{sys.executable}" "{plugin}" "${{KUBELET_SOCKET%/*}}" nvidia.com/gpu {ids}',
        scratch,
    )
    rows = dict(re.split(r" {2,}", line, maxsplit=1) for line in done.stdout.splitlines() if "  " in line)

    assert done.returncode == 0, done.stderr
    for figure in (figure for trial in TRIALS for figure in trial.figures):
        words = re.split(r" {2,}", rows[figure.name])
        assert re.fullmatch(r"[\d.]+ [mMBs/%]+!?( \([\d.]+ [mMBs/%]+!?\))?", words[1]), done.stdout
        assert len(words) == 4
    assert re.search(r"\d x$", rows["start to devices listed"])
    assert re.search(r"UNIMPLEMENTED +-$", rows["GetPreferredAllocation, p50"])
    assert re.search(r"not within 10 s! +-$", rows["XID event to unhealthy on the wire"])
    assert not traces(scratch)


@pytest.mark.slow
def test_a_peer_that_does_not_start_is_shown_with_its_own_words(scratch: Path) -> None:
    """There is no table then, and nothing is left over."""
    done = quick("sh -c 'echo no GPUs here; exit 3'", scratch)

    assert done.returncode == 1
    assert not done.stdout
    assert "peer has not listed 8 healthy devices after its start: exited with 3\nno GPUs here" in done.stderr
    assert not traces(scratch)


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_it_leaves_no_plugin_behind_when_it_is_told_to_end(scratch: Path, signum: signal.Signals) -> None:
    """Plugins have sessions of their own, so that no signal from a terminal reaches them."""
    environment = {**os.environ, "TMPDIR": str(scratch)}
    command = [sys.executable, "-m", "tests.bench", "--quick"]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE) as bench:
        deadline = time.monotonic() + 60
        while not list(scratch.glob("*/nvplug/log")) and time.monotonic() < deadline:
            time.sleep(0.01)
        before = traces(scratch)
        bench.send_signal(signum)
        code = bench.wait(60)

    assert before
    assert code == 1
    assert not traces(scratch)
