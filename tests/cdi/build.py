"""Compiles the Go program of this directory, which is CNCF's package for CDI with a command line."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path
from typing import Final

from kubelet.build import BuildError, find_go

__all__ = ["build"]

_SOURCE: Final = Path(__file__).parent
_CACHE: Final = _SOURCE.parent.parent / "build" / "cdi"
_FILES: Final = ("go.mod", "go.sum", "main.go")
_LIMIT: Final = 600.0


def build() -> Path:
    """Returns the program, compiled if it has not been yet: seconds, with a Go module proxy.

    Raises:
        GoError: there is no Go, or it is older than go.mod asks for.
        BuildError: the go command failed; the message is what it wrote.
    """
    go = find_go(_SOURCE / "go.mod")
    digest = hashlib.sha256(b"\0".join((_SOURCE / name).read_bytes() for name in _FILES)).hexdigest()[:16]
    program = _CACHE / f"inject-{digest}"
    if not program.exists():
        _CACHE.mkdir(parents=True, exist_ok=True)
        # Renamed into place, so that a build that was cut short leaves nothing that looks finished.
        unfinished = program.with_name(f"{program.name}.{os.getpid()}")
        command = [go, "build", "-mod=readonly", "-trimpath", "-buildvcs=false", "-o", str(unfinished), "."]
        environment = {**os.environ, "CGO_ENABLED": "0"}
        done = subprocess.run(
            command, cwd=_SOURCE, env=environment, check=False, text=True, capture_output=True, timeout=_LIMIT
        )
        if done.returncode:
            raise BuildError(f"{' '.join(command)} failed:\n{done.stderr}", remedy="see what the go command wrote")
        unfinished.rename(program)
    return program
