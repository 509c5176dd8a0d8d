from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from _nvplug.config import Config, read_config
from _nvplug.container import DeviceNode, edits_for
from _nvplug.hardware import Gpu, MigDevice
from _nvplug.resources import Device, Resource, chosen

CONTROL = ("/dev/nvidiactl", "/dev/nvidia-uvm")


def config(*arguments: str) -> Config:
    """What the flags ask for."""
    return read_config(arguments, {})


def device(index: int, minor: int | None = None) -> Device:
    """The device of a GPU, by default with a minor number other than its index."""
    uuid = f"GPU-{index}"
    return Device(uuid, Gpu(index, uuid, "", "", 7 - index if minor is None else minor, None, 0))


def paths(nodes: Sequence[DeviceNode]) -> list[str]:
    """Where a container finds them."""
    return [node.container_path for node in nodes]


def test_by_default_a_container_is_told_uuids() -> None:
    """UUIDs in the order of the devices, and nothing else."""
    edits = edits_for([device(2), device(0)], CONTROL, config())

    assert dict(edits.environment) == {"NVIDIA_VISIBLE_DEVICES": "GPU-2,GPU-0"}
    assert edits.device_nodes == ()


def test_by_index_a_container_is_told_indices() -> None:
    """The driver's indices, in the order of the devices."""
    edits = edits_for([device(2), device(0)], CONTROL, config("--device-id-strategy=index"))

    assert dict(edits.environment) == {"NVIDIA_VISIBLE_DEVICES": "2,0"}


def test_device_nodes_are_the_shared_ones_and_then_those_of_the_devices() -> None:
    """Nodes are numbered by minor, not by index, may be read and written, and are those of no other GPU."""
    edits = edits_for([device(2), device(0)], CONTROL, config("--pass-device-specs"))

    assert paths(edits.device_nodes) == ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia5", "/dev/nvidia7"]
    assert {node.permissions for node in edits.device_nodes} == {"rw"}


@pytest.mark.parametrize(
    ("dev_root", "host"),
    [("/", "/dev/nvidia7"), ("/run/nvidia/driver", "/run/nvidia/driver/dev/nvidia7"), ("/r/", "/r/dev/nvidia7")],
)
def test_nodes_lie_in_the_dev_root_on_the_host_only(dev_root: str, host: str) -> None:
    """Where the host keeps them, no container can tell."""
    edits = edits_for([device(0)], (), config("--pass-device-specs", "--dev-root", dev_root))

    assert edits.device_nodes == (DeviceNode("/dev/nvidia7", host),)


def test_what_has_no_minor_has_no_node() -> None:
    """A GPU whose minor number the driver does not say is still given, without a node of its own."""
    bare = Device("GPU-0", Gpu(0, "GPU-0", "", "", None, None, 0))

    edits = edits_for([bare, device(1)], CONTROL, config("--pass-device-specs"))

    assert edits.environment["NVIDIA_VISIBLE_DEVICES"] == "GPU-0,GPU-1"
    assert paths(edits.device_nodes) == [*CONTROL, "/dev/nvidia6"]


@given(st.lists(st.integers(0, 7), min_size=1), st.sampled_from(["uuid", "index"]))
def test_nothing_is_given_twice(indices: list[int], strategy: str) -> None:
    """Devices on one GPU need its id and its node once."""
    edits = edits_for(
        [device(index) for index in indices],
        CONTROL,
        config("--pass-device-specs", "--device-id-strategy", strategy),
    )

    ids = edits.environment["NVIDIA_VISIBLE_DEVICES"].split(",")
    assert len(ids) == len(set(ids)) == len(set(indices))
    assert len(edits.device_nodes) == len(set(edits.device_nodes)) == len(CONTROL) + len(set(indices))


@pytest.mark.parametrize("arguments", [(), ("--device-id-strategy=index", "--pass-device-specs")])
def test_the_order_of_the_ids_asked_for_is_irrelevant(arguments: tuple[str, ...]) -> None:
    """The kubelet asks in the order of a Go map; the container gets the same each time."""
    resource = Resource("nvidia.com/gpu", tuple(map(device, range(4))), control_nodes=CONTROL)

    answers = [
        edits_for(chosen(resource, resource, ids), resource.control_nodes, config(*arguments))
        for ids in permutations(["GPU-0", "GPU-1", "GPU-3"])
    ]

    assert all(answer == answers[0] for answer in answers)


MIG = MigDevice(1, "MIG-1", 7, 0, 0, 1, 1, 4864, gpu_instance_minor=66, compute_instance_minor=67)


def test_replicas_of_one_device_are_one_device() -> None:
    """A container sees the device itself, once, however many shares of it it has."""
    gpu = device(0).gpu
    replicas = [Device(f"GPU-0::{number}", gpu, replica=number) for number in range(3)]

    edits = edits_for(replicas, CONTROL, config("--pass-device-specs"))
    assert dict(edits.environment) == {"NVIDIA_VISIBLE_DEVICES": "GPU-0"}
    assert paths(edits.device_nodes) == [*CONTROL, "/dev/nvidia7"]


def test_a_mig_device_is_given_with_the_nodes_of_its_instances() -> None:
    """Its GPU's node, and those that grant access to the GPU instance and the compute instance in it."""
    gpu = replace(device(3).gpu, mig_enabled=True, mig_devices=(MIG,))
    mig = Device("MIG-1", gpu, mig=MIG)

    by_uuid = edits_for([mig], CONTROL, config("--pass-device-specs"))
    assert dict(by_uuid.environment) == {"NVIDIA_VISIBLE_DEVICES": "MIG-1"}
    assert paths(by_uuid.device_nodes) == [
        *CONTROL,
        "/dev/nvidia4",
        "/dev/nvidia-caps/nvidia-cap66",
        "/dev/nvidia-caps/nvidia-cap67",
    ]
    by_index = edits_for([mig, Device("MIG-1::1", gpu, mig=MIG, replica=1)], (), config("--device-id-strategy=index"))
    assert dict(by_index.environment) == {"NVIDIA_VISIBLE_DEVICES": "3:1"}


def test_mig_devices_of_one_gpu_share_its_node() -> None:
    """Which is given once; a minor that is not known leaves its node out, and nothing else."""
    other = replace(MIG, index=2, uuid="MIG-2", gpu_instance_minor=None, compute_instance_minor=70)
    gpu = device(3).gpu

    edits = edits_for(
        [Device("MIG-1", gpu, mig=MIG), Device("MIG-2", gpu, mig=other)], (), config("--pass-device-specs")
    )
    assert edits.environment["NVIDIA_VISIBLE_DEVICES"] == "MIG-1,MIG-2"
    assert [path.rpartition("/")[2] for path in paths(edits.device_nodes)] == [
        "nvidia4",
        "nvidia-cap66",
        "nvidia-cap67",
        "nvidia-cap70",
    ]
