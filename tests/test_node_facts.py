"""What is found on a node besides GPUs, and when it is known."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trio.testing
from nvml.waiting import until

from _nvplug.config import Config, read_config
from _nvplug.container.extras import Extra, find_extras, find_imex_channels
from _nvplug.container.facts import NodeFacts, Terms, gather
from _nvplug.container.looking import keep_terms
from _nvplug.happenings import ConfigRedundant, ConfigUnmet, Happening
from _nvplug.hardware import Gpu, Hardware
from _nvplug.health import Health
from _nvplug.latest import Latest
from _nvplug.resources import Offer, keep_offer

CHANNEL = "dev/nvidia-caps-imex-channels/channel0"
ALL = ("--gdrcopy-enabled", "--gds-enabled", "--mofed-enabled", "--imex-channel-ids=0")


def config(*arguments: str) -> Config:
    """What the flags ask for."""
    return read_config(arguments, {})


def put(root: Path, *paths: str) -> None:
    """Puts character devices below a root: links to one, as only root can make others."""
    for path in paths:
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to("/dev/null")


def test_extras_are_found_by_their_nodes(tmp_path: Path) -> None:
    """In order, with what belongs to them if it is there."""
    put(tmp_path, "dev/gdrdrv", "dev/nvidia-fs1", "dev/nvidia-fs0", "dev/infiniband/rdma_cm", "dev/infiniband/uverbs0")
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "cufile.json").touch()

    assert find_extras(config(*ALL), str(tmp_path)) == (
        Extra("gdrcopy", ("/dev/gdrdrv",)),
        Extra("gds", ("/dev/nvidia-fs0", "/dev/nvidia-fs1"), ("/etc/cufile.json",)),
        Extra("mofed", ("/dev/infiniband/uverbs0", "/dev/infiniband/rdma_cm")),
    )
    assert find_extras(config("--gds-enabled=false"), str(tmp_path)) == ()


def test_what_is_no_device_is_not_one(tmp_path: Path) -> None:
    """A file of the name, and a link that leads nowhere."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "gdrdrv").touch()
    (tmp_path / "dev" / "nvidia-fs0").symlink_to("nowhere")

    assert find_extras(config(*ALL), str(tmp_path)) == ()


@pytest.mark.parametrize(("places", "found"), [(["driver-root"], True), ([""], True), ([], False)])
def test_an_imex_channel_is_in_the_drivers_dev_or_in_ours(tmp_path: Path, places: list[str], found: bool) -> None:
    """Which of both has it depends on how nvplug was deployed."""
    (tmp_path / "driver-root" / "dev").mkdir(parents=True)
    for place in places:
        put(tmp_path, f"{place}/{CHANNEL}".lstrip("/"))

    assert find_imex_channels(config("--imex-channel-ids=0"), str(tmp_path)) == (("0",) if found else ())


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    """By its option, with what was looked for."""
    remarks = gather(config(*ALL), root=str(tmp_path)).remarks

    assert remarks == (
        ConfigUnmet(
            "imex.channelIDs",
            "there is no /dev/nvidia-caps-imex-channels/channel0; containers do without it",
        ),
        ConfigUnmet("gdrcopy-enabled", "there is no /dev/gdrdrv"),
        ConfigUnmet("gds-enabled", "there is no /dev/nvidia-fs*"),
        ConfigUnmet("mofed-enabled", "there is no /dev/infiniband/uverbs* and no /dev/infiniband/rdma_cm"),
    )


def test_one_way_to_name_devices_would_do() -> None:
    """The GPU Operator asks for both; it is served, and told."""
    (remark,) = gather(config("--device-list-strategy=cdi-annotations,cdi-cri")).remarks

    assert isinstance(remark, ConfigRedundant)
    assert gather(config("--device-list-strategy=cdi-cri,envvar")) == NodeFacts()


def hardware(*indices: int) -> Hardware:
    """A node with these GPUs."""
    return Hardware(tuple(Gpu(index, f"GPU-{index}", "", "", index, None, 0) for index in indices))


@dataclass(slots=True)
class Stage:
    """The tasks from hardware to offer, and the cells between them."""

    config: Latest[Config]
    terms: Latest[Terms]
    hardware: Latest[Hardware] = field(default_factory=lambda: Latest(Hardware()))
    health: Latest[Health] = field(default_factory=lambda: Latest(Health()))
    offer: Latest[Offer] = field(default_factory=lambda: Latest(Offer()))
    published: list[Happening] = field(default_factory=list)

    async def until_offered(self, *ids: str) -> None:
        """Waits until exactly these are on offer."""
        with trio.fail_after(10):
            while [device.id for resource in self.offer.value.resources for device in resource.devices] != [*ids]:
                await self.offer.newer_than(self.offer.version)


@asynccontextmanager
async def stage(root: Path, *arguments: str, **options: Any) -> AsyncGenerator[Stage, None]:
    """A stage on which the play goes on."""
    asked = config(*arguments)
    made = Stage(Latest(asked), Latest(Terms(asked)))
    async with trio.open_nursery() as nursery:

        async def look() -> None:
            await keep_terms(made.hardware, made.config, made.terms, made.published.append, root=str(root), **options)

        nursery.start_soon(look)
        nursery.start_soon(
            keep_offer, made.hardware, made.health, made.config, made.terms, made.offer, made.published.append
        )
        yield made
        nursery.cancel_scope.cancel()


async def test_nothing_is_offered_before_the_node_was_looked_at(tmp_path: Path) -> None:
    """Whoever can ask for a device is answered with all that is there; what comes later is found later."""
    put(tmp_path, "dev/gdrdrv")
    seen = []
    async with stage(tmp_path, *ALL, interval=0.02) as node:
        node.hardware.set(hardware(0))

        def note(offer: Offer) -> None:
            seen.append((len(offer.resources), node.terms.value.facts.extras))

        with trio.move_on_after(10) as patience:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(node.offer.follow, note)
                await node.until_offered("GPU-0")
                nursery.cancel_scope.cancel()
        assert not patience.cancelled_caught
        assert all(extras for resources, extras in seen if resources)
        put(tmp_path, "dev/nvidia-fs0")
        with trio.fail_after(10):
            while len(node.terms.value.facts.extras) < 2:
                await node.terms.newer_than(node.terms.version)
        assert len(node.published) == len(set(node.published))


async def test_what_needs_no_look_is_offered_at_once(tmp_path: Path) -> None:
    """By default nothing comes between the driver and the kubelet."""
    async with stage(tmp_path) as node:
        await trio.testing.wait_all_tasks_blocked()
        node.hardware.set(hardware(0, 1))
        await trio.testing.wait_all_tasks_blocked()

        assert node.offer.version == 1


async def test_nothing_is_offered_without_an_imex_channel_that_is_required(tmp_path: Path) -> None:
    """Where NVIDIA's plugin ends, nvplug waits for it; and what was offered once is not taken back."""
    async with stage(tmp_path, "--imex-channel-ids=0", "--imex-required", interval=0.02) as node:
        node.hardware.set(hardware(0))
        await until(lambda: bool(node.published))
        assert node.offer.version == 0
        assert "nothing is offered without it" in str(node.published[0])
        put(tmp_path, CHANNEL)
        await node.until_offered("GPU-0")
        (tmp_path / CHANNEL).unlink()
        node.hardware.set(hardware(0, 1))
        await node.until_offered("GPU-0", "GPU-1")

        assert not node.terms.value.met


async def test_a_new_configuration_is_obeyed_when_it_was_looked_for(tmp_path: Path) -> None:
    """Configuration and facts change in one step."""
    put(tmp_path, "dev/gdrdrv")
    async with stage(tmp_path) as node:
        node.hardware.set(hardware(0))
        await node.until_offered("GPU-0")
        node.config.set(config("--gdrcopy-enabled"))
        with trio.fail_after(10):
            terms = await node.terms.newer_than(node.terms.version)
            while not terms.config.gdrcopy_enabled:
                terms = await node.terms.newer_than(node.terms.version)

        assert [extra.device_class for extra in terms.facts.extras] == ["gdrcopy"]
