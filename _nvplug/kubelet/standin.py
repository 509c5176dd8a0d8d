"""A small kubelet, for the demo: one resource, one plugin at a time, and a process of its own.

It knows nothing of nvplug but the contract. What it is to do comes in as lines of JSON, what it saw goes out
as lines of JSON; the times in them are CLOCK_MONOTONIC in seconds, which all processes share.

In: ``{"do": "allocate", "count": 2}``, and the end of input, at which it ends. Out: ``{"saw": …, "at": …}``
with ``listening``, ``register``, ``refused``, ``list``, ``stream ended``; and the answers ``allocated`` or
``failed``. To restart it is to end this process and to start another.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, Final

from grpclib.client import Channel
from grpclib.const import Status
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError
from grpclib.server import Server

from _nvplug.kubelet.api.v1beta1 import (
    AllocateRequest,
    ContainerAllocateRequest,
    ContainerPreferredAllocationRequest,
    Device,
    DevicePluginStub,
    Empty,
    ListAndWatchResponse,
    PreferredAllocationRequest,
    RegisterRequest,
    RegistrationBase,
)

__all__ = ["run_standin"]

# As the kubelet's: how long it tries to reach a plugin that registers.
DIAL_WITHIN: Final = 10.0

# A kubelet would wait for ever, with all pods of the node behind it; a demo should come to an end.
ANSWER_WITHIN: Final = 5.0

_FAILURES: Final = (GRPCError, ProtocolError, StreamTerminatedError, TimeoutError, OSError)


def run_standin(directory: str) -> int:
    """Is the kubelet of this directory until standard input ends; returns the exit status."""
    # Ctrl-C is for the demo, which ends us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_StandIn(Path(directory)).run())
    return 0


class _StandIn(RegistrationBase):
    """The Registration service, and the plugin that is registered."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tasks: asyncio.TaskGroup
        self._watching: list[asyncio.Task[None]] = []
        self._plugin: DevicePluginStub | None = None
        self._asks_preference = False
        self._devices: list[Device] = []

    async def run(self) -> None:
        """Starts as a kubelet does: makes the directory, removes all sockets in it, binds, listens."""
        self._directory.mkdir(mode=0o750, exist_ok=True)
        for path in self._directory.iterdir():
            if path.is_socket():
                path.unlink()
        kubelet_socket = socket.socket(socket.AF_UNIX)
        kubelet_socket.bind(str(self._directory / "kubelet.sock"))
        server = Server([self])
        at = time.monotonic()
        await server.start(sock=kubelet_socket)
        _tell("listening", at)
        async with asyncio.TaskGroup() as self._tasks:
            commands = await _standard_input()
            while line := await commands.readline():
                await self._obey(json.loads(line))
            for task in self._watching:
                task.cancel()

    async def register(self, message: RegisterRequest) -> Empty:
        """Dials back, asks for the options and calls ListAndWatch before it answers, as since 1.25."""
        at = time.monotonic()
        channel = Channel(path=str(self._directory / message.endpoint))
        plugin = DevicePluginStub(channel)
        try:
            options = await plugin.get_device_plugin_options(Empty(), timeout=DIAL_WITHIN)
        except _FAILURES as error:
            reason = f"failed to get device plugin options: {error!r}"
            _tell("refused", time.monotonic(), reason=reason)
            raise GRPCError(Status.UNKNOWN, reason) from error
        self._plugin = plugin
        self._asks_preference = options.get_preferred_allocation_available
        _tell(
            "register",
            at,
            version=message.version,
            endpoint=message.endpoint,
            resource=message.resource_name,
            seconds=time.monotonic() - at,
        )
        self._watching.append(self._tasks.create_task(self._watch(plugin, channel)))
        return Empty()

    async def _watch(self, plugin: DevicePluginStub, channel: Channel) -> None:
        how = "OK"
        try:
            async for response in plugin.list_and_watch(Empty()):
                self._take(response)
        except _FAILURES as error:
            how = repr(error)
        _tell("stream ended", time.monotonic(), how=how)
        channel.close()
        if plugin is self._plugin:
            self._plugin = None

    def _take(self, response: ListAndWatchResponse) -> None:
        self._devices = response.devices
        _tell(
            "list",
            time.monotonic(),
            devices=[
                {
                    "id": device.id,
                    "health": device.health,
                    "numa": [node.id for node in device.topology.nodes] if device.topology else [],
                }
                for device in response.devices
            ],
        )

    async def _obey(self, command: dict[str, Any]) -> None:
        if command["do"] == "allocate":
            try:
                await self._allocate(command["count"])
            except _FAILURES as error:
                _tell("failed", time.monotonic(), reason=repr(error))

    async def _allocate(self, count: int) -> None:
        """Picks devices as the kubelet does, with the plugin's advice if it offers any, and asks for them."""
        if self._plugin is None:
            _tell("failed", time.monotonic(), reason="no plugin is registered")
            return
        ids = [device.id for device in self._devices if device.health == "Healthy"]
        if self._asks_preference:
            wish = ContainerPreferredAllocationRequest(available_deviceIDs=ids, allocation_size=count)
            preference = await self._plugin.get_preferred_allocation(
                PreferredAllocationRequest(container_requests=[wish]), timeout=ANSWER_WITHIN
            )
            ids = preference.container_responses[0].device_i_ds
        chosen = ids[:count]
        # The kubelet keeps them in a map, so that a plugin sees them in any order.
        random.shuffle(chosen)
        at = time.monotonic()
        response = await self._plugin.allocate(
            AllocateRequest(container_requests=[ContainerAllocateRequest(devices_ids=chosen)]),
            timeout=ANSWER_WITHIN,
        )
        container = response.container_responses[0]
        _tell(
            "allocated",
            at,
            seconds=time.monotonic() - at,
            ids=chosen,
            preferred=self._asks_preference,
            envs=container.envs,
            mounts=[[mount.host_path, mount.container_path, mount.read_only] for mount in container.mounts],
            devices=[[node.host_path, node.container_path, node.permissions] for node in container.devices],
            annotations=container.annotations,
            cdi_devices=[device.name for device in container.cdi_devices],
        )


async def _standard_input() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


def _tell(saw: str, at: float, **facts: Any) -> None:
    sys.stdout.write(json.dumps({"saw": saw, "at": at, **facts}) + "\n")
    sys.stdout.flush()
