"""The real driver code, run by a test on the stand-in library."""

from __future__ import annotations

from pathlib import Path
from typing import Final, TypeVar

import pytest

from _nvplug.drivers.nvml import NvmlDriver, Pace
from _nvplug.happenings import Happening
from _nvplug.hardware import Hardware
from _nvplug.latest import Latest
from nvml.standin import Control

__all__ = ["QUICK", "UNKNOWN", "Driven", "let_move"]

UNKNOWN: Final = 999
"""NVML_ERROR_UNKNOWN."""

# Short enough for tests, long enough for a busy machine.
QUICK: Final = Pace(
    settle=0.0,
    patience=0.5,
    sweep=0.05,
    late=0.01,
    attach=0.2,
    retry_first=0.02,
    retry_last=0.1,
    events_first=0.02,
    events_last=0.2,
    slice=0.05,
)

H = TypeVar("H", bound=Happening)


class Driven:
    """A driver, and what it has said so far."""

    def __init__(self, control: Control, tmp_path: Path) -> None:
        self.control = control
        self.dev = tmp_path / "dev"
        self.dev.mkdir()
        self.hardware = Latest(Hardware())
        self.said: list[Happening] = []

    def driver(self, pace: Pace, library_path: str = "") -> NvmlDriver:
        """One that sees nothing of this machine."""
        return NvmlDriver(
            str(self.control.root),
            dev=str(self.dev),
            sysfs=str(self.control.sysfs),
            library_path=library_path,
            pace=pace,
        )

    def all_said(self, kind: type[H]) -> list[H]:
        """All of one kind."""
        return [one for one in self.said if isinstance(one, kind)]


def let_move(control: Control, monkeypatch: pytest.MonkeyPatch) -> Control:
    """Lets the stand-in in this process be moved by ``control``, and returns that."""
    for name, value in control.environment.items():
        monkeypatch.setenv(name, value)
    return control
