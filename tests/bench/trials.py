"""What is measured, and how: each trial is made with every plugin in turn, again and again."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal

import trio
from peer.kubelet import CallError, DeviceList, Kubelet

from bench.figures import CPU, MEGABYTES, MILLISECONDS, Figure, Sample, percentile
from bench.node import GPUS, MissedError, Node
from bench.placing import EVERY_SIZE, GAPS, every_size, gaps, preferred
from bench.processes import cpu_seconds, memory

__all__ = ["NORMAL", "QUICK", "TRIALS", "Pace", "Samples", "Trial", "schedule"]

Samples = Mapping[Figure, Sequence[Sample]]


@dataclass(frozen=True, slots=True)
class Pace:
    """How thorough to be: seconds, but for the numbers at the end.

    Attributes:
        down: how long a kubelet is away, or nobody listens.
        mute: how long it does not answer.
        refused: how long it refuses every Register.
        quiet: how long nothing must have happened before a quiet plugin is looked at: pollers and back-offs calm down.
        idle: how long CPU time is counted.
        calls: how many calls a latency is made of.
        lives: how many restarts in a row.
        sizes: how many calls for each number of devices.
        patience: how long a plugin has to offer another number of devices.
        repeat: whether trials have all their runs, or one.
    """

    down: float
    mute: float
    refused: float
    quiet: float
    idle: float
    calls: int
    lives: int
    sizes: int
    patience: float
    repeat: bool


NORMAL: Final = Pace(
    down=1.0, mute=2.0, refused=6.0, quiet=6.0, idle=10.0, calls=500, lives=20, sizes=9, patience=10.0, repeat=True
)
QUICK: Final = Pace(
    down=0.5, mute=0.5, refused=0.5, quiet=0.5, idle=0.5, calls=20, lives=5, sizes=1, patience=2.5, repeat=False
)


@dataclass(frozen=True, slots=True)
class Trial:
    """One way to get some figures.

    Attributes:
        figures: that it has samples of; all of them are missed if it raises MissedError.
        run: gets samples. It begins from any state that the trial before may have left, and leaves any.
        runs: how often.
        together: whether all plugins run at once: where CPU time is counted, not real time, noise is no matter.
    """

    figures: tuple[Figure, ...]
    run: Callable[[Node, Pace], Awaitable[Samples]]
    runs: int
    together: bool = False


def schedule(trials: Sequence[Trial], *, repeat: bool) -> list[Trial]:
    """All runs, in rounds, so that what slows the machine for a while does not meet all runs of one trial."""
    rounds = max(trial.runs for trial in trials) if repeat else 1
    # Those with few runs are in the first rounds. It does not matter which.
    return [trial for turn in range(rounds) for trial in trials if trial.runs > turn]


STARTED: Final = Figure("start to devices listed", MILLISECONDS, 0.35)
STOPPED: Final = Figure("SIGTERM to exit", MILLISECONDS, 2.0)
REPORTED: Final = Figure("XID event to unhealthy on the wire", MILLISECONDS, 0.1)
RESIDENT: Final = Figure("resident set, all processes", MEGABYTES, 45e6)
PROPORTIONAL: Final = Figure("proportional set, all processes", MEGABYTES, 40e6)
FILE: Final = Figure("executable file of the process", MEGABYTES, 12 * 2**20)
ASKED: Final = Figure("CPU time of one nvplug health", MILLISECONDS, 20e-3)
IDLE: Final = Figure("CPU time while idle", CPU, 1e-3)
IDLE_16: Final = Figure("CPU time while idle, 16 GPUs", CPU, 2e-3)

# An XID that no plugin may take for the fault of an application: the GPU has fallen off the bus.
_FATAL_XID: Final = 79


async def start(node: Node, _pace: Pace) -> Samples:
    """A kubelet runs already."""
    await node.ready()
    await node.stop()
    await node.start()
    return {STARTED: [await node.back(node.started) - node.started]}


async def stop(node: Node, _pace: Pace) -> Samples:
    """From a state that it could keep for ever."""
    await node.ready()
    return {STOPPED: [await node.stop()]}


async def ask(node: Node, _pace: Pace) -> Samples:
    """As a probe does."""
    await node.ready()
    file = max(Path(f"/proc/{pid}/exe").stat().st_size for pid in node.processes())  # noqa: ASYNC240  # answers at once
    asked: list[Sample] = [await node.ask_for_health() for _ in range(10)] if node.plugin.health else []
    return {FILE: [file], ASKED: asked}


async def idle(node: Node, pace: Pace) -> Samples:
    """Nothing happens."""
    await node.ready()
    await node.quiet(pace.quiet)
    held = memory(node.processes())
    return {IDLE: [await _used(node, pace)], RESIDENT: [held.resident], PROPORTIONAL: [held.proportional]}


async def idle_with_16(node: Node, pace: Pace) -> Samples:
    """Nothing happens to twice as many GPUs."""
    await node.ready(16, patience=pace.patience)
    await node.quiet(pace.quiet)
    return {IDLE_16: [await _used(node, pace)]}


async def _used(node: Node, pace: Pace) -> float:
    # Of a process that comes or goes meanwhile the CPU time is not known.
    pids = node.processes()
    at, before = time.monotonic(), {pid: cpu_seconds(pid) for pid in pids}
    await trio.sleep(pace.idle)
    left = pids & node.processes()
    if not left:
        raise MissedError("exited")
    return sum(cpu_seconds(pid) - before[pid] for pid in left) / (time.monotonic() - at)


async def report_xid(node: Node, _pace: Pace) -> Samples:
    """One GPU after the other breaks, for good."""
    await node.ready()
    # A plugin may list its devices before it listens for events.
    await node.quiet(0.5)
    samples = []
    for index in range(GPUS):

        def is_listed(one: DeviceList, left: int = GPUS - index - 1) -> bool:
            return len(one.healthy) == left

        at = time.monotonic()
        node.control.xid(index, _FATAL_XID)
        listed = await node.in_time(partial(node.kubelet.await_list, is_listed, after=at, timeout=math.inf))
        samples.append(listed.at - at)
    return {REPORTED: samples}


def calls(name: str, ask: Callable[[Kubelet, tuple[str, ...]], Awaitable[float]], runs: int) -> Trial:
    """Calls one after the other, as a kubelet makes them; ``ask`` returns the seconds that one took."""
    half, nearly_all = (Figure(f"{name}, p{percent}", MILLISECONDS) for percent in (50, 99))

    async def run(node: Node, pace: Pace) -> Samples:
        await node.ready()
        ids = node.kubelet.lists[-1].healthy
        try:
            # The first calls fill caches on both sides.
            for _ in range(10):
                await ask(node.kubelet, ids)
            seconds = [await ask(node.kubelet, ids) for _ in range(pace.calls)]
        except CallError as error:
            raise MissedError(error.code) from None
        return {half: [percentile(seconds, 50)], nearly_all: [percentile(seconds, 99)]}

    return Trial((half, nearly_all), run, runs)


async def allocate(kubelet: Kubelet, ids: tuple[str, ...]) -> float:
    """Two of eight."""
    return (await kubelet.allocate(ids[1::-1])).seconds


async def prefer(kubelet: Kubelet, ids: tuple[str, ...]) -> float:
    """Four of eight."""
    return await preferred(kubelet, ids, 4)


def trouble(
    name: str,
    make: Callable[[Kubelet, Pace], Awaitable[float]],
    *,
    limit: float = 0.25,
    runs: int = 5,
    quiet: bool = False,
) -> Trial:
    """A kubelet's trouble.

    Args:
        name: of the row, behind "back after:".
        make: makes it, and returns the time from which on the kubelet answers.
        limit: seconds from then until the devices are listed on a new stream.
        runs: how often.
        quiet: whether the plugin has not been in trouble lately: with the stream alive only a poller can tell, and one
            that has just seen something looks more often.
    """
    figure = Figure(f"back after: {name}", MILLISECONDS, limit)

    async def run(node: Node, pace: Pace) -> Samples:
        await node.ready()
        if quiet:
            await node.quiet(pace.quiet)
        at = await make(node.kubelet, pace)
        return {figure: [await node.back(at) - at]}

    return Trial((figure,), run, runs)


async def restart(kubelet: Kubelet, _pace: Pace) -> float:
    """It ends as a process does, and a new one wipes the directory."""
    return await kubelet.restart()


async def crash(kubelet: Kubelet, _pace: Pace) -> float:
    """SIGKILL, another process, and the wipe."""
    return await kubelet.crash()


async def restart_after(kubelet: Kubelet, pace: Pace) -> float:
    """There is a file kubelet.sock, and nobody has it open."""
    return await kubelet.restart(down=pace.down)


async def nobody_listens(kubelet: Kubelet, pace: Pace) -> float:
    """A new kubelet has bound its socket, and refuses for a while."""
    await kubelet.stop()
    await kubelet.bind()
    await trio.sleep(pace.down)
    return await kubelet.listen()


async def starts_mute(kubelet: Kubelet, pace: Pace, how: Literal["backlog", "silent", "handler"]) -> float:
    """connect() succeeds, and there is no answer for a while."""
    await kubelet.stop()
    await kubelet.start(mute=how)
    await trio.sleep(pace.mute)
    return await kubelet.unmute()


async def refuses(kubelet: Kubelet, pace: Pace) -> float:
    """A new kubelet refuses every Register for a while."""
    await kubelet.stop()
    await kubelet.refuse("not now")
    await kubelet.start()
    await trio.sleep(pace.refused)
    return await kubelet.accept()


async def restarts(kubelet: Kubelet, pace: Pace) -> float:
    """One life after the other, each cut off at another moment of the registration."""
    at = 0.0
    for life in range(pace.lives):
        await trio.sleep(0.01 * (life % 10))
        at = await kubelet.restart()
    return at


async def cut(kubelet: Kubelet, _pace: Pace) -> float:
    """The stream is cut, and nothing else is wrong."""
    return await kubelet.cut()


async def replace(kubelet: Kubelet, _pace: Pace, *, cut: bool) -> float:
    """Another kubelet.sock; nothing is wiped."""
    return await kubelet.replace_socket(cut=cut)


async def delete(kubelet: Kubelet, _pace: Pace) -> float:
    """Somebody removes the plugin's socket."""
    return kubelet.delete_plugin_sockets()


async def replace_directory(kubelet: Kubelet, _pace: Pace) -> float:
    """Somebody removes the directory; a new one has a new kubelet.sock."""
    return await kubelet.replace_directory()


_EARLY: Final = Figure("back after: started before the kubelet", MILLISECONDS, 0.25)


async def start_early(node: Node, pace: Pace) -> Samples:
    """The directory is there and empty, and no kubelet."""
    await node.ready()
    await node.stop()
    await node.kubelet.stop()
    node.kubelet.socket.unlink()
    await node.start()
    # As long as anything needs to start, on a slow machine too: how far a peer is cannot be seen from outside.
    await trio.sleep(1.0 + pace.down)
    at = await node.kubelet.start()
    return {_EARLY: [await node.back(at) - at]}


TRIALS: Final[Sequence[Trial]] = (
    Trial((STARTED,), start, 8),
    Trial((FILE, ASKED), ask, 1),
    trouble("kubelet restarted, directory wiped", restart, runs=8),
    trouble("kubelet killed, directory wiped", crash),
    trouble("kubelet.sock replaced, stream cut", partial(replace, cut=True)),
    trouble("kubelet.sock replaced, stream lives", partial(replace, cut=False), runs=2, quiet=True),
    trouble("stream cut", cut, runs=8),
    trouble("dead kubelet.sock for a while", restart_after, runs=3),
    trouble("nobody listens for a while", nobody_listens, runs=3),
    trouble("mute, never accepts", partial(starts_mute, how="backlog"), runs=2),
    trouble("mute, accepts and is silent", partial(starts_mute, how="silent"), runs=2),
    trouble("mute, Register does not return", partial(starts_mute, how="handler"), runs=2),
    Trial((_EARLY,), start_early, 3),
    trouble("twenty restarts", restarts, runs=2),
    trouble("Register refused for a while", refuses, limit=0.5, runs=2),
    trouble("its socket deleted, stream lives", delete, limit=0.75, runs=3, quiet=True),
    trouble("directory replaced, stream lives", replace_directory, limit=0.75, runs=2, quiet=True),
    # Before the calls: the deadline of each may keep a plugin busy for its ten seconds.
    Trial((IDLE, RESIDENT, PROPORTIONAL), idle, 2, together=True),
    Trial((IDLE_16,), idle_with_16, 2, together=True),
    calls("Allocate", allocate, 3),
    calls("GetPreferredAllocation", prefer, 3),
    *(
        Trial((figure,), partial(every_size, gpus=gpus, replicas=replicas), 1)
        for (gpus, replicas), figure in EVERY_SIZE.items()
    ),
    Trial((GAPS,), gaps, 1),
    Trial((REPORTED,), report_xid, 2),
    Trial((STOPPED,), stop, 5),
)
