"""What each strategy gives, alone and with others: literally what NVIDIA's plugin gives for the same devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import chain, combinations
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from _nvplug.config import Config, read_config
from _nvplug.container import ContainerEdits, DeviceNode, Mount, edits_for
from _nvplug.container.extras import Extra
from _nvplug.container.facts import NodeFacts
from _nvplug.errors import UnusableDeviceError
from _nvplug.hardware import Gpu, MigDevice
from _nvplug.resources import Device, Resource, chosen

CONTROL: Final = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")
STRATEGIES: Final = ("envvar", "volume-mounts", "cdi-annotations", "cdi-cri", "direct")

GPUS: Final = tuple(Gpu(index, f"GPU-{index}", "", "", 10 + index, None, 0) for index in range(3))
MIG: Final = MigDevice(1, "MIG-1", 7, 0, 0, 1, 1, 4864, gpu_instance_minor=66, compute_instance_minor=67)

WHOLE: Final = (Device("GPU-0", GPUS[0]), Device("GPU-2", GPUS[2]))
SHARED: Final = (
    Device("GPU-0::1", GPUS[0], replica=1),
    Device("GPU-0::3", GPUS[0], replica=3),
    Device("GPU-1::0", GPUS[1], replica=0),
)
CUT: Final = (Device("MIG-1", GPUS[2], mig=MIG),)

EVERYTHING: Final = NodeFacts(
    imex_channels=("0",),
    extras=(
        Extra("gdrcopy", ("/dev/gdrdrv",)),
        Extra("gds", ("/dev/nvidia-fs0", "/dev/nvidia-fs1"), ("/etc/cufile.json", "/run/udev")),
        Extra("mofed", ("/dev/infiniband/uverbs0", "/dev/infiniband/rdma_cm")),
    ),
    driver_mounts=(
        Mount("/usr/lib64/libcuda.so.1", "/usr/lib64/libcuda.so.1.1"),
        Mount("/usr/bin/nvidia-smi", "/bin/nvidia-smi"),
    ),
)
SWITCHES: Final = ("--gdrcopy-enabled", "--gds-enabled", "--mofed-enabled", "--imex-channel-ids=0")
SWITCHED: Final = {"NVIDIA_GDRCOPY": "enabled", "NVIDIA_GDS": "enabled", "NVIDIA_MOFED": "enabled"}


def config(*arguments: str) -> Config:
    """What the flags ask for."""
    return read_config(arguments, {})


def answer(devices: Sequence[Device], facts: NodeFacts, *arguments: str) -> dict[str, Any]:
    """What the container gets, without what it does not get."""
    edits = edits_for(devices, CONTROL, config(*arguments), facts)
    return {field.name: value for field in fields(edits) if (value := getattr(edits, field.name))}


def nodes(*paths: str, root: str = "") -> tuple[DeviceNode, ...]:
    """As the reference gives them: to be read and written, under the same name below the host's root."""
    return tuple(DeviceNode(path, f"{root}{path}", "rw") for path in paths)


def told(*names: str) -> tuple[Mount, ...]:
    """Mounts that say names."""
    return tuple(Mount(f"/var/run/nvidia-container-devices/{name}", "/dev/null", read_only=False) for name in names)


KIND: Final = "k8s.device-plugin.nvidia.com"
KEY: Final = "cdi.k8s.io/nvidia-device-plugin_"

TABLE: Final[dict[str, tuple[Sequence[Device], NodeFacts, Sequence[str], dict[str, Any]]]] = {
    "envvar": (WHOLE, NodeFacts(), (), {"environment": {"NVIDIA_VISIBLE_DEVICES": "GPU-0,GPU-2"}}),
    "envvar by index": (
        WHOLE,
        NodeFacts(),
        ("--device-id-strategy=index",),
        {"environment": {"NVIDIA_VISIBLE_DEVICES": "0,2"}},
    ),
    "envvar with nodes": (
        WHOLE,
        NodeFacts(),
        ("--pass-device-specs", "--driver-root=/run/nvidia/driver"),
        {
            "environment": {"NVIDIA_VISIBLE_DEVICES": "GPU-0,GPU-2"},
            "device_nodes": nodes(*CONTROL, "/dev/nvidia10", "/dev/nvidia12", root="/run/nvidia/driver"),
        },
    ),
    "envvar and all switches": (
        WHOLE,
        EVERYTHING,
        ("--pass-device-specs", *SWITCHES),
        {
            "environment": {"NVIDIA_VISIBLE_DEVICES": "GPU-0,GPU-2", "NVIDIA_IMEX_CHANNELS": "0", **SWITCHED},
            "device_nodes": nodes(
                *CONTROL, "/dev/nvidia10", "/dev/nvidia12", "/dev/nvidia-caps-imex-channels/channel0"
            ),
        },
    ),
    "envvar and switches for what is not there": (
        WHOLE,
        NodeFacts(),
        SWITCHES,
        {"environment": {"NVIDIA_VISIBLE_DEVICES": "GPU-0,GPU-2", **SWITCHED}},
    ),
    "volume-mounts": (
        WHOLE,
        NodeFacts(),
        ("--device-list-strategy=volume-mounts",),
        {
            "environment": {"NVIDIA_VISIBLE_DEVICES": "/var/run/nvidia-container-devices"},
            "mounts": told("GPU-0", "GPU-2"),
        },
    ),
    "volume-mounts by index, of a MIG device": (
        CUT,
        EVERYTHING,
        ("--device-list-strategy=volume-mounts", "--device-id-strategy=index", "--pass-device-specs", *SWITCHES[3:]),
        {
            "environment": {"NVIDIA_VISIBLE_DEVICES": "/var/run/nvidia-container-devices"},
            "mounts": told("2:1", "imex/0"),
            "device_nodes": nodes(
                *CONTROL,
                "/dev/nvidia12",
                "/dev/nvidia-caps/nvidia-cap66",
                "/dev/nvidia-caps/nvidia-cap67",
                "/dev/nvidia-caps-imex-channels/channel0",
            ),
        },
    ),
    "cdi-annotations": (
        WHOLE,
        NodeFacts(),
        ("--device-list-strategy=cdi-annotations", "--pass-device-specs"),
        {"annotations": {f"{KEY}GPU-0": f"{KIND}/gpu=GPU-0,{KIND}/gpu=GPU-2"}},
    ),
    "cdi-annotations with another prefix": (
        SHARED,
        NodeFacts(),
        ("--device-list-strategy=cdi-annotations", "--cdi-annotation-prefix=nvidia.cdi.k8s.io/"),
        {"annotations": {"nvidia.cdi.k8s.io/nvidia-device-plugin_GPU-0": f"{KIND}/gpu=GPU-0,{KIND}/gpu=GPU-1"}},
    ),
    "cdi-cri": (
        WHOLE,
        NodeFacts(),
        ("--device-list-strategy=cdi-cri",),
        {"cdi_devices": (f"{KIND}/gpu=GPU-0", f"{KIND}/gpu=GPU-2")},
    ),
    "cdi-cri by index, of a MIG device": (
        CUT,
        NodeFacts(),
        ("--device-list-strategy=cdi-cri", "--device-id-strategy=index"),
        {"cdi_devices": (f"{KIND}/gpu=2:1",)},
    ),
    "cdi-cri and all switches": (
        WHOLE,
        EVERYTHING,
        ("--device-list-strategy=cdi-cri", *SWITCHES),
        {
            "environment": SWITCHED,
            "cdi_devices": (
                f"{KIND}/gpu=GPU-0",
                f"{KIND}/gpu=GPU-2",
                f"{KIND}/imex-channel=0",
                f"{KIND}/gdrcopy=all",
                f"{KIND}/gds=all",
                f"{KIND}/mofed=all",
            ),
        },
    ),
    "cdi-cri and switches for what is not there": (
        WHOLE,
        NodeFacts(),
        ("--device-list-strategy=cdi-cri", *SWITCHES),
        {"environment": SWITCHED, "cdi_devices": (f"{KIND}/gpu=GPU-0", f"{KIND}/gpu=GPU-2")},
    ),
    "the default of the GPU Operator": (
        SHARED,
        NodeFacts(),
        ("--device-list-strategy=cdi-annotations,cdi-cri",),
        {
            "annotations": {f"{KEY}GPU-0": f"{KIND}/gpu=GPU-0,{KIND}/gpu=GPU-1"},
            "cdi_devices": (f"{KIND}/gpu=GPU-0", f"{KIND}/gpu=GPU-1"),
        },
    ),
    "everything of the reference at once": (
        SHARED,
        NodeFacts(),
        ("--device-list-strategy=envvar,volume-mounts,cdi-annotations,cdi-cri", "--pass-device-specs"),
        {
            "environment": {"NVIDIA_VISIBLE_DEVICES": "/var/run/nvidia-container-devices"},
            "device_nodes": nodes(*CONTROL, "/dev/nvidia10", "/dev/nvidia11"),
            "mounts": told("GPU-0", "GPU-1"),
            "annotations": {f"{KEY}GPU-0": f"{KIND}/gpu=GPU-0,{KIND}/gpu=GPU-1"},
            "cdi_devices": (f"{KIND}/gpu=GPU-0", f"{KIND}/gpu=GPU-1"),
        },
    ),
    "direct": (
        WHOLE,
        EVERYTHING._replace(imex_channels=(), extras=()),
        ("--device-list-strategy=direct",),
        {
            "device_nodes": nodes(*CONTROL, "/dev/nvidia10", "/dev/nvidia12"),
            "mounts": EVERYTHING.driver_mounts,
        },
    ),
    "direct and all switches": (
        CUT,
        EVERYTHING,
        ("--device-list-strategy=direct", "--driver-root=/host", "--dev-root=/", *SWITCHES),
        {
            "device_nodes": nodes(
                *CONTROL,
                "/dev/nvidia12",
                "/dev/nvidia-caps/nvidia-cap66",
                "/dev/nvidia-caps/nvidia-cap67",
                "/dev/nvidia-caps-imex-channels/channel0",
                "/dev/gdrdrv",
                "/dev/nvidia-fs0",
                "/dev/nvidia-fs1",
                "/dev/infiniband/uverbs0",
                "/dev/infiniband/rdma_cm",
            ),
            "mounts": (
                *EVERYTHING.driver_mounts,
                Mount("/etc/cufile.json", "/host/etc/cufile.json"),
                Mount("/run/udev", "/host/run/udev"),
            ),
        },
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_a_container_is_given_this_and_nothing_else(name: str) -> None:
    """Exactly: no variable, node, mount, annotation or name besides."""
    devices, facts, arguments, expected = TABLE[name]

    assert answer(devices, facts, *arguments) == expected


COMBINATIONS: Final = [*chain.from_iterable(combinations(STRATEGIES, size) for size in range(1, 6))]

some_devices: Final = st.lists(st.sampled_from([*WHOLE, *SHARED, *CUT]), min_size=1, max_size=6)
some_flags: Final = st.sets(st.sampled_from([*SWITCHES, "--pass-device-specs", "--device-id-strategy=index"]))


def merged(answers: Sequence[ContainerEdits]) -> ContainerEdits:
    """Answers put together: of a variable and a mount the last one counts, and each thing is there once."""
    return ContainerEdits(
        {name: value for each in answers for name, value in each.environment.items()},
        tuple(dict.fromkeys(node for each in answers for node in each.device_nodes)),
        tuple(dict.fromkeys(mount for each in answers for mount in each.mounts)),
        {key: value for each in answers for key, value in each.annotations.items()},
        tuple(dict.fromkeys(name for each in answers for name in each.cdi_devices)),
    )


@pytest.mark.parametrize("combination", COMBINATIONS, ids=",".join)
@given(devices=some_devices, flags=some_flags)
@settings(max_examples=25)
def test_strategies_combine(combination: tuple[str, ...], devices: list[Device], flags: set[str]) -> None:
    """Several give what each of them gives, in whatever order they are named."""
    asked = config("--device-list-strategy", ",".join(combination), *flags)
    alone = [
        edits_for(devices, CONTROL, replace(asked, device_list_strategy=(each,)), EVERYTHING) for each in combination
    ]
    together = edits_for(devices, CONTROL, asked, EVERYTHING)

    assert together == merged(alone)
    backwards = replace(asked, device_list_strategy=combination[::-1])
    assert edits_for(devices, CONTROL, backwards, EVERYTHING) == together


@given(
    devices=some_devices,
    combination=st.sampled_from(COMBINATIONS),
    flags=some_flags,
    facts=st.sampled_from([NodeFacts(), EVERYTHING]),
)
def test_nothing_is_given_twice(
    devices: list[Device], combination: tuple[str, ...], flags: set[str], facts: NodeFacts
) -> None:
    """However many replicas and MIG devices have a GPU in common: a runtime refuses two mounts of one path."""
    edits = edits_for(devices, CONTROL, config("--device-list-strategy", ",".join(combination), *flags), facts)

    for given_once in (
        [node.container_path for node in edits.device_nodes],
        [mount.container_path for mount in edits.mounts],
        edits.cdi_devices,
        *(value.split(",") for value in edits.annotations.values()),
        edits.environment.get("NVIDIA_VISIBLE_DEVICES", "").split(","),
    ):
        assert len(given_once) == len(set(given_once))


@given(order=st.permutations(SHARED), combination=st.sampled_from(COMBINATIONS), flags=some_flags)
def test_the_order_of_the_question_is_irrelevant(
    order: list[Device], combination: tuple[str, ...], flags: set[str]
) -> None:
    """The kubelet asks in the order of a Go map; the answer is the same, down to the order of its parts."""
    resource = Resource("nvidia.com/gpu", SHARED, control_nodes=CONTROL)
    asked = config("--device-list-strategy", ",".join(combination), *flags)
    ids = [device.id for device in order]

    assert edits_for(chosen(resource, resource, ids), CONTROL, asked, EVERYTHING) == edits_for(
        SHARED, CONTROL, asked, EVERYTHING
    )


@pytest.mark.parametrize("combination", COMBINATIONS, ids=",".join)
def test_nvidias_runtime_is_told_only_where_it_is_to_act(combination: tuple[str, ...]) -> None:
    """Where CDI or nvplug itself gives devices, the variable would make the runtime give them a second time."""
    given = answer(WHOLE, NodeFacts(), "--device-list-strategy", ",".join(combination))

    assert bool(given.get("environment")) == bool({"envvar", "volume-mounts"} & {*combination})


def test_an_imex_channel_that_is_required_is_not_left_out() -> None:
    """A container that would run without it is refused, with the path and the remedy."""
    with pytest.raises(UnusableDeviceError, match="there is no /dev/nvidia-caps-imex-channels/channel0") as caught:
        answer(WHOLE, NodeFacts(), "--imex-channel-ids=0", "--imex-required")

    assert "NVreg_CreateImexChannel0" in caught.value.remedy
    assert answer(WHOLE, EVERYTHING, "--imex-channel-ids=0", "--imex-required")
