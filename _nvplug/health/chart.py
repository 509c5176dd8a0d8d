"""What is known of one GPU's health: what is wrong with it, and the signs that show a reset."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from _nvplug.hardware import Checkup, RecoveryAction
from _nvplug.health.policy import Back, Damping

__all__ = ["FLAPPING", "WHOLE", "Chart", "Complaint", "Place", "frees"]

Place = tuple[int | None, int | None]
"""GPU instance and compute instance; None for all of them."""

WHOLE: Place = (None, None)

FLAPPING = "flapping"

# What a GPU that answers has no more.
_ANSWERS = frozenset({("answer", WHOLE), ("listed", WHOLE)})

# More make no difference.
_MOST_FALLS = 15

_RESETTING = frozenset({RecoveryAction.GPU_RESET, RecoveryAction.DRAIN_AND_RESET, RecoveryAction.BUS_RESET})


@dataclass(frozen=True, slots=True)
class Complaint:
    """One thing that is wrong with a GPU, or a part of it.

    Attributes:
        key: what it is about; a GPU has one complaint of a key and place at a time.
        reason: for people.
        remedy: what a person can do.
        back: the evidence on which it ends.
        at: when it was true last, on a clock that never jumps; of flapping, when it ends.
        since: when it began, in seconds since 1970.
        resets: how many resets of the GPU had been seen by then.
        place: the part of the GPU.
        frees: whether the GPU should be let go of, so that it can be repaired.
        ends_in_reset: whether its end shows that the GPU was reset.
    """

    key: str
    reason: str
    remedy: str
    back: Back
    at: float
    since: float
    resets: int = 0
    place: Place = WHOLE
    frees: bool = False
    ends_in_reset: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """One GPU's.

    Attributes:
        complaints: in the order in which they came.
        last: its newest checkup, if there was one.
        last_at: when that was.
        resets: how many resets were seen.
        falls: when it went from healthy to unhealthy.
        evidence: why the last complaint ended.
    """

    complaints: tuple[Complaint, ...] = ()
    last: Checkup | None = None
    last_at: float = -math.inf
    resets: int = 0
    falls: tuple[float, ...] = ()
    evidence: str = ""

    def with_complaint(self, new: Complaint) -> Chart:
        """Takes a complaint in. One that is there already is true again; its first words stand."""
        for position, old in enumerate(self.complaints):
            if (old.key, old.place) == (new.key, new.place):
                again = replace(
                    old,
                    at=new.at,
                    resets=new.resets,
                    frees=new.frees,
                    ends_in_reset=old.ends_in_reset or new.ends_in_reset,
                )
                return replace(self, complaints=(*self.complaints[:position], again, *self.complaints[position + 1 :]))
        others = tuple(complaint for complaint in self.complaints if complaint.key != FLAPPING)
        falls = self.falls if others else (*self.falls[-_MOST_FALLS:], new.at)
        return replace(self, complaints=(*others, new), falls=falls)

    def without(
        self, ended: frozenset[tuple[str, Place]], evidence: str, now: float, wall: float, damping: Damping
    ) -> Chart:
        """Takes complaints out. If none is left and the GPU flaps, that is the next one."""
        if not self.complaints:
            return self
        rest: list[Complaint] = []
        gone: list[Complaint] = []
        for complaint in self.complaints:
            (gone if (complaint.key, complaint.place) in ended else rest).append(complaint)
        if not gone:
            return self
        resets = self.resets + any(complaint.ends_in_reset for complaint in gone)
        lately = sum(now - at < damping.window for at in self.falls)
        if not rest and lately >= damping.falls and all(complaint.key != FLAPPING for complaint in gone):
            hold = min(damping.first_hold * 2 ** (lately - damping.falls), damping.longest_hold)
            reason = f"it broke {lately} times within {damping.window:g} s, last by {gone[0].reason}"
            remedy = f"none needed: it returns when it has been well for {hold:g} s; if it goes on, replace the GPU"
            rest = [Complaint(FLAPPING, reason, remedy, Back.CHECK, now + hold, wall)]
        return replace(self, complaints=tuple(rest), resets=resets, evidence=evidence)

    def with_checkup(self, new: Checkup, now: float, wall: float, damping: Damping) -> Chart:
        """Takes a checkup in: the GPU answers, and perhaps there was a reset since the one before.

        A GPU is looked at right after each error. If the first look after an error, soon after it, is the one that
        shows a reset, the reset may have come before the error, and is no evidence against it.
        """
        chart = self.without(_ANSWERS, "the driver answers for it", now, wall, damping)
        resets = chart.resets + (self.last is not None and _was_reset(self.last, new))
        complaints = chart.complaints
        if resets > self.resets:
            complaints = tuple(
                replace(complaint, resets=resets)
                if complaint.at > self.last_at and now - complaint.at < damping.quiet
                else complaint
                for complaint in complaints
            )
        # Not by replace, which takes as long as all the rest: most checkups change nothing else.
        return Chart(complaints, new, now, resets, chart.falls, chart.evidence)

    @property
    def has_recovery_action(self) -> bool:
        """Whether the driver is known to tell what a GPU needs."""
        return self.last is not None and self.last.action is not None

    @property
    def waits_for_repair(self) -> bool:
        """Whether nvplug should let go of the GPU."""
        return any(complaint.frees for complaint in self.complaints)


def _was_reset(old: Checkup, new: Checkup) -> bool:
    if old.life and new.life and old.life != new.life:
        return True
    return _fell(old.energy, new.energy) or _fell(old.uncorrectable, new.uncorrectable)


def _fell(old: int | None, new: int | None) -> bool:
    """Whether a counter that only grows began anew."""
    return old is not None and new is not None and new < old


def frees(action: int) -> bool:
    """Whether a recovery action is one that nobody can carry out while a process holds the GPU."""
    return action in _RESETTING
