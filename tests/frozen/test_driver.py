from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from nvml.standin import Control

from frozen.roots import inside

Run = Callable[..., subprocess.CompletedProcess[str]]

# By file name: with a modern glibc the compiler needs none of them, but the genuine library was linked to an old one.
NEEDED: Final = ("libpthread.so.0", "libm.so.6", "libdl.so.2", "librt.so.1")


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Control:
    """A driver whose library needs what the genuine one does: NEEDED libraries, thread-local storage."""
    header = Path(__file__).with_name("needs.h")
    libraries = " ".join(f"-l:{name}" for name in NEEDED)
    # The stand-in is kept by the command that builds it: which therefore says what is in the header.
    digest = hashlib.sha256(header.read_bytes()).hexdigest()
    monkeypatch.setenv("CC", f"cc -DNEEDS={digest} -include {header} -Wl,--no-as-needed {libraries}")
    control = Control(tmp_path, gpus=3)
    control.install()
    return control


def install(driver: Control, root: Path, place: str) -> Path:
    """Copies the library into a place of a root; returns the directory."""
    directory = root / place
    shutil.copytree(driver.libraries, directory, symlinks=True, dirs_exist_ok=True)
    return directory


def test_the_library_of_the_driver_needs_what_the_genuine_one_does(driver: Control) -> None:
    """Or the tests below would prove nothing."""
    library = driver.libraries / "libnvidia-ml.so.1"
    dynamic = subprocess.run(["readelf", "-dW", library], check=True, text=True, capture_output=True).stdout
    symbols = subprocess.run(
        ["readelf", "-sW", "--dyn-syms", library], check=True, text=True, capture_output=True
    ).stdout

    assert all(f"[{name}]" in dynamic for name in NEEDED)
    assert "__tls_get_addr" in symbols


@pytest.mark.parametrize(
    "place", ["usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/local/nvidia/lib64", "driver-root/usr/lib64"]
)
def test_it_is_found_where_drivers_are_installed(driver: Control, root: Path, nvplug: Run, place: str) -> None:
    """By its path, without a cache of the dynamic loader."""
    made = [root / name for name in ("driver-root", "usr/local/nvidia") if not (root / name).exists()]
    directory = install(driver, root, place)
    try:
        under = inside(root, ["proc", "dev", "read-only"], bound=Path(driver.environment["NVML_STANDIN"]).parent)
        answer = nvplug("devices", under=under, env=driver.environment)
    finally:
        for library in directory.glob("libnvidia-ml*"):
            library.unlink()
        for path in made:
            shutil.rmtree(path, ignore_errors=True)

    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("GPU-") == 3


@pytest.mark.parametrize("how", ["LD_LIBRARY_PATH", "ld.so.cache"])
def test_it_is_found_where_nobody_looks(driver: Control, empty: Path, nvplug: Run, how: str) -> None:
    """Through what the operator says to the dynamic loader, in either way."""
    install(driver, empty, "srv/strange")
    env = dict(driver.environment)
    if how == "LD_LIBRARY_PATH":
        env["LD_LIBRARY_PATH"] = "/srv/strange"
    else:
        (empty / "etc").mkdir()
        (empty / "etc" / "ld.so.conf").write_text("/srv/strange\n")
        subprocess.run(["ldconfig", "-r", empty], check=True, capture_output=True)
    under = inside(empty, ["proc", "dev", "read-only"], bound=Path(driver.environment["NVML_STANDIN"]).parent)
    answer = nvplug("devices", under=under, env=env)

    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("GPU-") == 3


def test_what_it_starts_is_of_the_host(driver: Control, nvplug: Run, tmp_path: Path) -> None:
    """A program that the library starts, nvidia-modprobe say, sees the variables as they were and none of our files."""
    report = tmp_path / "report"
    env = {
        **driver.environment,
        "LD_LIBRARY_PATH": str(driver.libraries),
        "NEEDS_CHILD": f"exec >{report}; env -0; ls /proc/self/fd; cat /proc/self/maps",
    }
    answer = nvplug("devices", env=env)
    *variables, rest = report.read_text().split("\0")

    assert answer.returncode == 0, answer.stderr
    # What the shell sets for itself apart.
    given = {"PATH": os.environ["PATH"], **env}.items()
    assert {(name, value) for name, _, value in (word.partition("=") for word in variables)} - given <= {
        ("PWD", os.getcwd()),  # noqa: PTH109  # as text
        ("_", "/usr/bin/env"),
        ("OLDPWD", ""),
        ("SHLVL", "0"),
        ("SHLVL", "1"),
    }
    assert {word.partition("=")[0] for word in variables} >= dict(given).keys()
    assert not [line for line in rest.splitlines() if line.isdigit() and int(line) > 99]
    assert "memfd" not in rest


def test_what_the_dynamic_loader_says_is_passed_on(empty: Path, nvplug: Run) -> None:
    """Word for word: a library that is there and cannot be loaded is not "not found"."""
    (empty / "usr" / "lib64").mkdir(parents=True)
    (empty / "usr" / "lib64" / "libnvidia-ml.so.1").write_text("not a library, and longer than the header of one" * 9)
    answer = nvplug("devices", under=inside(empty, ["proc", "read-only"]))

    assert answer.returncode != 0
    assert "invalid ELF header" in answer.stderr


def test_nothing_of_the_hosts_glibc_is_used(driver: Control, root: Path) -> None:
    """While it serves with the driver's library loaded, that is the only file of the host in its memory."""
    directory = install(driver, root, "usr/lib64")
    bound = Path(driver.environment["NVML_STANDIN"]).parent
    command = [
        *inside(root, ["proc", "dev", "run"], bound=bound),
        "/nvplug",
        "run",
        "--kubelet-socket=/run/k/kubelet.sock",
    ]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={"PATH": os.environ["PATH"], **driver.environment}
    ) as process:
        try:
            assert process.stderr is not None
            log = ""
            for line in process.stderr:
                log += line
                if "found GPUs" in line:
                    break
            maps = Path(f"/proc/{process.pid}/maps").read_text()
        finally:
            process.terminate()
            process.communicate(timeout=20)
            for library in directory.glob("libnvidia-ml*"):
                library.unlink()

    files = {line.split(None, 5)[5] for line in maps.splitlines() if len(line.split(None, 5)) == 6}
    # The stand-in counts its calls in a file.
    own = f"{driver.environment['NVML_STANDIN']}.calls"
    foreign = {name for name in files if not name.startswith(("[", "/memfd:")) and not name.endswith(own)}
    assert process.returncode == 0, log
    assert {Path(name).name.partition(".so")[0] for name in foreign} == {"nvplug", "libnvidia-ml"}
