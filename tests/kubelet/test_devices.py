from __future__ import annotations

from pathlib import Path

import pytest
import trio

from _nvplug.drivers.machines import find_machine
from kubelet.device_manager import DeviceNode, Hint, RefusedError, running
from kubelet.plugins import BACK, GPU, UUIDS, nvplug, started, stop, write

pytestmark = pytest.mark.conformance


async def test_first_registration_makes_the_gpus_allocatable(kdm: Path, directory: Path) -> None:
    """A kubelet that runs has all GPUs soon after nvplug has started, and none after it has ended."""
    async with running(kdm, directory) as kubelet, nvplug(kubelet) as plugin:
        await kubelet.await_allocatable(GPU, 8)

        assert (await kubelet.status()).capacity == {GPU: 8}
        await kubelet.stays_allocatable(GPU, 8, seconds=1)
        assert await kubelet.registrations(GPU) == 1

        await stop(kubelet, plugin)
        assert (await kubelet.status()).capacity == {GPU: 8}


async def test_nvplug_waits_for_the_kubelet(kdm: Path, directory: Path) -> None:
    """Started before the kubelet, even before its directory, nvplug is there as soon as the kubelet is."""
    async with started(directory / "kubelet.sock", "8xH100") as plugin:
        await plugin.wait_for_line("GPUs")
        # The time to look more than once, and to give up.
        await trio.sleep(0.5)
        async with running(kdm, directory) as kubelet:
            reached = await kubelet.await_allocatable(GPU, 8)

            assert reached.since_start < BACK


async def test_options_arrive_whole(kdm: Path, directory: Path) -> None:
    """What Allocate answers is what the runtime would be told: environment and device nodes, and nothing else."""
    async with running(kdm, directory) as kubelet, nvplug(kubelet, "8xH100", "--pass-device-specs"):
        await kubelet.await_allocatable(GPU, 8)
        container = (await kubelet.admit("pod", {GPU: 2}))["main"]

        indices = sorted(UUIDS.index(one) for one in container.device_ids[GPU])
        assert len(indices) == 2
        assert container.envs == {"NVIDIA_VISIBLE_DEVICES": ",".join(UUIDS[index] for index in indices)}
        wanted = {f"/dev/nvidia{index}" for index in indices}
        wanted |= {"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"}
        assert set(container.device_nodes) == {DeviceNode(path, path, "rw") for path in wanted}
        assert (container.mounts, container.annotations, container.cdi_devices) == ((), {}, ())


async def test_a_device_breaks_and_comes_back(kdm: Path, directory: Path) -> None:
    """A broken GPU leaves allocatable, not capacity, is given to nobody, and returns when it is well."""
    gpus = directory.with_name("gpus.json")
    write(gpus, {"machine": "8xH100"})
    async with running(kdm, directory) as kubelet, nvplug(kubelet, gpus):
        await kubelet.await_allocatable(GPU, 8)
        write(gpus, {"machine": "8xH100", "faults": {"3": {"xid": 79}}})
        await kubelet.await_allocatable(GPU, 7)

        assert (await kubelet.status()).capacity == {GPU: 8}
        container = (await kubelet.admit("pod", {GPU: 7}))["main"]
        assert set(container.device_ids[GPU]) == {*UUIDS} - {UUIDS[3]}

        write(gpus, {"machine": "8xH100"})
        await kubelet.await_allocatable(GPU, 8)


async def test_sixty_thousand_devices(kdm: Path, directory: Path) -> None:
    """A list just below what a kubelet can read arrives, and can be allocated from."""
    gpus = directory.with_name("gpus.json")
    write(gpus, {"machine": "8xH100", "count": 60_000})
    async with running(kdm, directory) as kubelet, nvplug(kubelet, gpus) as plugin:
        await kubelet.await_allocatable(GPU, 60_000, within=30)
        container = (await kubelet.admit("pod", {GPU: 1}))["main"]

        assert container.envs["NVIDIA_VISIBLE_DEVICES"] == container.device_ids[GPU][0]
        assert await kubelet.registrations(GPU) == 1

        await stop(kubelet, plugin)


async def test_preferences_are_asked_for_and_obeyed(kdm: Path, directory: Path) -> None:
    """The kubelet, which by itself takes devices at random, takes those that nvplug prefers: by their NVLinks.

    A single GPU; then four, from the side of the cube that is whole; then two, of the rest those with the most NVLinks.
    """
    machine = find_machine("8xV100")
    async with running(kdm, directory) as kubelet, nvplug(kubelet, "8xV100"):
        await kubelet.await_allocatable(GPU, 8)
        pods = [await kubelet.admit(f"pod{size}", {GPU: size}) for size in (1, 4, 2)]

        wanted = [sorted(machine.gpu(index).uuid for index in each) for each in ([0], [4, 5, 6, 7], [2, 3])]
        assert [pod["main"].device_ids[GPU] for pod in pods] == [tuple(each) for each in wanted]


async def test_an_init_containers_device_is_used_again(kdm: Path, directory: Path) -> None:
    """Devices of an init container go to the main one, with nvplug's consent: they must be in the preferred set."""
    async with running(kdm, directory) as kubelet, nvplug(kubelet):
        await kubelet.await_allocatable(GPU, 8)
        containers = await kubelet.admit("pod", {GPU: 3}, init={GPU: 2})

        assert {*containers["init"].device_ids[GPU]} < {*containers["main"].device_ids[GPU]}
        assert len((await kubelet.admit("rest", {GPU: 5}))["main"].device_ids[GPU]) == 5


async def test_topology_hints(kdm: Path, directory: Path) -> None:
    """The kubelet knows the NUMA node of each GPU, and keeps a pod on one where that is the policy."""
    async with (
        running(kdm, directory, numa=2, topology_policy="single-numa-node") as kubelet,
        nvplug(kubelet),
    ):
        await kubelet.await_allocatable(GPU, 8)
        hints = await kubelet.hints({GPU: 4})

        one, other_one, both = (
            Hint((0,), preferred=True),
            Hint((1,), preferred=True),
            Hint((0, 1), preferred=False),
        )
        assert set(hints[GPU] or ()) == {one, other_one, both}
        pods = [(await kubelet.admit(f"pod{n}", {GPU: 2}))["main"].device_ids[GPU] for n in range(4)]
        for pod in pods:
            assert len({UUIDS.index(one) // 4 for one in pod}) == 1
        await kubelet.remove("pod0")
        with pytest.raises(RefusedError, match="TopologyAffinityError"):
            await kubelet.admit("wide", {GPU: 3})
