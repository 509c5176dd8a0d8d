"""The kubelet for tests is itself tested against a plugin that is not nvplug: grpcio on both ends."""

from __future__ import annotations

import os
import threading
from concurrent import futures
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import trio

from peer.contract import PLUGIN, REGISTRATION, message
from peer.kubelet import CallError, Device, kubelet_in

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

pytestmark = pytest.mark.process


class Plugin:
    """Serves a fixed list on a socket, registers when told to, and tries nothing again."""

    def __init__(self, directory: Path, *devices: Any) -> None:
        self.endpoint = f"plugin-{os.urandom(4).hex()}.sock"
        self._directory = directory
        self._devices = devices
        self._streams: list[threading.Event] = []
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=8))
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    PLUGIN,
                    {
                        "GetDevicePluginOptions": grpc.unary_unary_rpc_method_handler(
                            lambda _request, _context: message("DevicePluginOptions")(),
                            message("Empty").FromString,
                            message("DevicePluginOptions").SerializeToString,
                        ),
                        "ListAndWatch": grpc.unary_stream_rpc_method_handler(
                            self._list_and_watch,
                            message("Empty").FromString,
                            message("ListAndWatchResponse").SerializeToString,
                        ),
                        "Allocate": grpc.unary_unary_rpc_method_handler(
                            self._allocate,
                            message("AllocateRequest").FromString,
                            message("AllocateResponse").SerializeToString,
                        ),
                    },
                ),
            )
        )
        self._server.add_insecure_port(f"unix:{directory / self.endpoint}")
        self._server.start()

    async def register(self, *, resource: str = "nvidia.com/gpu", timeout: float = 20.0) -> None:
        """Registers, and raises grpc.RpcError if that is refused."""
        request = message("RegisterRequest")(version="v1beta1", endpoint=self.endpoint, resource_name=resource)

        def call() -> None:
            options = (("grpc.use_local_subchannel_pool", 1),)
            with grpc.insecure_channel(f"unix:{self._directory}/kubelet.sock", options=options) as channel:
                channel.unary_unary(
                    f"/{REGISTRATION}/Register",
                    message("RegisterRequest").SerializeToString,
                    message("Empty").FromString,
                )(request, timeout=timeout)

        with trio.fail_after(timeout + 10):
            await trio.to_thread.run_sync(call)

    def end_streams(self) -> None:
        """Returns from every ListAndWatch."""
        for stream in self._streams:
            stream.set()

    def close(self) -> None:
        """Ends everything."""
        self.end_streams()
        self._server.stop(grace=None).wait(10)

    def _list_and_watch(self, _request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        ended = threading.Event()
        self._streams.append(ended)
        context.add_callback(ended.set)
        yield message("ListAndWatchResponse")(devices=self._devices)
        ended.wait()

    def _allocate(self, request: Any, context: grpc.ServicerContext) -> Any:
        ids = request.container_requests[0].devices_ids
        if "unknown" in ids:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "there is no device unknown")
        response = message("AllocateResponse")()
        container = response.container_responses.add(envs={"IDS": ",".join(ids)})
        container.devices.add(container_path="/dev/inside", host_path="/dev/outside", permissions="rw")
        return response


@contextmanager
def plugin_in(directory: Path, *devices: Any) -> Generator[Plugin]:
    """A plugin that serves, and does not register by itself."""
    plugin = Plugin(directory, *devices)
    try:
        yield plugin
    finally:
        plugin.close()


def device(name: str, health: str = "Healthy", *numa: int) -> Any:
    """One device of a list, as protobuf has it."""
    nodes = [message("NUMANode")(ID=node) for node in numa]
    return message("Device")(ID=name, health=health, topology=message("TopologyInfo")(nodes=nodes))


async def test_what_a_plugin_lists_is_allocatable_while_its_stream_lives(tmp_path: Path) -> None:
    """Healthy devices count, the list is kept as it was sent, and nothing is allocatable after the stream."""
    async with kubelet_in(tmp_path / "k") as kubelet:
        with plugin_in(kubelet.directory, device("a", "Healthy", 1), device("b", "broken")) as plugin:
            await plugin.register()
            await kubelet.await_allocatable(1)

            assert kubelet.lists[0].devices == (Device("a", "Healthy", (1,)), Device("b", "broken", ()))
            assert kubelet.registrations[0].endpoint == plugin.endpoint

            plugin.end_streams()
            await kubelet.await_allocatable(0)

            assert kubelet.streams[0].code == "OK"
            assert kubelet.complaints == ["list of nvidia.com/gpu: health 'broken' of b"]


async def test_allocate_gives_the_answer_or_the_code(tmp_path: Path) -> None:
    """What the plugin answers arrives decoded, what it refuses with code and words."""
    async with kubelet_in(tmp_path / "k") as kubelet:
        with plugin_in(kubelet.directory, device("a")) as plugin:
            await plugin.register()
            await kubelet.await_allocatable(1)
            answer = await kubelet.allocate(["a", "b"])

            assert answer.container.envs == {"IDS": "a,b"}
            assert answer.container.devices[0].host_path == "/dev/outside"
            with pytest.raises(CallError, match="INVALID_ARGUMENT: there is no device unknown"):
                await kubelet.allocate(["unknown"])


@pytest.mark.parametrize("trouble", ["restart", "crash"])
async def test_a_restart_forgets_and_wipes(tmp_path: Path, trouble: str) -> None:
    """Whether it ended well or not, the new kubelet knows nobody and has removed the plugins' sockets."""
    async with kubelet_in(tmp_path / "k") as kubelet:
        with plugin_in(kubelet.directory, device("a")) as first:
            await first.register()
            await kubelet.await_allocatable(1)
            at = await (kubelet.restart() if trouble == "restart" else kubelet.crash())

            assert kubelet.allocatable() == 0
            assert kubelet.live_streams() == ()
            assert kubelet.plugin_sockets() == ()
        with plugin_in(kubelet.directory, device("a"), device("b")) as second:
            await second.register()

            assert await kubelet.await_back(2, after=at) > at


@pytest.mark.parametrize(("minor", "left"), [(36, 0), (37, 1)])
async def test_the_end_of_an_old_stream_takes_a_new_plugin_away_up_to_36(tmp_path: Path, minor: int, left: int) -> None:
    """Up to 1.36 clients are known by resource only: the old one's end disconnects the new one."""
    async with kubelet_in(tmp_path / "k", minor=minor) as kubelet:
        with (
            plugin_in(kubelet.directory, device("a")) as old,
            plugin_in(kubelet.directory, device("a")) as new,
        ):
            await old.register()
            await kubelet.await_allocatable(1)
            await new.register()
            await kubelet.await_that(lambda: len(kubelet.lists) == 2, "both lists")
            old.end_streams()
            await kubelet.await_that(lambda: len(kubelet.live_streams()) == left, "the streams that live on")

            assert kubelet.allocatable() == left
            assert kubelet.complaints == [f"{new.endpoint} registers while {old.endpoint} serves nvidia.com/gpu"]


async def test_register_can_be_refused(tmp_path: Path) -> None:
    """By the kubelet's own rules, or because the test wants it; always with UNKNOWN and the words."""
    async with kubelet_in(tmp_path / "k") as kubelet:
        with plugin_in(kubelet.directory, device("a")) as plugin:
            with pytest.raises(grpc.RpcError, match='the ResourceName "gpu" is invalid'):
                await plugin.register(resource="gpu")
            await kubelet.refuse("not now")
            with pytest.raises(grpc.RpcError, match="not now"):
                await plugin.register()
            await kubelet.accept()
            await plugin.register()
            await kubelet.await_allocatable(1)

            assert [r.error for r in kubelet.registrations] == [
                'the ResourceName "gpu" is invalid',
                "not now",
                None,
            ]


@pytest.mark.parametrize("how", ["backlog", "silent", "handler"])
async def test_a_mute_kubelet_answers_who_has_waited(tmp_path: Path, how: Any) -> None:
    """However it does not answer, connect() succeeds; and a Register that waits succeeds once it answers."""
    async with kubelet_in(tmp_path / "k", start=False) as kubelet:
        await kubelet.start(mute=how)
        with plugin_in(kubelet.directory, device("a")) as plugin:
            with pytest.raises(grpc.RpcError, match="DEADLINE_EXCEEDED"):
                await plugin.register(timeout=0.3)

            assert kubelet.allocatable() == 0
            async with trio.open_nursery() as nursery:
                nursery.start_soon(plugin.register)
                at = await kubelet.unmute()

            assert await kubelet.await_back(1, after=at) > at


async def test_a_socket_that_is_bound_only_refuses(tmp_path: Path) -> None:
    """Between bind and listen there is a file, and nobody behind it."""
    async with kubelet_in(tmp_path / "k", start=False) as kubelet:
        await kubelet.bind()
        with pytest.raises(ConnectionRefusedError):
            await trio.open_unix_socket(str(kubelet.socket))
        await kubelet.listen()

        async with await trio.open_unix_socket(str(kubelet.socket)):
            pass


async def test_the_old_stream_survives_a_socket_or_directory_that_is_replaced(tmp_path: Path) -> None:
    """A new kubelet.sock, even in a new directory, ends no stream unless that is asked for."""
    async with kubelet_in(tmp_path / "k") as kubelet:
        with plugin_in(kubelet.directory, device("a")) as plugin:
            await plugin.register()
            await kubelet.await_allocatable(1)
            await kubelet.replace_socket(cut=False)
            await kubelet.replace_directory()

            assert kubelet.plugin_sockets() == ()
            assert len(kubelet.live_streams()) == 1
            await kubelet.replace_socket(cut=True)
            await kubelet.await_allocatable(0)

            assert kubelet.streams[0].code == "CUT"
