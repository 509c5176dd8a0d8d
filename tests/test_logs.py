from __future__ import annotations

import inspect
import logging
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from _nvplug import happenings
from _nvplug.happenings import Happening, Registered, StreamLost
from _nvplug.observe.logs import line, log

ROOT = Path(__file__).parents[1]

KINDS = [
    kind
    for _, kind in inspect.getmembers(happenings, inspect.isclass)
    if issubclass(kind, Happening) and kind is not Happening
]


def test_happenings_are_exported() -> None:
    """What rooms may publish is what the module names."""
    assert {kind.__name__ for kind in KINDS} | {"Happening", "Publish"} == set(happenings.__all__)


@pytest.mark.parametrize("kind", KINDS)
def test_every_happening_has_a_line(kind: type[Happening], caplog: pytest.LogCaptureFixture) -> None:
    """Whatever is published is worded, with a level, and with each of its fields by name."""
    samples: dict[str, object] = {"str": "Zaphod", "int": 42, "float": 1.5}
    happening = kind(**{field.name: samples[str(field.type)] for field in fields(kind)})

    with caplog.at_level(logging.INFO, "nvplug"):
        log(happening)

    (record,) = caplog.records
    assert record.levelno in {logging.INFO, logging.WARNING, logging.ERROR}
    text = record.getMessage()
    assert text.isprintable()
    written = {"str": "Zaphod", "int": "42", "float": "1.500s"}
    for field in fields(kind):
        assert f" {field.name}={written[str(field.type)]}" in text


def test_a_line_reads_well() -> None:
    """First what happened, then the fields; durations in seconds to the millisecond."""
    happening = Registered("nvidia.com/gpu", "nvplug-gpu-0a1b2c3d.sock", 0.01234)

    assert line(happening) == "registered resource=nvidia.com/gpu socket=nvplug-gpu-0a1b2c3d.sock took=0.012s"


@given(st.text(min_size=1))
def test_a_happening_is_one_line(text: str) -> None:
    """Whatever an exception says, it cannot begin another line, nor look like another field."""
    written = line(StreamLost(text))

    assert written.isprintable()
    assert len(re.findall(r'[^ "=]+=(?:[^ "=]+|"(?:[^"\\]|\\.)*")$', written)) == 1


def test_an_empty_field_is_left_out() -> None:
    """What is not known is not written."""
    assert "resource" not in line(StreamLost(""))


SCRIPT = """
import logging
from _nvplug.happenings import StreamLost
from _nvplug.observe.logs import log, set_up_logging

set_up_logging()
log(StreamLost("nvidia.com/gpu"))
logging.getLogger("another.library").info("chatter")
logging.getLogger("another.library").warning("a warning")
"""


def test_lines_go_to_stderr() -> None:
    """One line each with time and level, nothing on stdout; and of libraries only what warns."""
    run = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=True)

    assert run.stdout == ""
    first, second = run.stderr.splitlines()
    when, rest = first.split(" ", 1)
    assert when.endswith("Z")
    assert rest == "INFO the kubelet ended its stream; registering anew resource=nvidia.com/gpu"
    assert second.endswith(" WARNING a warning")


UNREAD = """
import os, sys, time
from _nvplug.happenings import StreamLost
from _nvplug.observe.logs import log, set_up_logging

reader, writer = os.pipe()
os.dup2(writer, 2)
set_up_logging()
began = time.monotonic()
for _ in range(20000):
    log(StreamLost("nvidia.com/gpu"))
print(time.monotonic() - began)
"""


def test_a_stderr_that_nobody_reads_holds_nobody_up() -> None:
    """Its pipe fills, lines are dropped, and whoever publishes goes on; so does the end of the program."""
    run = subprocess.run(
        [sys.executable, "-c", UNREAD], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )

    assert float(run.stdout) < 30
