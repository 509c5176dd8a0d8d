from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest
import trio
from node import GPUS, MACHINE
from peer.kubelet import kubelet_in

from frozen.conftest import ROOT, skipping
from frozen.containers import CGROUP2, HOST, Containers
from frozen.roots import require

SYSTEM: Final = "/etc/systemd/system"
UNIT: Final = ROOT / "deploy" / "nvplug.service"


@pytest.fixture(scope="module")
def containers() -> Generator[Containers]:
    """With the image of a host."""
    with skipping():
        require("unshare")
        containers = Containers(ROOT / "build" / "containers")
        containers.make_host()
    try:
        yield containers
    finally:
        containers.run("podman", "rm", "--all", "--force", "--time=0", under=CGROUP2)


class Host:
    """A booted container; every method waits for the end of what it does."""

    def __init__(self, containers: Containers, name: str) -> None:
        self._containers = containers
        self._name = name

    async def run(self, *command: str) -> str:
        """Runs a command in it; returns what it wrote."""
        done = await trio.to_thread.run_sync(
            lambda: self._containers.run("podman", "exec", self._name, *command, under=CGROUP2)
        )
        return done.stdout.strip()

    async def root(self) -> Path:
        """The root of its file system, seen from outside."""
        pid = await trio.to_thread.run_sync(
            lambda: self._containers.run("podman", "inspect", "--format={{.State.Pid}}", self._name, under=CGROUP2)
        )
        return Path("/proc", pid.stdout.strip(), "root")

    async def show(self, name: str, *, of: str = "nvplug") -> str:
        """A property of a unit."""
        return await self.run("systemctl", "show", of, f"--property={name}", "--value")

    async def await_that(self, name: str, expected: str, *, timeout: float = 40) -> None:
        """Waits for a property of the unit to be, or to end with, what is expected."""
        deadline = time.monotonic() + timeout
        while not (value := await self.show(name)).endswith(expected):
            if time.monotonic() > deadline:
                log = await self.run("journalctl", "--no-pager", "--unit=nvplug")
                raise AssertionError(f"{name} is {value!r} and not {expected!r}\n{log}")
            await trio.sleep(0.1)


def test_the_unit_is_well_formed(binary: Path, tmp_path: Path) -> None:
    """Nothing is complained of."""
    with skipping():
        require("systemd-analyze")
    unit = tmp_path / "nvplug.service"
    unit.write_text(UNIT.read_text().replace("/usr/local/bin/nvplug", str(binary)))
    verified = subprocess.run(["systemd-analyze", "verify", unit], check=False, text=True, capture_output=True)

    assert verified.returncode == 0
    assert not verified.stderr


@asynccontextmanager
async def booted(containers: Containers, binary: Path, files: Path, mounts: Mapping[Path, str]) -> AsyncGenerator[Host]:
    """A host with nvplug installed, and simulated GPUs; ``files`` is a directory for what is put into it."""
    variables = files / "nvplug.env"
    variables.write_text(f"DEVICE_DISCOVERY_STRATEGY={MACHINE.partition('=')[2]}\n")
    there = {
        **mounts,
        binary: "/usr/local/bin/nvplug:ro",
        UNIT: f"{SYSTEM}/nvplug.service:ro",
        variables: "/etc/default/nvplug:ro",
    }
    options = (
        *("--systemd=always", "--privileged", "--pids-limit=-1", "--cgroupns=private", "--network=none"),
        *(f"--volume={source}:{target}" for source, target in there.items()),
    )
    # Blocks: nothing else runs yet.
    started = containers.run("podman", "run", "--detach", *options, HOST, "/sbin/init", under=CGROUP2)
    name = started.stdout.strip()
    assert name, started.stderr
    host = Host(containers, name)
    try:
        await host.await_that("LoadState", "loaded")
        yield host
    finally:
        containers.run("podman", "rm", "--force", "--time=0", name, under=CGROUP2)


async def test_an_installed_unit(containers: Containers, binary: Path) -> None:
    """It is ready before there is a kubelet; whatever befalls it, it is there again; a stop is an end."""
    with tempfile.TemporaryDirectory(prefix="nvs") as scratch:
        plugins, files = Path(scratch) / "k", Path(scratch) / "files"
        plugins.mkdir()
        files.mkdir()
        (files / "watchdog.conf").write_text("[Service]\nWatchdogSec=3\n")
        mounts = {
            plugins: "/var/lib/kubelet/device-plugins",
            files / "watchdog.conf": f"{SYSTEM}/nvplug.service.d/watchdog.conf:ro",
        }
        async with booted(containers, binary, files, mounts) as host:
            await host.run("systemctl", "enable", "--now", "nvplug")
            await host.await_that("StatusText", "waiting for the kubelet")
            assert await host.show("ActiveState") == "active"
            async with kubelet_in(plugins) as kubelet:
                await kubelet.await_allocatable(GPUS)
                registered = f"nvidia.com/gpu: registered, {GPUS} of {GPUS} healthy"
                await host.await_that("StatusText", registered)
                assert await host.run("nvplug", "health", "--ready") == registered

                first = await host.show("MainPID")
                streams = len(kubelet.streams)
                await host.run("systemctl", "reload", "nvplug")
                await host.await_that("ActiveState", "active")
                assert await host.show("MainPID") == first
                assert len(kubelet.streams) == streams

                # Killed, and hung.
                for restarts, signal in enumerate(("KILL", "STOP"), start=1):
                    await host.run("sh", "-c", f"kill -{signal} {await host.show('MainPID')}")
                    await host.await_that("NRestarts", str(restarts))
                    await host.await_that("StatusText", "healthy")
                    await kubelet.await_allocatable(GPUS)

                await host.run("systemctl", "stop", "nvplug")
                await host.await_that("ActiveState", "inactive")
                assert await host.show("Result") == "success"
                assert not kubelet.plugin_sockets()


async def test_a_host_that_boots(containers: Containers, binary: Path) -> None:
    """The unit is enabled before the first boot, and no kubelet has ever run: it polls, and finds the first that does.

    It was ready before the kubelet's unit was started, and outlives it.
    """
    with tempfile.TemporaryDirectory(prefix="nvs") as scratch:
        files = Path(scratch)
        wanted = files / "wants"
        wanted.mkdir()
        for unit in ("nvplug", "kubelet"):
            (wanted / f"{unit}.service").symlink_to(f"{SYSTEM}/{unit}.service")
        (files / "kubelet.service").write_text("[Service]\nExecStart=sleep infinity\n")
        mounts = {
            wanted: f"{SYSTEM}/multi-user.target.wants:ro",
            files / "kubelet.service": f"{SYSTEM}/kubelet.service:ro",
        }
        async with booted(containers, binary, files, mounts) as host:
            await host.await_that("StatusText", "waiting for the kubelet")
            ready = int(await host.show("ActiveEnterTimestampMonotonic"))

            assert ready <= int(await host.show("ExecMainStartTimestampMonotonic", of="kubelet"))

            async with kubelet_in(await host.root() / "var/lib/kubelet/device-plugins") as kubelet:
                await kubelet.await_allocatable(GPUS)
                await host.await_that("StatusText", "healthy")
                await host.run("systemctl", "stop", "kubelet")

                assert await host.show("ActiveState", of="kubelet") == "inactive"
                assert await host.show("ActiveState") == "active"
                assert await host.show("NRestarts") == "0"
