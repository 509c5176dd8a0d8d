from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
import trio
from conftest import Measure

from e2e.node import CONTROL_NODES, GPU_NODES, UUIDS, Node, node_with
from e2e.waiting import holds

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ALL: Final = frozenset(UUIDS)


@dataclass(frozen=True, slots=True)
class Placed:
    """A running pod: its GPUs in nvplug's order, and what `Pod.life` is as long as its container is not replaced."""

    uuids: tuple[str, ...]
    life: object


async def place(node: Node, name: str, gpus: int) -> Placed:
    """Runs a pod with so many GPUs.

    Checks that its container has got those that nvplug says it has allocated, by every way in which it can tell, and
    no others.
    """
    before = len(node.nvplug.lines)
    node.place(name, gpus)
    line = await node.nvplug.wait_for_line(r" allocated resource=nvidia\.com/gpu devices=(\S+)", skip=before)
    uuids = tuple(line[1].split(","))
    minors = {UUIDS.index(uuid) for uuid in uuids}
    pod = await node.healthy(name, dict.fromkeys(uuids, "Healthy"))
    report = await node.report(name)

    assert len(minors) == gpus
    assert pod.phase == "Running"
    assert report.environment["NVIDIA_VISIBLE_DEVICES"] == ",".join(uuids)
    assert {path: numbers for path, numbers in report.nodes.items() if path not in CONTROL_NODES} == {
        f"/dev/nvidia{minor}": (GPU_NODES, minor) for minor in minors
    }
    assert report.nodes.keys() >= CONTROL_NODES
    assert report.opened == minors
    return Placed(uuids, pod.life)


async def test_a_pod_runs_with_the_gpus_that_nvplug_allotted(kubelet: Path, measure: Measure) -> None:
    """A container that asks for two GPUs has their UUIDs in its environment, their nodes in /dev, and no other GPU."""
    async with node_with(kubelet) as node:
        started = trio.current_time()
        await place(node, "two", 2)

        measure("a pod with 2 GPUs, from its manifest until it has reported", trio.current_time() - started, 5.0)


async def test_a_running_pod_survives_restarts_of_the_kubelet(kubelet: Path, measure: Measure) -> None:
    """The kubelet is ended and killed under a running pod: it runs on, and what it has is given to nobody else."""
    async with node_with(kubelet) as node:
        first = await place(node, "first", 2)
        for by in (signal.SIGTERM, signal.SIGKILL):
            lines = len(node.nvplug.lines)
            await node.end_kubelet(by)
            started = trio.current_time()
            node.start_kubelet()
            await node.nvplug.wait_for_line(" registered ", skip=lines)
            await node.allocatable(ALL)
            took = trio.current_time() - started
            again = await node.healthy("first", dict.fromkeys(first.uuids, "Healthy"))

            measure(f"allocatable again, from the start of a kubelet after {by.name}", took, 5.0)
            assert again.life == first.life

        second = await place(node, "second", 4)

        assert not set(first.uuids) & set(second.uuids)

        node.place("third", 3)
        refused = await node.pod("third", phase="Failed")

        assert refused.reason == "UnexpectedAdmissionError"
        assert "Requested: 3, Available: 2" in refused.message
        assert (await node.pod("first")).life == first.life


async def test_the_status_of_a_pod_tells_that_its_gpu_broke(kubelet: Path, tmp_path: Path) -> None:
    """A GPU breaks under a running pod: the kubelet says so in the pod's status until it is well, and the pod lives."""
    file = tmp_path / "machine.json"
    file.write_text(json.dumps({"machine": "8xH100"}))
    async with node_with(kubelet, file) as node:
        placed = await place(node, "two", 2)
        well, broken = placed.uuids
        file.write_text(json.dumps({"machine": "8xH100", "faults": {broken: {"xid": 79}}}))
        await node.healthy("two", {well: "Healthy", broken: "Unhealthy"})
        await node.allocatable(ALL - {broken})
        file.write_text(json.dumps({"machine": "8xH100"}))
        await node.allocatable(ALL)
        pod = await node.healthy("two", dict.fromkeys(placed.uuids, "Healthy"))

        assert pod.life == placed.life


async def test_nothing_is_left_on_the_machine(kubelet: Path) -> None:
    """What a node with a running pod was made of goes with it: files, cgroups, mounts, processes. Settings stay."""
    before = what_a_node_could_change()
    async with node_with(kubelet) as node:
        node.place("two", 2)
        await node.report("two")
        on = node.machine
        pids = [int(pid) for path in on.cgroup.rglob("cgroup.procs") for pid in path.read_text().split()]

        assert len(pids) > 5

    # Whatever was not a child of ours is still to be collected by its parent.
    await holds(lambda: not any(alive(pid) for pid in pids), str)
    assert not on.directory.exists()
    assert not on.cgroup.exists()
    assert what_a_node_could_change() == before


def what_a_node_could_change() -> list[str]:
    """Of the machine that it runs on: settings that a kubelet makes, mounts, and where daemons keep their files."""
    names = ("sys/kernel/panic", "sys/kernel/panic_on_oops", "sys/vm/overcommit_memory", "self/mounts")
    places = ("/run/containerd", "/var/lib/containerd", "/var/lib/kubelet", "/var/log/containers", "/var/log/pods")
    there = [place for place in places if Path(place).exists()]
    return [*(Path("/proc", name).read_text() for name in names), *there]


def alive(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
