"""Keeps a small machine for one kubelet: namespaces, a cgroup, a directory. And takes all of it away again.

::

    keeper.py KUBELET

It says in one line of JSON what there is: ``{"directory": …, "cgroup": …, "pid": …}``. The last is a process in the
namespaces; the cgroup is where everything started in them must belong. When its stdin ends, because its parent asks
for that or because the parent is no more, every process of the cgroup is killed, containers among them. With the last
of them go the namespaces and their mounts; the cgroup and the directory are removed.

A process of its own, since a test that was killed cannot clean up.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

__all__ = ["NAMESPACES"]

NAMESPACES: Final = ("--mount", "--net", "--cgroup", "--ipc", "--uts")
"""As unshare(1) and nsenter(1) call them."""

_WORLD: Final = Path(__file__).with_name("world.sh")
_END_LIMIT: Final = 20.0


class _KeeperError(Exception):
    """The machine cannot be made, or not be removed."""


def main(kubelet: Path) -> None:
    """Makes the machine, and keeps it until stdin ends."""
    # The parent decides, by closing stdin: nothing that is sent to a whole process group does.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with _directory() as directory, _cgroup(directory.name) as cgroup, _world(cgroup, directory, kubelet) as pid:
        sys.stdout.write(json.dumps({"directory": str(directory), "cgroup": str(cgroup), "pid": pid}) + "\n")
        sys.stdout.flush()
        sys.stdin.read()


@contextmanager
def _directory() -> Generator[Path]:
    # Not below TMPDIR: sockets in it must have short paths, and it must not be below what the namespaces cover.
    directory = Path(tempfile.mkdtemp(prefix="nvplug-e2e-", dir="/tmp"))
    try:
        yield directory
    finally:
        # Whatever was mounted in it went with the namespaces, and was never to be seen from here.
        shutil.rmtree(directory)


@contextmanager
def _cgroup(name: str) -> Generator[Path]:
    """A cgroup at the root of the hierarchy of version 2; at the end it is emptied and removed."""
    mounts = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    hierarchy = next((fields[1] for fields in mounts if fields[2] == "cgroup2"), None)
    if hierarchy is None:
        raise _KeeperError("no cgroup2 file system is mounted")
    cgroup = Path(hierarchy, name)
    cgroup.mkdir()
    try:
        yield cgroup
    finally:
        deadline = time.monotonic() + _END_LIMIT
        (cgroup / "cgroup.kill").write_text("1")
        while "populated 1" in (cgroup / "cgroup.events").read_text():
            if time.monotonic() > deadline:
                raise _KeeperError(f"processes of {cgroup} cannot be killed")
            time.sleep(0.01)
        for below, _, _ in os.walk(cgroup, topdown=False):
            Path(below).rmdir()


@contextmanager
def _world(cgroup: Path, directory: Path, kubelet: Path) -> Generator[int]:
    """A process in namespaces of its own."""
    enter = ("sh", "-c", 'echo $$ >"$1" && shift && exec "$@"', "sh", str(cgroup / "cgroup.procs"))
    with subprocess.Popen(
        [*enter, "unshare", *NAMESPACES, "sh", str(_WORLD), str(directory), str(kubelet)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise _KeeperError("the namespaces cannot be made")
        try:
            yield process.pid
        finally:
            process.kill()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
