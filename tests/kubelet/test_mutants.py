from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from needs import lacking
from peer.program import ROOT

from kubelet.build import VERSIONS
from kubelet.mutant import CONTROL, Mutant, plant
from kubelet.mutants import MUTANTS

FOLDER: Final = Path(__file__).parent
LIMIT: Final = 600.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one test. ``lines`` are those of the test at which it failed."""

    passed: bool
    lines: tuple[str, ...]


@pytest.mark.conformance
@pytest.mark.usefixtures("every_kdm")
@pytest.mark.parametrize(
    "mutant",
    [pytest.param(each, id=each.name, marks=() if each.quick else pytest.mark.mutants) for each in MUTANTS],
)
def test_a_fault_fells_its_tests(mutant: Mutant, tmp_path: Path) -> None:
    """A program with this fault fails the tests that are there for it, where it should, and no others."""
    if mutant.needs_old_inodes and not inodes_are_used_again(tmp_path):
        lacking(f"the file system of {tmp_path} does not use the number of an inode again at once")
    script = plant(mutant, tmp_path)
    falls = {node(fall.test, version): fall for fall in mutant.falls for version in fall.versions}
    felled = {fall.test for fall in mutant.falls} | {*mutant.also}
    control = [test for test in CONTROL if mutant.spares and test not in felled]
    spared = [node(test, version) for test in (*control, *mutant.spared) for version in VERSIONS]

    found = outcomes(script, [*falls, *spared], tmp_path / "outcomes")

    survivors = [test for test in falls if found[test].passed]
    assert not survivors, "the fault is not seen"
    elsewhere = {
        test: found[test].lines for test, fall in falls.items() if not any(fall.at in x for x in found[test].lines)
    }
    assert not elsewhere, "the fault is seen, but not where it should be"
    victims = {test: one.lines for test, one in found.items() if test not in falls and not one.passed}
    assert not victims, "the fault breaks more than it should"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_can_be_made(mutant: Mutant, tmp_path: Path) -> None:
    """The text that a mutant replaces is in the program, once, and the lines at which tests are to fail are in them."""
    plant(mutant, tmp_path)

    for fall in mutant.falls:
        assert fall.at in source(fall.test)


def test_every_test_is_felled_by_something() -> None:
    """There is no test against the real kubelet that no fault turns red."""
    felled = {fall.test.partition("[")[0] for mutant in MUTANTS for fall in mutant.falls}
    tests = {
        f"{path.stem.removeprefix('test_')}::{function.name.removeprefix('test_')}"
        for path in FOLDER.glob("test_*.py")
        if path.stem not in {"test_build", "test_mutants"}
        for function in ast.parse(path.read_text()).body
        if isinstance(function, ast.AsyncFunctionDef) and function.name.startswith("test_")
    }

    assert tests == felled


def outcomes(script: Path, tests: list[str], report: Path) -> dict[str, Outcome]:
    """Runs tests against that nvplug.py."""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "kubelet.outcomes", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "tests"),
            "NVPLUG_PROGRAM": str(script),
            "NVPLUG_OUTCOMES": str(report),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert report.exists(), result.stdout + result.stderr
    found: dict[str, Outcome] = {}
    for line in report.read_text().splitlines():
        one = json.loads(line)
        before = found.get(one["test"], Outcome(passed=True, lines=()))
        found[one["test"]] = Outcome(before.passed and one["passed"], (*before.lines, *one["lines"]))
    assert set(found) == set(tests), result.stdout + result.stderr
    return found


def node(test: str, version: str) -> str:
    """What pytest calls a test of the table."""
    name, _, parameter = test.rstrip("]").partition("[")
    file, _, function = name.partition("::")
    parameters = "-".join(filter(None, (version, parameter)))
    return f"tests/kubelet/test_{file}.py::test_{function}[{parameters}]"


def source(test: str) -> str:
    """The text of a test of the table."""
    file, _, function = test.partition("[")[0].partition("::")
    text = (FOLDER / f"test_{file}.py").read_text()
    (found,) = (
        each
        for each in ast.parse(text).body
        if isinstance(each, ast.AsyncFunctionDef) and each.name == f"test_{function}"
    )
    return ast.get_source_segment(text, found) or ""


def inodes_are_used_again(directory: Path) -> bool:
    """Whether a file that follows a removed one has its inode number."""
    path = directory / "probe"
    numbers = []
    for _ in range(2):
        path.touch()
        numbers.append(path.stat().st_ino)
        path.unlink()
    return numbers[0] == numbers[1]
