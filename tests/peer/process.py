"""The process of the kubelet.

Commands come in as lines of JSON; answers, and what happened, go out as lines of JSON. It ends when its input
does, so that it never outlives the test that started it.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import stat
import sys
import threading
import time
from concurrent import futures
from pathlib import Path
from typing import Any, Final

import grpc

from peer.contract import REGISTRATION, message, unary
from peer.front import Front, Mute
from peer.manager import Manager, RefusedError

__all__: list[str] = []

_CHECKPOINT: Final = "kubelet_internal_checkpoint"


class _Kubelet:
    """One process, and in it one life of a kubelet after another. Commands are its public methods."""

    _numbers = itertools.count(1)

    def __init__(self, directory: Path, minor: int) -> None:
        self._directory = directory
        self._socket = directory / "kubelet.sock"
        self._minor = minor
        self._lock = threading.Lock()
        self._manager = Manager(directory, minor, self._emit)
        self._front: Front | None = None
        self._refusal: str | None = None
        self._released = threading.Event()
        self._released.set()
        self._address = f"nvplug-test-kubelet-{os.getpid()}"
        # Blocked Register handlers must not keep others out.
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=64))
        register = grpc.unary_unary_rpc_method_handler(
            self._register,
            request_deserializer=message("RegisterRequest").FromString,
            response_serializer=message("Empty").SerializeToString,
        )
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(REGISTRATION, {"Register": register}),)
        )
        self._server.add_insecure_port(f"unix-abstract:{self._address}")
        self._server.start()

    def start(self, *, wipe: bool = True, mute: str = "not", listen: bool = True) -> float:
        """A kubelet starts: the directory is made and wiped, the socket bound, then listened on."""
        if self._front is not None:
            raise RuntimeError("the kubelet runs already")
        self._directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        if wipe:
            for path in self._directory.iterdir():
                self._wipe(path)
        # What net.Listen needs in any case: a path that is free.
        self._socket.unlink(missing_ok=True)
        self._manager = Manager(self._directory, self._minor, self._emit)
        self._front = Front(self._socket, self._address, self._connected)
        return self.listen(mute=mute) if listen else time.monotonic()

    def listen(self, *, mute: str = "not") -> float:
        """Listens on a socket that ``start(listen=False)`` has bound."""
        self._hold_handlers(mute)
        return self._running().listen(Mute(mute))

    def mute(self, *, mute: str) -> float:
        """Goes on listening, and answers no longer, or again."""
        at = self._running().mute(Mute(mute))
        self._hold_handlers(mute)
        return at

    def stop(self) -> float:
        """The kubelet's process ends: connections end, socket files stay."""
        at = time.monotonic()
        front = self._running()
        self._front = None
        self._manager.die()
        # Handlers that still wait belong to the dead; let them find out.
        self._released.set()
        front.close(cut=True)
        return at

    def replace(self, *, cut: bool) -> float:
        """A new kubelet.sock in place of the old, without a wipe; the device manager lives on."""
        self._running().close(cut=cut)
        if cut:
            self._manager.cut(None)
        self._socket.unlink(missing_ok=True)
        self._front = Front(self._socket, self._address, self._connected)
        return self._front.listen(Mute.NOT)

    def replace_directory(self, *, down: float) -> float:
        """The directory is deleted with all in it, and made again after a while, with a new kubelet.sock.

        No connection ends.
        """
        self._running().close(cut=False)
        shutil.rmtree(self._directory)
        time.sleep(down)
        self._directory.mkdir(mode=0o750)
        self._front = Front(self._socket, self._address, self._connected)
        return self._front.listen(Mute.NOT)

    def cut(self, *, resource: str | None) -> float:
        """Ends the streams and their connections, of one resource or of all."""
        return self._manager.cut(resource)

    def refuse(self, *, refusal: str | None) -> float:
        """Fails every Register with these words from now on; with None no longer."""
        at = time.monotonic()
        self._refusal = refusal
        return at

    def allocate(self, *, resource: str, containers: list[list[str]], timeout: float) -> dict[str, Any]:
        """Allocate, as the kubelet calls it, but with any number of containers."""
        request = message("AllocateRequest")()
        for ids in containers:
            request.container_requests.add().devices_ids.extend(ids)
        response, seconds = self._call(resource, "Allocate", request, "AllocateResponse", timeout)
        return {
            "seconds": seconds,
            "containers": [
                {
                    "envs": dict(c.envs),
                    "mounts": [[m.container_path, m.host_path, m.read_only] for m in c.mounts],
                    "devices": [[d.container_path, d.host_path, d.permissions] for d in c.devices],
                    "annotations": dict(c.annotations),
                    "cdi_devices": [d.name for d in c.cdi_devices],
                }
                for c in response.container_responses
            ],
        }

    def preferred(  # the four parts of the message, and where it goes
        self, *, resource: str, available: list[str], must_include: list[str], size: int, timeout: float
    ) -> dict[str, Any]:
        """GetPreferredAllocation for one container."""
        request = message("PreferredAllocationRequest")()
        container = request.container_requests.add()
        container.available_deviceIDs.extend(available)
        container.must_include_deviceIDs.extend(must_include)
        container.allocation_size = size
        response, seconds = self._call(
            resource, "GetPreferredAllocation", request, "PreferredAllocationResponse", timeout
        )
        return {"seconds": seconds, "containers": [list(c.deviceIDs) for c in response.container_responses]}

    def _call(self, resource: str, method: str, request: Any, response: str, timeout: float) -> tuple[Any, float]:
        client = self._manager.endpoint(resource)
        if client is None:
            raise RefusedError(f"no endpoint of {resource} is running")
        call = unary(client.channel, method, type(request).DESCRIPTOR.name, response)
        before = time.perf_counter()
        answer = call(request, timeout=timeout)
        return answer, time.perf_counter() - before

    def _register(self, request: Any, context: grpc.ServicerContext) -> Any:
        number, manager = next(self._numbers), self._manager
        error: str | None = None
        self._emit(
            {
                "event": "register",
                "at": time.monotonic(),
                "register": number,
                "version": request.version,
                "endpoint": request.endpoint,
                "resource": request.resource_name,
                "preferred": request.options.get_preferred_allocation_available,
            }
        )
        self._released.wait()
        if self._refusal is not None:
            error = self._refusal
        else:
            try:
                manager.register(request, context)
            except RefusedError as refused:
                error = str(refused)
        self._emit(
            {
                "event": "registered",
                "at": time.monotonic(),
                "register": number,
                "abandoned": not context.is_active(),
                "error": error,
            }
        )
        if error is not None:
            context.abort(grpc.StatusCode.UNKNOWN, error)
        return message("Empty")()

    def _hold_handlers(self, mute: str) -> None:
        if Mute(mute) is Mute.HANDLER:
            self._released.clear()
        else:
            self._released.set()

    def _running(self) -> Front:
        if self._front is None:
            raise RuntimeError("no kubelet runs")
        return self._front

    def _wipe(self, path: Path) -> None:
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            # Its owner was quicker.
            return
        if stat.S_ISDIR(mode) or path.name == _CHECKPOINT:
            return
        # Up to 1.32 whatever is a file goes, later only sockets.
        if self._minor <= 32 or stat.S_ISSOCK(mode):
            path.unlink(missing_ok=True)

    def _connected(self) -> None:
        self._emit({"event": "connection", "at": time.monotonic()})

    def _emit(self, event: dict[str, Any]) -> None:
        line = json.dumps(event) + "\n"
        with self._lock:
            sys.stdout.write(line)
            sys.stdout.flush()

    def serve_commands(self) -> None:
        """Until the input ends. Calls to the plugin, which may never return, have threads of their own."""
        self._emit({"event": "ready", "at": time.monotonic()})
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] in ("allocate", "preferred"):
                threading.Thread(target=self._obey, args=(command,), daemon=True).start()
            else:
                self._obey(command)

    def _obey(self, command: dict[str, Any]) -> None:
        answer: dict[str, Any] = {"reply": command["id"]}
        try:
            answer["value"] = getattr(self, command["do"])(**command["with"])
        except grpc.RpcError as error:
            answer["code"], answer["details"] = error.code().name, error.details() or ""
        except RefusedError as error:
            answer["code"], answer["details"] = "NO_ENDPOINT", str(error)
        except (OSError, RuntimeError, ValueError) as error:
            answer["failed"] = f"{type(error).__name__}: {error}"
        self._emit(answer)


if __name__ == "__main__":
    _Kubelet(Path(sys.argv[1]), int(sys.argv[2])).serve_commands()
    # Threads may be inside gRPC, which does not let go of them: what a kill would do is meant here.
    sys.stdout.flush()
    os._exit(0)
