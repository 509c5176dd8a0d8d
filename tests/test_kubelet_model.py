from __future__ import annotations

import pytest
from kubelet_model import ALREADY_CONNECTED, Connection, Listener, Node, Stream


class Plugin:
    """An endpoint that does nothing by itself."""

    def __init__(self, node: Node, name: str) -> None:
        self.name = name
        self.listener = Listener(open=True)
        self.streams: list[Stream] = []
        self.replies: list[str | None] = []
        self._node = node
        node.bind(name, self.listener)

    def watch(self, stream: Stream) -> None:
        """ListAndWatch is called."""
        self.streams.append(stream)

    def watched_no_more(self, stream: Stream) -> None:
        """The kubelet ended it."""
        self.streams.remove(stream)

    def register(self) -> Connection:
        """Registers; what comes of it is found in ``replies``."""
        connection = Connection(self._node.kubelet, greeted=nothing, broken=nothing)
        self._node.kubelet.connect(connection)
        connection.register(self, lambda error, _final: self.replies.append(error))
        return connection

    def end(self) -> None:
        """Ends its streams, its listener and its file."""
        for stream in self.streams:
            stream.end()
        self.listener.open = False
        self._node.unlink(self.name)


def nothing() -> None:
    """Is done."""


def node_with(minor: int) -> Node:
    """One with a kubelet that listens."""
    node = Node(minor)
    node.start()
    node.agenda.run(1.0)
    return node


@pytest.mark.parametrize(("minor", "remains"), [(24, True), (34, False), (36, False), (37, True)])
def test_an_older_stream_ends(minor: int, remains: bool) -> None:
    """From 1.25 to 1.36 the end of an older stream of the same resource takes the newer one away"""
    node = node_with(minor)
    older, newer = Plugin(node, "older"), Plugin(node, "newer")
    for plugin in (older, newer):
        plugin.register()
        node.agenda.run(1.0)
    assert node.allocatable
    older.end()
    node.agenda.run(1.0)

    assert node.allocatable is remains
    assert bool(newer.streams) is remains


@pytest.mark.parametrize(("minor", "forgotten"), [(24, False), (34, True), (36, True), (37, False)])
def test_a_register_fails_late(minor: int, forgotten: bool) -> None:
    """From 1.25 to 1.36 a dial that fails after 10 s makes the kubelet forget a newer client, and ignore its end"""
    node = node_with(minor)
    gone, newer = Plugin(node, "gone"), Plugin(node, "newer")
    gone.end()
    gone.register()
    node.agenda.run(1.0)
    newer.register()
    node.agenda.run(15.0)
    assert node.allocatable
    newer.end()
    node.agenda.run(1.0)

    assert node.allocatable is forgotten


@pytest.mark.parametrize(("minor", "seconds"), [(24, 0.1), (34, 10.1), (36, 0.1), (37, 0.1)])
def test_the_plugin_hangs_up(minor: int, seconds: float) -> None:
    """Up to 1.34 a Register goes on without its caller, from 1.35 on it ends with it"""
    node = node_with(minor)
    gone = Plugin(node, "gone")
    gone.end()
    connection = gone.register()
    node.agenda.run(0.05)
    connection.close()
    node.agenda.run(seconds)

    assert not node.kubelet.busy


@pytest.mark.parametrize(("minor", "reply"), [(34, None), (37, ALREADY_CONNECTED)])
def test_the_same_socket_again(minor: int, reply: str | None) -> None:
    """From 1.37 on a socket that is connected is refused; up to 1.36 it gets a second stream"""
    node = node_with(minor)
    plugin = Plugin(node, "same")
    for _ in range(2):
        plugin.register()
        node.agenda.run(1.0)

    assert plugin.replies == [None, reply]
    assert len(plugin.streams) == (1 if reply else 2)


@pytest.mark.parametrize("wipe", [True, False])
def test_a_kubelet_starts(wipe: bool) -> None:
    """It wipes the directory, makes its socket, listens, and knows nobody"""
    node = node_with(34)
    plugin = Plugin(node, "ours")
    plugin.register()
    node.agenda.run(1.0)
    node.kubelet.die()
    node.agenda.run(1.0)
    streams, files = len(plugin.streams), set(node.files)
    node.start(wipe=wipe)
    node.agenda.run(1.0)

    assert streams == 0
    assert files == {"kubelet.sock", "ours"}
    assert set(node.files) == ({"kubelet.sock"} if wipe else files)
    assert not node.allocatable


def test_a_frozen_kubelet() -> None:
    """What is sent to it is kept, and taken in when it continues"""
    node = node_with(34)
    plugin = Plugin(node, "ours")
    node.kubelet.frozen = True
    plugin.register()
    node.agenda.run(60.0)
    replies = len(plugin.replies)
    node.kubelet.thaw()
    node.agenda.run(0.1)

    assert replies == 0
    assert node.allocatable
