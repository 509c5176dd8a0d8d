"""From what we offer to bytes on the wire."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from _nvplug.container import ContainerEdits
from _nvplug.errors import ListTooLongError
from _nvplug.kubelet.api.v1beta1 import (
    CdiDevice,
    ContainerAllocateResponse,
    Device,
    DeviceSpec,
    ListAndWatchResponse,
    Mount,
    NumaNode,
    TopologyInfo,
)
from _nvplug.resources import Device as OfferedDevice

__all__ = ["HEALTHY", "LIST_LIMIT", "ListEncoder", "container_response"]

HEALTHY = "Healthy"
UNHEALTHY = "Unhealthy"

# The kubelet's gRPC client reads messages of up to 4 MiB. A longer list does not fail a call, it ends the stream.
LIST_LIMIT = (4 << 20) - (64 << 10)

_Key = tuple[str, bool, int | None]


class ListEncoder:
    """Encodes device lists, keeping the piece of every device for the next list.

    A list is a concatenation of its devices' encodings, so joining kept pieces gives, byte for byte, what encoding the
    whole list gives: in 11 ms instead of 1.3 s for 60,000 devices.
    """

    def __init__(self) -> None:
        self._pieces: Mapping[_Key, bytes] = {}

    def encode(self, devices: Iterable[OfferedDevice]) -> bytes:
        """The ListAndWatchResponse with these devices, in this order.

        Raises:
            ListTooLongError: no kubelet would read it.
        """
        pieces: dict[_Key, bytes] = {}
        for device in devices:
            key = (device.id, device.healthy, device.gpu.numa)
            pieces[key] = self._pieces.get(key) or _piece(*key)
        self._pieces = pieces
        encoded = b"".join(pieces.values())
        if len(encoded) > LIST_LIMIT:
            raise ListTooLongError(
                f"a list of {len(pieces)} devices takes {len(encoded)} bytes; kubelets read {LIST_LIMIT}",
                remedy="offer fewer devices under one resource name",
            )
        return encoded


def _piece(device_id: str, healthy: bool, numa: int | None) -> bytes:
    # The kubelet reads an absent topology as "no preference", and would take -1 for a node.
    topology = None if numa is None else TopologyInfo(nodes=[NumaNode(id=numa)])
    device = Device(id=device_id, health=HEALTHY if healthy else UNHEALTHY, topology=topology)
    return bytes(ListAndWatchResponse(devices=[device]))


def container_response(edits: ContainerEdits) -> ContainerAllocateResponse:
    """What a container is given, as the kubelet wants to hear it."""
    return ContainerAllocateResponse(
        envs=dict(edits.environment),
        mounts=[
            Mount(container_path=mount.container_path, host_path=mount.host_path, read_only=mount.read_only)
            for mount in edits.mounts
        ],
        devices=[
            DeviceSpec(container_path=node.container_path, host_path=node.host_path, permissions=node.permissions)
            for node in edits.device_nodes
        ],
        annotations=dict(edits.annotations),
        cdi_devices=[CdiDevice(name=name) for name in edits.cdi_devices],
    )
