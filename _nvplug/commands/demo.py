"""``nvplug demo``: the main job where there is neither a GPU nor a kubelet, as a story with timings.

The program under show is an unmodified ``nvplug run`` on simulated GPUs, and the kubelet a process of its
own, which speaks gRPC to it and nothing else. What is told is what that kubelet saw on the wire; each step is
checked, and the first that goes wrong ends the story with exit status 1.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import trio

from _nvplug.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

__all__ = ["main", "run_demo"]

PAUSE: Final = 2.5
"""Seconds between two steps, so that a person can follow."""

PATIENCE: Final = 20.0
"""Seconds that each step may take: far more than it should, as the machine may be busy with other things."""

_MACHINE: Final = "8xH100"
_RESOURCE: Final = "nvidia.com/gpu"
_BROKEN: Final = 3
_XID: Final = 79

# nvplug promises to end within 2 s; the rest is for a busy machine.
_STOP_WITHIN: Final = 5.0

_LOG_LINES: Final = 30

# From linux/prctl.h.
_PR_SET_PDEATHSIG: Final = 1


class _WrongError(Exception):
    """A step did not go as it should."""


def main(arguments: Sequence[str]) -> int:
    """``nvplug demo``; with ``--kubelet DIRECTORY``, as which it starts itself, the kubelet of the demo.

    Raises:
        OptionError: other arguments were given.
    """
    match arguments:
        case []:
            return trio.run(run_demo)
        case ["--kubelet", directory]:
            # Only this process needs asyncio.
            from _nvplug.kubelet.standin import run_standin  # noqa: PLC0415

            return run_standin(directory)
        case _:
            raise OptionError(f"demo takes no options, such as {arguments[0]}", remedy="Run nvplug demo")


async def run_demo(pause: float = PAUSE, patience: float = PATIENCE) -> int:
    """Tells the story on standard output; leaves no process, socket or directory, however it ends.

    Args:
        pause: seconds between steps.
        patience: seconds that each step may take.

    Returns:
        0 if all went well, 1 if not, 128 and the signal's number after SIGINT, SIGTERM or SIGHUP.
    """
    status = 0
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
        async with trio.open_nursery() as nursery:
            story = trio.CancelScope()

            async def watch_signals() -> None:
                nonlocal status
                # To the very end: a second Ctrl-C must not interrupt the tidying up after the first.
                async for signum in signals:
                    status = 128 + signum
                    story.cancel()

            nursery.start_soon(watch_signals)
            with story:
                async with _open_stage(patience) as stage:
                    try:
                        await _tell_story(stage, pause)
                    except BrokenPipeError:
                        # Whoever read the story has left; what is in the buffer must not fail again at exit.
                        status = 1
                        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                    except _WrongError as wrong:
                        await stage.close()
                        status = 1
                        sys.stderr.write(f"\nnvplug demo: {wrong}\n{stage.logs()}")
            nursery.cancel_scope.cancel()
    return status


async def _tell_story(stage: _Stage, pause: float) -> None:
    kubelet, _ = await stage.start_kubelet()
    _title("A kubelet listens. nvplug starts")
    _say(f"$ nvplug run {' '.join(stage.arguments)}")
    nvplug, started = stage.start_nvplug()

    _title("1. nvplug registers, and lists its devices")
    registered = await stage.next("register")
    listed = await stage.next("list")
    devices = listed["devices"]
    _check(registered["resource"] == _RESOURCE, f"it registered {registered['resource']!r}")
    _check(registered["version"] == "v1beta1", f"it registered for {registered['version']!r}")
    _check(len(devices) == 8, f"it listed {len(devices)} devices instead of 8")
    _check(len(_healthy(devices)) == 8, f"only {len(_healthy(devices))} of 8 devices are healthy")
    for device in devices:
        _say(f"{device['id']}   {device['health']}   NUMA {', '.join(map(str, device['numa'])) or '-'}")
    _say(
        f"{len(_healthy(devices))} of {len(devices)} {registered['resource']} allocatable, "
        f"{_ms(listed['at'] - started)} after the start of the process"
    )
    await trio.sleep(pause)

    _title("2. A pod asks for two GPUs; its container gets")
    await stage.order(kubelet, do="allocate", count=2)
    allocated = await stage.next("allocated")
    _check_allocation(allocated, [device["id"] for device in devices])
    for name, value in sorted(allocated["envs"].items()):
        _say(f"env      {name}={value}")
    for host, inside, permissions in allocated["devices"]:
        _say(f"device   {inside}   {permissions}" + (f"   (on the host {host})" if host != inside else ""))
    for host, inside, read_only in allocated["mounts"]:
        _say(f"mount    {inside}   {'ro' if read_only else 'rw'}   (on the host {host})")
    for name, value in sorted(allocated["annotations"].items()):
        _say(f"note     {name}={value}")
    for name in allocated["cdi_devices"]:
        _say(f"cdi      {name}")
    _say(f"answered in {_ms(allocated['seconds'])}")
    await trio.sleep(pause)

    victim = devices[_BROKEN]["id"]
    _title(f"3. GPU {_BROKEN} breaks: the driver reports XID {_XID}")
    at = stage.describe(broken=True)
    listed = await stage.next("list")
    sick = [device for device in listed["devices"] if device["health"] != "Healthy"]
    _check([device["id"] for device in sick] == [victim], f"unhealthy is {sick}, not {victim}")
    _check(_ids(listed["devices"]) == _ids(devices), "the list no longer has the same devices")
    _say(f"{victim}   {sick[0]['health']}")
    _say(f"{len(_healthy(listed['devices']))} of {len(devices)} allocatable, {_ms(listed['at'] - at)} later")
    await trio.sleep(pause)

    _title(f"4. GPU {_BROKEN} works again")
    at = stage.describe(broken=False)
    listed = await stage.next("list")
    _check(listed["devices"] == devices, "the list is not what it was before")
    _say(f"{victim}   {listed['devices'][_BROKEN]['health']}")
    _say(f"{len(_healthy(listed['devices']))} of {len(devices)} allocatable, {_ms(listed['at'] - at)} later")
    await trio.sleep(pause)

    _title("5. The kubelet restarts: its directory is wiped, its socket is another one")
    await stage.dismiss(kubelet)
    _, listening = await stage.start_kubelet()
    again = await stage.next("register")
    listed = await stage.next("list")
    _check(again["endpoint"] != registered["endpoint"], "it registered a socket that was wiped")
    _check(listed["devices"] == devices, "the list is not what it was before")
    _say(f"nvplug serves a new socket, {again['endpoint']}")
    _say(
        f"{len(_healthy(listed['devices']))} of {len(devices)} allocatable, "
        f"{_ms(listed['at'] - listening)} after the kubelet listened"
    )
    await trio.sleep(pause)

    _title("6. nvplug is told to stop")
    code, seconds = await stage.dismiss(nvplug)
    ended = await stage.next("stream ended")
    left = [path.name for path in stage.sockets.iterdir() if path.name != "kubelet.sock"]
    _check(code == 0, f"nvplug ended with status {code}")
    _check(ended["how"] == "OK", f"its stream did not end well: {ended['how']}")
    _check(stage.unread() == 0, "the kubelet saw more after that")
    _check(not left, f"it left {', '.join(left)} behind")
    _say(f"exit code {code} after {_ms(seconds)}, stream closed, sockets left: {len(left)}")


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise _WrongError(otherwise)


def _check_allocation(allocated: dict[str, Any], offered: Sequence[str]) -> None:
    """Two of the devices offered, the same in the environment, and the nodes of these and no other GPU."""
    ids = sorted(allocated["ids"], key=offered.index) if set(allocated["ids"]) <= set(offered) else []
    _check(len(set(ids)) == 2, f"the kubelet was advised to take {allocated['ids']}")
    visible = allocated["envs"].get("NVIDIA_VISIBLE_DEVICES", "")
    _check(visible == ",".join(ids), f"NVIDIA_VISIBLE_DEVICES={visible!r} instead of {','.join(ids)!r}")
    inside = [path for _, path, _ in allocated["devices"]]
    gpus = [path for path in inside if path.removeprefix("/dev/nvidia").isdecimal()]
    _check(gpus == [f"/dev/nvidia{offered.index(one)}" for one in ids], f"the GPUs' nodes are {gpus}")
    _check("/dev/nvidiactl" in inside, f"/dev/nvidiactl is not among the nodes {inside}")


def _ids(devices: Sequence[dict[str, Any]]) -> list[str]:
    return [device["id"] for device in devices]


def _healthy(devices: Sequence[dict[str, Any]]) -> list[str]:
    return [device["id"] for device in devices if device["health"] == "Healthy"]


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 0.01 else f"{seconds * 1000:.0f} ms"


def _title(text: str) -> None:
    sys.stdout.write(f"\n{_emphasised(text)}\n")
    sys.stdout.flush()


def _say(text: str) -> None:
    sys.stdout.write(f"   {text}\n")
    sys.stdout.flush()


def _emphasised(text: str) -> str:
    return f"\033[1m{text}\033[0m" if sys.stdout.isatty() and "NO_COLOR" not in os.environ else text


def _ourselves() -> list[str]:
    """The command that runs this program: itself if frozen, otherwise nvplug.py, beside the rooms."""
    if getattr(sys, "frozen", False):
        return [sys.executable]
    return [sys.executable, str(Path(__file__).parents[2] / "nvplug.py")]


@asynccontextmanager
async def _open_stage(patience: float) -> AsyncGenerator[_Stage, None]:
    """A temporary directory, and the processes that are started on it; none of it is left afterwards."""
    # nvplug refuses directories of more than 70 bytes, because a socket's path has at most 107.
    short = len(tempfile.gettempdir()) < 32
    directory = Path(tempfile.mkdtemp(prefix="nvplug-demo-", dir=None if short else "/tmp"))  # noqa: S108
    try:
        # A nursery around the yield of a context manager, not of a generator: entered and left by one task.
        async with trio.open_nursery() as nursery:
            stage = _Stage(directory, nursery, patience)
            try:
                yield stage
            finally:
                with trio.CancelScope(shield=True):
                    await stage.close()
                nursery.cancel_scope.cancel()
    finally:
        shutil.rmtree(directory)


class _Stage:
    """Where the story plays, who plays in it, and what the kubelet sees."""

    def __init__(self, directory: Path, nursery: trio.Nursery, patience: float) -> None:
        self.sockets = directory / "device-plugins"
        self._directory = directory
        self._description = directory / "machine.json"
        self._nursery = nursery
        self._patience = patience
        self._players: list[subprocess.Popen[bytes]] = []
        self._dismissed: set[int] = set()
        self._orders: dict[int, trio.lowlevel.FdStream] = {}
        self._seen, self._facts = trio.open_memory_channel[dict[str, Any]](1000)
        self.arguments = (
            "--kubelet-socket",
            str(self.sockets / "kubelet.sock"),
            "--device-discovery-strategy",
            f"simulated:{self._description}",
            "--pass-device-specs",
        )
        self.describe(broken=False)

    def describe(self, *, broken: bool) -> float:
        """Writes what the simulated GPUs are, and returns the time just before that took effect."""
        text = {"machine": _MACHINE, "faults": {str(_BROKEN): {"xid": _XID}} if broken else {}}
        new = self._description.with_suffix(".new")
        new.write_text(json.dumps(text))
        at = time.monotonic()
        new.replace(self._description)
        return at

    async def start_kubelet(self) -> tuple[subprocess.Popen[bytes], float]:
        """A new stand-in, and since when it listens."""
        stdin, orders = os.pipe()
        facts, stdout = os.pipe()
        try:
            kubelet = self._start("kubelet", [*_ourselves(), "demo", "--kubelet", str(self.sockets)], stdin, stdout)
        finally:
            os.close(stdin)
            os.close(stdout)
        self._orders[kubelet.pid] = trio.lowlevel.FdStream(orders)
        self._nursery.start_soon(self._listen, trio.lowlevel.FdStream(facts))
        return kubelet, (await self.next("listening"))["at"]

    def start_nvplug(self) -> tuple[subprocess.Popen[bytes], float]:
        """The program under show, and when its process was made."""
        at = time.monotonic()
        command = [*_ourselves(), "run", *self.arguments]
        return self._start("nvplug", command, subprocess.DEVNULL, subprocess.DEVNULL), at

    async def order(self, kubelet: subprocess.Popen[bytes], **command: Any) -> None:
        """Tells the kubelet to do something."""
        await self._orders[kubelet.pid].send_all(json.dumps(command).encode() + b"\n")

    async def next(self, saw: str) -> dict[str, Any]:
        """The next thing that the kubelet saw, which must be this: neither more nor less may happen."""
        with trio.move_on_after(self._patience) as waiting:
            fact = await self._facts.receive()
        _check(not waiting.cancelled_caught, f"the kubelet has not seen {saw!r} in {self._patience:g} s")
        _check(fact["saw"] == saw, f"the kubelet should have seen {saw!r}; instead: {fact}")
        return fact

    def unread(self) -> int:
        """How many things the kubelet saw that nobody has asked for."""
        return self._facts.statistics().current_buffer_used

    async def dismiss(self, player: subprocess.Popen[bytes]) -> tuple[int, float]:
        """SIGTERM; returns the exit status and how many seconds it took."""
        self._dismissed.add(player.pid)
        at = time.monotonic()
        if player.poll() is None:
            player.terminate()
            with trio.move_on_after(_STOP_WITHIN):
                await _ended(player)
            player.kill()
            await _ended(player)
        return player.wait(), time.monotonic() - at

    async def close(self) -> None:
        """Ends whoever still runs."""
        for player in reversed(self._players):
            await self.dismiss(player)

    def logs(self) -> str:
        """What the players wrote to their stderr, for when something went wrong."""
        text = ""
        for path in sorted(self._directory.glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()[-_LOG_LINES:]
            if lines:
                text += "\n".join([f"\nThe last lines of {path.stem}:", *lines, ""])
        return text

    def _start(self, name: str, command: Sequence[str], stdin: int, stdout: int) -> subprocess.Popen[bytes]:
        # What is set for a plugin on a real node, in an image or a shell, must not change the story.
        kept = ("HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "TMPDIR")
        with (self._directory / f"{name}.log").open("ab") as log:
            # Not Trio's open_process: it forks in a thread, and PR_SET_PDEATHSIG means that thread's death.
            player = subprocess.Popen(  # noqa: S603  # our own command
                command,
                stdin=stdin,
                stdout=stdout,
                stderr=log,
                env={name: os.environ[name] for name in kept if name in os.environ}
                # And probes of a true one must not ask here.
                | {"HEALTH_SOCKET": f"@nvplug-demo-{os.getpid()}"},
                # A Ctrl-C in the terminal is for the demo alone, which then ends the others in order.
                process_group=0,
                preexec_fn=_dies_with(os.getpid()),  # noqa: PLW1509  # there is no other thread
            )
        self._players.append(player)
        self._nursery.start_soon(self._watch, name, player)
        return player

    async def _listen(self, stdout: trio.lowlevel.FdStream) -> None:
        rest = b""
        async with stdout:
            async for chunk in stdout:
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self._seen.send_nowait(json.loads(line))

    async def _watch(self, name: str, player: subprocess.Popen[bytes]) -> None:
        await _ended(player)
        if player.pid not in self._dismissed:
            self._seen.send_nowait({"saw": f"the end of the process of {name}", "status": player.wait()})


async def _ended(player: subprocess.Popen[bytes]) -> None:
    """Waits until the process has ended; it may have been waited for already."""
    if player.poll() is not None:
        return
    descriptor = os.pidfd_open(player.pid)
    try:
        await trio.lowlevel.wait_readable(descriptor)
    finally:
        os.close(descriptor)


def _dies_with(parent: int) -> Callable[[], None]:
    """To be called between fork and exec: the child gets SIGTERM when the process ``parent`` ends."""
    prctl = ctypes.CDLL(None).prctl

    def arrange() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        # It may have ended before that.
        if os.getppid() != parent:
            os._exit(1)

    return arrange
