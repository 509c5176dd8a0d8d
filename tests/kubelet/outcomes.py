"""A pytest plugin for test_mutants.py: writes where each test failed.

One JSON object per test into the file that NVPLUG_OUTCOMES names: the node id, whether it passed, and the lines of the
test at which it did not. ``python -m pytest -p kubelet.outcomes``.
"""

from __future__ import annotations

import json
import linecache
import os
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

__all__ = ["pytest_runtest_makereport"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Notes the outcome of each test's call, and of what is around it if that fails."""
    report = yield
    if call.when == "call" or not report.passed:
        lines = [] if call.excinfo is None else list(_lines(call.excinfo.value))
        with Path(os.environ["NVPLUG_OUTCOMES"]).open("a") as outcomes:
            outcomes.write(json.dumps({"test": item.nodeid, "passed": report.passed, "lines": lines}) + "\n")
    return report


def _lines(error: BaseException) -> Iterator[str]:
    """The lines of tests through which an error came, also as a part of a group."""
    for frame, number in traceback.walk_tb(error.__traceback__):
        path = frame.f_code.co_filename
        if Path(path).name.startswith("test_"):
            yield linecache.getline(path, number).strip()
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from _lines(part)
