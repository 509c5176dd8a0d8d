"""Verdicts that only an event told, written down, so that they survive a restart of nvplug."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from _nvplug.hardware import Checkup
from _nvplug.health.chart import Chart, Complaint
from _nvplug.health.judging import Health, with_chart
from _nvplug.health.policy import Back

__all__ = ["Memory", "as_text", "from_text", "lasting"]

_VERSION: Final = 1
_LARGEST: Final = 1 << 20

# A checkup finds the others again by itself.
_LASTING: Final = frozenset({Back.RESET, Back.PRESENCE})


@dataclass(frozen=True, slots=True)
class Memory:
    """A file, in a directory that a reboot empties.

    Attributes:
        file: where verdicts are kept. Its directory is made when needed.
        boot: names the boot of the node that verdicts belong to.
    """

    file: Path
    boot: str

    @classmethod
    def at(cls, directory: str = "/run/nvplug", proc: str = "/proc") -> Memory:
        """The memory in this directory, for this boot."""
        try:
            boot = Path(proc, "sys/kernel/random/boot_id").read_text().strip()
        except (OSError, UnicodeDecodeError):
            boot = ""
        return cls(Path(directory) / "health.json", boot)

    def load(self, now: float) -> Health:
        """What was kept, of this boot. Blocks.

        Args:
            now: seconds, on the clock that verdicts are judged by.

        Raises:
            OSError: it cannot be read.
            ValueError: it is damaged.
        """
        try:
            with self.file.open("rb") as file:
                content = file.read(_LARGEST)
        except FileNotFoundError:
            return Health()
        return from_text(content, self.boot, now)

    def store(self, text: str) -> None:
        """Replaces what was kept, all or nothing. Blocks.

        Raises:
            OSError: it cannot be written.
        """
        self.file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        new = self.file.with_suffix(".new")
        new.write_text(text)
        new.replace(self.file)


def lasting(health: Health) -> Mapping[str, tuple[Complaint, ...]]:
    """The complaints that are worth keeping, by UUID."""
    kept = {
        uuid: tuple(complaint for complaint in chart.complaints if complaint.back in _LASTING)
        for uuid, chart in health.charts.items()
    }
    return {uuid: complaints for uuid, complaints in kept.items() if complaints}


def as_text(health: Health, boot: str) -> str:
    """What is to be kept, as JSON."""
    gpus = {}
    for uuid, complaints in lasting(health).items():
        last = health.charts[uuid].last or Checkup(uuid)
        gpus[uuid] = {
            # What a reset changes, to see whether there was one meanwhile.
            "life": last.life,
            "uncorrectable": last.uncorrectable,
            "energy": last.energy,
            "complaints": [
                {
                    "key": complaint.key,
                    "reason": complaint.reason,
                    "remedy": complaint.remedy,
                    "back": complaint.back.name,
                    "since": complaint.since,
                    "place": complaint.place,
                    "frees": complaint.frees,
                }
                for complaint in complaints
            ],
        }
    return json.dumps({"version": _VERSION, "boot": boot, "gpus": gpus}, indent=1)


def from_text(content: bytes, boot: str, now: float) -> Health:
    """The opposite. What was kept in another boot is over.

    Raises:
        ValueError: it is damaged.
    """
    try:
        kept = json.loads(content)
        if kept["version"] != _VERSION or not boot or kept["boot"] != boot:
            return Health()
        health = Health(MappingProxyType({}))
        for uuid, gpu in kept["gpus"].items():
            last = Checkup(
                uuid,
                life=_checked(gpu["life"], str),
                uncorrectable=_number(gpu["uncorrectable"]),
                energy=_number(gpu["energy"]),
            )
            chart = Chart(last=last)
            for entry in gpu["complaints"]:
                chart = chart.with_complaint(_complaint(entry, now))
            health = with_chart(health, uuid, replace(chart, falls=()))
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return health


def _complaint(entry: Any, now: float) -> Complaint:
    gpu_instance, compute_instance = entry["place"]
    return Complaint(
        key=_checked(entry["key"], str),
        reason=_checked(entry["reason"], str),
        remedy=_checked(entry["remedy"], str),
        back=Back[entry["back"]],
        at=now,
        since=float(entry["since"]),
        place=(_number(gpu_instance), _number(compute_instance)),
        frees=_checked(entry["frees"], bool),
    )


def _number(value: Any) -> int | None:
    return None if value is None else int(_checked(value, int))


def _checked(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"expected {kind.__name__}, got {value!r:.40}")
    return value
