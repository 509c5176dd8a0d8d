from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
from needs import lacking

from frozen.roots import SUITES, MissingError, debian, require

ROOT: Final = Path(__file__).parents[2]


@contextmanager
def skipping() -> Generator[None]:
    """A test that this machine may not have the tools for."""
    try:
        yield
    except MissingError as missing:
        lacking(str(missing))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of these take their time."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.frozen)
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def binary() -> Path:
    """``dist/nvplug``, built from what is in the checkout now."""
    base = getattr(sys, "_base_executable", sys.executable)
    built = subprocess.run(
        ["make", "binary", f"PYTHON={base}"], cwd=ROOT, check=False, text=True, capture_output=True, timeout=600
    )
    with skipping():
        if "make binary: " in built.stderr and "apt-get install" in built.stderr:
            raise MissingError(built.stderr.strip())
    assert built.returncode == 0, built.stdout + built.stderr

    return ROOT / "dist" / "nvplug"


@pytest.fixture
def empty(binary: Path) -> Generator[Path]:
    """A root with nothing in it but /nvplug."""
    with skipping():
        require("unshare")
    with tempfile.TemporaryDirectory(prefix="nvr") as directory:
        root = Path(directory)
        root.chmod(0o755)
        shutil.copy(binary, root / "nvplug")
        yield root


@pytest.fixture(params=["empty", *SUITES])
def root(request: pytest.FixtureRequest, binary: Path) -> Generator[Path]:
    """An empty root, and those of Debian, each with /nvplug."""
    if request.param == "empty":
        yield request.getfixturevalue("empty")
        return
    with skipping():
        made = debian(request.param)
    shutil.copy(binary, made / "nvplug")
    yield made


@pytest.fixture
def nvplug(binary: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the executable to its end, under another command if need be."""

    def run(
        *words: str, under: tuple[str, ...] = (), env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        name = "/nvplug" if under else str(binary)
        return subprocess.run(
            [*under, name, *words],
            check=False,
            text=True,
            capture_output=True,
            env={"PATH": os.environ["PATH"], **(env or {})},
            timeout=60,
        )

    return run
