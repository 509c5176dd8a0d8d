"""Root file systems to run the executable in: of Debian 11, 12 and 13, and an empty one."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final, Literal

__all__ = ["SUITES", "MissingError", "Option", "debian", "inside", "require"]

SUITES: Final = ("bullseye", "bookworm", "trixie")
"""Debian 11 to 13: glibc 2.31, 2.36 and 2.41."""

Option = Literal["proc", "dev", "tmp", "tmp-noexec", "run", "read-only"]
"""What is mounted in a root: /proc, a /dev with null alone, tmpfs on /tmp and /run; whether / can be written."""

_CACHE: Final = Path(__file__).parents[2] / "build" / "roots"

_MOUNT: Final = """
set -e
root=$1; options=" $2 "; bound=$3; shift 3
mount --bind "$root" "$root"
cd "$root"
[ -z "$bound" ] || mount --rbind "$bound" "$root$bound"
for option in $options; do
    case $option in
        proc) mount -t proc proc "$root/proc" ;;
        dev) mount -t tmpfs tmpfs "$root/dev"; touch "$root/dev/null"; mount --bind /dev/null "$root/dev/null" ;;
        tmp) mount -t tmpfs tmpfs "$root/tmp" ;;
        tmp-noexec) mount -t tmpfs -o noexec,nosuid,nodev tmpfs "$root/tmp" ;;
        run) mount -t tmpfs tmpfs "$root/run" ;;
        read-only) mount -o remount,bind,ro "$root" ;;
    esac
done
exec chroot "$root" "$@"
"""


class MissingError(Exception):
    """What a test needs is not on this machine; says what, and how to get it."""


def require(*tools: str) -> None:
    """Checks for tools, and for the rights that mounting needs.

    Raises:
        MissingError: one is not there.
    """
    if os.geteuid():
        raise MissingError("mounting needs root")
    for tool in tools:
        if not shutil.which(tool):
            raise MissingError(f"there is no {tool}; on Debian apt-get install {tool}")


def debian(suite: str, *, with_packages: Sequence[str] = ()) -> Path:
    """The root of a Debian, made by debootstrap unless it was before: 30 s and 250 MB each.

    Args:
        suite: its name.
        with_packages: besides the essential ones. For each choice there is a root of its own.

    Raises:
        MissingError: debootstrap is not there, or the mirror that this machine's apt uses has no such suite.
    """
    require("debootstrap", "apt-get")
    root = _CACHE / "-".join([suite, *with_packages])
    if not root.exists():
        _CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_CACHE) as scratch:
            made = Path(scratch) / suite
            command = [
                "debootstrap",
                "--variant=minbase",
                *([f"--include={','.join(with_packages)}"] if with_packages else []),
                suite,
                str(made),
                *_mirror(),
            ]
            done = subprocess.run(command, check=False, text=True, capture_output=True)
            if done.returncode:
                raise MissingError(f"debootstrap cannot make {suite}: {done.stdout[-500:]}{done.stderr[-500:]}")
            shutil.rmtree(made / "var" / "cache" / "apt", ignore_errors=True)
            try:
                made.rename(root)
            except OSError:
                # Somebody else made the same meanwhile.
                if not root.exists():
                    raise
    return root


def _mirror() -> list[str]:
    """The one that this machine's own apt uses; nothing if it uses none, and debootstrap takes its default."""
    command = ["apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages"]
    return subprocess.run(command, check=True, text=True, capture_output=True).stdout.split()[:1]


def inside(root: Path, options: Collection[Option] = (), bound: Path | None = None) -> tuple[str, ...]:
    """A command that runs its arguments by exec in a root, in a mount namespace of their own.

    Args:
        root: a directory. What is mounted in it vanishes with the process.
        options: what is.
        bound: a directory that has the same path in the root as outside.
    """
    for option in options:
        if option != "read-only":
            (root / option.partition("-")[0]).mkdir(exist_ok=True)
    if bound:
        (root / bound.relative_to("/")).mkdir(parents=True, exist_ok=True)
    return ("unshare", "--mount", "sh", "-c", _MOUNT, "sh", str(root), " ".join(options), str(bound or ""))
