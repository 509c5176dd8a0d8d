"""The real kubelet's device manager, driven from tests.

:class:`DeviceManager` runs ``kdm``, which :mod:`kubelet.build` has made, in a directory of its own and speaks to it:
one JSON object per line each way.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

__all__ = [
    "Container",
    "DeviceManager",
    "DeviceNode",
    "EndedError",
    "Hint",
    "Mount",
    "NotReachedError",
    "Reached",
    "RefusedError",
    "Status",
    "running",
]

_ANSWER_LIMIT = 30.0
_END_LIMIT = 10.0


class RefusedError(Exception):
    """The kubelet said no; the message is what it said."""


class EndedError(Exception):
    """The device manager is not running, or ended before it answered; the message carries the end of its log."""


class NotReachedError(AssertionError):
    """The node's allocatable did not become what it was to be in time."""


@dataclass(frozen=True, slots=True)
class Status:
    """What the kubelet puts into the node's status, by resource.

    Attributes:
        capacity: all devices.
        allocatable: the healthy ones.
        deleted: resources that the kubelet has just forgotten, 5 min after their plugin ended.
    """

    capacity: Mapping[str, int]
    allocatable: Mapping[str, int]
    deleted: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reached:
    """When the node's allocatable had become what was waited for, to a millisecond.

    Attributes:
        elapsed: seconds since it was asked for.
        since_start: seconds since this kubelet, or its last restart, began to listen.
    """

    elapsed: float
    since_start: float


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A device node that the runtime would make in the container."""

    host_path: str
    container_path: str
    permissions: str


@dataclass(frozen=True, slots=True)
class Mount:
    """A mount that the runtime would make in the container."""

    host_path: str
    container_path: str
    read_only: bool


@dataclass(frozen=True, slots=True)
class Container:
    """What one container of an admitted pod got.

    Attributes:
        device_ids: by resource, sorted.
        envs, mounts, device_nodes, annotations, cdi_devices: what the kubelet would tell the container runtime.
    """

    device_ids: Mapping[str, tuple[str, ...]]
    envs: Mapping[str, str]
    mounts: tuple[Mount, ...]
    device_nodes: tuple[DeviceNode, ...]
    annotations: Mapping[str, str]
    cdi_devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Hint:
    """A set of NUMA nodes that could serve a request; ``preferred`` are the smallest sets that could ever."""

    nodes: tuple[int, ...]
    preferred: bool


class DeviceManager:
    """A kubelet, as far as device plugins can tell. One task at a time may ask it things.

    What it logs goes to the file beside the directory, ``DIRECTORY.log``. It ends when this process ends.

    Attributes:
        directory: where kubelet.sock is and plugins put their sockets; made when the kubelet starts.
        rejected: the pods that ran before the last start and were not admitted again, with the reason.
    """

    def __init__(self, program: Path, directory: Path, *, numa: int = 1, topology_policy: str = "none") -> None:
        self.directory = directory
        self.rejected: Mapping[str, str] = {}
        self._log = directory.parent / f"{directory.name}.log"
        self._command = [
            str(program),
            f"--dir={directory}",
            f"--pods={directory.parent / directory.name}.pods.json",
            f"--numa={numa}",
            f"--topology-policy={topology_policy}",
            "-v=2",
        ]
        self._process: trio.Process | None = None
        self._received = b""
        self._commands = 0

    @property
    def socket(self) -> Path:
        """Where plugins register."""
        return self.directory / "kubelet.sock"

    @property
    def pid(self) -> int:
        """Of the running process."""
        return self._running().pid

    def log(self, lines: int = 40) -> str:
        """The last lines of what all runs of this kubelet have logged."""
        try:
            with self._log.open(errors="replace") as log:
                return "".join(deque(log, maxlen=lines))
        except FileNotFoundError:
            return ""

    async def start(self) -> None:
        """Starts the process; it listens, and has seen all pods that ran before, when this returns.

        Start it again after :meth:`crash` or :meth:`close`: checkpoint, pods and dead sockets are still there.
        """
        with self._log.open("ab") as log:
            self._process = await trio.lowlevel.open_process(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            )
        self._received = b""
        self.rejected = (await self._answer(_ANSWER_LIMIT))["rejected"]

    async def restart(self) -> None:
        """Stops the manager properly and starts a new one in the same process, as kubelets do not, but tests do.

        Plugins are disconnected and kubelet.sock goes, then the directory is wiped of sockets and a new kubelet.sock
        is made. Registrations are counted on.
        """
        self.rejected = (await self._ask("restart"))["rejected"]

    async def crash(self) -> None:
        """Kills the process, frozen or not: as in every real stop of a kubelet, its sockets stay."""
        process = self._running()
        process.kill()
        await self._reap(process)

    async def close(self) -> None:
        """Ends the process by closing its input; it leaves its sockets, too. Kills it if that takes 10 s."""
        process = self._process
        if process is None:
            return
        try:
            with trio.move_on_after(_END_LIMIT):
                if process.stdin is not None:
                    await process.stdin.aclose()
                await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
            await self._reap(process)

    def freeze(self) -> None:
        """Stops the process where it is (SIGSTOP): the system still accepts connections for it."""
        self._running().send_signal(signal.SIGSTOP)

    async def freeze_at(self, text: str) -> None:
        """Makes the process freeze itself when it next logs a line with this text, inside the call that logs it.

        ``Got registration request`` is the beginning of Register, ``Connected to new client`` its end: options are
        known, neither has ListAndWatch been called nor the reply been sent. :meth:`frozen` waits for it.
        """
        await self._ask("freeze_at", text=text)

    async def frozen(self, *, within: float = 10.0) -> None:
        """Waits until the process is frozen.

        Raises:
            NotReachedError: it did not freeze within that many seconds.
        """
        stat = Path(f"/proc/{self.pid}/stat")
        with trio.move_on_after(within):
            # The state follows the name, which is in parentheses.
            # Neither does /proc wait, nor does it tell when something happens.
            while stat.read_text().rpartition(")")[2].split()[0] != "T":  # noqa: ASYNC110, ASYNC240
                await trio.sleep(0.001)
            return
        raise NotReachedError(f"the kubelet did not freeze within {within} s. Its log:\n{self.log()}")

    def thaw(self) -> None:
        """Lets a frozen process continue."""
        self._running().send_signal(signal.SIGCONT)

    async def status(self) -> Status:
        """What the kubelet reports just now."""
        answer = await self._ask("capacity")
        return Status(answer["capacity"], answer["allocatable"], tuple(answer["deleted"]))

    async def await_allocatable(self, resource: str, n: int, *, within: float = 10.0) -> Reached:
        """Waits until ``n`` devices are allocatable; the kubelet's memory is looked at every millisecond.

        A resource that the kubelet does not know has 0.

        Raises:
            NotReachedError: it did not happen within that many seconds.
        """
        answer = await self._ask("await", limit=within + _ANSWER_LIMIT, allocatable={resource: n}, timeout=within)
        if not answer["met"]:
            raise NotReachedError(
                f"{resource} was to be {n} within {within} s, is {answer['allocatable'].get(resource)} "
                f"(capacity {answer['capacity'].get(resource)}). The kubelet's log:\n{self.log()}"
            )
        return Reached(answer["elapsed"], answer["since_start"])

    async def stays_allocatable(self, resource: str, n: int, *, seconds: float) -> None:
        """Sees that ``n`` devices are allocatable for so long; looks every hundredth of a second.

        Raises:
            NotReachedError: there were more, or fewer.
        """
        end = trio.current_time() + seconds
        while trio.current_time() < end:
            found = (await self.status()).allocatable.get(resource, 0)
            if found != n:
                raise NotReachedError(
                    f"{resource} was to stay {n}, and became {found}. The kubelet's log:\n{self.log()}"
                )
            await trio.sleep(0.01)

    async def admit(
        self,
        uid: str,
        requests: Mapping[str, int],
        *,
        init: Mapping[str, int] | None = None,
        limit: float = _ANSWER_LIMIT,
    ) -> Mapping[str, Container]:
        """Admits a pod with a container ``main`` and, with ``init``, an init container of that name.

        The pod stays across restarts and crashes until it is removed.

        Returns:
            What each container got, by its name.

        Raises:
            RefusedError: the pod was rejected; the message is the reason and message of its status.
        """
        answer = await self._ask("admit", limit=limit, uid=uid, requests=dict(requests), init=dict(init or {}))
        devices = answer["devices"]
        return {name: _container(options, devices[name]) for name, options in answer["containers"].items()}

    async def remove(self, uid: str) -> None:
        """The pod has ended; its devices are free."""
        await self._ask("remove", uid=uid)

    async def devices(self, uid: str) -> Mapping[str, Mapping[str, tuple[str, ...]]]:
        """The device ids of an admitted pod, by container and resource, as the checkpoint has them."""
        answer = (await self._ask("devices", uid=uid))["devices"]
        return {name: _device_ids(resources) for name, resources in answer.items()}

    async def hints(self, requests: Mapping[str, int]) -> Mapping[str, tuple[Hint, ...] | None]:
        """What the topology manager would be told about a new pod; None for a resource without NUMA nodes."""
        answer = (await self._ask("hints", uid="hints", requests=dict(requests)))["hints"]
        return {
            resource: tuple(Hint(tuple(h["nodes"]), h["preferred"]) for h in hints) if hints is not None else None
            for resource, hints in answer.items()
        }

    async def registrations(self, resource: str) -> int:
        """How often Register was called for the resource in the life of this process, refused calls included."""
        counts: Mapping[str, int] = (await self._ask("registrations"))["registrations"]
        return counts.get(resource, 0)

    def _running(self) -> trio.Process:
        if self._process is None:
            raise EndedError("the device manager is not running")
        return self._process

    async def _ask(self, command: str, *, limit: float = _ANSWER_LIMIT, **fields: object) -> dict[str, Any]:
        process = self._running()
        self._commands += 1
        line = json.dumps({"id": self._commands, "cmd": command, **fields}).encode() + b"\n"
        assert process.stdin is not None
        with trio.fail_after(limit):
            try:
                await process.stdin.send_all(line)
            except trio.BrokenResourceError as error:
                raise EndedError(f"the device manager ended:\n{self.log()}") from error
        while True:
            answer = await self._answer(limit)
            # One that was given up on earlier may still come.
            if answer.get("id") == self._commands:
                break
        if "error" in answer:
            raise RefusedError(answer["error"])
        return answer

    async def _answer(self, limit: float) -> dict[str, Any]:
        process = self._running()
        assert process.stdout is not None
        with trio.fail_after(limit):
            while b"\n" not in self._received:
                chunk = await process.stdout.receive_some()
                if not chunk:
                    raise EndedError(f"the device manager ended:\n{self.log()}")
                self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def _reap(self, process: trio.Process) -> None:
        """Waits for a process that was killed or has ended, whatever else is being cancelled."""
        with trio.CancelScope(shield=True):
            await process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    await pipe.aclose()
        self._process = None


@asynccontextmanager
async def running(
    program: Path, directory: Path, *, numa: int = 1, topology_policy: str = "none"
) -> AsyncGenerator[DeviceManager, None]:
    """A started device manager, which is gone afterwards."""
    manager = DeviceManager(program, directory, numa=numa, topology_policy=topology_policy)
    try:
        await manager.start()
        yield manager
    finally:
        # Not close: a test may leave it frozen, or waiting for a hung plugin.
        if manager._process is not None:  # noqa: SLF001 - the same module
            await manager.crash()


def _device_ids(resources: Mapping[str, list[str]]) -> dict[str, tuple[str, ...]]:
    return {resource: tuple(sorted(ids)) for resource, ids in resources.items()}


def _container(options: Mapping[str, Any], devices: Mapping[str, list[str]]) -> Container:
    # The kubelet's own names; Go writes what is empty as null.
    def rows(key: str) -> list[dict[str, Any]]:
        return options.get(key) or []

    return Container(
        device_ids=_device_ids(devices),
        envs={e["Name"]: e["Value"] for e in rows("envs")},
        mounts=tuple(Mount(m["HostPath"], m["ContainerPath"], m["ReadOnly"]) for m in rows("mounts")),
        device_nodes=tuple(
            DeviceNode(d["PathOnHost"], d["PathInContainer"], d["Permissions"]) for d in rows("devices")
        ),
        annotations={a["Name"]: a["Value"] for a in rows("annotations")},
        cdi_devices=tuple(c["Name"] for c in rows("cdi_devices")),
    )
