"""Images and containers without a daemon and without a registry: buildah and podman, with a storage of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from frozen.roots import debian, require

__all__ = ["BASE", "CGROUP2", "HOST", "Containers"]

BASE: Final = "docker.io/library/python:3.13-slim-trixie"
"""What the Dockerfile builds on. Here a look-alike under the same name: Debian 13, whose own Python is a 3.13."""

HOST: Final = "localhost/nvplug-host:1"
"""Debian 12 with systemd, to be booted."""

CGROUP2: Final = (
    *("unshare", "--mount", "sh", "-c"),
    'umount --recursive /sys/fs/cgroup && mount -t cgroup2 cgroup2 /sys/fs/cgroup && exec "$@"',
    "sh",
)
"""A command that runs its arguments by exec where control groups are those of version 2 alone, as a booted systemd
wants them to sandbox and to restart. Where they are, every later call for the same container must be, too."""

_PYTHON: Final = ("ca-certificates", "libpython3-dev", "python3", "python3-venv")

# Neither controllers of cgroups nor the right to raise limits are needed.
_STORAGE: Final = """
[storage]
driver = "vfs"
runroot = "{0}/run"
graphroot = "{0}/root"
"""
_CONTAINERS: Final = """
[containers]
default_ulimits = ["nofile=20000:20000", "nproc=32768:32768"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
"""


class Containers:
    """Both tools, on a storage in a directory."""

    def __init__(self, directory: Path) -> None:
        require("buildah", "podman", "runc")
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in (("storage", _STORAGE), ("containers", _CONTAINERS)):
            (directory / f"{name}.conf").write_text(text.format(directory))
        self.environment = {
            "CONTAINERS_STORAGE_CONF": str(directory / "storage.conf"),
            "CONTAINERS_CONF": str(directory / "containers.conf"),
        }

    def run(
        self, *command: str | Path, under: tuple[str, ...] = (), timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end, whatever that is; ``podman ...`` or ``buildah ...``."""
        return subprocess.run(
            [*under, *command],
            check=False,
            text=True,
            capture_output=True,
            env={**os.environ, **self.environment},
            timeout=timeout,
        )

    def must(self, *command: str | Path, timeout: float = 60) -> str:
        """Runs a command that must not fail; returns what it wrote, without the last newline."""
        done = self.run(*command, timeout=timeout)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout.strip()

    def make_base(self) -> None:
        """Makes the image that the Dockerfile builds on, unless it is there."""
        self._make(BASE, debian("trixie", with_packages=_PYTHON))

    def make_host(self) -> None:
        """Makes the image of a host with systemd, unless it is there."""
        self._make(HOST, debian("bookworm", with_packages=("dbus", "systemd", "systemd-sysv")))

    def _make(self, image: str, of: Path) -> None:
        if self.run("buildah", "inspect", "--type", "image", image).returncode == 0:
            return
        with tempfile.TemporaryDirectory() as scratch:
            root = Path(scratch) / "root"
            # It has devices, which shutil would read.
            subprocess.run(["cp", "--archive", of, root], check=True)
            # Where this machine's packages come from, in what only the build stage sees.
            for file in ("/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt"):
                if Path(file).exists():
                    place = root / file.lstrip("/")
                    place.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(file, place)
            container = self.must("buildah", "from", "scratch")
            self.must("buildah", "add", "--quiet", container, root, "/", timeout=300)
            self.must("buildah", "commit", "--quiet", container, image, timeout=300)
            self.must("buildah", "rm", container)

    def build(self, checkout: Path, tag: str, commit: str) -> None:
        """Builds the image of a checkout as ``make image`` does."""
        variables = [f"--env={name}={value}" for name, value in os.environ.items() if name.startswith("PIP_")]
        self.must(
            "make",
            "-C",
            checkout,
            "image",
            f"COMMIT={commit}",
            "BUILDER=buildah build --quiet --isolation=chroot --network=host --pull=never " + " ".join(variables),
            timeout=900,
        )
        self.must("buildah", "tag", "localhost/nvplug:dev", tag)
