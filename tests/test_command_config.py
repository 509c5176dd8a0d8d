from __future__ import annotations

from pathlib import Path

import pytest

from _nvplug.commands.config import main
from _nvplug.config import OPTIONS
from _nvplug.errors import OptionError

FILE = """\
flags: {migStrategy: mixed}
resources:
  gpus: [{pattern: "*H100*", name: h100}, {pattern: "*", name: other}]
sharing:
  timeSlicing:
    failRequestsGreaterThanOne: true
    resources: [{name: h100, replicas: 4, devices: ["0", "2"], rename: few}]
selection:
  exclude: [{index: 7}]
health:
  silence: 1m
  xids: {79: ignore, 63: reset}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that says something of everything."""
    path = tmp_path / "config.yaml"
    path.write_text(FILE)
    return path


def rows(written: str) -> list[list[str]]:
    """The cells of the table, by two spaces or more."""
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in written.splitlines()]


def test_show_has_every_value_with_its_origin(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Flags, variables, keys with their line, and defaults; all that is in force, and only that."""
    status = main(["show", f"--config-file={file}", "--dev-root=/x"], {"DEVICE_ID_STRATEGY": "index"})
    shown = rows(capsys.readouterr().out)

    assert status == 0
    assert {row[0] for row in shown} >= {option.name for option in OPTIONS}
    assert ["mig-strategy", "mixed", f"flags.migStrategy ({file}:1)"] in shown
    assert ["device-id-strategy", "index", "DEVICE_ID_STRATEGY"] in shown
    assert ["dev-root", "/x", "--dev-root"] in shown
    assert ["pass-device-specs", "false", "default"] in shown
    assert ["resources.gpus", "'*H100*' -> nvidia.com/h100", f"resources.gpus ({file}:3)"] in shown
    assert ["resources.gpus", "'*' -> nvidia.com/other"] in shown
    assert ["resources.mig", "-", "default"] in shown
    assert [
        "sharing.timeSlicing",
        "nvidia.com/h100: 4 replicas of 0,2 -> nvidia.com/few",
        f"sharing.timeSlicing ({file}:5)",
    ] in shown
    assert ["sharing.timeSlicing", "requests for more than one are refused"] in shown
    assert ["selection", "exclude index: 7", f"selection ({file}:8)"] in shown
    assert ["health-silence", "60s", f"health.silence ({file}:11)"] in shown
    assert ["health.xids", "63: reset", f"health.xids ({file}:12)"] in shown
    assert ["health.xids", "79: ignore"] in shown


def test_check_names_what_the_reference_would_ignore(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A good file is good, and nobody is surprised by it."""
    assert main(["check", str(file)], {}) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{file} is good.",
        "NVIDIA's plugin accepts and ignores these keys, and nvplug obeys them:",
        "  resources.gpus",
        "  sharing.timeSlicing.resources[0].devices",
        "  sharing.timeSlicing.resources[0].rename",
    ]


def test_check_judges_the_file_alone(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Variables of the shell that it runs in are not part of it."""
    file.write_text("version: v1")

    assert main(["check", str(file)], {"MIG_STRATEGY": "misxed"}) == 0
    assert capsys.readouterr().out == f"{file} is good.\n"


def test_check_refuses_a_bad_file(file: Path) -> None:
    """With the error that a start with it would end with."""
    file.write_text("flags: {migStrategy: misxed}")
    with pytest.raises(OptionError, match="did you mean mixed") as caught:
        main(["check", str(file)], {})

    assert caught.value.exit_code == 2


@pytest.mark.parametrize("words", [[], ["chek", "x"], ["check"], ["check", "a", "b"], ["check", "--config-file=x"]])
def test_what_is_no_command_is_refused(words: list[str]) -> None:
    """With what there is."""
    with pytest.raises(OptionError, match="is no command") as caught:
        main(words, {})

    assert "nvplug config check FILE" in caught.value.remedy
