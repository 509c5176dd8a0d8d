"""What each error of a GPU means, as data, and what the operator changes in that.

The table follows NVIDIA's public catalogue ("Analyzing Xid Errors"): its meaning in a few words, and its immediate
action. Where the catalogue and NVIDIA's plugin disagree, the row says so.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from _nvplug.config.model import Config, XidRule
from _nvplug.hardware import NoticeKind

__all__ = [
    "APPLICATION_XIDS",
    "ECC_ERRORS",
    "NOTICES",
    "XIDS",
    "Action",
    "Back",
    "Damping",
    "Policy",
    "Row",
    "health_policy",
    "policy_of",
]


class Action(enum.Enum):
    """What has to be done about an error, and so what becomes of the GPU."""

    RESTART_APPLICATION = "restart the application"
    IGNORE = "nothing"
    RESET = "reset the GPU"
    REBOOT = "reboot the node"
    ASK_DRIVER = "what the driver's recovery action says"

    @property
    def spares(self) -> bool:
        """Whether the GPU serves the next program all the same."""
        return self in {Action.RESTART_APPLICATION, Action.IGNORE}


class Back(enum.Enum):
    """The evidence on which a GPU returns."""

    CHECK = "the same check finds it well"
    PRESENCE = "it answers, and the driver asks for no recovery action"
    RESET = "the driver's recovery action is none; on drivers without that, a reset, driver reload or reboot was seen"
    REPORT = "whoever reported it reports it well"


@dataclass(frozen=True, slots=True)
class Row:
    """One error: what it means, what NVIDIA says to do, and on what evidence the GPU comes back."""

    meaning: str
    action: Action
    back: Back = Back.RESET

    @property
    def remedy(self) -> str:
        """What a person can do, while nvplug runs."""
        if self.action is Action.REBOOT:
            return f"{self.meaning}: reboot the node; if it comes again, replace the GPU"
        return f"{self.meaning}: drain the GPU and reset it with nvidia-smi -r; if it comes again, replace it"


def _rows(action: Action, meanings: Mapping[int, str]) -> dict[int, Row]:
    return {code: Row(meaning, action) for code, meaning in meanings.items()}


XIDS: Final[Mapping[int, Row]] = MappingProxyType(
    _rows(
        Action.RESTART_APPLICATION,
        {
            8: "the GPU stopped processing a channel",
            13: "graphics engine exception",
            31: "page fault of a program",
            32: "corrupted push buffer of a program",
            39: "copy engine exception",
            40: "copy engine exception",
            41: "copy engine exception",
            # NVIDIA's plugin ignores it, too; its users dispute that.
            68: "video decoder exception",
            69: "graphics engine class error",
            **dict.fromkeys((70, 71, 72, 75, 76, 77, 85, *range(126, 136)), "copy engine exception"),
            80: "corrupted data sent to the GPU",
            **dict.fromkeys((82, *range(99, 106)), "JPEG engine exception"),
            **dict.fromkeys((83, 84, 88, 89, 96, 97, 98), "video decoder exception"),
            **dict.fromkeys((86, 139), "optical flow engine exception"),
            # Fatal to NVIDIA's plugin. The catalogue: contained to one program, all others are unaffected.
            94: "contained memory error",
            # To be reset by the catalogue, ignored by NVIDIA's plugin. The recovery action tells which it was.
            109: "context switch timeout",
        },
    )
    | _rows(
        Action.IGNORE,
        {
            43: "a program's channel was reset",
            45: "channels were cleaned up after another error",
            63: "memory is to be remapped or retired at the next reset",
            92: "many corrected ECC errors",
            93: "the InfoROM is worn",
            106: "test message of the SMBPBI",
            107: "silent test message of the SMBPBI",
            108: "address translation failed at the far end of an NVLink",
            121: "corrected error of the link to the CPU",
            137: "a program's access over NVLink was refused",
            141: "fast path error",
            147: "NVLink TREX error",
            148: "NVLink LPW control error",
            157: "memory could not be retired",
            160: "a memory channel is to be retired",
            161: "a memory channel could not be retired",
        },
    )
    | _rows(
        Action.RESET,
        {
            46: "the GPU stopped processing",
            48: "double-bit ECC error",
            62: "a microcontroller of the GPU halted",
            64: "memory could not be remapped or retired",
            74: "NVLink error",
            95: "uncontained memory error",
            110: "security fault",
            119: "the GPU's system processor (GSP) does not answer",
            120: "the GPU's system processor (GSP) failed",
            136: "NVLink training failed",
            140: "unrecovered ECC error",
            143: "the GPU could not be initialised",
            144: "NVLink SAW error",
            145: "NVLink RLW error",
            146: "NVLink TLW error",
            149: "NVLink NETIR error",
            150: "NVLink MSE error",
            155: "NVLink error found by software",
            156: "memory of the GPU is to be retired",
            158: "fatal timeout of the GPU",
            159: "error of the coherent interface to the CPU",
        },
    )
    | _rows(Action.REBOOT, {79: "the GPU has fallen off the bus", 151: "key rotation error"})
    | _rows(Action.ASK_DRIVER, {154: "the recovery action changed"})
)
"""By XID. One that is not here takes the GPU away, as in NVIDIA's plugin."""

NOTICES: Final[Mapping[NoticeKind, Row]] = MappingProxyType(
    {
        NoticeKind.DOUBLE_BIT_ECC_ERROR: Row("uncorrectable ECC error", Action.RESET),
        NoticeKind.DRAM_RETIREMENT: Row("memory is to be retired at the next reset", Action.IGNORE),
        NoticeKind.DRAM_RETIREMENT_FAILURE: Row("memory could not be retired", Action.RESET),
        NoticeKind.NON_FATAL_POISON: Row("poisoned data reached one program", Action.RESTART_APPLICATION),
        NoticeKind.FATAL_POISON: Row("poisoned data spread", Action.RESET),
        NoticeKind.UNAVAILABLE: Row("the driver cannot use the GPU", Action.RESET),
        NoticeKind.RECOVERY_ACTION: XIDS[154],
    }
)
"""What drivers of 2025 and later report besides XIDs, always of a whole GPU."""

ECC_ERRORS: Final = Row("uncorrectable ECC errors", Action.RESET, Back.PRESENCE)
"""More of them than before, on a GPU that remaps rows: what is worse than a remap has a check of its own."""

APPLICATION_XIDS: Final = frozenset(code for code, row in XIDS.items() if row.action.spares)
"""Those that leave a GPU as it is, unless the operator says otherwise."""

_UNKNOWN: Final = Row("it is not in the table", Action.RESET)


@dataclass(frozen=True, slots=True)
class Damping:
    """How a clock delays what evidence decides, in seconds.

    Attributes:
        quiet: that an error must be past before evidence of its end counts: evidence may be older than it looks.
        falls: a GPU that broke so often within ``window`` must be well for a while before it returns.
        window: see there.
        first_hold: how long that is; twice as long each time after.
        longest_hold: at most.
    """

    quiet: float = 10.0
    falls: int = 3
    window: float = 600.0
    first_hold: float = 30.0
    longest_hold: float = 300.0


@dataclass(frozen=True, slots=True)
class Policy:
    """Which errors take a GPU away.

    Attributes:
        xids: whether errors do that the driver reports, where nothing is said of one.
        checks: whether what nvplug finds by looking does.
        disabled: XIDs that do not, whatever the table says.
        enabled: XIDs that do, whatever the table and all else says; None for every XID there is.
        changed: what the operator says of single XIDs instead of the table.
        malformed: what was written and makes no sense, each with the variable that it stands in.
        damping: see there.
    """

    xids: bool = True
    checks: bool = True
    disabled: frozenset[int] = frozenset()
    enabled: frozenset[int] | None = frozenset()
    changed: Mapping[int, Action] = field(default_factory=lambda: MappingProxyType({}))
    malformed: tuple[str, ...] = ()
    damping: Damping = Damping()

    def row(self, code: int) -> Row | None:
        """What an XID means; None if it leaves the GPU alone."""
        row = XIDS.get(code, _UNKNOWN)
        if code in self.changed:
            row = Row(row.meaning, self.changed[code], row.back)
        if self.enabled is None or code in self.enabled:
            return Row(row.meaning, Action.RESET, row.back) if row.action.spares else row
        if not self.xids or code in self.disabled or row.action.spares:
            return None
        return row

    def notice(self, kind: NoticeKind) -> Row | None:
        """The same of what is no XID. It goes by the switch for XIDs."""
        row = NOTICES[kind]
        return None if row.action.spares or not (self.xids or self.enabled is None) else row

    @property
    def summary(self) -> str:
        """The policy in a few words, for one line of the log."""
        every = self.enabled is None
        spared = [code for code in sorted({*XIDS, *self.changed, *self.disabled}) if self.row(code) is None]
        if every:
            xids = "every XID takes a GPU away"
        elif not self.xids:
            xids = f"no XID takes a GPU away{f' but {_ranges(self.enabled or ())}' if self.enabled else ''}"
        else:
            xids = f"every XID takes a GPU away but {_ranges(spared)}"
        return f"{xids}; checks are {'on' if self.checks else 'off'}"


# By the words of the configuration file.
_ACTIONS: Final[Mapping[str, Action]] = MappingProxyType(
    {"ignore": Action.IGNORE, "reset": Action.RESET, "reboot": Action.REBOOT, "ask-driver": Action.ASK_DRIVER}
)


def health_policy(disable: str, enable: str, xids: Iterable[XidRule] = ()) -> Policy:
    """Makes the policy of two variables, with the meaning that NVIDIA documents for its plugin, and of the file.

    A variable is a list with commas of XIDs, ``xids`` (all of them) and ``all``; case does not matter. What is enabled
    is so whatever is disabled, also after ``all``, where NVIDIA's own plugin fails to. Beyond theirs, ``all`` disables
    the checks as well, and ``xids`` does not.

    Args:
        disable: DP_DISABLE_HEALTHCHECKS.
        enable: DP_ENABLE_HEALTHCHECKS.
        xids: what the file says of single XIDs: more than the table, and less than the variables.
    """
    off, off_words, bad_off = _parse(disable)
    on, on_words, bad_on = _parse(enable)
    return Policy(
        xids=not off_words,
        checks="all" not in off_words or "all" in on_words,
        disabled=off,
        enabled=None if on_words else on,
        changed=MappingProxyType({rule.code: _ACTIONS[rule.action] for rule in xids}),
        malformed=(
            *(f"{item!r} in DP_DISABLE_HEALTHCHECKS" for item in bad_off),
            *(f"{item!r} in DP_ENABLE_HEALTHCHECKS" for item in bad_on),
        ),
    )


def policy_of(config: Config) -> Policy:
    """The policy that a configuration asks for."""
    return health_policy(config.dp_disable_healthchecks, config.dp_enable_healthchecks, config.health_xids)


def _parse(text: str) -> tuple[frozenset[int], frozenset[str], tuple[str, ...]]:
    """The numbers, the words, and what is neither."""
    items = [item.strip() for item in text.split(",") if item.strip()]
    words = frozenset(item.lower() for item in items) & {"all", "xids"}
    numbers = [item for item in items if re.fullmatch("[0-9]{1,9}", item)]
    rest = [item for item in items if item not in numbers and item.lower() not in words]
    return frozenset(map(int, numbers)), words, tuple(rest)


def _ranges(codes: Iterable[int]) -> str:
    """``8,13,39-41``."""
    parts: list[list[int]] = []
    for code in sorted(codes):
        if parts and code == parts[-1][-1] + 1:
            parts[-1].append(code)
        else:
            parts.append([code])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 2 else ",".join(map(str, part)) for part in parts)
