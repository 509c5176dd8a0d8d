"""kubelet.sock, with every trouble that a kubelet can make with a socket.

grpcio binds, listens, accepts, answers and unlinks as one, and none of it can be held back. So its server
listens on an abstract address of this process, and kubelet.sock is made here with plain sockets: what comes
in is carried over, byte by byte, once and as long as the kubelet is meant to answer.
"""

from __future__ import annotations

import contextlib
import enum
import select
import socket
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["Front", "Mute"]


class Mute(enum.Enum):
    """How a kubelet does not answer although connect() succeeds."""

    NOT = "not"
    BACKLOG = "backlog"
    """It listens and never accepts: what a frozen process looks like."""
    SILENT = "silent"
    """It accepts, reads nothing and sends nothing."""
    HANDLER = "handler"
    """It speaks HTTP/2, and its Register handler does not return. (Nothing to do here; see process.py.)"""


class Front:
    """One listening kubelet.sock and the connections that came through it."""

    def __init__(self, path: Path, server: str, accepted: Callable[[], None]) -> None:
        """Binds the socket and does not listen yet.

        Args:
            path: of kubelet.sock; there must be nothing there.
            server: the abstract address, without its leading NUL, at which the gRPC server listens.
            accepted: called for each connection, from a thread.
        """
        self._accepted = accepted
        self._server = f"\0{server}"
        self._lock = threading.Lock()
        self._pairs: set[_Pair] = set()
        self._held: list[socket.socket] = []
        self._mute = Mute.NOT
        self._closed = False
        self._woken, self._wake = socket.socketpair()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        path.chmod(0o755)

    def listen(self, mute: Mute) -> float:
        """Listens, and returns the time just before it did: no plugin can have got through earlier."""
        self._mute = mute
        before = time.monotonic()
        # As Go does: net.core.somaxconn.
        self._socket.listen(4096)
        threading.Thread(target=self._accept, daemon=True).start()
        return before

    def mute(self, mute: Mute) -> float:
        """Changes how it does not answer; what waited is answered now if it does again."""
        with self._lock:
            before = time.monotonic()
            self._mute = mute
            released, self._held = (self._held, []) if mute is not Mute.SILENT else ([], self._held)
            self._wake.send(b"!")
        for connection in released:
            self._carry(connection)
        return before

    def close(self, *, cut: bool) -> None:
        """Stops listening, as the end of the process would: the file stays.

        Args:
            cut: whether the connections end, too.
        """
        with self._lock:
            self._closed = True
            pairs, held, self._held = list(self._pairs), self._held, []
            # Whoever connects from here on is refused, although the other thread still holds the socket.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            self._wake.send(b"!")
        if cut:
            for pair in pairs:
                pair.cut()
            for connection in held:
                connection.close()

    def _accept(self) -> None:
        with self._woken:
            while True:
                with self._lock:
                    if self._closed:
                        return
                    waited_for = [self._woken] if self._mute is Mute.BACKLOG else [self._woken, self._socket]
                ready, _, _ = select.select(waited_for, [], [])
                if self._woken in ready:
                    self._woken.recv(16)
                    continue
                try:
                    connection, _ = self._socket.accept()
                except OSError:
                    continue
                self._accepted()
                with self._lock:
                    held = self._mute is Mute.SILENT
                    if held:
                        self._held.append(connection)
                if not held:
                    self._carry(connection)

    def _carry(self, connection: socket.socket) -> None:
        inner = socket.socket(socket.AF_UNIX)
        inner.connect(self._server)
        pair = _Pair(connection, inner, self._forget)
        with self._lock:
            self._pairs.add(pair)
        pair.start()

    def _forget(self, pair: _Pair) -> None:
        with self._lock:
            self._pairs.discard(pair)


class _Pair:
    """A connection and its continuation inside, a thread for each direction."""

    def __init__(self, outer: socket.socket, inner: socket.socket, ended: Callable[[_Pair], None]) -> None:
        self._outer = outer
        self._inner = inner
        self._ended = ended
        self._lock = threading.Lock()
        self._open = 2

    def start(self) -> None:
        for source, sink in ((self._outer, self._inner), (self._inner, self._outer)):
            threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def cut(self) -> None:
        """Ends both sides at once; the threads see it and close."""
        for side in (self._outer, self._inner):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        # gRPC has no use for half-open connections: when one side is done, so is the other.
        self.cut()
        with self._lock:
            self._open -= 1
            last = self._open == 0
        if last:
            self._outer.close()
            self._inner.close()
            self._ended(self)
