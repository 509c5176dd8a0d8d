"""What a mutant is: a small fault, put into a copy of the program, and the tests that must fail because of it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from peer.program import ROOT

from kubelet.build import VERSIONS

__all__ = ["CONTROL", "Edit", "Fall", "Mutant", "MutantError", "plant"]


class MutantError(Exception):
    """The program has changed, and a mutant has not: the text that it replaces is not there exactly once."""


@dataclass(frozen=True, slots=True)
class Edit:
    """A text of the program, and what is put in its place. ``file`` is relative to the checkout."""

    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Fall:
    """A test that must fail.

    Attributes:
        test: file, function and parameter, the first two without ``test_``: ``restarts::fifty_restarts[crash]``.
        at: part of the line of the test at which it must fail: the assertion, or the wait.
        versions: the kubelets that show the fault. Others may be indifferent to it.
    """

    test: str
    at: str
    versions: tuple[str, ...] = VERSIONS


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault.

    Attributes:
        name: in the words of the field.
        breaks: which promise it breaks, and how that shows. Where it cannot be seen by itself, why.
        edits: how to make it.
        falls: the tests that fail because of it. Without one it is an innocent: none may fail.
        spares: whether CONTROL must stay green.
        spared: further tests that must stay green.
        also: tests of CONTROL that fail, too, or may, besides ``falls``.
        needs_old_inodes: whether it shows only where a file system uses the number of an inode again at once.
        quick: whether it is one of those that ``make test`` plants.
    """

    name: str
    breaks: str
    edits: tuple[Edit, ...]
    falls: tuple[Fall, ...]
    spares: bool = True
    spared: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    needs_old_inodes: bool = False
    quick: bool = False


CONTROL = (
    "devices::first_registration_makes_the_gpus_allocatable",
    "devices::options_arrive_whole",
    "devices::a_device_breaks_and_comes_back",
    "devices::preferences_are_asked_for_and_obeyed",
    "devices::topology_hints",
    "restarts::pods_keep_their_gpus_over_restarts",
    "restarts::nvplug_is_killed_and_starts_again",
    "several::two_resources_at_once",
)
"""Tests of all that a mutant might break besides what it is to break. They take a second or two each."""


def plant(mutant: Mutant, directory: Path) -> Path:
    """Makes a copy of the program with this fault; returns its nvplug.py.

    Raises:
        MutantError: see there.
    """
    shutil.copytree(ROOT / "_nvplug", directory / "_nvplug", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "nvplug.py", directory)
    for edit in mutant.edits:
        path = directory / edit.file
        text = path.read_text()
        if text.count(edit.old) != 1:
            raise MutantError(
                f"mutant {mutant.name!r}: in {edit.file} this text stands {text.count(edit.old)} times:\n{edit.old}"
            )
        text = text.replace(edit.old, edit.new)
        # A slip of ours would fell every test, and pass for a fault that is found.
        compile(text, str(path), "exec")
        path.write_text(text)
    return directory / "nvplug.py"
