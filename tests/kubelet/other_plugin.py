"""Some other device plugin, in grpcio: ``python other_plugin.py DIRECTORY RESOURCE ID...`` until SIGTERM.

It does what most do: it binds one socket, registers, serves, and does all of that again when kubelet.sock is another.
Its containers get ``OTHER_DEVICES`` and nothing else.
"""

from __future__ import annotations

import signal
import sys
import threading
from concurrent import futures
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from peer.contract import PLUGIN, REGISTRATION, message

if TYPE_CHECKING:
    from collections.abc import Iterator

SOCKET = "nvidia-gpu.sock"
"""Its name, which other plugins have for NVIDIA's GPUs, too."""

_STREAMS = 8
_LOOK = 0.05
_REGISTER_WITHIN = 15.0


class _Plugin:
    def __init__(self, ids: list[str]) -> None:
        self._ids = ids
        self._ended = threading.Event()

    def serve(self, socket: Path) -> grpc.Server:
        self._ended = threading.Event()
        socket.unlink(missing_ok=True)
        server = grpc.server(futures.ThreadPoolExecutor(_STREAMS))
        methods = {
            "GetDevicePluginOptions": self._unary(lambda _request: message("DevicePluginOptions")(), "Empty"),
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(
                self._list,
                request_deserializer=message("Empty").FromString,
                response_serializer=message("ListAndWatchResponse").SerializeToString,
            ),
            "Allocate": self._unary(self._allocate, "AllocateRequest"),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(PLUGIN, methods),))
        server.add_insecure_port(f"unix:{socket}")
        server.start()
        return server

    def stop(self, server: grpc.Server) -> None:
        self._ended.set()
        server.stop(grace=1.0).wait()

    def _unary(self, answer: Any, request: str) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(
            lambda asked, _context: answer(asked),
            request_deserializer=message(request).FromString,
            response_serializer=lambda response: response.SerializeToString(),
        )

    def _list(self, _request: object, context: grpc.ServicerContext) -> Iterator[object]:
        ended = self._ended
        context.add_callback(ended.set)
        yield message("ListAndWatchResponse")(devices=[{"ID": one, "health": "Healthy"} for one in self._ids])
        ended.wait()

    def _allocate(self, request: Any) -> object:
        responses = [{"envs": {"OTHER_DEVICES": ",".join(one.devices_ids)}} for one in request.container_requests]
        return message("AllocateResponse")(container_responses=responses)


def _register(directory: Path, socket: Path, resource: str) -> None:
    request = message("RegisterRequest")(version="v1beta1", endpoint=socket.name, resource_name=resource)
    with grpc.insecure_channel(f"unix:{directory / 'kubelet.sock'}") as channel:
        call = channel.unary_unary(
            f"/{REGISTRATION}/Register",
            request_serializer=message("RegisterRequest").SerializeToString,
            response_deserializer=message("Empty").FromString,
        )
        call(request, timeout=_REGISTER_WITHIN)


def main(directory: Path, resource: str, ids: list[str]) -> None:
    """Serves until SIGTERM."""
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda _number, _frame: told.set())
    kubelet, socket = directory / "kubelet.sock", directory / SOCKET
    plugin = _Plugin(ids)
    while not told.is_set():
        if not kubelet.exists():
            told.wait(_LOOK)
            continue
        seen = kubelet.stat()
        server = plugin.serve(socket)
        try:
            _register(directory, socket, resource)
            while not told.wait(_LOOK) and kubelet.exists() and kubelet.stat().st_ctime_ns == seen.st_ctime_ns:
                pass
        except grpc.RpcError:
            told.wait(_LOOK)
        finally:
            plugin.stop(server)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
