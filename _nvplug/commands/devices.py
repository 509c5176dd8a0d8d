"""``nvplug devices``: the GPUs that nvplug would offer, how they are joined, and which a container would be given."""

from __future__ import annotations

import re
import sys
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import trio

from _nvplug.commands.topology import drawn, explained
from _nvplug.errors import DriverError, OptionError
from _nvplug.happenings import ConfigUnmet, DeviceExcluded, DeviceNotOffered, DriverFound, DriverTrouble
from _nvplug.hardware import Hardware
from _nvplug.health import Health, Verdict, judge
from _nvplug.latest import Latest
from _nvplug.mig import profile_of
from _nvplug.resources import Offer, next_offer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _nvplug.config import Config
    from _nvplug.drivers import Driver
    from _nvplug.happenings import Happening
    from _nvplug.hardware import GpuEvent

__all__ = ["View", "ask", "main", "read_view", "show", "table"]

DEADLINE = 10.0
"""Seconds that a driver gets to answer. One that loads its kernel module first takes several."""

HEADER = ("INDEX", "UUID", "NAME", "MEMORY", "NUMA", "PCI", "DEVICE-NODE", "RESOURCE", "HEALTH")
RIGHT_ALIGNED = {"INDEX", "MEMORY", "NUMA"}


class View(NamedTuple):
    """What to show; if nothing of this, the table.

    Attributes:
        topology: whether to draw how the GPUs are joined.
        prefer: explain what a container that asks for so many would be given; 0 for no explanation.
    """

    topology: bool = False
    prefer: int = 0


def read_view(arguments: Sequence[str]) -> tuple[View, list[str]]:
    """Takes ``--topology`` and ``--prefer N`` out of the arguments, and returns what is left.

    Raises:
        OptionError: N is not a number of devices.
    """
    view, rest = View(), list[str]()
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if word in {"-topology", "--topology"}:
            view = view._replace(topology=True)
        elif name in {"-prefer", "--prefer"}:
            text = value if equals else next(words, "")
            if not re.fullmatch("[1-9][0-9]{0,5}", text):
                raise OptionError(
                    f"--prefer is {text!r}: a number of devices is wanted", remedy="write --prefer=4, for example"
                )
            view = view._replace(prefer=int(text))
        else:
            rest.append(word)
    return view, rest


def main(driver: Driver, config: Config, view: View = View()) -> int:  # noqa: B008 - frozen
    """Prints what is to be seen, or what stands in the way of it, and returns the exit status."""
    try:
        text = trio.run(show, driver, config, view)
    except DriverError as error:
        sys.stderr.write(f"nvplug devices: {error}; {error.remedy}\n")
        return error.exit_code
    sys.stdout.write(text)
    return 0


async def show(
    driver: Driver,
    config: Config,
    view: View = View(),  # noqa: B008 - frozen
    *,
    deadline: float = DEADLINE,
) -> str:
    """The GPUs of ``driver``, with what ``config`` makes of them.

    Raises:
        DriverError: see ask.
    """
    hardware, health = await ask(driver, deadline=deadline)
    parts = []
    if view.topology:
        parts.append(drawn(hardware, health))
    if view.prefer:
        parts.append(explained(hardware, next_offer(Offer(), hardware, health, config), view.prefer))
    return "\n".join(parts) or table(hardware, health, config)


async def ask(driver: Driver, *, deadline: float = DEADLINE) -> tuple[Hardware, Health]:
    """Runs ``driver`` until it knows its GPUs.

    Raises:
        DriverError: it reported trouble first, or nothing within ``deadline`` seconds.
    """
    hardware = Latest(Hardware())
    health = Health()
    trouble: DriverTrouble | None = None
    answered = trio.Event()

    def report(event: GpuEvent) -> None:
        nonlocal health
        health = judge(health, event)

    def publish(happening: Happening) -> None:
        nonlocal trouble
        if isinstance(happening, DriverTrouble):
            trouble = happening
            answered.set()
        # A driver without any GPU may have nothing to put in a snapshot that an empty one does not have.
        elif isinstance(happening, DriverFound) and not happening.gpus:
            answered.set()

    async def wait_for_snapshot() -> None:
        await hardware.newer_than(0)
        answered.set()

    with trio.move_on_after(deadline):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(driver.run, hardware, report, publish, name="driver")
            nursery.start_soon(wait_for_snapshot)
            await answered.wait()
            nursery.cancel_scope.cancel()
    if not answered.is_set():
        raise DriverError(
            f"the driver did not answer within {deadline:g} s",
            remedy="see if `nvidia-smi -L` answers; if not, the kernel log (`dmesg`) says more",
        )
    if trouble is not None and not hardware.version:
        raise DriverError(trouble.reason, remedy=trouble.remedy)
    return hardware.value, health


def table(hardware: Hardware, health: Health, config: Config) -> str:
    """One line per GPU and MIG device in index order, aligned; below, what is not offered and why.

    Args:
        hardware: the snapshot.
        health: which GPUs are unhealthy, and why.
        config: how devices are named and shared, and which are left out.
    """
    offer = next_offer(Offer(), hardware, health, config)
    offered = _offered(offer)
    rows = []
    for gpu in hardware.gpus:
        node = "-" if gpu.minor is None else f"/dev/nvidia{gpu.minor}"
        place = ("-" if gpu.numa is None else str(gpu.numa), gpu.pci or "-", node)
        memory = f"{gpu.memory // 2**20} MiB" if gpu.memory else "-"
        rows.append(
            (
                str(gpu.index),
                gpu.uuid,
                gpu.name,
                memory,
                *place,
                offered.get(gpu.uuid, "-"),
                _health(health.of(gpu.uuid)),
            )
        )
        for mig in gpu.mig_devices:
            verdict = health.of(gpu.uuid, mig.gpu_instance, mig.compute_instance)
            rows.append(
                (
                    f"{gpu.index}:{mig.index}",
                    mig.uuid,
                    str(profile_of(gpu, mig)),
                    f"{mig.memory} MiB",
                    *place,
                    offered.get(mig.uuid, "-"),
                    _health(verdict),
                )
            )
    lines = _aligned([HEADER, *rows]) if rows else ["There is no GPU to offer."]
    left_out = [f"GPU {each.index}: {each.reason}" for each in hardware.left_out]
    left_out += [
        f"{'MIG device' if ':' in remark.index else 'GPU'} {remark.index}: {remark.reason}"
        for remark in offer.remarks
        if isinstance(remark, DeviceExcluded | DeviceNotOffered)
    ]
    unmet = [f"{remark.key}: {remark.reason}" for remark in offer.remarks if isinstance(remark, ConfigUnmet)]
    for title, items in (("Left out:", left_out), ("Asked for, and not to be had here:", unmet)):
        if items:
            lines += ["", title, *(f"  {item}" for item in items)]
    return "\n".join(lines) + "\n"


def _offered(offer: Offer) -> dict[str, str]:
    """By UUID, under which name a device is offered, and how often."""
    counts = Counter((device.uuid, resource.name) for resource in offer.resources for device in resource.devices)
    return {uuid: name if count == 1 else f"{name} ({count} replicas)" for (uuid, name), count in counts.items()}


def _health(verdict: Verdict | None) -> str:
    return "Healthy" if verdict is None else f"Unhealthy ({verdict.reason})"


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if name in RIGHT_ALIGNED else cell.ljust(width)
            for name, cell, width in zip(HEADER, row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]
