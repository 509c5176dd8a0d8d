from __future__ import annotations

import shutil
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import trio
import yaml
from conftest import Measure
from frozen.conftest import binary as binary  # noqa: PLC0414  # a fixture
from nvml.standin import Control

from e2e.image import write_nvplug_image
from e2e.machine import machine
from e2e.node import UUIDS, Node

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

DEPLOY: Final = Path(__file__).parents[2] / "deploy"


def pod_in(manifest: str, **variables: str) -> dict[str, Any]:
    """What the pods of a DaemonSet are made from, with further variables."""
    text = (DEPLOY / f"{manifest}.yaml").read_text()
    spec: dict[str, Any] = yaml.safe_load(text)["spec"]["template"]["spec"]
    # An API server knows the runtime classes, and here is none.
    spec.pop("runtimeClassName", None)
    (container,) = spec["containers"]
    container["env"] += [{"name": name, "value": value} for name, value in variables.items()]
    # A kubelet that has just started lets a part of the period go by at first.
    container["readinessProbe"]["periodSeconds"] = 1
    return spec


@asynccontextmanager
async def node_with_image(kubelet: Path, binary: Path) -> AsyncGenerator[Node]:
    """A node that has the image, and runs nothing yet."""
    async with machine(kubelet) as on:
        image = on.directory / "nvplug.tar"
        write_nvplug_image(image, binary)
        await on.load(image)
        node = Node(on)
        node.start_kubelet()
        yield node


async def test_the_pod_for_a_runtime_class(kubelet: Path, binary: Path, measure: Measure) -> None:
    """It serves, is ready at once, and serves again when the kubelet's directory was replaced behind its mount."""
    simulated = {"DEVICE_DISCOVERY_STRATEGY": "simulated:8xH100", "PASS_DEVICE_SPECS": "true"}
    async with node_with_image(kubelet, binary) as node:
        node.place_pod("nvplug", pod_in("nvplug-runtime-class", **simulated, NVIDIA_DEV_ROOT=str(node.root)))
        await node.allocatable(frozenset(UUIDS))
        started = trio.current_time()
        before = await node.ready("nvplug")
        measure("a pod of nvplug: from allocatable GPUs to ready", trio.current_time() - started, 10.0)
        node.place("two", 2)
        report = await node.report("two")

        assert len(report.opened) == 2

        await node.end_kubelet(signal.SIGTERM)
        shutil.rmtree(node.kubelet_socket.parent)
        node.start_kubelet()
        await node.allocatable(frozenset(UUIDS))
        after = await node.ready("nvplug")

        assert before.life is not None
        assert after.life is not None
        assert after.life[2] == before.life[2] + 1, "how often it was restarted"


async def test_the_pod_without_nvidias_runtime(kubelet: Path, binary: Path) -> None:
    """It finds the driver in the host's root, serves and is ready."""
    async with node_with_image(kubelet, binary) as node:
        driver = Control(node.machine.directory / "run" / "driver", gpus=3)
        driver.install()
        inside = {
            name: value.replace(str(node.machine.directory), "/driver-root")
            for name, value in {**driver.environment, "DRIVER_ROOT_CTR_PATH": str(driver.root)}.items()
        }
        node.place_pod("nvplug", pod_in("nvplug-driver-root", **inside))
        await node.allocatable(frozenset(f"GPU-00000000-0000-4000-8000-{index:012}" for index in range(3)))
        pod = await node.ready("nvplug")

        assert pod.life is not None
        assert pod.life[2] == 0, "how often it was restarted"
