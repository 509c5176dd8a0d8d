from __future__ import annotations

import os
from pathlib import Path

import pytest
from kubelet.build import GoError
from needs import lacking

from cdi.build import build


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of these start processes or compile."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.process)


@pytest.fixture(scope="session")
def inject() -> Path:
    """The program around CNCF's package."""
    try:
        return build()
    except GoError as error:
        lacking(f"CNCF's package for CDI cannot be built: {error}; {error.remedy}")


@pytest.fixture(autouse=True)
def _root() -> None:
    if os.geteuid():
        lacking("device nodes can only be made by root")
