"""``nvplug config show`` and ``nvplug config check FILE``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from _nvplug.config import OPTIONS, Config, Settings, read_settings
from _nvplug.config.model import NamingRule, Selection, SharedResource, TimeSlicing, XidRule
from _nvplug.errors import OptionError

__all__ = ["main"]

# Fields of Config that no flag has, under the keys of their sections.
SECTIONS: Mapping[str, str] = {
    "gpu_names": "resources.gpus",
    "mig_names": "resources.mig",
    "time_slicing": "sharing.timeSlicing",
    "selection": "selection",
    "health_xids": "health.xids",
}


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Prints what was asked for, and returns the exit status.

    Raises:
        OptionError: the words, the options or the file cannot be obeyed.
    """
    action, *rest = arguments or [""]
    if action == "show":
        sys.stdout.write(shown(read_settings(rest, environment)))
    elif action == "check" and len(rest) == 1 and not rest[0].startswith("-"):
        sys.stdout.write(judged(rest[0]))
    else:
        raise OptionError(
            f"{' '.join(['nvplug config', *arguments])!r} is no command",
            remedy="write nvplug config show [FLAGS] or nvplug config check FILE",
        )
    return 0


def shown(settings: Settings) -> str:
    """The options in force, one a line, each with its origin."""
    names = {option.field: option.name for option in OPTIONS} | dict(SECTIONS)
    rows = [
        (names[field.name], line, settings.origins.get(field.name, "default") if first else "")
        for field in fields(Config)
        for first, line in _lines(getattr(settings.config, field.name))
    ]
    rows = [("OPTION", "VALUE", "FROM"), *rows]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}".rstrip() for name, value, origin in rows]
    return "\n".join(lines) + "\n" + _obeyed(settings)


def judged(path: str) -> str:
    """What there is to say about a good file.

    Raises:
        OptionError: it is not.
    """
    settings = read_settings([f"--config-file={path}"], {})
    return f"{path} is good.\n{_obeyed(settings)}"


def _obeyed(settings: Settings) -> str:
    if not settings.file.obeyed:
        return ""
    keys = "".join(f"  {key}\n" for key in settings.file.obeyed)
    return f"NVIDIA's plugin accepts and ignores these keys, and nvplug obeys them:\n{keys}"


def _lines(value: Any) -> list[tuple[bool, str]]:
    texts = _texts(value) or ["-"]
    return [(position == 0, text) for position, text in enumerate(texts)]


def _texts(value: Any) -> list[str]:
    """A value as lines."""
    match value:
        case bool():
            return ["true" if value else "false"]
        case int():
            # The only numbers are durations.
            return [f"{value}s"]
        case NamingRule():
            return [f"{value.pattern!r} -> {value.name}"]
        case XidRule():
            return [f"{value.code}: {value.action}"]
        case SharedResource():
            which = "all" if value.devices is None else value.devices
            if isinstance(which, tuple):
                which = ",".join(which)
            return [f"{value.name}: {value.replicas} replicas of {which} -> {value.offered_as}"]
        case TimeSlicing():
            refused = ["requests for more than one are refused"] if value.fail_requests_greater_than_one else []
            return [*(text for each in value.resources for text in _texts(each)), *refused]
        case Selection():
            return [
                *(f"include {selector}" for selector in value.include or ()),
                *(f"exclude {selector}" for selector in value.exclude),
            ]
        case tuple() if all(isinstance(each, str) for each in value):
            return [",".join(value)] if value else []
        case tuple():
            return [text for each in value for text in _texts(each)]
        case _:
            return [str(value)] if str(value) else []
