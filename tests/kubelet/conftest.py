from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conftest import IN_MEMORY, file_system_of
from needs import lacking

from kubelet.build import VERSIONS, GoError, build

if TYPE_CHECKING:
    from collections.abc import Iterator


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker."""
    config.addinivalue_line("markers", "mutants: spoils the program on purpose; left out of `make test`")


@pytest.fixture(scope="session", params=VERSIONS)
def kdm(request: pytest.FixtureRequest) -> Path:
    """The real device manager of each version. It needs a Go that can build it."""
    version: str = request.param
    return _built(version)


@pytest.fixture(scope="session")
def every_kdm() -> None:
    """Sees that all versions are there, as `kdm` does."""
    for version in VERSIONS:
        _built(version)


def _built(version: str) -> Path:
    try:
        return build(version)
    except GoError as error:
        lacking(f"the real kubelet {version} cannot be built: {error}; {error.remedy}")


@pytest.fixture
def directory() -> Iterator[Path]:
    """Where a kubelet and its plugins meet: on a disk, as on a node, where inode numbers are used again at once.

    Not below tmp_path, whose length a socket's path cannot have.
    """
    parents = [parent for parent in (Path("/tmp"), Path("/var/tmp")) if os.access(parent, os.W_OK)]
    on_disk = [parent for parent in parents if file_system_of(parent) not in IN_MEMORY]
    with tempfile.TemporaryDirectory(prefix="kdm-", dir=next(iter(on_disk), None)) as path:
        yield Path(path, "device-plugins")
