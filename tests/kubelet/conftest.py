from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kubelet.build import VERSIONS, GoError, build

if TYPE_CHECKING:
    from collections.abc import Iterator


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker."""
    config.addinivalue_line(
        "markers", "conformance: runs against the real kubelet's code, which Go builds once, in minutes"
    )


@pytest.fixture(scope="session", params=VERSIONS)
def kdm(request: pytest.FixtureRequest) -> Path:
    """The real device manager of each version. Without a Go that can build it the test is skipped, and says so.

    With CONFORMANCE_REQUIRED set, as in CI, it fails instead.
    """
    version: str = request.param
    try:
        return build(version)
    except GoError as error:
        reason = f"the real kubelet {version} cannot be built: {error}; {error.remedy}"
        if os.environ.get("CONFORMANCE_REQUIRED"):
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture
def directory() -> Iterator[Path]:
    """Where a kubelet and its plugins meet. Not below tmp_path, whose length a socket's path cannot have."""
    with tempfile.TemporaryDirectory(prefix="kdm-") as path:
        yield Path(path, "device-plugins")
