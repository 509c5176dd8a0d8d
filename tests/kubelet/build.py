"""Compiles Kubernetes' code: the Go programs of this directory, ``kdm`` for each version, and the kubelet itself."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from _nvplug.errors import NvplugError

__all__ = ["VERSIONS", "BuildError", "GoError", "build", "build_judge", "build_kubelet", "find_go"]

_SOURCE = Path(__file__).parent
_CACHE = _SOURCE.parent.parent / "build" / "kubelet"

# What each version is built from: its go.mod and build tags. go.mod itself belongs to the newest, so that a plain
# `go build` works, too.
_RECIPES = {
    "v1.36.3": ("v1.36.mod", "kubelet_1_36"),
    "v1.37.2": ("go.mod", ""),
}

VERSIONS = tuple(_RECIPES)
"""The kubelets that can be had, oldest first.

Up to 1.36 a kubelet knows plugins by the name of their resource, from 1.37 on by the path of their socket.
"""

_BUILD_LIMIT = 3600.0
_VERSION_LIMIT = 30.0


class GoError(NvplugError):
    """No Go that can build the kubelet's code is on PATH."""


class BuildError(NvplugError):
    """The go command failed."""


def build(version: str) -> Path:
    """Returns ``kdm`` for one of VERSIONS, compiled if it has not been yet: minutes the first time.

    Waits for another process that is building.

    Raises:
        GoError: there is no Go, or it is older than go.mod asks for.
        BuildError: the go command failed; the message is what it wrote.
    """
    sources = sorted(p.name for p in _SOURCE.iterdir() if p.suffix in {".go", ".s"})
    return _compile("kdm", version, ".", sources)


def build_kubelet() -> Path:
    """Returns the whole kubelet of the newest of VERSIONS; as `build`, and takes longer."""
    version = VERSIONS[-1]
    major, minor, _ = version.removeprefix("v").split(".")
    # What Kubernetes' own build sets; without it the kubelet calls itself v0.0.0-master.
    known = {"gitVersion": version, "gitMajor": major, "gitMinor": minor}
    flags = [f"-X k8s.io/component-base/version.{name}={value}" for name, value in known.items()]
    return _compile("kubelet", version, "k8s.io/kubernetes/cmd/kubelet", [], *flags)


def build_judge() -> Path:
    """Returns ``manifests``, which judges manifests as an API server of the newest of VERSIONS does; as `build`."""
    return _compile("manifests", VERSIONS[-1], "./manifests", ["manifests/main.go"])


def _compile(name: str, version: str, package: str, sources: Sequence[str], *linker_flags: str) -> Path:
    modfile, tags = _RECIPES[version]
    go = find_go(_SOURCE / modfile)
    arguments = [
        f"-modfile={modfile}",
        f"-tags={tags}",
        "-mod=readonly",
        "-trimpath",
        "-buildvcs=false",
        f"-ldflags={' '.join(['-s', '-w', *linker_flags])}",
    ]
    digest = _digest([*arguments, package], [*sources, modfile, str(Path(modfile).with_suffix(".sum"))])
    program = _CACHE / f"{name}-{version}-{digest}"
    if program.exists():
        return program
    _CACHE.mkdir(parents=True, exist_ok=True)
    with (_CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if program.exists():
            return program
        # Renamed into place, so that a build that was cut short leaves nothing that looks finished.
        unfinished = program.with_name(f"{program.name}.unfinished")
        command = [go, "build", *arguments, "-o", str(unfinished), package]
        result = subprocess.run(
            command,
            cwd=_SOURCE,
            env={**os.environ, "CGO_ENABLED": "0"},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_BUILD_LIMIT,
            check=False,
            text=True,
        )
        if result.returncode != 0:
            raise BuildError(
                f"{shlex.join(command)} in {_SOURCE} failed:\n{result.stderr}",
                remedy="see what the go command wrote: it needs a Go module proxy once, and 6 GB of disk",
            )
        unfinished.rename(program)
        for older in _CACHE.glob(f"{name}-{version}-*"):
            if older != program:
                older.unlink()
    return program


def _digest(arguments: Sequence[str], files: Sequence[str]) -> str:
    """Names what a program is made of."""
    digest = hashlib.sha256("\0".join(arguments).encode())
    for name in files:
        content = (_SOURCE / name).read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def find_go(gomod: Path) -> str:
    """Returns the go command on PATH.

    Args:
        gomod: says which version it must be at least.

    Raises:
        GoError: there is none, or it is older.
    """
    needed = re.search(r"^go (\S+)$", gomod.read_text(), re.MULTILINE)
    if needed is None:
        raise BuildError(f"{gomod} has no go directive", remedy="restore it from git")
    remedy = f"put the bin directory of Go {needed[1]} or newer first on PATH"
    go = shutil.which("go")
    if go is None:
        raise GoError("the go command is not on PATH", remedy=remedy)
    # Asked outside the module: inside it an older go would fail, or fetch a newer one.
    answer = subprocess.run(
        [go, "env", "GOVERSION"], cwd="/", capture_output=True, text=True, timeout=_VERSION_LIMIT, check=False
    )
    found = re.match(r"go(\d+(?:\.\d+)*)", answer.stdout)
    if found is None:
        raise GoError(f"{go} does not tell its version: {answer.stdout}{answer.stderr}", remedy=remedy)
    if _numbers(found[1]) < _numbers(needed[1]):
        raise GoError(f"{go} is Go {found[1]}, and {gomod.name} asks for {needed[1]} or newer", remedy=remedy)
    return go


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in version.split("."))
