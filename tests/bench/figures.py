"""What was measured, and the table that it makes: no I/O here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

__all__ = [
    "CPU",
    "MEGABYTES",
    "MILLISECONDS",
    "PERCENT",
    "Column",
    "Figure",
    "Missed",
    "Sample",
    "Unit",
    "cell",
    "median",
    "number",
    "percentile",
    "ratio",
    "table",
    "worst",
]


@dataclass(frozen=True, slots=True)
class Unit:
    """How a figure is written. ``per_base`` of them are one of what is measured: a second, a byte."""

    name: str
    per_base: float


MILLISECONDS: Final = Unit("ms", 1e3)
MEGABYTES: Final = Unit("MB", 1e-6)
PERCENT: Final = Unit("%", 1e2)
CPU: Final = Unit("ms/s", 1e3)
"""CPU time in each second of real time."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One row. ``limit`` is named in an issue; like every sample it is in seconds, bytes, or seconds per second."""

    name: str
    unit: Unit
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class Missed:
    """There is no figure, because what was to be measured did not happen: ``why``."""

    why: str


Sample = float | Missed
Column = Mapping[Figure, Sequence[Sample]]
"""All samples of one plugin."""


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent of all do not exceed: by nearest rank, so it was measured."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def median(samples: Sequence[Sample]) -> Sample:
    """The middle one, of two the mean. What was missed took longer than everything else."""
    ordered = sorted(samples, key=_size)
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    if isinstance(low, Missed) or isinstance(high, Missed):
        return high
    return (low + high) / 2


def worst(samples: Sequence[Sample]) -> Sample:
    """The largest, or one that was missed."""
    return max(samples, key=_size)


def number(value: float) -> str:
    """Three digits that count, and no more than two behind the point."""
    digits = 0 if value >= 99.5 else 1 if value >= 9.95 else 2
    return f"{value:.{digits}f}"


def cell(figure: Figure, samples: Sequence[Sample]) -> str:
    """The median and, in brackets, the worst; ``!`` behind what exceeds the limit."""
    if not samples:
        return "-"
    middle, last = _show(figure, median(samples)), _show(figure, worst(samples))
    return middle if len(samples) == 1 or middle == last else f"{middle} ({last})"


def ratio(ours: Sequence[Sample], theirs: Sequence[Sample]) -> str:
    """How many times our median theirs is."""
    if not ours or not theirs:
        return "-"
    one, other = median(ours), median(theirs)
    if isinstance(one, Missed) or isinstance(other, Missed) or one == 0:
        return "-"
    return f"{number(other / one)} x"


def table(figures: Sequence[Figure], ours: Column, theirs: Column | None = None) -> str:
    """All figures as lines of text; with a peer's column, the ratios too."""
    head = ["what", "limit", "nvplug: median (worst)"]
    if theirs is not None:
        head += ["peer: median (worst)", "peer / nvplug"]
    rows = [head]
    for figure in figures:
        limit = "-" if figure.limit is None else f"{figure.limit * figure.unit.per_base:g} {figure.unit.name}"
        mine = ours.get(figure, ())
        row = [figure.name, limit, cell(figure, mine)]
        if theirs is not None:
            others = theirs.get(figure, ())
            row += [cell(figure, others), ratio(mine, others)]
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(word.rjust(width) for word, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _size(sample: Sample) -> float:
    return math.inf if isinstance(sample, Missed) else sample


def _show(figure: Figure, sample: Sample) -> str:
    mark = "!" if figure.limit is not None and _size(sample) > figure.limit else ""
    if isinstance(sample, Missed):
        return sample.why + mark
    return f"{number(sample * figure.unit.per_base)} {figure.unit.name}{mark}"
