# ruff: noqa: ASYNC240 - small files
"""What a node offers, as its kubelet sees it: several resources, and a configuration that is edited."""

from __future__ import annotations

import json
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from node import Node, node_in
from peer.kubelet import CallError, Device, Kubelet

pytestmark = pytest.mark.process

GPU: Final = "nvidia.com/gpu"
SMALL: Final = "nvidia.com/mig-1g.10gb"

FOUR: Final = {
    "machine": "4xH100",
    "count": 4,
    "gpus": [{}, {"mig": ["1g.10gb", "1g.10gb", "3g.40gb"]}, {"mig": []}],
}


@asynccontextmanager
async def configured(
    directory: Path, config: str, *flags: str, gpus: dict[str, Any] | None = None, devices: int
) -> AsyncGenerator[tuple[Node, Path], None]:
    """A node with a configuration file, from ``devices`` of nvidia.com/gpu on."""
    file, machine = directory.with_name("config.yaml"), directory.with_name("gpus.json")
    file.write_text(config)
    machine.write_text(json.dumps(gpus or {"machine": "4xH100"}))
    arguments = (f"--device-discovery-strategy=simulated:{machine}", f"--config-file={file}", *flags)
    async with node_in(directory, *arguments, devices=devices) as node:
        yield node, file


def edit(file: Path, text: str) -> None:
    """Puts another file in its place, in one step."""
    new = file.with_suffix(".new")
    new.write_text(text)
    new.rename(file)


def listed(kubelet: Kubelet, resource: str) -> tuple[Device, ...]:
    """What the kubelet was told last."""
    return [each for each in kubelet.lists if each.resource == resource][-1].devices


async def test_every_mig_profile_is_a_resource(disk: Path) -> None:
    """Each registered, listed and allocated for itself; what cannot be offered is said."""
    async with configured(disk, "flags: {migStrategy: mixed}", "--pass-device-specs", gpus=FOUR, devices=2) as (
        node,
        _,
    ):
        kubelet = node.kubelet
        await kubelet.await_allocatable(2, SMALL)
        await kubelet.await_allocatable(1, "nvidia.com/mig-3g.40gb")
        small = [device.id for device in listed(kubelet, SMALL)]
        answer = await kubelet.allocate([small[1]], resource=SMALL)
        paths = [each.container_path for each in answer.container.devices]

        assert answer.container.envs == {"NVIDIA_VISIBLE_DEVICES": small[1]}
        assert paths[4:] == ["/dev/nvidia1", "/dev/nvidia-caps/nvidia-cap21", "/dev/nvidia-caps/nvidia-cap22"]
        assert {each.resource for each in kubelet.registrations} == {GPU, SMALL, "nvidia.com/mig-3g.40gb"}
        await node.nvplug.wait_for_line(" WARNING a device is not offered index=2 .*there is no MIG device in it")
        at = await kubelet.restart()
        for number, resource in ((2, GPU), (2, SMALL), (1, "nvidia.com/mig-3g.40gb")):
            await kubelet.await_back(number, after=at, resource=resource)


async def test_shared_gpus_are_shared(disk: Path) -> None:
    """Replicas are listed, spread over GPUs, given as the GPUs that they are of, and limited if so configured."""
    config = """
sharing: {timeSlicing: {failRequestsGreaterThanOne: true, resources: [{name: nvidia.com/gpu, replicas: 3, devices: 2}]}}
"""
    async with configured(disk, config, devices=8) as (node, file):
        kubelet = node.kubelet
        ids = [device.id for device in listed(kubelet, GPU)]
        uuid = ids[3].partition("::")[0]

        assert [one.rpartition("::")[2] for one in ids[:6]] == ["0", "1", "2"] * 2
        assert not any("::" in one for one in ids[6:])
        assert (await kubelet.allocate([ids[4]])).container.envs == {"NVIDIA_VISIBLE_DEVICES": uuid}
        assert {one.partition("::")[0] for one in await kubelet.preferred(ids[:6], 2)} == {
            ids[0].partition("::")[0],
            uuid,
        }
        with pytest.raises(
            CallError, match=r"INVALID_ARGUMENT.*maximum request size for shared resources is 1; found 2"
        ):
            await kubelet.allocate([ids[4], ids[5]])
        await node.nvplug.wait_for_line("WARNING NVIDIA's plugin ignores some keys .*resources\\[0\\].devices")
        edit(file, config.replace("true", "false"))
        await node.nvplug.wait_for_line("the new configuration is in force .*changed=time-slicing")

        envs = (await kubelet.allocate([ids[4], ids[5], ids[0]])).container.envs
        assert envs == {"NVIDIA_VISIBLE_DEVICES": f"{ids[0].partition('::')[0]},{uuid}"}
        assert len(kubelet.streams) == 1
        assert len(kubelet.lists) == 1


async def test_what_does_not_change_keeps_its_stream(disk: Path) -> None:
    """An edit reaches the resources that it changes, in one list each, and no other."""
    async with configured(disk, "flags: {migStrategy: mixed}", gpus=FOUR, devices=2) as (node, file):
        kubelet = node.kubelet
        await kubelet.await_allocatable(2, SMALL)
        await kubelet.await_allocatable(1, "nvidia.com/mig-3g.40gb")
        before = list(kubelet.lists)
        edit(
            file,
            "flags: {migStrategy: mixed}\n"
            f"sharing: {{timeSlicing: {{resources: [{{name: {SMALL}, replicas: 5, rename: few}}]}}}}",
        )
        await kubelet.await_allocatable(10, "nvidia.com/few")
        await kubelet.await_allocatable(0, SMALL)

        assert sorted(each.resource for each in kubelet.lists[len(before) :]) == ["nvidia.com/few", SMALL]
        assert listed(kubelet, SMALL) == ()
        assert all(stream.ended is None for stream in kubelet.streams)
        assert len(kubelet.streams) == 4


async def test_a_bad_edit_takes_nothing_away(disk: Path) -> None:
    """The configuration before it keeps serving, the error is logged, and the next good one is obeyed."""
    async with configured(disk, "selection: {exclude: [{index: 3}]}", devices=3) as (node, file):
        edit(file, "selection: {exclud: [{index: 3}]}")
        await node.nvplug.wait_for_line(
            r" ERROR the new configuration cannot be obeyed; the one before stands .*"
            r"config.yaml:1: there is no key 'exclud' in selection.*did you mean exclude\?"
        )
        ids = [device.id for device in listed(node.kubelet, GPU)]
        await node.kubelet.allocate(ids[:1])

        assert (len(ids), len(node.kubelet.lists)) == (3, 1)
        edit(file, "selection: {exclude: [{index: 0}, {index: 1}]}")
        await node.kubelet.await_allocatable(2)
        with pytest.raises(CallError, match=r"FAILED_PRECONDITION.*no longer offered here"):
            await node.kubelet.allocate(ids[:1])

        assert len(node.kubelet.streams) == 1
        assert len([line for line in node.nvplug.lines if "a GPU is excluded index=0" in line]) == 1


async def test_an_edit_under_load_answers_every_call(disk: Path) -> None:
    """While the file goes back and forth, who asks for what is offered before and after it is served."""
    some, all_of = "selection: {exclude: [{index: 3}]}", "version: v1"
    async with configured(disk, some, devices=3) as (node, file):
        ids = [device.id for device in listed(node.kubelet, GPU)]
        for number in range(6):
            edit(file, (all_of, some)[number % 2])
            for _ in range(10):
                await node.kubelet.allocate(ids[:2])
            await node.kubelet.await_allocatable((4, 3)[number % 2])

        assert len(node.kubelet.streams) == 1
        assert len(node.kubelet.lists) == 7


async def test_sighup_reads_the_file_at_once(disk: Path) -> None:
    """And ends nothing, however often it comes."""
    async with configured(disk, "version: v1", devices=4) as (node, file):
        edit(file, "selection: {exclude: [{product: '*H100*'}]}")
        for _ in range(3):
            node.nvplug.send(signal.SIGHUP)
        await node.kubelet.await_allocatable(0)

        assert node.nvplug.code is None
        assert len(node.kubelet.streams) == 1


async def test_sighup_without_a_file_ends_nothing(disk: Path) -> None:
    """The default action of the signal would end the process."""
    async with node_in(disk) as node:
        node.nvplug.send(signal.SIGHUP)
        await node.nvplug.wait_for_line("the new configuration is in force changed=nothing")
        await node.serves()


async def test_a_long_name_has_a_socket(disk: Path) -> None:
    """The kernel's limit on paths of sockets is not the operator's concern."""
    name = "n" * 63
    config = f'resources: {{gpus: [{{pattern: "Tesla*", name: gpu}}, {{pattern: "*", name: {name}}}]}}'
    gpus = {"machine": "4xH100", "count": 4, "gpus": [{"name": "Tesla T4"}]}
    disk.mkdir()
    async with configured(disk / ("d" * 30), config, gpus=gpus, devices=1) as (node, _):
        await node.kubelet.await_allocatable(3, f"nvidia.com/{name}")

        assert {each.resource for each in node.kubelet.registrations} == {GPU, f"nvidia.com/{name}"}


async def test_options_that_cannot_change_wait_for_a_restart(disk: Path) -> None:
    """A WARNING says so, and all the rest is obeyed."""
    async with configured(disk, "version: v1", devices=4) as (node, file):
        edit(
            file,
            "flags: {deviceDiscoveryStrategy: nvml, plugin: {containerDriverRoot: /x}}\n"
            "selection: {exclude: [{index: 0}]}",
        )
        await node.nvplug.wait_for_line(
            " WARNING an option changed that only a restart of nvplug can change option=driver-root-ctr-path value=/x"
        )
        await node.kubelet.await_allocatable(3)

        # The flag of the command line wins over the file, as at start.
        assert "option=device-discovery-strategy" not in node.nvplug.log()
