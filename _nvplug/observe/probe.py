"""What `nvplug health` is told: whether nvplug lives, whether it serves, and in words what it is at.

The protocol: whoever connects to the socket, of SOCK_SEQPACKET, is sent one message and is never read. It has a digit
for each question, 0 for yes, a blank, and the words. The socket has a name in the abstract namespace (unix(7)), which
belongs to a network namespace and needs no directory: it is there in a container with nothing mounted, two pods on one
node have one each, and it is gone when the process is, however that ends. (A file would need a place that can be
written, and rules about who may remove it.)
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Awaitable, Callable
from typing import Final, NoReturn

import trio

from _nvplug.happenings import ProbesNotAnswered, Publish
from _nvplug.latest import Latest
from _nvplug.observe.systemd import State, status

__all__ = ["keep_answering"]

# Seconds for a loop to come round, less than `nvplug health` waits; and between two tries where the name is taken.
_ROUND_WITHIN: Final = 4.0
_PAUSE: Final = 1.0

# Connections that the kernel keeps for us. They are answered one after the other, each at once; the rest waits.
_BACKLOG: Final = 16

# Far less than any socket takes without anybody reading.
_LONGEST: Final = 4000


async def keep_answering(
    name: str,
    state: Latest[State],
    lives: Callable[[], Awaitable[None]],
    publish: Publish,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> NoReturn:
    """Answers everybody who connects, until cancelled. Has started when it does, or another process does.

    Args:
        name: of the socket, with ``@`` in front. As long as another process has it, that one answers.
        state: what to tell.
        lives: returns soon if the program's loops turn.
        publish: for what an operator should know.
        task_status: Trio's.
    """
    said = False
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            try:
                listener.bind(f"\0{name[1:]}")
            except OSError as error:
                if not said:
                    taken = error.errno == errno.EADDRINUSE
                    publish(ProbesNotAnswered(name, "another process has that name" if taken else str(error)))
                    task_status.started()
                said = True
            else:
                listener.listen(_BACKLOG)
                if not said:
                    task_status.started()
                await _answer(trio.socket.from_stdlib_socket(listener), state, lives)
        await trio.sleep(_PAUSE)


async def _answer(
    listener: trio.socket.SocketType, state: Latest[State], lives: Callable[[], Awaitable[None]]
) -> NoReturn:
    while True:
        try:
            connection, _ = await listener.accept()
        except OSError:
            # No descriptor is left. Whoever waits goes on to wait.
            await trio.sleep(_PAUSE)
            continue
        with connection:
            with trio.move_on_after(_ROUND_WITHIN) as scope:
                await lives()
            answer = _hung() if scope.cancelled_caught else _living(state.value)
            with contextlib.suppress(OSError):
                await connection.send(answer.encode()[:_LONGEST])


def _living(state: State) -> str:
    return f"0{int(not state.serving)} {status(state)}"


def _hung() -> str:
    return "11 the loop that serves the kubelet hangs"
