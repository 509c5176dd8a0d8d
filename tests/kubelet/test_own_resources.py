"""Several resources of nvplug's own: each has a socket, a registration and a stream, and none knows of the others."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from peer.program import Program

from kubelet.device_manager import DeviceManager, running
from kubelet.plugins import BACK, GPU, STOPPED, UUIDS, nvplug, sockets, write

pytestmark = pytest.mark.conformance

SMALL: Final = "nvidia.com/small"
LARGE: Final = "example.com/large"
SLICE: Final = "nvidia.com/mig-1g.10gb"

# Six GPUs of one name, two of another.
NODE: Final = {"gpus": [{"name": "NVIDIA H200" if index > 5 else "NVIDIA H100 80GB HBM3"} for index in range(8)]}
NAMES: Final = f"resources: {{gpus: [{{pattern: '*H200*', name: {LARGE}}}, {{pattern: '*', name: small}}]}}\n"


def socket_of(kubelet: DeviceManager, word: str) -> Path:
    """That of one resource, which has its name in it."""
    (found,) = (path for path in sockets(kubelet) if word in path.name)
    return found


class Node(NamedTuple):
    """A kubelet with both resources, and the files by which they are changed."""

    kubelet: DeviceManager
    plugin: Program
    gpus: Path
    config: Path


@asynccontextmanager
async def two_resources(kdm: Path, directory: Path) -> AsyncGenerator[Node, None]:
    """Both are allocatable, and nvplug has said so."""
    gpus, config = directory.with_name("gpus.json"), directory.with_name("config.yaml")
    write(gpus, NODE)
    config.write_text(NAMES)
    async with running(kdm, directory) as kubelet, nvplug(kubelet, gpus, f"--config-file={config}") as plugin:
        await kubelet.await_allocatable(SMALL, 6)
        await kubelet.await_allocatable(LARGE, 2)
        for resource in (SMALL, LARGE):
            await plugin.wait_for_line(f"registered resource={resource}")
        yield Node(kubelet, plugin, gpus, config)


async def test_two_resources_by_product(kdm: Path, directory: Path) -> None:
    """Each is allocatable, given, broken, lost and ended for itself; and both are back after a kubelet's crash."""
    async with two_resources(kdm, directory) as (kubelet, plugin, gpus, _):
        assert (await kubelet.status()).capacity == {SMALL: 6, LARGE: 2}
        assert set((await kubelet.admit("one", {LARGE: 2}))["main"].device_ids[LARGE]) == {*UUIDS[6:]}
        assert set((await kubelet.admit("other", {SMALL: 5}))["main"].device_ids[SMALL]) < {*UUIDS[:6]}

        write(gpus, {**NODE, "faults": {"7": {"xid": 79}}})
        await kubelet.await_allocatable(LARGE, 1)
        await kubelet.stays_allocatable(SMALL, 6, seconds=0.5)
        assert await kubelet.registrations(SMALL) == await kubelet.registrations(LARGE) == 1

        await kubelet.crash()
        await kubelet.start()
        await kubelet.await_allocatable(SMALL, 6, within=BACK)
        await kubelet.await_allocatable(LARGE, 1, within=BACK)

        await plugin.stop()
        await kubelet.await_allocatable(SMALL, 0, within=STOPPED)
        await kubelet.await_allocatable(LARGE, 0, within=STOPPED)


async def test_one_socket_deleted(kdm: Path, directory: Path) -> None:
    """That resource registers anew, and the other is not touched."""
    async with two_resources(kdm, directory) as (kubelet, plugin, _, _):
        kept, deleted = socket_of(kubelet, "small"), socket_of(kubelet, "large")
        lines = len(plugin.lines)
        deleted.unlink()
        await plugin.wait_for_line(f"registered resource={LARGE}", skip=lines)
        await kubelet.await_allocatable(LARGE, 2, within=BACK)

        assert socket_of(kubelet, "small") == kept
        assert await kubelet.registrations(SMALL) == 1
        assert await kubelet.registrations(LARGE) == 2


async def test_an_edit_of_one_resource(kdm: Path, directory: Path) -> None:
    """It is shared, then renamed; the other keeps its socket, its registration and its list, and hears of nothing."""
    async with two_resources(kdm, directory) as (kubelet, plugin, _, config):
        kept, lines = socket_of(kubelet, "small"), len(plugin.lines)

        config.write_text(NAMES + f"sharing: {{timeSlicing: {{resources: [{{name: {LARGE}, replicas: 4}}]}}}}\n")
        await kubelet.await_allocatable(LARGE, 8)
        ids = (await kubelet.admit("pod", {LARGE: 8}))["main"].device_ids[LARGE]
        assert set(ids) == {f"{uuid}::{number}" for uuid in UUIDS[6:] for number in range(4)}

        config.write_text(NAMES.replace(LARGE, "example.com/huge"))
        await kubelet.await_allocatable("example.com/huge", 2)
        await kubelet.await_allocatable(LARGE, 0)

        assert (await kubelet.status()).allocatable == {SMALL: 6, LARGE: 0, "example.com/huge": 2}
        assert await kubelet.registrations(SMALL) == await kubelet.registrations(LARGE) == 1
        assert socket_of(kubelet, "small") == kept
        assert not [line for line in plugin.lines[lines:] if SMALL in line]


async def test_whole_gpus_and_parts_of_them(kdm: Path, directory: Path) -> None:
    """The MIG strategy mixed; GPUs that are cut anew move from one resource to the other."""
    gpus = directory.with_name("gpus.json")
    cut = {"mig": ["1g.10gb"] * 7}
    write(gpus, {"gpus": [cut, *[{}] * 7]})
    async with running(kdm, directory) as kubelet, nvplug(kubelet, gpus, "--mig-strategy=mixed"):
        await kubelet.await_allocatable(GPU, 7)
        await kubelet.await_allocatable(SLICE, 7)
        (id_,) = (await kubelet.admit("pod", {SLICE: 1}))["main"].device_ids[SLICE]
        assert id_.startswith("MIG-")

        write(gpus, {"gpus": [cut, cut, *[{}] * 6]})
        await kubelet.await_allocatable(GPU, 6)
        await kubelet.await_allocatable(SLICE, 14)
        write(gpus, {})
        await kubelet.await_allocatable(GPU, 8)
        await kubelet.await_allocatable(SLICE, 0)
        assert await kubelet.registrations(GPU) == await kubelet.registrations(SLICE) == 1
