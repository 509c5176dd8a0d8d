"""nvplug: the NVIDIA GPU device plugin for Kubernetes. The program, on one page.

Each command imports what it needs when it runs, so that ``run`` does not pay for the others.
"""

from __future__ import annotations

import difflib
import os
import signal
import sys
from typing import TYPE_CHECKING

from _nvplug.errors import NvplugError, OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import trio

    from _nvplug.config import Config
    from _nvplug.drivers import Driver

__all__ = ["main"]

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

USAGE = """\
nvplug offers the NVIDIA GPUs of this node to its kubelet.

  nvplug [run] [FLAGS]    serve until SIGTERM or SIGINT
  nvplug devices [FLAGS]  show the GPUs that would be offered
  nvplug demo             play the main job through, with simulated GPUs and a small kubelet
  nvplug --version        show which nvplug this is

Flags, each with its variables and its default:

"""

INERT_USAGE = """\

What NVIDIA's plugin has besides is accepted where it asks for nothing:

"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command, and returns the exit status: 0, or that of the error that ended it."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = words.pop(0) if words and not words[0].startswith("-") else "run"
    try:
        if name not in COMMANDS:
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            raise OptionError(
                f"there is no command {name!r}", remedy=f"did you mean {near[0]}?" if near else "see nvplug --help"
            )
        if {"-h", "-help", "--help"}.intersection(words):
            name = "help"
        elif {"-version", "--version"}.intersection(words):
            name = "version"
        return COMMANDS[name](words)
    except* NvplugError as group:
        error = first(group)
        sys.stderr.write(f"nvplug: {error}; {error.remedy}\n")
        status = error.exit_code
    return status


def run(arguments: Sequence[str]) -> int:
    """``nvplug run``: serves until told to end."""
    # Signals wait until somebody listens. Otherwise one during the start would end the process with the wrong status,
    # and the first process of a container would not notice it at all.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    import trio

    from _nvplug.config import read_config
    from _nvplug.observe.logs import set_up_logging

    config = read_config(arguments, os.environ)
    driver = driver_for(config)
    set_up_logging()
    trio.run(serve, config, driver)
    return 0


async def serve(config: Config, driver: Driver) -> None:
    """Every task of the program, and the cells through which one tells the next: driver, offer, kubelet."""
    import trio

    from _nvplug.hardware import Hardware
    from _nvplug.health import Health, watch
    from _nvplug.kubelet.loop import open_loop
    from _nvplug.kubelet.registrar import keep_registered
    from _nvplug.latest import Latest
    from _nvplug.observe.logs import log
    from _nvplug.resources import Offer, keep_offer

    hardware, health, offer = Latest(Hardware()), Latest(Health()), Latest(Offer())
    # The loop is around the nursery: streams are ended and sockets removed while the tasks are being cancelled.
    async with open_loop(), trio.open_nursery() as nursery:
        await nursery.start(wait_for_signal, nursery.cancel_scope)
        nursery.start_soon(watch, driver, hardware, health, log, name="driver")
        nursery.start_soon(keep_offer, hardware, health, offer, name="offer")
        nursery.start_soon(keep_registered, offer, config, log, name="kubelet")


async def wait_for_signal(scope: trio.CancelScope, *, task_status: trio.TaskStatus[None]) -> None:
    """Cancels ``scope`` at the first SIGTERM or SIGINT."""
    import trio

    with trio.open_signal_receiver(*STOP_SIGNALS) as signals:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        task_status.started()
        async for _ in signals:
            # From here on they wait again: a second one must not cut short what the first one begins.
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            scope.cancel()


def driver_for(config: Config) -> Driver:
    """The driver that the options ask for. Simulated GPUs are never chosen by themselves."""
    if config.device_discovery_strategy.startswith("simulated:"):
        from _nvplug.drivers.simulated import SimulatedDriver, parse_simulated

        return SimulatedDriver(parse_simulated(config.device_discovery_strategy))
    from _nvplug.drivers.nvml import NvmlDriver

    return NvmlDriver(config.driver_root_ctr_path)


def devices(arguments: Sequence[str]) -> int:
    """``nvplug devices``: a table of the GPUs."""
    from _nvplug.commands.devices import main as show
    from _nvplug.config import read_config

    return show(driver_for(read_config(arguments, os.environ)))


def demo(arguments: Sequence[str]) -> int:
    """``nvplug demo``: the main job where there is neither GPU nor kubelet."""
    from _nvplug.commands.demo import main as play

    return play(arguments)


def usage(_arguments: Sequence[str]) -> int:
    """``nvplug --help``."""
    from _nvplug.config import INERT, OPTIONS

    sys.stdout.write(USAGE)
    for option in OPTIONS:
        sys.stdout.write(f"  {option.written}\n      {option.help}{f' [{option.default}]' if option.default else ''}\n")
    sys.stdout.write(INERT_USAGE)
    for option in INERT:
        sys.stdout.write(f"  {option.written}\n      {option.help}\n")
    return 0


def version(_arguments: Sequence[str]) -> int:
    """``nvplug --version``: of nvplug, of the commit that it was built from, and of what came along."""
    import platform

    from _nvplug import COMMIT, VERSION

    origin = f"commit {COMMIT}" if COMMIT else "from source"
    sys.stdout.write(
        f"nvplug {VERSION} ({origin}; Python {platform.python_version()}, {os.confstr('CS_GNU_LIBC_VERSION')})\n"
    )
    return 0


def first(group: BaseExceptionGroup[NvplugError]) -> NvplugError:
    """One error of a group: they have one cause."""
    error = group.exceptions[0]
    return first(error) if isinstance(error, BaseExceptionGroup) else error


COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "run": run,
    "devices": devices,
    "demo": demo,
    "help": usage,
    "version": version,
}

if __name__ == "__main__":
    sys.exit(main())
