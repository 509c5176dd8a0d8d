"""The device plugin contract, read by protoc and protobuf from ``proto/deviceplugin.proto``."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from google.protobuf import (
    descriptor_pb2,
    descriptor_pool,
    message_factory,
)

if TYPE_CHECKING:
    import grpc

__all__ = ["PLUGIN", "REGISTRATION", "message", "unary", "unary_stream"]

REGISTRATION: Final = "v1beta1.Registration"
PLUGIN: Final = "v1beta1.DevicePlugin"

_ROOT: Final = Path(__file__).parents[2]
_PROTO: Final = _ROOT / "proto" / "deviceplugin.proto"


def message(name: str) -> Any:
    """The class of a message of the contract."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"v1beta1.{name}"))


def unary(channel: grpc.Channel, method: str, request: str, response: str) -> Any:
    """A callable for a method of the plugin that takes and returns one message."""
    return channel.unary_unary(
        f"/{PLUGIN}/{method}",
        request_serializer=message(request).SerializeToString,
        response_deserializer=message(response).FromString,
    )


def unary_stream(channel: grpc.Channel, method: str, request: str, response: str) -> Any:
    """A callable for a method of the plugin that takes one message and returns a stream of them."""
    return channel.unary_stream(
        f"/{PLUGIN}/{method}",
        request_serializer=message(request).SerializeToString,
        response_deserializer=message(response).FromString,
    )


def _descriptors() -> bytes:
    """The compiled contract, kept under ``build/`` by the hash of its source: protoc takes a while."""
    kept = _ROOT / "build" / "peer" / f"{hashlib.sha256(_PROTO.read_bytes()).hexdigest()[:16]}.binpb"
    if kept.exists():
        return kept.read_bytes()
    from grpc_tools import protoc  # noqa: PLC0415  # only the first kubelet of a checkout pays for it

    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
        made = Path(scratch, "made")
        status = protoc.main(["protoc", f"-I{_PROTO.parent}", f"--descriptor_set_out={made}", str(_PROTO)])
        if status != 0:
            raise RuntimeError(f"protoc exited with {status} on {_PROTO}")
        # Kubelets of several tests may start at once: the last one wins, and all wrote the same.
        os.replace(made, kept)  # noqa: PTH105  # Path.replace would do the same and hide that this is atomic
    return kept.read_bytes()


_POOL: Final = descriptor_pool.DescriptorPool()
for _file in descriptor_pb2.FileDescriptorSet.FromString(_descriptors()).file:
    _POOL.Add(_file)
