from __future__ import annotations

import os
import platform
import re
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from _nvplug import VERSION
from freeze import bundle
from frozen.roots import Option, inside

Run = Callable[..., subprocess.CompletedProcess[str]]

WITHOUT_MEMFD: Final = (sys.executable, str(Path(__file__).with_name("seccomp.py")))
LARGEST: Final = 12 << 20


def test_it_is_static_and_small(binary: Path) -> None:
    """It names no dynamic loader and no library, and has at most 12 MiB."""
    content = binary.read_bytes()
    start, size, count = (*struct.unpack_from("<Q", content, 32), *struct.unpack_from("<HH", content, 54))
    kinds = {struct.unpack_from("<I", content, start + index * size)[0] for index in range(count)}

    assert not kinds & {2, 3}, "PT_DYNAMIC or PT_INTERP"
    assert len(content) <= LARGEST
    assert binary.stat().st_mode & 0o777 == 0o755


def test_it_says_which_nvplug_it_is(nvplug: Run) -> None:
    """Version, commit, and the Python and the glibc inside."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], check=False, text=True, capture_output=True)

    assert nvplug("--version").stdout == (
        f"nvplug {VERSION} ({f'commit {commit.stdout.strip()}' if commit.stdout else 'from source'};"
        f" Python {platform.python_version()}, {os.confstr('CS_GNU_LIBC_VERSION')})\n"
    )


def test_it_runs_anywhere(nvplug: Run, root: Path) -> None:
    """With another glibc and with none, where nothing can be written: all that it needs is /proc."""
    answer = nvplug("devices", "--device-discovery-strategy=simulated:2xT4", under=inside(root, ["proc", "read-only"]))

    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("Tesla T4") == 2


def test_it_runs_as_anybody(nvplug: Run, empty: Path) -> None:
    """Without root, without capabilities, without new privileges."""
    nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs", "--bounding-set=-all")
    answer = subprocess.run([*nobody, empty / "nvplug", "--version"], check=False, text=True, capture_output=True)

    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == nvplug("--version").stdout


def test_without_proc_it_says_so(nvplug: Run, empty: Path) -> None:
    """In words, with the remedy."""
    answer = nvplug("--version", under=inside(empty))

    assert answer.returncode == 126
    assert "/proc is not mounted" in answer.stderr


def test_with_few_descriptors_it_says_so(nvplug: Run, binary: Path) -> None:
    """In words, with the remedy."""
    answer = nvplug("--version", under=("sh", "-c", f'ulimit -n 100; shift; exec {binary} "$@"', "sh"))

    assert answer.returncode == 126
    assert "limit of open files" in answer.stderr


@pytest.mark.parametrize(
    ("options", "env", "works"),
    [
        (["proc", "tmp", "read-only"], {}, True),
        (["proc", "run", "read-only"], {}, True),
        (["proc", "run", "read-only"], {"TMPDIR": "/nowhere"}, True),
        (["proc", "tmp-noexec", "run", "read-only"], {}, True),
        (["proc", "tmp-noexec", "read-only"], {"TMPDIR": "/nowhere"}, False),
        (["proc", "read-only"], {"TMPDIR": "/proc"}, False),
    ],
)
def test_without_memfds_it_takes_a_directory(
    empty: Path, options: list[Option], env: dict[str, str], works: bool
) -> None:
    """$TMPDIR, /tmp, /run: the first that is writable and executable. Where none is, it says why not, of each."""
    command = [*WITHOUT_MEMFD, *inside(empty, options), "/nvplug", "--version"]
    answer = subprocess.run(
        command, check=False, text=True, capture_output=True, env={"PATH": os.environ["PATH"], **env}
    )

    if works:
        assert answer.returncode == 0, answer.stderr
        assert answer.stdout.startswith("nvplug ")
    else:
        assert answer.returncode == 126
        assert "in memory: not permitted" in answer.stderr
        assert "TMPDIR" in answer.stderr
        for place in (env["TMPDIR"], "/tmp"):
            assert re.search(rf"{place}: (no such directory|not permitted|read-only|no files)", answer.stderr)


def test_an_unsuitable_python_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing is said before anything is built, and which package of Debian has it."""
    real = sysconfig.get_config_var
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: 0 if name == "Py_ENABLE_SHARED" else real(name))
    with pytest.raises(bundle.Unsuitable, match=r"has no shared library; .*--enable-shared.*PYTHON="):
        bundle.check_python()
    monkeypatch.undo()
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(bundle.Unsuitable, match="there is no no-such-compiler; on Debian apt-get install gcc"):
        bundle.check_python()


def test_two_builds_are_the_same(binary: Path, tmp_path: Path) -> None:
    """Bit for bit, from another directory, at another time: what differs are commit, Python, compiler and glibc."""
    root = binary.parents[1]
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=root, check=True, text=True, capture_output=True
    ).stdout.split()
    for file in files:
        if (root / file).is_file() and not file.startswith("tests/"):
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_bytes((root / file).read_bytes())
    commit = re.search(
        r"commit ([^;]+);", subprocess.run([binary, "--version"], check=True, capture_output=True, text=True).stdout
    )
    assert commit is not None
    version = ".".join(map(str, sys.version_info[:2]))
    environment = root / ".venv" / f"{version}-build"
    subprocess.run(
        [environment / "bin" / "pyinstaller", "--noconfirm", "--log-level=WARN", "--distpath=dist", "build.spec"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        env={**os.environ, "PYTHONHASHSEED": "0", "COMMIT": commit[1]},
    )

    assert (tmp_path / "dist" / "nvplug").read_bytes() == binary.read_bytes()
