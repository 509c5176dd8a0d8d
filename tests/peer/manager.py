"""The kubelet's device manager: who is registered, and what is allocatable.

Written after the contract (``kubelet-contract.md`` 1.2 to 1.6), with the flaws that plugins meet: up to 1.36
a client is known by its resource only, so that the end of an old stream, or a Register that fails late, takes
the newest one away.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from typing import TYPE_CHECKING, Any, Final

import grpc

from peer.contract import message, unary, unary_stream

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["Client", "Manager", "RefusedError"]

_DIAL_SECONDS: Final = 10.0
_DOMAIN: Final = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_RESOURCE: Final = re.compile(rf"(?=.{{1,244}}/){_DOMAIN}/(?=.{{1,63}}$)[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")

# As grpc-go dials: its own connection for each client, a list of at most 4 MiB.
_CHANNEL_OPTIONS: Final = (
    ("grpc.default_authority", "localhost"),
    ("grpc.max_receive_message_length", 4 * 1024 * 1024),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)


class RefusedError(Exception):
    """Register fails with this message; the kubelet's own errors carry no other code than UNKNOWN."""


class Manager:
    """All that one life of a kubelet knows. A restarted kubelet is a new manager.

    Args:
        directory: where the plugins' sockets are.
        minor: of the kubelet's version, 1.``minor``: from 35 on the dial ends with the plugin's call, from 37
            on clients are known by resource and socket.
        emit: takes what happened, from any thread.
    """

    def __init__(self, directory: Path, minor: int, emit: Callable[[dict[str, Any]], None]) -> None:
        self.lock = threading.RLock()
        self._directory = directory
        self._minor = minor
        self._emit = emit
        self._dead = threading.Event()
        self._clients: dict[tuple[str, str], Client] = {}
        self._endpoints: dict[str, Client] = {}
        self._live: set[Client] = set()
        self._channels: list[grpc.Channel] = []
        self._healthy: dict[str, set[str]] = {}
        self._unhealthy: dict[str, set[str]] = {}

    def register(self, request: Any, context: grpc.ServicerContext) -> None:
        """The Register handler: returns when the plugin is connected and its ListAndWatch has been called.

        Raises:
            RefusedError: with the kubelet's words.
        """
        resource = request.resource_name
        if self.dead:
            raise RefusedError("the kubelet is gone")
        if request.version != "v1beta1":
            raise RefusedError(
                f'requested API version "{request.version}" is not supported by kubelet. '
                'Supported version is ["v1beta1"]'
            )
        if not _RESOURCE.fullmatch(resource) or "kubernetes.io/" in resource or resource.startswith("requests."):
            raise RefusedError(f'the ResourceName "{resource}" is invalid')
        key = self._key(resource, request.endpoint)
        client = Client(resource, request.endpoint, self)
        with self.lock:
            if self._minor >= 37 and key in self._clients:
                raise RefusedError(f"device plugin already connected: {self._directory / request.endpoint}")
            for other in self._live:
                # The same one again is what a plugin does whose first call was never answered.
                if other.resource == resource and other.endpoint != client.endpoint:
                    self.complain(f"{client.endpoint} registers while {other.endpoint} serves {resource}")
            self._clients[key] = client
        try:
            client.connect(self._directory / request.endpoint, context if self._minor >= 35 else None)
        except RefusedError:
            with self.lock:
                # By key, whoever is there by now: this is the late failure that forgets a live client.
                self._clients.pop(key, None)
            raise
        with self.lock:
            self._endpoints[resource] = client
            self._live.add(client)
        threading.Thread(target=self._run, args=(client,), daemon=True).start()

    def endpoint(self, resource: str) -> Client | None:
        """Who answers for a resource now."""
        with self.lock:
            client = self._endpoints.get(resource)
            return None if client is None or client.stopped else client

    def cut(self, resource: str | None) -> float:
        """Ends the connections to the plugins of one resource, or of all."""
        before = time.monotonic()
        with self.lock:
            clients = [c for c in self._live if resource in (None, c.resource)]
        for client in clients:
            client.close()
        return before

    def die(self) -> None:
        """What the end of the process does: all connections end, and nothing counts any more."""
        with self.lock:
            self._dead.set()
            for resource in self._healthy:
                self._emit_allocatable(resource, 0)
            channels = list(self._channels)
        for channel in channels:
            channel.close()

    @property
    def dead(self) -> bool:
        """Whether this life is over."""
        return self._dead.is_set()

    def adopt(self, channel: grpc.Channel) -> None:
        """Remembers a channel, to close it at the end of this life and not a moment earlier."""
        with self.lock:
            if self.dead:
                channel.close()
                raise RefusedError("the kubelet is gone")
            self._channels.append(channel)

    def receive(self, client: Client, response: Any) -> None:
        """One message of ListAndWatch: it replaces the list of the resource, whichever stream it came on."""
        now = time.monotonic()
        devices = [{"id": d.ID, "health": d.health, "numa": [n.ID for n in d.topology.nodes]} for d in response.devices]
        ids = [d["id"] for d in devices]
        if len(set(ids)) != len(ids) or "" in ids:
            self.complain(f"list of {client.resource}: an id is empty or stands twice")
        for device in devices:
            if device["health"] not in ("Healthy", "Unhealthy"):
                self.complain(f"list of {client.resource}: health {device['health']!r} of {device['id']}")
            if any(node < 0 for node in device["numa"]):
                self.complain(f"list of {client.resource}: NUMA nodes {device['numa']} of {device['id']}")
        with self.lock:
            if self.dead:
                return
            self._emit(
                {
                    "event": "list",
                    "at": now,
                    "stream": client.number,
                    "resource": client.resource,
                    "devices": devices,
                }
            )
            healthy = {d["id"] for d in devices if d["health"] == "Healthy"}
            self._healthy[client.resource] = healthy
            self._unhealthy[client.resource] = set(ids) - healthy
            self._emit_allocatable(client.resource, len(healthy), now)

    def complain(self, what: str) -> None:
        """Notes something that a plugin must not do."""
        self._emit({"event": "complaint", "at": time.monotonic(), "what": what})

    def _run(self, client: Client) -> None:
        with self.lock:
            if self.dead:
                return
            self._emit(
                {
                    "event": "stream",
                    "at": time.monotonic(),
                    "stream": client.number,
                    "resource": client.resource,
                    "endpoint": client.endpoint,
                }
            )
        code, details = client.list_and_watch()
        with self.lock:
            self._live.discard(client)
            if self.dead:
                code, details = "DEAD", "the kubelet ended"
            self._emit(
                {
                    "event": "stream_ended",
                    "at": time.monotonic(),
                    "stream": client.number,
                    "code": code,
                    "details": details,
                }
            )
            # By key again: up to 1.36 this is the newest client of the resource, if another has registered
            # since.
            found = self._clients.pop(self._key(client.resource, client.endpoint), None)
            if found is None:
                return
            found.close()
            resource = found.resource
            if self._minor >= 37:
                found.stopped = True
                if any(c.resource == resource for c in self._live):
                    return
            elif resource in self._endpoints:
                self._endpoints[resource].stopped = True
            self._unhealthy.setdefault(resource, set()).update(self._healthy.get(resource, ()))
            self._healthy[resource] = set()
            if not self.dead:
                self._emit_allocatable(resource, 0)

    def _key(self, resource: str, endpoint: str) -> tuple[str, str]:
        return (resource, endpoint if self._minor >= 37 else "")

    def _emit_allocatable(self, resource: str, devices: int, at: float | None = None) -> None:
        self._emit({"event": "allocatable", "at": at or time.monotonic(), "resource": resource, "devices": devices})


class Client:
    """The kubelet's client of one registration.

    Attributes:
        number: of its stream, unique in this process.
        stopped: whether the manager has given it up.
        channel: its connection, once there is one.
    """

    _numbers = itertools.count(1)

    def __init__(self, resource: str, endpoint: str, manager: Manager) -> None:
        self.resource = resource
        self.endpoint = endpoint
        self.number = next(self._numbers)
        self.stopped = False
        self.options: Any = None
        self.channel: grpc.Channel | None = None
        self._manager = manager
        self._closed_by_us = False

    def connect(self, path: Path, context: grpc.ServicerContext | None) -> None:
        """Dials for at most 10 s, until the plugin's SETTINGS have come, then asks for its options.

        Raises:
            RefusedError: the plugin is not to be reached, or its options are not.
        """
        channel = grpc.insecure_channel(f"unix:{path}", options=_CHANNEL_OPTIONS)
        self._manager.adopt(channel)
        ready = grpc.channel_ready_future(channel)
        deadline = time.monotonic() + _DIAL_SECONDS
        while True:
            try:
                ready.result(timeout=0.1)
                break
            except grpc.FutureTimeoutError:
                gone = self._manager.dead or (context is not None and not context.is_active())
                if gone or time.monotonic() >= deadline:
                    ready.cancel()
                    channel.close()
                    why = "context canceled" if gone else "context deadline exceeded"
                    raise RefusedError(f"failed to dial device plugin: {why}") from None
        self.channel = channel
        # No deadline of its own: a plugin that never answers keeps Register pending, up to 1.34 for ever.
        remaining = context.time_remaining() if context is not None else None
        # grpcio writes "no deadline" as a number of seconds that it does not take back.
        if remaining is not None and remaining > 1e9:
            remaining = None
        try:
            self.options = unary(channel, "GetDevicePluginOptions", "Empty", "DevicePluginOptions")(
                message("Empty")(), timeout=remaining
            )
        except (grpc.RpcError, ValueError) as error:
            raise RefusedError(f"failed to get device plugin options: {_say(error)}") from None

    def list_and_watch(self) -> tuple[str, str]:
        """Reads the stream to its end; returns the gRPC code and details that ended it."""
        try:
            for response in unary_stream(self.channel, "ListAndWatch", "Empty", "ListAndWatchResponse")(
                message("Empty")()
            ):
                self._manager.receive(self, response)
        except grpc.RpcError as error:
            if self._closed_by_us:
                return "CUT", "by the kubelet"
            return error.code().name, error.details() or ""
        except ValueError:
            # The channel was closed between Register and here.
            return "CUT", "by the kubelet"
        return "OK", ""

    def close(self) -> None:
        """Closes the connection."""
        self._closed_by_us = True
        if self.channel is not None:
            self.channel.close()


def _say(error: Exception) -> str:
    if isinstance(error, grpc.RpcError):
        return f"rpc error: code = {error.code().name} desc = {error.details()}"
    return str(error)
