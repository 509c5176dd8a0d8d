from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final, NoReturn

import pytest
from kubelet.build import GoError, build_kubelet
from needs import lacking

_TOOLS: Final = {
    "cc": "gcc",
    "containerd": "containerd",
    "ctr": "containerd",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "runc": "runc",
    "unshare": "util-linux",
}
"""Commands, and the Debian packages that have them."""


@pytest.fixture(scope="session")
def kubelet() -> Path:
    """The whole kubelet."""
    if os.geteuid() != 0:
        _impossible("a kubelet must be root")
    missing = sorted({package for command, package in _TOOLS.items() if shutil.which(command) is None})
    if missing:
        _impossible(f"not installed, by the names of Debian's packages: {' '.join(missing)}")
    if not any(line.split()[2] == "cgroup2" for line in Path("/proc/self/mounts").read_text().splitlines()):
        _impossible("no cgroup2 file system is mounted")
    try:
        return build_kubelet()
    except GoError as error:
        _impossible(f"it cannot be built: {error}; {error.remedy}")


def _impossible(reason: str) -> NoReturn:
    lacking(f"no whole kubelet: {reason}")
