"""``nvplug devices``: the GPUs that nvplug would offer, as a plain table."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import trio

from _nvplug.errors import DriverError
from _nvplug.happenings import DriverFound, DriverTrouble
from _nvplug.hardware import Hardware
from _nvplug.health import Health, Verdict, judge
from _nvplug.latest import Latest

if TYPE_CHECKING:
    from _nvplug.drivers import Driver
    from _nvplug.happenings import Happening
    from _nvplug.hardware import GpuEvent

__all__ = ["main", "show", "table"]

DEADLINE = 10.0
"""Seconds that a driver gets to answer. One that loads its kernel module first takes several."""

HEADER = ("INDEX", "UUID", "NAME", "MEMORY", "NUMA", "PCI", "DEVICE-NODE", "HEALTH")
RIGHT_ALIGNED = {"INDEX", "MEMORY", "NUMA"}


def main(driver: Driver) -> int:
    """Prints the table, or what stands in the way of it, and returns the exit status."""
    try:
        text = trio.run(show, driver)
    except DriverError as error:
        sys.stderr.write(f"nvplug devices: {error}; {error.remedy}\n")
        return error.exit_code
    sys.stdout.write(text)
    return 0


async def show(driver: Driver, *, deadline: float = DEADLINE) -> str:
    """Runs ``driver`` until it knows its GPUs, and returns them as a table.

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
    return table(hardware.value, health)


def table(hardware: Hardware, health: Health) -> str:
    """One line per GPU in index order, aligned; below, those that cannot be offered and why.

    Args:
        hardware: the snapshot.
        health: which GPUs are unhealthy, and why.
    """
    rows = [
        (
            str(gpu.index),
            gpu.uuid,
            gpu.name,
            f"{gpu.memory // 2**20} MiB" if gpu.memory else "-",
            "-" if gpu.numa is None else str(gpu.numa),
            gpu.pci or "-",
            "-" if gpu.minor is None else f"/dev/nvidia{gpu.minor}",
            _health(health.of(gpu.uuid)),
        )
        for gpu in hardware.gpus
    ]
    lines = _aligned([HEADER, *rows]) if rows else ["There is no GPU to offer."]
    if hardware.left_out:
        lines += ["", "Left out:"]
        lines += [f"  GPU {left_out.index}: {left_out.reason}" for left_out in hardware.left_out]
    return "\n".join(lines) + "\n"


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
