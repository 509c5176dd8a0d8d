from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
from generate_api import ROOT, generate
from google.protobuf import descriptor_pb2

CHECKED_IN: Final = ROOT / "_nvplug" / "kubelet" / "api"

# The contract as every kubelet from 1.10 on speaks it: message -> number -> (name, type, repeated). A map is a repeated
# entry; fields and messages that a kubelet does not know yet it ignores.
MESSAGES: Final[dict[str, dict[int, tuple[str, str, bool]]]] = {
    "AllocateRequest": {1: ("container_requests", "ContainerAllocateRequest", True)},
    "AllocateResponse": {1: ("container_responses", "ContainerAllocateResponse", True)},
    "CDIDevice": {1: ("name", "string", False)},
    "ContainerAllocateRequest": {1: ("devices_ids", "string", True)},
    "ContainerAllocateResponse": {
        1: ("envs", "map<string, string>", True),
        2: ("mounts", "Mount", True),
        3: ("devices", "DeviceSpec", True),
        4: ("annotations", "map<string, string>", True),
        5: ("cdi_devices", "CDIDevice", True),
    },
    "ContainerPreferredAllocationRequest": {
        1: ("available_deviceIDs", "string", True),
        2: ("must_include_deviceIDs", "string", True),
        3: ("allocation_size", "int32", False),
    },
    "ContainerPreferredAllocationResponse": {1: ("deviceIDs", "string", True)},
    "Device": {1: ("ID", "string", False), 2: ("health", "string", False), 3: ("topology", "TopologyInfo", False)},
    "DevicePluginOptions": {
        1: ("pre_start_required", "bool", False),
        2: ("get_preferred_allocation_available", "bool", False),
    },
    "DeviceSpec": {
        1: ("container_path", "string", False),
        2: ("host_path", "string", False),
        3: ("permissions", "string", False),
    },
    "Empty": {},
    "ListAndWatchResponse": {1: ("devices", "Device", True)},
    "Mount": {
        1: ("container_path", "string", False),
        2: ("host_path", "string", False),
        3: ("read_only", "bool", False),
    },
    "NUMANode": {1: ("ID", "int64", False)},
    "PreStartContainerRequest": {1: ("devices_ids", "string", True)},
    "PreStartContainerResponse": {},
    "PreferredAllocationRequest": {1: ("container_requests", "ContainerPreferredAllocationRequest", True)},
    "PreferredAllocationResponse": {1: ("container_responses", "ContainerPreferredAllocationResponse", True)},
    "RegisterRequest": {
        1: ("version", "string", False),
        2: ("endpoint", "string", False),
        3: ("resource_name", "string", False),
        4: ("options", "DevicePluginOptions", False),
    },
    "TopologyInfo": {1: ("nodes", "NUMANode", True)},
}

# Service -> method -> (request, response, whether the response is a stream).
SERVICES: Final[dict[str, dict[str, tuple[str, str, bool]]]] = {
    "DevicePlugin": {
        "Allocate": ("AllocateRequest", "AllocateResponse", False),
        "GetDevicePluginOptions": ("Empty", "DevicePluginOptions", False),
        "GetPreferredAllocation": ("PreferredAllocationRequest", "PreferredAllocationResponse", False),
        "ListAndWatch": ("Empty", "ListAndWatchResponse", True),
        "PreStartContainer": ("PreStartContainerRequest", "PreStartContainerResponse", False),
    },
    "Registration": {"Register": ("RegisterRequest", "Empty", False)},
}


def files(directory: Path) -> dict[str, bytes]:
    """What a package consists of."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_generated_code_is_that_of_the_contract(tmp_path: Path) -> None:
    """What is checked in is, byte for byte, what the generator makes of proto/; nothing more, nothing less."""
    generate(tmp_path)

    made, found = files(tmp_path), files(CHECKED_IN)
    assert made.keys() == found.keys()
    differing = [name for name in made if made[name] != found[name]]
    assert not differing, "run make api"


@pytest.fixture(scope="module")
def contract(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """proto/, as protoc understands it."""
    made = tmp_path_factory.mktemp("contract") / "descriptors"
    protoc = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={ROOT / 'proto'}"]
    subprocess.run([*protoc, f"--descriptor_set_out={made}", "deviceplugin.proto"], cwd=ROOT / "proto", check=True)
    (file,) = descriptor_pb2.FileDescriptorSet.FromString(made.read_bytes()).file
    return file


def test_the_package_is_the_version(contract: Any) -> None:
    """The package is part of every method's path."""
    assert contract.package == "v1beta1"
    assert contract.syntax == "proto3"


def test_messages_are_those_on_the_wire(contract: Any) -> None:
    """Numbers, names and types are those of the kubelet's contract; none is missing and none invented."""
    assert {message.name: dict(map(field_of(message), message.field)) for message in contract.message_type} == MESSAGES


def test_services_are_those_on_the_wire(contract: Any) -> None:
    """So are the methods."""
    assert {
        service.name: {
            method.name: (short(method.input_type), short(method.output_type), method.server_streaming)
            for method in service.method
        }
        for service in contract.service
    } == SERVICES
    assert not [method for service in contract.service for method in service.method if method.client_streaming]


def field_of(message: Any) -> Any:
    """Turns a field of ``message`` into an item of the table above."""
    entries = {entry.name: entry for entry in message.nested_type if entry.options.map_entry}
    types = descriptor_pb2.FieldDescriptorProto.Type

    def type_of(field: Any) -> str:
        entry = entries.get(short(field.type_name))
        if entry is not None:
            return f"map<{', '.join(map(type_of, entry.field))}>"
        return short(field.type_name) or str(types.Name(field.type)).removeprefix("TYPE_").lower()

    def item(field: Any) -> tuple[int, tuple[str, str, bool]]:
        return field.number, (field.name, type_of(field), field.label == field.LABEL_REPEATED)

    return item


def short(name: str) -> str:
    """A type without its package."""
    return name.rpartition(".")[2]
