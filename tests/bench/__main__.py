"""The command: ``python -m tests.bench [--peer "command"]`` from the checkout."""

from __future__ import annotations

import argparse
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TypeVar

import trio

# The stand-ins in tests/ are imported as pytest does it, and not as parts of a package called tests.
sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.figures import Figure, Missed, Sample, table
from bench.node import (
    GPUS,
    NVPLUG,
    PATIENCE,
    MissedError,
    Node,
    Plugin,
    PluginError,
    frozen,
    namespace,
    node_in,
    peer,
)
from bench.soak import soak
from bench.trials import NORMAL, QUICK, TRIALS, Pace, Trial, schedule

__all__: list[str] = []

T = TypeVar("T")

PEER = f"""\
what a peer must be:
  A shell command that becomes a device plugin, and ends by SIGTERM. It is run as "exec COMMAND"; to set variables,
  begin with env. It must offer {GPUS} devices as nvidia.com/gpu, and finds
    - libnvidia-ml.so.1, a stand-in with {GPUS} GPUs, through LD_LIBRARY_PATH (NVML_STANDIN is for that library);
    - the kubelet, a stand-in too, at /var/lib/kubelet/device-plugins: it runs in a mount namespace in which that is
      a temporary directory. That needs root. Elsewhere it must go by the variable KUBELET_SOCKET.
  nvplug is then measured in the same way, run by run in turn with the peer, in a namespace, with a kubelet and a driver
  of its own. A peer that does not do something within {PATIENCE:g} s is killed, and started again for the next row.

  python -m tests.bench --peer "python3 /another/checkout/nvplug.py"
"""


def main() -> int:
    """Returns the exit status: 0 if everything could be measured of nvplug, whatever the figures are."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench",
        description="How long everything takes, as one table. What exceeds a limit named in an issue is marked with !.",
        epilog=PEER,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--peer", metavar="COMMAND", help="another device plugin, measured beside nvplug")
    parser.add_argument(
        "--executable", metavar="PATH", help="nvplug as `make binary` makes it, instead of that in the checkout"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one run of each, and short waits: to try the benchmark itself"
    )
    parser.add_argument(
        "--soak", metavar="MINUTES", type=float, help="instead: one trouble after the other, and whether anything grows"
    )
    options = parser.parse_args()
    if options.soak:
        with tempfile.TemporaryDirectory(prefix="nvb") as scratch:
            return trio.run(until_told, partial(soak, Path(scratch), NVPLUG, options.soak), 1)
    pace = QUICK if options.quick else NORMAL
    nvplug = frozen(options.executable) if options.executable else NVPLUG
    plugins = [nvplug, peer(options.peer)] if options.peer else [nvplug]
    columns: list[dict[Figure, list[Sample]]] = []
    try:
        columns = trio.run(until_told, partial(measure, plugins, pace), columns)
    except* PluginError as group:
        sys.stderr.write(f"{_only(group)}\n")
    if not columns:
        return 1
    figures = [figure for trial in TRIALS for figure in trial.figures]
    print(table(figures, *columns))
    print(f"\n{_machine()}. Calls: as a client in Python sees them, its own time included.")
    return int(any(isinstance(sample, Missed) for samples in columns[0].values() for sample in samples))


async def until_told(work: Callable[[], Awaitable[T]], otherwise: T) -> T:
    """What the work returns, and ``otherwise`` if SIGINT or SIGTERM comes: plugins would outlive this process."""
    made = otherwise
    async with trio.open_nursery() as nursery:

        async def wait_for_signal() -> None:
            with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                async for _ in signals:
                    nursery.cancel_scope.cancel()

        nursery.start_soon(wait_for_signal)
        made = await work()
        nursery.cancel_scope.cancel()
    return made


async def measure(plugins: Sequence[Plugin], pace: Pace) -> list[dict[Figure, list[Sample]]]:
    """Makes all trials with all plugins; returns a column for each."""
    # Short: the path of a socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="nvb") as scratch:
        in_namespace = len(plugins) > 1 and _may_mount(Path(scratch))
        if len(plugins) > 1 and not in_namespace:
            sys.stderr.write("no mount namespace, which needs root: the peer must go by KUBELET_SOCKET\n")
        async with AsyncExitStack() as stack:
            nodes = [
                await stack.enter_async_context(node_in(Path(scratch, plugin.name), plugin, in_namespace=in_namespace))
                for plugin in plugins
            ]
            # A first start, which fills caches on disk, and tells whether there is anything to measure.
            for node in nodes:
                await node.ready()
            columns: list[dict[Figure, list[Sample]]] = [{} for _ in nodes]
            runs = schedule(TRIALS, repeat=pace.repeat)
            for done, trial in enumerate(runs):
                if sys.stderr.isatty():
                    sys.stderr.write(f"\r{done * 100 // len(runs):3} %  {trial.figures[0].name:<60}\r")
                await make(trial, nodes, columns, pace)
            if sys.stderr.isatty():
                sys.stderr.write(f"{'':70}\r")
            return columns


async def make(trial: Trial, nodes: Sequence[Node], columns: Sequence[dict[Figure, list[Sample]]], pace: Pace) -> None:
    """One run of a trial with every plugin: one after the other, or together."""

    async def run(node: Node, column: dict[Figure, list[Sample]]) -> None:
        try:
            samples = await trial.run(node, pace)
        except MissedError as error:
            samples = {figure: [Missed(str(error))] for figure in trial.figures}
            await node.kill()
        for figure in trial.figures:
            column.setdefault(figure, []).extend(samples[figure])

    if trial.together:
        async with trio.open_nursery() as nursery:
            for node, column in zip(nodes, columns, strict=True):
                nursery.start_soon(run, node, column)
    else:
        for node, column in zip(nodes, columns, strict=True):
            await run(node, column)


def _may_mount(directory: Path) -> bool:
    tried = subprocess.run([*namespace(directory), "true"], capture_output=True, check=False)
    return tried.returncode == 0


def _only(group: BaseExceptionGroup[PluginError]) -> PluginError:
    error = group.exceptions[0]
    return _only(error) if isinstance(error, BaseExceptionGroup) else error


def _machine() -> str:
    load = " ".join(f"{one:.1f}" for one in os.getloadavg())
    return f"Python {platform.python_version()}, {os.cpu_count()} CPUs, load {load}"


if __name__ == "__main__":
    sys.exit(main())
