"""A node with everything that is real: the kubelet, containerd, pods, and nvplug with GPUs on paper."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc
import trio
from peer.program import Program, program

from _nvplug.drivers.machines import find_machine
from e2e.image import IMAGE
from e2e.machine import CONTAINERD_SOCKET, Machine, machine
from e2e.waiting import becomes

__all__ = ["CONTROL_NODES", "GPU", "GPU_NODES", "UUIDS", "Node", "Pod", "Report", "node_with"]

GPU: Final = "nvidia.com/gpu"

UUIDS: Final = tuple(find_machine("8xH100").gpu(index).uuid for index in range(8))
"""In index order, which is the order of minor numbers as well."""

GPU_NODES: Final = 60
"""The major number of the device nodes: one of those that Linux keeps for experiments, so no driver serves them."""

CONTROL_NODES: Final = frozenset({"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"})
"""Those that all GPUs share."""

_NODE: Final = "node"
_PORT: Final = 10255
_ANSWER_LIMIT: Final = 30.0

_FETCH: Final = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=20).read().decode())"

_KUBELET_CONFIG: Final[Mapping[str, Any]] = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    # Without an API server nobody could be asked who somebody is. The network is the machine's own.
    "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
    "authorization": {"mode": "AlwaysAllow"},
    "address": "127.0.0.1",
    "readOnlyPort": _PORT,
    "staticPodPath": "/var/lib/manifests",
    "volumePluginDir": "/var/lib/volume-plugins",
    "fileCheckFrequency": "1s",
    "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
    "cgroupDriver": "cgroupfs",
    "cgroupsPerQOS": False,
    "enforceNodeAllocatable": [],
    "localStorageCapacityIsolation": False,
    "failSwapOn": False,
    "makeIPTablesUtilChains": False,
    # The defaults need CAP_SYS_RESOURCE.
    "oomScoreAdj": 0,
    "maxOpenFiles": 4096,
    # A disk that is nearly full is no reason to end a test.
    "evictionHard": {
        "imagefs.available": "0%",
        "imagefs.inodesFree": "0%",
        "memory.available": "1Mi",
        "nodefs.available": "0%",
        "nodefs.inodesFree": "0%",
    },
}


_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Report:
    """What a container says that it was given.

    Attributes:
        environment: its variables.
        nodes: the driver's device nodes in its /dev, with their numbers.
        opened: the minor numbers of the GPUs that its device cgroup lets it open, by nodes of its own making.
    """

    environment: Mapping[str, str]
    nodes: Mapping[str, tuple[int, int]]
    opened: frozenset[int]


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod with one container, as the kubelet and Linux see it.

    Attributes:
        phase: Running, Failed and so on.
        reason, message: why, if it was rejected.
        health: what the kubelet says of the devices that the container was given.
        ready: whether its container is, as its probes find.
        life: what makes a running container this one: its id, when it was started, how often it was started before,
            its process and when that was started, in clock ticks.
    """

    phase: str
    reason: str
    message: str
    health: Mapping[str, str] = field(default_factory=dict)
    ready: bool = False
    life: tuple[str, str, int, int, int] | None = None


class Node:
    """Made by :func:`node_with`."""

    def __init__(self, on: Machine) -> None:
        self.programs: list[Program] = []
        self.machine = on
        self._kubelet: subprocess.Popen[bytes] | None = None
        (on.directory / "kubelet.json").write_text(json.dumps(_KUBELET_CONFIG))
        (on.directory / "var/lib/manifests").mkdir()
        (on.directory / "var/lib/kubelet").mkdir()
        # The driver's device nodes, as far as anybody looks at them.
        (self.root / "dev").mkdir(parents=True)
        paths = [*(f"/dev/nvidia{index}" for index in range(len(UUIDS))), *sorted(CONTROL_NODES)]
        for minor, path in enumerate(paths):
            os.mknod(f"{self.root}{path}", stat.S_IFCHR | 0o666, os.makedev(GPU_NODES, minor))

    @property
    def nvplug(self) -> Program:
        """nvplug, where it is no pod but a process beside the kubelet."""
        (program,) = self.programs
        return program

    @property
    def root(self) -> Path:
        """What the machine's driver has as its root."""
        return self.machine.directory / "root"

    @property
    def kubelet_socket(self) -> Path:
        """Where the kubelet listens for plugins, seen from outside the machine: /var/lib/kubelet is constant."""
        return self.machine.directory / "var/lib/kubelet/device-plugins/kubelet.sock"

    def log(self) -> str:
        """What there is to read when something went wrong."""
        programs = [line for program in self.programs for line in ("--- nvplug", program.log())]
        return "\n".join([self.machine.log("containerd"), self.machine.log("kubelet"), *programs])

    def start_kubelet(self) -> None:
        """Starts it. Whether it gets anywhere is seen by waiting for what it is to do."""
        assert self._kubelet is None
        self._kubelet = self.machine.start(
            "kubelet",
            str(self.machine.directory / "kubelet"),
            f"--config={self.machine.directory / 'kubelet.json'}",
            "--root-dir=/var/lib/kubelet",
            f"--hostname-override={_NODE}",
            "--node-ip=127.0.0.1",
            "--node-labels=nvidia.com/gpu.present=true",
            "-v=2",
        )

    async def end_kubelet(self, by: signal.Signals) -> None:
        """Sends it a signal, and waits for its end."""
        assert self._kubelet is not None
        self._kubelet.send_signal(by)
        await trio.to_thread.run_sync(self._kubelet.wait, _ANSWER_LIMIT)
        self._kubelet = None

    async def allocatable(self, uuids: frozenset[str]) -> None:
        """Returns when these GPUs are what the kubelet calls allocatable."""

        async def look() -> bool | None:
            return await trio.to_thread.run_sync(self._allocatable) == uuids or None

        await self._becomes(look)

    def place(self, name: str, gpus: int) -> None:
        """Gives the kubelet a static pod whose container asks for GPUs and reports what it gets."""
        container = {
            "name": "report",
            "image": IMAGE,
            "imagePullPolicy": "Never",
            "command": ["/report", str(GPU_NODES), str(len(UUIDS))],
            "resources": {"limits": {GPU: gpus}},
        }
        self.place_pod(
            name, {"enableServiceLinks": False, "terminationGracePeriodSeconds": 1, "containers": [container]}
        )

    def place_pod(self, name: str, spec: Mapping[str, Any]) -> None:
        """Gives the kubelet a static pod."""
        manifest = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "default"},
            # No CNI: the pod has the network of the machine.
            "spec": {**spec, "hostNetwork": True},
        }
        manifests = self.machine.directory / "var/lib/manifests"
        # The kubelet reads no names with a dot in front, so it never sees half of it.
        unfinished = manifests / f".{name}.json"
        unfinished.write_text(json.dumps(manifest))
        unfinished.rename(manifests / f"{name}.json")

    async def pod(self, name: str, *, phase: str = "Running") -> Pod:
        """The pod of this name, as soon as it is in this phase."""

        async def look() -> Pod | None:
            found = await self._pod(name)
            return found if found is not None and found.phase == phase else None

        return await self._becomes(look)

    async def ready(self, name: str) -> Pod:
        """The pod of this name, as soon as its readiness probe has succeeded."""

        async def look() -> Pod | None:
            found = await self._pod(name)
            return found if found is not None and found.ready else None

        return await self._becomes(look)

    async def healthy(self, name: str, healths: Mapping[str, str]) -> Pod:
        """The pod of this name, as soon as the kubelet says this of the GPUs that it has."""

        async def look() -> Pod | None:
            found = await self._pod(name)
            return found if found is not None and found.health == healths else None

        return await self._becomes(look)

    async def report(self, name: str) -> Report:
        """What the container of a running pod says."""

        async def look() -> list[str] | None:
            logs = self.machine.directory / "var/log/pods"
            # As the CRI has it: a time, the stream, whether the line is whole, and the line.
            lines = [
                line.split(" ", 3)[3]
                for log in logs.glob(f"default_{name}-{_NODE}_*/report/0.log")
                for line in log.read_text().splitlines()
            ]
            return lines if "end" in lines else None

        return _report(await self._becomes(look))

    async def _becomes(self, look: Callable[[], Awaitable[_T | None]]) -> _T:
        """What ``look`` finds, as soon as that is something, unless a process that it may depend on has ended."""

        async def look_while_all_run() -> _T | None:
            assert self._kubelet is not None
            assert self._kubelet.poll() is None, self.log()
            assert all(program.code is None for program in self.programs), self.log()
            return await look()

        return await becomes(look_while_all_run, self.log)

    async def _pod(self, name: str) -> Pod | None:
        answer = await self.machine.run(sys.executable, "-c", _FETCH, f"http://127.0.0.1:{_PORT}/pods")
        # Nothing as long as the kubelet does not listen.
        pods = (json.loads(answer)["items"] or []) if answer else []
        status = next((pod["status"] for pod in pods if pod["metadata"]["name"] == f"{name}-{_NODE}"), None)
        if status is None:
            return None
        phase, reason, message = (status.get(key, "") for key in ("phase", "reason", "message"))
        container: Mapping[str, Any] = next(iter(status.get("containerStatuses", ())), {})
        if "running" not in container.get("state", {}):
            return Pod(phase, reason, message)
        health = {
            each["resourceID"]: each["health"]
            for resource in container.get("allocatedResourcesStatus", ())
            if resource["name"] == GPU
            for each in resource["resources"]
        }
        identity = container["containerID"].removeprefix("containerd://")
        started = container["state"]["running"]["startedAt"]
        process = _process_in(self.machine.cgroup / identity)
        if process is None:
            return Pod(phase, reason, message)
        life = (identity, started, container["restartCount"], *process)
        return Pod(phase, reason, message, health, container["ready"], life)

    def _allocatable(self) -> frozenset[str] | None:
        socket = self.machine.directory / "var/lib/kubelet/pod-resources/kubelet.sock"
        with grpc.insecure_channel(f"unix:{socket}") as channel:
            ask = channel.unary_unary("/v1.PodResourcesLister/GetAllocatableResources")
            try:
                answer = ask(b"", timeout=_ANSWER_LIMIT)
            except grpc.RpcError:
                # The kubelet does not listen yet.
                return None
        # proto/ does not have this contract. Nothing else in the answer looks like a UUID.
        return frozenset(uuid.decode() for uuid in re.findall(rb"GPU-[0-9a-f-]{36}", answer))


def _process_in(cgroup: Path) -> tuple[int, int] | None:
    """The oldest process of a cgroup, and when it was started; None if it has ended.

    A probe that runs in a container is another one.
    """
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for pid in (cgroup / "cgroup.procs").read_text().split():
            # Behind the name, which may hold anything, is what proc(5) calls field 3.
            fields = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()
            found.append((int(fields[22 - 3]), int(pid)))
    if not found:
        return None
    started, oldest = min(found)
    return oldest, started


def _report(lines: list[str]) -> Report:
    environment, nodes, made = {}, {}, {}
    for line in lines:
        kind, _, rest = line.partition(" ")
        if kind == "env":
            name, _, value = rest.partition("=")
            environment[name] = value
        elif kind == "node":
            path, numbers, _ = rest.split(" ")
            major, _, minor = numbers.partition(":")
            nodes[path] = (int(major), int(minor))
        elif kind == "made":
            number, error = map(int, rest.split(" "))
            made[number] = error
    return Report(
        environment,
        {path: numbers for path, numbers in nodes.items() if path.startswith("/dev/nvidia")},
        frozenset(number for number, error in made.items() if errno.errorcode.get(error) != "EPERM"),
    )


@asynccontextmanager
async def node_with(kubelet: Path, gpus: str | Path = "8xH100") -> AsyncGenerator[Node]:
    """A node whose kubelet has taken up the GPUs, which are those of a machine or a file."""
    async with machine(kubelet) as on:
        node = Node(on)
        node.start_kubelet()
        async with program(
            node.kubelet_socket,
            f"--device-discovery-strategy=simulated:{gpus}",
            "--pass-device-specs",
            f"--dev-root={node.root}",
            under=on.joined,
        ) as nvplug:
            node.programs.append(nvplug)
            await node.allocatable(frozenset(UUIDS))
            yield node
        assert "Traceback" not in node.nvplug.log(), node.nvplug.log()
