"""The kubelet for tests, as a Trio test sees it: troubles as methods, what came over the wire as data.

Every time is CLOCK_MONOTONIC, in seconds, which all processes share: ``time.monotonic()`` and
``trio.current_time()`` differ, so compare with the former. Every method has a deadline, and raises
``trio.TooSlowError`` when it passes.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import trio

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable

__all__ = [
    "Answer",
    "CallError",
    "Container",
    "Device",
    "DeviceList",
    "DeviceNode",
    "Kubelet",
    "KubeletError",
    "Mute",
    "Registration",
    "Stream",
    "kubelet_in",
]

GPU: Final = "nvidia.com/gpu"

Mute = Literal["not", "backlog", "silent", "handler"]
"""How a kubelet that listens does not answer: it never accepts, it is silent, or Register does not return."""

# Of a command's answer, and of awaiting something, unless told otherwise: generous, as tests share a machine.
_DEADLINE: Final = 20.0


class KubeletError(AssertionError):
    """The test asked for something that this kubelet cannot do now, or its process has ended unasked."""


class CallError(Exception):
    """A call to the plugin failed.

    Attributes:
        code: of gRPC, such as ``INVALID_ARGUMENT``; ``NO_ENDPOINT`` if the kubelet has nobody to ask.
        details: what the plugin said.
    """

    def __init__(self, code: str, details: str) -> None:
        super().__init__(f"{code}: {details}")
        self.code = code
        self.details = details


@dataclass(frozen=True, slots=True)
class Registration:
    """One Register call. ``answered`` is None while it is pending; ``error`` is what it was refused with.

    ``abandoned``: the plugin had given the call up by the time that it was answered.
    """

    at: float
    version: str
    endpoint: str
    resource: str
    preferred: bool
    answered: float | None = None
    abandoned: bool = False
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Device:
    """One device of a list."""

    id: str
    health: str
    numa: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DeviceList:
    """One message of ListAndWatch; ``stream`` is the index into :attr:`Kubelet.streams`."""

    at: float
    stream: int
    resource: str
    devices: tuple[Device, ...]

    @property
    def healthy(self) -> tuple[str, ...]:
        """The ids of the healthy devices, in order."""
        return tuple(device.id for device in self.devices if device.health == "Healthy")


@dataclass(frozen=True, slots=True)
class Stream:
    """One ListAndWatch call.

    ``code`` is OK if the plugin returned, CUT if the kubelet closed its connection, DEAD if the kubelet
    ended, else gRPC's; ``""`` while it lives.
    """

    at: float
    resource: str
    endpoint: str
    ended: float | None = None
    code: str = ""
    details: str = ""


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A device node that a container is given."""

    container_path: str
    host_path: str
    permissions: str


@dataclass(frozen=True, slots=True)
class Container:
    """What one container is given."""

    envs: dict[str, str]
    mounts: tuple[tuple[str, str, bool], ...]
    devices: tuple[DeviceNode, ...]
    annotations: dict[str, str]
    cdi_devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to Allocate. ``seconds``: how long the call took, as the kubelet saw it."""

    containers: tuple[Container, ...]
    seconds: float

    @property
    def container(self) -> Container:
        """The only one that a kubelet reads."""
        return self.containers[0]


@asynccontextmanager
async def kubelet_in(directory: Path, *, minor: int = 34, start: bool = True) -> AsyncGenerator[Kubelet, None]:
    """A kubelet that keeps its sockets in ``directory``, running unless ``start`` is False.

    Args:
        directory: made if it is not there, its sockets wiped. Its path and a file name must fit in 107 bytes.
        minor: its version is 1.``minor``. From 35 on its dial ends with the plugin's Register call; from 37
            on it knows clients by resource and socket, before by resource only; from 33 on it wipes nothing
            but sockets.
        start: whether to start it now.
    """
    kubelet = Kubelet(directory, minor)
    # A nursery around the yield of a context manager, not of a generator: it is entered and left by the same
    # task.
    async with trio.open_nursery() as nursery:
        try:
            await kubelet._begin(nursery)  # noqa: SLF001  # half of this function, kept where the state is
            if start:
                await kubelet.start()
            yield kubelet
        finally:
            with trio.CancelScope(shield=True):
                await kubelet._end()  # noqa: SLF001  # the same


class Kubelet:
    """Made by :func:`kubelet_in`.

    Attributes:
        directory: where the sockets are.
        registrations: every Register call, in order of arrival.
        streams: every ListAndWatch call, in order of calling.
        lists: every message received, over all streams.
        complaints: what the plugin did that the contract forbids; a test usually ends with ``assert not``
            this.
        connections: when connections through kubelet.sock were accepted.
    """

    def __init__(self, directory: Path, minor: int) -> None:
        self.directory = directory
        self.registrations: list[Registration] = []
        self.streams: list[Stream] = []
        self.lists: list[DeviceList] = []
        self.complaints: list[str] = []
        self.connections: list[float] = []
        self._minor = minor
        self._allocatable: dict[str, tuple[int, float]] = {}
        self._process: trio.Process | None = None
        self._nursery: trio.Nursery | None = None
        self._changed = trio.Event()
        self._numbers = itertools.count(1)
        self._replies: dict[int, dict[str, Any]] = {}
        self._awaited: set[int] = set()
        # Numbers of the present process, which start anew with each, to indices of the lists above.
        self._stream_index: dict[int, int] = {}
        self._register_index: dict[int, int] = {}

    @property
    def socket(self) -> Path:
        """The path of kubelet.sock."""
        return self.directory / "kubelet.sock"

    def allocatable(self, resource: str = GPU) -> int:
        """How many healthy devices of a resource there are now; 0 if it is not known."""
        return self._allocatable.get(resource, (0, 0.0))[0]

    def live_streams(self) -> tuple[Stream, ...]:
        """The streams that have not ended."""
        return tuple(stream for stream in self.streams if stream.ended is None)

    def plugin_sockets(self) -> tuple[Path, ...]:
        """The sockets in the directory that are not kubelet.sock."""
        if not self.directory.exists():
            return ()
        return tuple(sorted(p for p in self.directory.iterdir() if p.is_socket() and p != self.socket))

    # What a kubelet does to its plugins. Each returns the time just before the kubelet answered, or answered
    # again.

    async def start(self, *, wipe: bool = True, mute: Mute = "not") -> float:
        """Starts, as after ``stop``: makes the directory, wipes it, binds and listens."""
        return await self._time("start", wipe=wipe, mute=mute)

    async def bind(self, *, wipe: bool = True) -> None:
        """Starts, but does not listen on its socket until ``listen``: connections are refused."""
        await self._time("start", wipe=wipe, listen=False)

    async def listen(self) -> float:
        """Goes on from ``bind``."""
        return await self._time("listen")

    async def stop(self) -> float:
        """Ends as a process does: connections end; kubelet.sock and the plugins' sockets stay."""
        return await self._time("stop")

    async def restart(self, *, wipe: bool = True, down: float = 0.0) -> float:
        """``stop``, ``down`` seconds of nobody listening behind the file, ``start``."""
        await self.stop()
        await trio.sleep(down)
        return await self.start(wipe=wipe)

    async def crash(self, *, wipe: bool = True, down: float = 0.0) -> float:
        """SIGKILL, ``down`` seconds, and another process."""
        assert self._nursery is not None
        await self._kill()
        await trio.sleep(down)
        await self._spawn(self._nursery)
        return await self.start(wipe=wipe)

    async def replace_socket(self, *, cut: bool) -> float:
        """Puts a new kubelet.sock in the place of the old one and wipes nothing.

        Args:
            cut: whether connections end, those of streams and those to the old kubelet.sock.
        """
        return await self._time("replace", cut=cut)

    async def replace_directory(self, *, down: float = 0.0) -> float:
        """Deletes the directory and all in it, and makes a new one with a kubelet.sock. No stream ends."""
        return await self._time("replace_directory", down=down)

    async def cut(self, resource: str | None = None) -> float:
        """Closes the connections to the plugins of a resource, or to all; kubelet.sock goes on answering."""
        return await self._time("cut", resource=resource)

    async def mute(self, how: Literal["backlog", "silent", "handler"]) -> None:
        """Goes on listening and does not answer; streams that are open live on."""
        await self._time("mute", mute=how)

    async def unmute(self) -> float:
        """Answers again, also whoever has been waiting."""
        return await self._time("mute", mute="not")

    async def refuse(self, words: str) -> None:
        """Fails every Register with UNKNOWN and these words."""
        await self._time("refuse", refusal=words)

    async def accept(self) -> float:
        """Refuses no longer."""
        return await self._time("refuse", refusal=None)

    def delete_plugin_sockets(self) -> float:
        """Unlinks the plugins' sockets, and nothing else; their streams live on."""
        at = time.monotonic()
        for path in self.plugin_sockets():
            path.unlink()
        return at

    def freeze(self) -> None:
        """SIGSTOP: the kernel goes on accepting connections for it."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> float:
        """SIGCONT."""
        assert self._process is not None
        at = time.monotonic()
        self._process.send_signal(signal.SIGCONT)
        return at

    # What a kubelet asks of a plugin.

    async def allocate(self, *containers: Iterable[str], resource: str = GPU, timeout: float = 10.0) -> Answer:
        """Allocate, with the given ids for each container, in that order; a real kubelet sends one container.

        Raises:
            CallError: it failed.
        """
        value = await self._ask(
            "allocate", resource=resource, containers=[list(ids) for ids in containers], timeout=timeout
        )
        return Answer(
            containers=tuple(
                Container(
                    envs=c["envs"],
                    mounts=tuple((a, b, read_only) for a, b, read_only in c["mounts"]),
                    devices=tuple(DeviceNode(*node) for node in c["devices"]),
                    annotations=c["annotations"],
                    cdi_devices=tuple(c["cdi_devices"]),
                )
                for c in value["containers"]
            ),
            seconds=value["seconds"],
        )

    async def preferred(
        self,
        available: Iterable[str],
        size: int,
        *,
        must_include: Iterable[str] = (),
        resource: str = GPU,
        timeout: float = 10.0,
    ) -> tuple[str, ...]:
        """GetPreferredAllocation for one container: the ids, in the plugin's order.

        Raises:
            CallError: it failed.
        """
        value = await self._ask(
            "preferred",
            resource=resource,
            available=list(available),
            must_include=list(must_include),
            size=size,
            timeout=timeout,
        )
        return tuple(value["containers"][0])

    # What a test waits for.

    async def await_allocatable(self, n: int, resource: str = GPU, *, timeout: float = _DEADLINE) -> float:
        """Waits until ``n`` devices are allocatable; returns since when they have been."""
        await self.await_that(
            lambda: resource in self._allocatable and self.allocatable(resource) == n,
            f"{n} of {resource} allocatable",
            timeout=timeout,
        )
        return self._allocatable[resource][1]

    async def await_back(self, n: int, *, after: float, resource: str = GPU, timeout: float = _DEADLINE) -> float:
        """Waits for a list with ``n`` healthy devices on a stream opened since ``after``; returns its time.

        ``await await_back(8, after=t) - t``, with ``t`` from one of the troubles, is the time out of service.
        """

        def found() -> float | None:
            for one in self.lists:
                stream = self.streams[one.stream]
                if one.resource == resource and stream.at >= after and len(one.healthy) == n:
                    return one.at
            return None

        await self.await_that(
            lambda: found() is not None,
            f"{n} of {resource} on a stream opened after {after}",
            timeout=timeout,
        )
        at = found()
        assert at is not None
        return at

    async def await_list(
        self, predicate: Callable[[DeviceList], bool], *, after: float = 0.0, timeout: float = _DEADLINE
    ) -> DeviceList:
        """Waits for a list that came after ``after`` and satisfies the predicate; returns the first."""

        def found() -> DeviceList | None:
            return next((one for one in self.lists if one.at >= after and predicate(one)), None)

        await self.await_that(lambda: found() is not None, "such a list", timeout=timeout)
        one = found()
        assert one is not None
        return one

    async def await_that(self, predicate: Callable[[], bool], what: str, *, timeout: float = _DEADLINE) -> None:
        """Waits until the predicate, over what this object knows, is true.

        Raises:
            KubeletError: it was not, before the deadline; says ``what`` was awaited, and what is known.
        """
        with trio.move_on_after(timeout):
            while not predicate():
                await self._changed.wait()
            return
        raise KubeletError(f"after {timeout} s still not: {what}\n{self._report()}")

    async def _begin(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        await self._spawn(nursery)

    async def _end(self) -> None:
        """Ends the process, and removes nothing but its own socket."""
        await self._kill()
        self.socket.unlink(missing_ok=True)

    async def _spawn(self, nursery: trio.Nursery) -> None:
        self._stream_index.clear()
        self._register_index.clear()
        ready = trio.Event()
        self._process = await trio.lowlevel.open_process(
            [sys.executable, "-m", "peer.process", str(self.directory), str(self._minor)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[1],
            # grpcio's own notes about sockets that tests break on purpose.
            env={**os.environ, "GRPC_VERBOSITY": "NONE"},
        )
        nursery.start_soon(self._read, self._process, ready)
        with trio.fail_after(_DEADLINE):
            await ready.wait()

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        now = time.monotonic()
        process.kill()
        await process.wait()
        assert process.stdin is not None
        await process.stdin.aclose()
        for index, stream in enumerate(self.streams):
            if stream.ended is None:
                self.streams[index] = replace(stream, ended=now, code="DEAD", details="the kubelet was killed")
        self._allocatable = dict.fromkeys(self._allocatable, (0, now))
        self._announce()

    async def _read(self, process: trio.Process, ready: trio.Event) -> None:
        assert process.stdout is not None
        rest = b""
        async with process.stdout:
            async for chunk in process.stdout:
                *lines, rest = (rest + chunk).split(b"\n")
                # What a killed process had still to say is not news.
                if process is not self._process:
                    continue
                for line in lines:
                    self._note(json.loads(line), ready)
                self._announce()
        if process is self._process:
            raise KubeletError(f"the kubelet's process ended by itself, with {await process.wait()}")

    def _note(self, event: dict[str, Any], ready: trio.Event) -> None:
        match event:
            case {"reply": number}:
                if number in self._awaited:
                    self._replies[number] = event
            case {"event": "ready"}:
                ready.set()
            case {"event": "register"}:
                self._register_index[event["register"]] = len(self.registrations)
                names = ("at", "version", "endpoint", "resource", "preferred")
                self.registrations.append(Registration(**{name: event[name] for name in names}))
            case {"event": "registered"}:
                index = self._register_index[event["register"]]
                self.registrations[index] = replace(
                    self.registrations[index],
                    answered=event["at"],
                    abandoned=event["abandoned"],
                    error=event["error"],
                )
            case {"event": "stream"}:
                self._stream_index[event["stream"]] = len(self.streams)
                self.streams.append(Stream(event["at"], event["resource"], event["endpoint"]))
            case {"event": "stream_ended"}:
                index = self._stream_index[event["stream"]]
                self.streams[index] = replace(
                    self.streams[index], ended=event["at"], code=event["code"], details=event["details"]
                )
            case {"event": "list"}:
                devices = tuple(Device(d["id"], d["health"], tuple(d["numa"])) for d in event["devices"])
                self.lists.append(
                    DeviceList(event["at"], self._stream_index[event["stream"]], event["resource"], devices)
                )
            case {"event": "allocatable"}:
                self._allocatable[event["resource"]] = self._since(event)
            case {"event": "connection"}:
                self.connections.append(event["at"])
            case {"event": "complaint"}:
                self.complaints.append(event["what"])
            case _:
                raise KubeletError(f"unknown: {event}")

    def _since(self, event: dict[str, Any]) -> tuple[int, float]:
        """The same number again is as old as it was."""
        before = self._allocatable.get(event["resource"])
        if before is not None and before[0] == event["devices"]:
            return before
        return event["devices"], event["at"]

    def _announce(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    async def _time(self, do: str, **arguments: Any) -> float:
        return float(await self._ask(do, **arguments))

    async def _ask(self, do: str, **arguments: Any) -> Any:
        if self._process is None or self._process.stdin is None:
            raise KubeletError(f"{do}: there is no process")
        number = next(self._numbers)
        self._awaited.add(number)
        try:
            line = json.dumps({"id": number, "do": do, "with": arguments}) + "\n"
            with trio.fail_after(_DEADLINE + arguments.get("timeout", 0.0)):
                await self._process.stdin.send_all(line.encode())
                while number not in self._replies:
                    await self._changed.wait()
        finally:
            self._awaited.discard(number)
            reply = self._replies.pop(number, {})
        if "failed" in reply:
            raise KubeletError(f"{do}: {reply['failed']}")
        if "code" in reply:
            raise CallError(reply["code"], reply["details"])
        return reply["value"]

    def _report(self) -> str:
        lists = [
            f"  list at {one.at:.3f} stream {one.stream}: {len(one.healthy)} of {len(one.devices)} healthy"
            for one in self.lists[-8:]
        ]
        return "\n".join(
            [
                f"allocatable: {self._allocatable}",
                *(f"  {registration}" for registration in self.registrations[-8:]),
                *(f"  {stream}" for stream in self.streams[-8:]),
                *lists,
                f"complaints: {self.complaints}",
            ]
        )
