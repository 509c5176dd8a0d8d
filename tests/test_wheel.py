from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final
from zipfile import ZipFile

import pytest

pytestmark = pytest.mark.process

ROOT: Final = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, made without network."""
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(directory)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (made,) = directory.iterdir()
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory into which the wheel alone is installed; what it depends on is there already."""
    directory = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    alone = ["--no-deps", "--no-index", "--no-compile", "--target", str(directory), str(wheel)]
    subprocess.run([*pip, *alone], check=True, capture_output=True)
    return directory


def nvplug(installed: Path, empty: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the installed command from a directory where nothing of the checkout can be imported by accident."""
    return subprocess.run(
        [str(installed / "bin" / "nvplug"), *arguments],
        cwd=empty,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_the_wheel_holds_the_program_and_nothing_else(wheel: Path) -> None:
    """nvplug.py and every file of _nvplug; neither tests nor anything that lies about in the checkout."""
    with ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}

    package = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "_nvplug").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert held == {"nvplug.py", *package}


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    """It carries the licence, and the command."""
    with ZipFile(wheel) as archive:
        texts = {name.partition(".dist-info/")[2]: archive.read(name).decode() for name in archive.namelist()}

    assert texts["licenses/LICENSE"] == (ROOT / "LICENSE").read_text()
    assert "License-Expression: Apache-2.0" in texts["METADATA"]
    assert "nvplug = nvplug:main" in texts["entry_points.txt"]


def test_the_installed_command_helps(installed: Path, tmp_path: Path) -> None:
    """It starts where there is no checkout."""
    help_ = nvplug(installed, tmp_path, "--help")

    assert help_.returncode == 0
    assert "--kubelet-socket" in help_.stdout


def test_the_installed_command_does_its_work(installed: Path, tmp_path: Path) -> None:
    """Nothing that it needs is missing from the wheel or from its dependencies, as far as a table of GPUs goes."""
    table = nvplug(installed, tmp_path, "devices", "--device-discovery-strategy", "simulated:2xT4")

    assert table.returncode == 0, table.stderr
    assert table.stdout.count("Tesla T4") == 2


def test_the_installed_modules_are_complete(installed: Path, tmp_path: Path) -> None:
    """Every module can be imported from the installed package, and comes from there."""
    script = (
        "import importlib, pkgutil, _nvplug, nvplug\n"
        "for module in pkgutil.walk_packages(_nvplug.__path__, '_nvplug.'):\n"
        "    importlib.import_module(module.name)\n"
        "print(nvplug.__file__, _nvplug.__file__)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [str(installed / "nvplug.py"), str(installed / "_nvplug" / "__init__.py")]
