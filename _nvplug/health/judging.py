"""What is wrong with each GPU, and when it is well again: a fold over what a driver reports. No I/O, no clock.

Evidence decides. A clock only delays: evidence counts when it is younger than the error by more than
``Damping.quiet``, and a GPU that breaks again and again must be well for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from _nvplug.hardware import Checkup, Fault, GpuEvent, Notice, RecoveryAction, Restored, Sign, Xid
from _nvplug.health.chart import FLAPPING, WHOLE, Chart, Complaint, Place, frees
from _nvplug.health.policy import ECC_ERRORS, Action, Back, Damping, Policy, Row

__all__ = ["RETIRED_PAGES_LIMIT", "Health", "Verdict", "forget_instances", "judge", "with_chart"]

RETIRED_PAGES_LIMIT: Final = 64
"""A GPU that retires pages has room for so many in its InfoROM; after that, errors stay in use."""

_DEFAULT: Final = Policy()


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a GPU is unhealthy, what a person can do about it, and since when, in seconds since 1970 (0: unknown)."""

    reason: str
    remedy: str
    since: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Health:
    """The unhealthy GPUs of a node.

    Attributes:
        unhealthy: by UUID, of GPUs as a whole.
        parts: by UUID, GPU instance and compute instance (None: all of the GPU instance).
        charts: by UUID, what the verdicts are made of. Healths with the same verdicts are equal.
    """

    unhealthy: Mapping[str, Verdict] = field(default_factory=lambda: MappingProxyType({}))
    parts: Mapping[tuple[str, int | None, int | None], Verdict] = field(default_factory=lambda: MappingProxyType({}))
    charts: Mapping[str, Chart] = field(default_factory=lambda: MappingProxyType({}), compare=False)

    def of(self, uuid: str, gpu_instance: int | None = None, compute_instance: int | None = None) -> Verdict | None:
        """What is wrong with a device, or None.

        Args:
            uuid: of the physical GPU.
            gpu_instance: that of a MIG device. Without it the device is the whole GPU, and what is wrong with any
                part of it is wrong with it.
            compute_instance: that of a MIG device.
        """
        if uuid in self.unhealthy:
            return self.unhealthy[uuid]
        for (whose, gi, ci), verdict in self.parts.items():
            if whose == uuid and (gpu_instance is None or (gi == gpu_instance and ci in {None, compute_instance})):
                return verdict
        return None

    @property
    def waiting(self) -> frozenset[str]:
        """The GPUs, by UUID, that nothing should hold, as they wait for a repair."""
        return frozenset(uuid for uuid, chart in self.charts.items() if chart.waits_for_repair)


def judge(health: Health, event: GpuEvent, *, policy: Policy = _DEFAULT, now: float = 0.0, wall: float = 0.0) -> Health:
    """Takes one event in, and returns the health after it: the same object if nothing at all is new.

    The first reason stands until its evidence: what follows a fault is usually its consequence.

    Args:
        health: the one before.
        event: what a driver reported.
        policy: what the operator wants.
        now: seconds, on a clock that never jumps.
        wall: seconds since 1970.
    """
    before = health.charts.get(event.uuid, Chart())
    after = _JUDGES[type(event)](before, event, policy, now, wall)
    return health if after is before else with_chart(health, event.uuid, after)


def with_chart(health: Health, uuid: str, chart: Chart) -> Health:
    """The health with another chart of one GPU, and the verdicts that follow from it."""
    charts = MappingProxyType({**health.charts, uuid: chart})
    before = health.charts.get(uuid)
    if before is not None and before.complaints == chart.complaints:
        # Not by replace, which takes as long as all the rest: most checkups come this way.
        return Health(health.unhealthy, health.parts, charts)
    unhealthy = {other: verdict for other, verdict in health.unhealthy.items() if other != uuid}
    parts = {key: verdict for key, verdict in health.parts.items() if key[0] != uuid}
    for complaint in chart.complaints:
        verdict = Verdict(complaint.reason, complaint.remedy, complaint.since)
        if complaint.place == WHOLE:
            unhealthy.setdefault(uuid, verdict)
        else:
            parts.setdefault((uuid, *complaint.place), verdict)
    return Health(MappingProxyType(unhealthy), MappingProxyType(parts), charts)


def forget_instances(
    health: Health, uuid: str, gone: frozenset[Place], *, policy: Policy = _DEFAULT, now: float = 0.0, wall: float = 0.0
) -> Health:
    """What was wrong with MIG instances that are no more is wrong no more."""
    chart = health.charts.get(uuid)
    if chart is None:
        return health
    ended = frozenset((complaint.key, complaint.place) for complaint in chart.complaints if complaint.place in gone)
    after = chart.without(ended, "the MIG instance is no more", now, wall, policy.damping)
    return health if after is chart else with_chart(health, uuid, after)


# --- one function for each kind of event


def _error(chart: Chart, name: str, row: Row, place: Place, now: float, wall: float) -> Chart:
    """Takes an error in that only this event tells of."""
    parts = zip(("GPU instance", "compute instance"), place, strict=True)
    where = ", ".join(f"{part} {number}" for part, number in parts if number is not None)
    return chart.with_complaint(
        Complaint(
            name,
            f"{name} ({where})" if where else name,
            row.remedy,
            row.back,
            now,
            wall,
            chart.resets,
            place,
            frees=place == WHOLE and row.back is Back.RESET,
        )
    )


def _judge_xid(chart: Chart, event: Xid, policy: Policy, now: float, wall: float) -> Chart:
    row = policy.row(event.code)
    # A driver that reports XID 154 mostly tells the action as well, and the next checkup is judged by it.
    if row is None or (row.action is Action.ASK_DRIVER and chart.has_recovery_action):
        return chart
    return _error(chart, f"XID {event.code}", row, (event.gpu_instance, event.compute_instance), now, wall)


def _judge_notice(chart: Chart, event: Notice, policy: Policy, now: float, wall: float) -> Chart:
    row = policy.notice(event.kind)
    if row is None or (row.action is Action.ASK_DRIVER and chart.has_recovery_action):
        return chart
    return _error(chart, event.kind.value, row, WHOLE, now, wall)


def _judge_sign(chart: Chart, event: Sign, policy: Policy, now: float, wall: float) -> Chart:
    if not policy.checks:
        return chart
    if not event.trouble:
        return chart.without(frozenset({(event.aspect, WHOLE)}), "it is well again", now, wall, policy.damping)
    return chart.with_complaint(
        Complaint(
            event.aspect,
            event.trouble,
            event.remedy,
            Back.CHECK,
            now,
            wall,
            frees=event.ends_in_reset,
            ends_in_reset=event.ends_in_reset,
        )
    )


def _judge_checkup(chart: Chart, event: Checkup, policy: Policy, now: float, wall: float) -> Chart:
    before = chart.last
    chart = chart.with_checkup(event, now, wall, policy.damping)
    if policy.checks:
        chart = chart.without(
            frozenset((key, WHOLE) for key in _fine(event)), "it is well again", now, wall, policy.damping
        )
        for complaint in _findings(event, now, wall):
            chart = chart.with_complaint(complaint)
        if before is not None and before.life == event.life and _grew(before.uncorrectable, event.uncorrectable):
            row = policy.row(48) if event.remap_failure is None else ECC_ERRORS
            if row is not None:
                chart = _error(chart, "uncorrectable ECC errors", row, WHOLE, now, wall)
    for complaint in chart.complaints:
        if evidence := _evidence(complaint, chart, event, now, policy.damping):
            chart = chart.without(frozenset({(complaint.key, complaint.place)}), evidence, now, wall, policy.damping)
    return chart


def _fine(event: Checkup) -> Iterator[str]:
    """What is well with a GPU by its own account. What it did not tell is neither well nor wrong."""
    if event.remap_failure is False:
        yield "remap"
    if event.retired_pages is not None and event.retired_pages < RETIRED_PAGES_LIMIT:
        yield "pages"
    # A driver without the field asks for nothing, whatever one before it did.
    if event.action in {None, RecoveryAction.NONE}:
        yield "action"
    if not event.mig_pending:
        yield "mig"


def _findings(event: Checkup, now: float, wall: float) -> Iterator[Complaint]:
    """What is wrong with a GPU by its own account."""

    def finding(key: str, reason: str, remedy: str, *, lets_go: bool = False) -> Complaint:
        return Complaint(key, reason, remedy, Back.CHECK, now, wall, frees=lets_go)

    if event.remap_failure:
        yield finding("remap", "a row of its memory could not be remapped", "replace the GPU")
    if (event.retired_pages or 0) >= RETIRED_PAGES_LIMIT:
        yield finding("pages", f"{event.retired_pages} pages of its memory are retired", "replace the GPU")
    if event.action is not None and event.action > RecoveryAction.NONE:
        reason, remedy = _ACTIONS.get(event.action, (f"recovery action {event.action}", "reboot the node"))
        yield finding("action", f"the driver asks for {reason}", remedy, lets_go=frees(event.action))
    if event.mig_pending:
        yield finding(
            "mig",
            "a change of its MIG mode waits for a reset",
            "drain the GPU and reset it with nvidia-smi -r",
            lets_go=True,
        )


_RESET_IT: Final = "drain the GPU and reset it with nvidia-smi -r"
_ACTIONS: Final[Mapping[int, tuple[str, str]]] = MappingProxyType(
    {
        RecoveryAction.GPU_RESET: ("a reset of the GPU", _RESET_IT),
        RecoveryAction.NODE_REBOOT: ("a reboot of the node", "drain and reboot the node"),
        RecoveryAction.DRAIN_P2P: (
            "an end of peer-to-peer traffic",
            "end the programs that use this GPU together with others",
        ),
        RecoveryAction.DRAIN_AND_RESET: (
            "an end of peer-to-peer traffic and a reset",
            "end the programs that use this GPU together with others, then reset it with nvidia-smi -r",
        ),
        RecoveryAction.RECOVER_IMEX_DOMAIN: (
            "a recovery of the IMEX domain",
            "restart nvidia-imex on the nodes of the domain",
        ),
        RecoveryAction.BUS_RESET: ("a reset of its PCI bus", "drain the GPU and reset its bus, or reboot the node"),
        RecoveryAction.SYSTEM_REBOOT: ("a reboot of the system", "drain and reboot the node"),
    }
)


def _evidence(complaint: Complaint, chart: Chart, event: Checkup, now: float, damping: Damping) -> str:
    """Why a complaint is over, now that the GPU answers; "" if it is not."""
    if complaint.key == FLAPPING:
        return "it has been well for long enough" if now >= complaint.at else ""
    if complaint.back not in {Back.RESET, Back.PRESENCE} or now - complaint.at < damping.quiet:
        return ""
    if event.action is not None:
        return "the driver asks for no recovery action" if event.action == RecoveryAction.NONE else ""
    if complaint.back is Back.PRESENCE:
        return "it answers, and no check finds anything"
    return "it was reset" if chart.resets > complaint.resets else ""


def _grew(old: int | None, new: int | None) -> bool:
    return old is not None and new is not None and new > old


def _judge_fault(chart: Chart, event: Fault, _policy: Policy, now: float, wall: float) -> Chart:
    return chart.with_complaint(Complaint("fault", event.reason, event.remedy, Back.REPORT, now, wall))


def _judge_restored(chart: Chart, event: Restored, _policy: Policy, _now: float, _wall: float) -> Chart:
    # Whoever says so has the last word: it is the driver of GPUs on paper.
    return replace(chart, complaints=(), evidence=event.evidence) if chart.complaints else chart


_JUDGES: Final[Mapping[type, Callable[..., Chart]]] = MappingProxyType(
    {
        Xid: _judge_xid,
        Notice: _judge_notice,
        Sign: _judge_sign,
        Checkup: _judge_checkup,
        Fault: _judge_fault,
        Restored: _judge_restored,
    }
)
