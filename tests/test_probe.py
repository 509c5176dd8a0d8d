from __future__ import annotations

import contextlib
import os
import resource
import secrets
import socket as stdlib
import subprocess
import sys
from collections.abc import Generator

import pytest
import trio

from _nvplug.commands.health import main
from _nvplug.errors import NotAnsweredError, OptionError
from _nvplug.happenings import Happening, ProbesNotAnswered
from _nvplug.latest import Latest
from _nvplug.observe.probe import keep_answering
from _nvplug.observe.systemd import State

GPU = "nvidia.com/gpu"

# Listens as an ordinary user of this machine, and answers that all is well.
STRANGER = """
import os, socket, sys
os.setuid(65534)
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
    listener.bind("\\0" + sys.argv[1][1:])
    listener.listen()
    print("listens", flush=True)
    listener.accept()[0].send(b"00 all is well")
"""


@pytest.fixture
def name() -> str:
    """A name that no other test has."""
    return f"@nvplug-test-{secrets.token_hex(8)}"


async def lives() -> None:
    """The loops turn."""


async def hangs() -> None:
    """They do not."""
    await trio.sleep_forever()


def socket() -> trio.socket.SocketType:
    """One to ask with."""
    return trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_SEQPACKET)


async def ask(name: str) -> str:
    """The whole answer."""

    def call() -> bytes:
        # As `nvplug health` does: where others wait, it waits, which a socket of Trio's does not.
        with stdlib.socket(stdlib.AF_UNIX, stdlib.SOCK_SEQPACKET) as asking:
            asking.connect(f"\0{name[1:]}")
            return asking.recv(4096)

    return (await trio.to_thread.run_sync(call)).decode()


def crowd(name: str, stack: contextlib.ExitStack) -> None:
    """Two hundred who connect: some send, some leave, and the others stay without a word."""
    for number in range(200):
        asking = stack.enter_context(stdlib.socket(stdlib.AF_UNIX, stdlib.SOCK_SEQPACKET))
        asking.connect(f"\0{name[1:]}")
        if number % 3 == 0:
            with contextlib.suppress(OSError):
                asking.send(b"GET / HTTP/1.1\r\n" * 100)
        elif number % 3 == 1:
            asking.close()


@contextlib.contextmanager
def no_descriptors() -> Generator[None]:
    """No file can be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open("/dev/null", os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("state", "answer"),
    [
        (State(), "01 starting"),
        (State(driver="waiting for the driver: no library"), "01 waiting for the driver: no library"),
        (State(resources={GPU: "waiting for the kubelet"}), f"01 {GPU}: waiting for the kubelet"),
        (
            State(resources={GPU: "registered"}, devices={GPU: "0 of 8 healthy"}),
            f"00 {GPU}: registered, 0 of 8 healthy",
        ),
        (
            State(resources={GPU: "registered", "a/b": "registering anew"}),
            f"01 a/b: registering anew; {GPU}: registered",
        ),
    ],
)
async def test_a_probe_is_told_what_is_going_on(name: str, state: State, answer: str) -> None:
    """It lives whatever its driver and its kubelet do, and serves when the kubelet watches all that it offers."""
    async with trio.open_nursery() as nursery:
        await nursery.start(keep_answering, name, Latest(state), lives, list[Happening]().append)

        assert await ask(name) == answer
        nursery.cancel_scope.cancel()


async def test_a_hung_loop_is_no_life(name: str, autojump_clock: object) -> None:
    """Whoever asks hears of it before he gives up."""
    del autojump_clock
    async with trio.open_nursery() as nursery:
        await nursery.start(keep_answering, name, Latest(State()), hangs, list[Happening]().append)
        started = trio.current_time()

        assert (await ask(name)).startswith("11 ")
        assert trio.current_time() - started < 5
        nursery.cancel_scope.cancel()


async def test_nobody_who_connects_can_hold_it_up(name: str) -> None:
    """Those who send, who stay, who leave: the next one is answered all the same."""
    async with trio.open_nursery() as nursery:
        await nursery.start(keep_answering, name, Latest(State()), lives, list[Happening]().append)
        with contextlib.ExitStack() as stack:
            await trio.to_thread.run_sync(crowd, name, stack)

            assert await ask(name) == "01 starting"
        nursery.cancel_scope.cancel()


async def test_without_descriptors_it_answers_late(name: str) -> None:
    """When there are some again."""
    async with trio.open_nursery() as nursery:
        await nursery.start(keep_answering, name, Latest(State()), lives, list[Happening]().append)
        with socket() as asking:
            with no_descriptors():
                await asking.connect(f"\0{name[1:]}")
                with trio.move_on_after(0.2) as scope:
                    await asking.recv(4096)

            assert scope.cancelled_caught
            with trio.fail_after(10):
                assert await asking.recv(4096) == b"01 starting"
        nursery.cancel_scope.cancel()


async def test_a_name_that_is_taken_is_waited_for(name: str) -> None:
    """Of two with one name the first answers, until it ends. The second says so once, and takes over."""
    published: list[Happening] = []
    async with trio.open_nursery() as nursery:
        first = trio.CancelScope()

        async def run_first(task_status: trio.TaskStatus[None]) -> None:
            with first:
                state = Latest(State(driver="first"))
                await keep_answering(name, state, lives, published.append, task_status=task_status)

        await nursery.start(run_first)
        await nursery.start(keep_answering, name, Latest(State(driver="second")), lives, published.append)

        assert await ask(name) == "01 first"
        first.cancel()
        answer = ""
        while not answer.endswith("second"):
            # Nobody listens, or the first ends while it is asked.
            with contextlib.suppress(ConnectionError):
                answer = await ask(name)

        assert published == [ProbesNotAnswered(name, "another process has that name")]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("resources", "words", "status"),
    [
        ({GPU: "registered"}, [], 0),
        ({GPU: "registered"}, ["--ready"], 0),
        ({GPU: "waiting for the kubelet"}, [], 0),
        ({GPU: "waiting for the kubelet"}, ["--ready"], 1),
    ],
)
async def test_the_command_says_it_in_a_line_and_a_status(
    name: str, resources: dict[str, str], words: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """That it lives is asked for, or that it serves; the line is the same."""
    async with trio.open_nursery() as nursery:
        await nursery.start(keep_answering, name, Latest(State(resources=resources)), lives, list[Happening]().append)

        # What else the environment says may make no sense.
        environment = {"HEALTH_SOCKET": name, "MIG_STRATEGY": "nonsense"}
        assert await trio.to_thread.run_sync(main, words, environment) == status
        assert capsys.readouterr().out == f"{GPU}: {resources[GPU]}\n"
        nursery.cancel_scope.cancel()


def test_the_command_says_that_nobody_answers(name: str) -> None:
    """And where it asked."""
    with pytest.raises(NotAnsweredError, match=f"nobody answers at {name}"):
        main([], {"HEALTH_SOCKET": name})


def test_the_command_believes_no_stranger(name: str) -> None:
    """On a host any user can take the name while nvplug does not run."""
    if os.geteuid():
        pytest.skip("only root can become another user")
    with subprocess.Popen([sys.executable, "-c", STRANGER, name], stdout=subprocess.PIPE) as stranger:
        assert stranger.stdout is not None
        stranger.stdout.readline()
        with pytest.raises(NotAnsweredError, match="is not nvplug"):
            main([], {"HEALTH_SOCKET": name})


@pytest.mark.parametrize(
    ("words", "socket", "named"),
    [
        (["--raedy"], "@x", "--ready"),
        (["x"], "@x", "--ready"),
        ([], "/run/x", "HEALTH_SOCKET"),
        ([], "@", "HEALTH_SOCKET"),
    ],
)
def test_what_the_command_does_not_understand(words: list[str], socket: str, named: str) -> None:
    """It says what it would."""
    with pytest.raises(OptionError) as caught:
        main(words, {"HEALTH_SOCKET": socket})

    assert named in f"{caught.value}; {caught.value.remedy}"
