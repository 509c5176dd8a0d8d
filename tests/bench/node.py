"""A plugin under measurement: its process, a kubelet and a driver of its own, all real as far as it can tell."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import trio
from nvml.standin import Control
from peer.kubelet import Kubelet, kubelet_in
from peer.program import ROOT

from bench.processes import cpu_seconds, family

__all__ = [
    "GPUS",
    "NVPLUG",
    "PATIENCE",
    "MissedError",
    "Node",
    "Plugin",
    "PluginError",
    "frozen",
    "namespace",
    "node_in",
    "peer",
]

GPUS: Final = 8

PATIENCE: Final = 10.0
"""Seconds after which a plugin that is not back counts as not coming back."""

_HOST: Final = Path("/var/lib/kubelet")

T = TypeVar("T")


class MissedError(Exception):
    """What was to be measured did not happen."""


class PluginError(Exception):
    """A plugin does not even start: nothing can be measured."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """A device plugin: what to call it, the command that becomes it, and one that asks for its health, if any."""

    name: str
    command: tuple[str, ...]
    health: tuple[str, ...] = ()


def _nvplug(*command: str) -> Plugin:
    return Plugin("nvplug", (*command, "run"), (*command, "health"))


NVPLUG: Final = _nvplug(sys.executable, str(ROOT / "nvplug.py"))


def frozen(executable: str) -> Plugin:
    """The executable, by its path."""
    return _nvplug(str(Path(executable).resolve()))


def peer(command: str) -> Plugin:
    """Another plugin, by a shell command."""
    # By exec, so that SIGTERM and the figures of the process are the plugin's and no shell's.
    return Plugin("peer", ("sh", "-c", f"exec {command}"))


def namespace(directory: Path) -> tuple[str, ...]:
    """A command that runs its arguments by exec where ``directory`` is /var/lib/kubelet, and changes nothing elsewhere.

    Other plugins have the path of their sockets built in. Its parent is mounted, so that it can itself be replaced.
    """
    script = f"""
[ -d {_HOST} ] || {{ mount -t tmpfs tmpfs {_HOST.parent} && mkdir {_HOST}; }} || exit
mount --bind "$0" {_HOST} && exec "$@"
"""
    return ("unshare", "--mount", "sh", "-c", script, str(directory))


@asynccontextmanager
async def node_in(directory: Path, plugin: Plugin, *, in_namespace: bool) -> AsyncGenerator[Node, None]:
    """A node with a kubelet that runs and a plugin that does not yet; at the end nothing of both is left.

    Args:
        directory: for all its files; not there yet.
        plugin: what to measure.
        in_namespace: whether the plugin sees the kubelet's directory at its usual place, by :func:`namespace`.
    """
    control = Control(directory, gpus=GPUS)
    control.install()
    async with kubelet_in(directory / "kubelet" / "device-plugins") as kubelet:
        under = namespace(directory / "kubelet") if in_namespace else ()
        seen_at = (_HOST if in_namespace else directory / "kubelet") / "device-plugins" / "kubelet.sock"
        # Whatever the developer's own shell exports must not change a figure.
        inherited = {name: os.environ[name] for name in ("HOME", "LANG", "PATH", "TMPDIR") if name in os.environ}
        environment = {
            **inherited,
            **control.environment,
            "LD_LIBRARY_PATH": str(control.libraries),
            "KUBELET_SOCKET": str(seen_at),
            "HEALTH_SOCKET": f"@nvplug-bench-{os.getpid()}-{plugin.name}",
        }
        node = Node(plugin, (*under, *plugin.command), environment, directory / "log", kubelet, control)
        try:
            yield node
        finally:
            with trio.CancelScope(shield=True):
                await node.kill()


class Node:
    """Made by :func:`node_in`.

    Attributes:
        plugin: what is measured here.
        kubelet: its kubelet.
        control: its driver.
        started: when its process was last made: CLOCK_MONOTONIC, in seconds, as all times here.
    """

    def __init__(
        self,
        plugin: Plugin,
        command: tuple[str, ...],
        environment: Mapping[str, str],
        log: Path,
        kubelet: Kubelet,
        control: Control,
    ) -> None:
        self.plugin = plugin
        self.kubelet = kubelet
        self.control = control
        self.started = 0.0
        self._command = command
        self._environment = environment
        self._config = log.with_name("config.json")
        self._shape = (GPUS, 1)
        self._log = log
        self._process: trio.Process | None = None

    async def ready(self, gpus: int = GPUS, replicas: int = 1, *, patience: float = PATIENCE) -> None:
        """Sees to it that the plugin runs and all its devices are allocatable; if not, everything is started anew.

        Args:
            gpus: how many the driver shows.
            replicas: how often each is offered, by a configuration file that CONFIG_FILE names.
            patience: how long a fresh start may take, in seconds.

        Raises:
            PluginError: it is not ready after a fresh start either.
            MissedError: the same, where it is about another number than the usual one.
        """
        shape, devices = (gpus, replicas), gpus * replicas
        if self._running() and self._shape == shape and self.kubelet.allocatable() == devices:
            return
        await self.kill()
        self._shape = shape
        self.control.gpus(gpus)
        await self.kubelet.restart()
        await self.start()

        async def back() -> float:
            return await self.kubelet.await_back(devices, after=self.started, timeout=math.inf)

        try:
            await self.in_time(back, patience)
        except MissedError as error:
            if shape != (GPUS, 1):
                raise MissedError(f"no {devices} devices") from None
            tail = self.log()[-2000:]
            raise PluginError(
                f"{self.plugin.name} has not listed {GPUS} healthy devices after its start: {error}\n{tail}"
            ) from None

    async def quiet(self, seconds: float) -> None:
        """Waits until nothing has happened to the plugin for so long."""
        last = max(self.started, *(one.at for one in self.kubelet.lists[-1:]))
        await trio.sleep(max(0.0, last + seconds - time.monotonic()))

    async def start(self) -> None:
        """Makes the plugin's process."""
        environment = dict(self._environment)
        if self._shape[1] > 1:
            shared = {"name": "nvidia.com/gpu", "replicas": self._shape[1]}
            self._config.write_text(json.dumps({"version": "v1", "sharing": {"timeSlicing": {"resources": [shared]}}}))
            environment["CONFIG_FILE"] = str(self._config)
        with self._log.open("wb") as log:
            self.started = time.monotonic()
            self._process = await trio.lowlevel.open_process(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                # A session of its own, by which all that it starts is found.
                start_new_session=True,
            )

    async def stop(self) -> float:
        """SIGTERM; returns the seconds until the exit.

        Raises:
            MissedError: it was too late.
        """
        process = self._running()
        if process is None:
            raise MissedError("had exited")
        at = time.monotonic()
        process.send_signal(signal.SIGTERM)
        with trio.move_on_after(PATIENCE):
            await process.wait()
            return time.monotonic() - at
        raise MissedError(f"not within {PATIENCE:g} s")

    async def kill(self) -> None:
        """SIGKILL, to it and what it has started."""
        if self._process is not None:
            for pid in family(self._process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await self._process.wait()
            self._process = None

    def log(self) -> str:
        """What the plugin has said since its start."""
        return self._log.read_text(errors="replace")

    async def ask_for_health(self) -> float:
        """Has the plugin asked for its health; returns the seconds of CPU that this took, on both sides.

        Raises:
            MissedError: it cannot be asked, or is not well.
        """
        process = self._running()
        if process is None or not self.plugin.health:
            raise MissedError("cannot be asked")
        before = cpu_seconds(process.pid)
        asking = os.posix_spawn(  # noqa: ASYNC221  # at once, and for the sake of wait4
            self.plugin.health[0],
            self.plugin.health,
            self._environment,
            file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
        )
        _, status, used = await trio.to_thread.run_sync(os.wait4, asking, 0)
        if status:
            raise MissedError("not well")
        return float(used.ru_utime + used.ru_stime) + cpu_seconds(process.pid) - before

    def processes(self) -> frozenset[int]:
        """The ids of the plugin's processes."""
        process = self._running()
        return frozenset() if process is None else family(process.pid)

    async def back(self, after: float) -> float:
        """Waits for a list with every device healthy, on a stream opened since; returns its time.

        Raises:
            MissedError: none came in time.
        """
        return await self.in_time(lambda: self.kubelet.await_back(GPUS, after=after, timeout=math.inf))

    async def in_time(self, wait: Callable[[], Awaitable[T]], patience: float = PATIENCE) -> T:
        """Waits for what the plugin is to do.

        Raises:
            MissedError: it was too late, or has exited.
        """
        process = self._running()
        if process is None:
            raise MissedError("exited")
        came: list[T] = []
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                await process.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            with trio.move_on_after(patience):
                came.append(await wait())
            nursery.cancel_scope.cancel()
        if came:
            return came[0]
        code = process.poll()
        raise MissedError(f"not within {patience:g} s" if code is None else f"exited with {code}")

    def _running(self) -> trio.Process | None:
        return None if self._process is None or self._process.poll() is not None else self._process
