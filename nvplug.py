"""nvplug: the NVIDIA GPU device plugin for Kubernetes. The program, on one page.

Each command imports what it needs when it runs, so that ``run`` does not pay for the others.
"""

from __future__ import annotations

import difflib
import functools
import gc
import os
import signal
import sys
from typing import TYPE_CHECKING

from _nvplug.errors import NvplugError, OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import trio

    from _nvplug.config import Config, Settings
    from _nvplug.drivers import Driver
    from _nvplug.happenings import Happening
    from _nvplug.observe.systemd import Service

__all__ = ["main"]

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)

USAGE = """\
nvplug offers the NVIDIA GPUs of this node to its kubelet.

  nvplug [run] [FLAGS]    serve until SIGTERM, SIGINT or SIGQUIT
  nvplug devices [FLAGS]  show the GPUs that would be offered; with --topology, how they are joined; with --prefer N,
                          which of them a container that asks for N would be given, and why
  nvplug config show [FLAGS]
                          show the options in force, each with its origin
  nvplug config check FILE
                          judge a configuration file
  nvplug health [--ready] ask the nvplug that runs whether it lives; or serves
  nvplug cdi [FLAGS]      print the CDI document of this node
  nvplug demo             play the main job through, with simulated GPUs and a small kubelet
  nvplug --version        show which nvplug this is

Flags, each with its variables, its default, and its key in the file of --config-file:

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
    except* KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except* BrokenPipeError:
        # Whoever read our output has left. What is still in the buffer is not wanted, and must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 128 + signal.SIGPIPE
    return status


def run(arguments: Sequence[str]) -> int:
    """``nvplug run``: serves until told to end."""
    # Signals wait until somebody listens. Otherwise one during the start would end the process with the wrong status,
    # and the first process of a container would not notice it at all.
    signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGHUP})
    # When nobody listens any more they do nothing: worker threads do not block them, and one would end the process with
    # the wrong status. (Not ignored yet, or those that wait would be dropped.)
    for each in (*STOP_SIGNALS, signal.SIGHUP):
        signal.signal(each, do_nothing)
    # What is imported is there to stay. To look for garbage among it takes a fifteenth of the time of a start.
    gc.disable()
    import trio

    from _nvplug.config import read_settings
    from _nvplug.observe.logs import set_up_logging
    from _nvplug.observe.systemd import service_from

    service = service_from(os.environ)
    read = functools.partial(read_settings, arguments, os.environ)
    settings = read()
    driver = driver_for(settings.config)
    log = set_up_logging()
    try:
        trio.run(serve, driver, settings, read, service)
    finally:
        # Why it ends is written by main, behind all that is still to be written.
        log.flush()
    # A handler of ours would be taken away before the last threads are.
    for each in (*STOP_SIGNALS, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    return 0


async def serve(
    driver: Driver, settings: Settings, read: Callable[[], Settings], service: Service | None = None
) -> None:
    """Every task, and the cells by which they tell the next: config, driver, container, offer, plan, cdi, kubelet."""
    import trio

    from _nvplug.config.watching import keep_config
    from _nvplug.container.describing import keep_described
    from _nvplug.container.facts import Terms
    from _nvplug.container.looking import keep_terms
    from _nvplug.hardware import Hardware
    from _nvplug.health import Health, Memory, policy_of, watch
    from _nvplug.kubelet.loop import come_round, open_loop
    from _nvplug.kubelet.registrar import keep_registered
    from _nvplug.latest import Latest
    from _nvplug.observe.logs import log
    from _nvplug.observe.probe import keep_answering
    from _nvplug.observe.systemd import State, after, keep_told
    from _nvplug.placement import Plan, keep_plan
    from _nvplug.resources import Offer, keep_offer
    from _nvplug.supervise import again

    gc.enable()
    state = Latest(State())

    def publish(happening: Happening) -> None:
        log(happening)
        state.set(after(state.value, happening))

    asked = settings.config
    config, terms, agreed = Latest(asked), Latest(Terms(asked)), Latest(Terms(asked))
    hardware, health = Latest(Hardware()), Latest(Health())
    offer, described, plan = Latest(Offer()), Latest(Offer()), Latest(Plan())
    policy = Latest(policy_of(asked))
    # What only an event told is kept where a service manager made a directory for it, until the next boot.
    runtime = os.environ.get("RUNTIME_DIRECTORY", "").partition(":")[0]
    keep_health = functools.partial(
        watch,
        driver,
        hardware,
        health,
        publish,
        policy=policy,
        memory=Memory.at(runtime) if runtime else None,
        forget=asked.forget_health,
    )
    keep_node = functools.partial(keep_terms, hardware, config, terms, publish)
    # The loop is around the nursery: streams are ended and sockets removed while the tasks are being cancelled.
    async with open_loop(), trio.open_nursery() as nursery:
        await nursery.start(wait_for_signal, nursery.cancel_scope)
        await nursery.start(keep_config, config, settings, read, publish, name="config")
        await nursery.start(keep_answering, asked.health_socket, state, come_round, publish, name="probe")
        nursery.start_soon(config.follow, lambda new: policy.set(policy_of(new)), name="policy")
        nursery.start_soon(again, "the driver", keep_health, name="driver")
        nursery.start_soon(again, "the look at the node", keep_node, name="container")
        nursery.start_soon(keep_offer, hardware, health, config, terms, offer, publish, name="offer")
        nursery.start_soon(again, "the placement plan", functools.partial(keep_plan, hardware, plan), name="placement")
        nursery.start_soon(keep_described, hardware, offer, terms, described, agreed, publish, name="cdi")
        nursery.start_soon(keep_registered, described, plan, agreed, publish, name="kubelet")
        if service is not None:
            nursery.start_soon(keep_told, service, state, come_round, name="observe")


def do_nothing(_number: int, _frame: object) -> None:
    """Handles a signal that is of no concern any more."""


async def wait_for_signal(scope: trio.CancelScope, *, task_status: trio.TaskStatus[None]) -> None:
    """Cancels ``scope`` at the first signal that asks for an end."""
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
    from _nvplug.drivers.nvml import NvmlDriver, Pace
    from _nvplug.drivers.platforms import check_platform

    if config.device_discovery_strategy == "auto":
        check_platform((config.driver_root_ctr_path, "/"))
    return NvmlDriver(config.driver_root_ctr_path, pace=Pace(silence=config.health_silence))


def devices(arguments: Sequence[str]) -> int:
    """``nvplug devices``: a table of the GPUs, how they are joined, or which of them a container would be given."""
    from _nvplug.commands.devices import main as show
    from _nvplug.commands.devices import read_view
    from _nvplug.config import read_config

    view, words = read_view(arguments)
    config = read_config(words, os.environ)
    return show(driver_for(config), config, view)


def config(arguments: Sequence[str]) -> int:
    """``nvplug config``: what is in force and why, or whether a file is good."""
    from _nvplug.commands.config import main as tell

    return tell(arguments, os.environ)


def health(arguments: Sequence[str]) -> int:
    """``nvplug health``: whether the nvplug that runs lives. The executable answers that by itself, in launcher.c."""
    from _nvplug.commands.health import main as ask

    return ask(arguments, os.environ)


def cdi(arguments: Sequence[str]) -> int:
    """``nvplug cdi``: the document by which container runtimes find the GPUs."""
    from _nvplug.commands.cdi import main as tell
    from _nvplug.config import read_config

    config = read_config(arguments, os.environ)
    return tell(driver_for(config), config)


def demo(arguments: Sequence[str]) -> int:
    """``nvplug demo``: the main job where there is neither GPU nor kubelet."""
    from _nvplug.commands.demo import main as play

    return play(arguments)


def usage(_arguments: Sequence[str]) -> int:
    """``nvplug --help``."""
    from _nvplug.config import INERT, OPTIONS

    sys.stdout.write(USAGE)
    for option in OPTIONS:
        default = f" [{option.default}]" if option.default else ""
        sys.stdout.write(f"  {option.written}\n      {option.help}{default}\n{in_file(option.key)}")
    sys.stdout.write(INERT_USAGE)
    for option in INERT:
        sys.stdout.write(f"  {option.written}\n      {option.help}\n{in_file(option.key)}")
    return 0


def in_file(key: str) -> str:
    """A line of the usage: where an option stands in the configuration file."""
    return f"      in the file: {key}\n" if key else ""


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
    "config": config,
    "health": health,
    "cdi": cdi,
    "demo": demo,
    "help": usage,
    "version": version,
}

if __name__ == "__main__":
    sys.exit(main())
