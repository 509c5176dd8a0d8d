"""Which keys the configuration file has, and of what types: the schema of NVIDIA's plugin, and sections of our own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from _nvplug.config.options import INERT, OPTIONS, Option

__all__ = [
    "BY_KEY",
    "FileText",
    "RuleText",
    "SelectionText",
    "SelectorText",
    "SharedText",
    "TimeSlicingText",
    "at",
    "canonical",
    "keys_at",
]

# Keys of the shared schema that are for GPU feature discovery, and none of ours.
_FOREIGN: Final = (
    "flags.useNodeFeatureAPI",
    "flags.gfd.oneshot",
    "flags.gfd.noTimestamp",
    "flags.gfd.sleepInterval",
    "flags.gfd.outputFile",
    "flags.gfd.machineTypeFile",
)


# --- the schema


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Null is allowed wherever a field is optional."""


class RuleText(_Section, frozen=True):
    pattern: str
    name: str


class _Resources(_Section, frozen=True):
    gpus: list[RuleText] | None = None
    mig: list[RuleText] | None = None


class SharedText(_Section, frozen=True):
    name: str
    replicas: int
    devices: str | int | list[str | int] | None = None
    rename: str | None = None


class TimeSlicingText(_Section, frozen=True):
    resources: list[SharedText] | None = None
    rename_by_default: bool | None = None
    fail_requests_greater_than_one: bool | None = None


class _Sharing(_Section, frozen=True):
    time_slicing: TimeSlicingText | None = None
    mps: Any = None


class SelectorText(_Section, frozen=True):
    index: int | None = None
    uuid: str | None = None
    pci: str | None = None
    product: str | None = None


class SelectionText(_Section, frozen=True):
    include: list[SelectorText] | None = None
    exclude: list[SelectorText] | None = None


def _section(keys: Mapping[str, Any]) -> type[msgspec.Struct]:
    """A section out of its keys with their types; a dot leads into a section of it."""
    fields: dict[str, Any] = {}
    for key, kind in keys.items():
        first, dot, rest = key.partition(".")
        if dot:
            fields.setdefault(first, {})[rest] = kind
        else:
            fields[first] = kind
    return msgspec.defstruct(
        "Section",
        [(name, (_section(kind) if isinstance(kind, dict) else kind) | None, None) for name, kind in fields.items()],
        forbid_unknown_fields=True,
        frozen=True,
    )


def _kind(option: Option[Any]) -> Any:
    if option.kind.is_list:
        return str | list[str | int]
    return bool if option.kind.is_switch else str


BY_KEY: Final = {option.key: option for option in (*OPTIONS, *INERT) if option.key}

FileText: Final = _section(
    {"version": str}
    | {key: _kind(option) for key, option in BY_KEY.items()}
    | dict.fromkeys(_FOREIGN, Any)
    | {
        "resources": _Resources,
        "sharing": _Sharing,
        "selection": SelectionText,
        # By XID. What is wrong with a value is said with its key, which a type here could not name.
        "health.xids": dict[str, Any],
    }
)


def _steps(where: str) -> Iterator[str | int]:
    for name, position in re.findall(r"\.([^.\[\]]+)|\[(\d+)\]", where):
        yield name or int(position)


def at(value: Any, where: str) -> Any:
    """What stands at a path, in plain values or in sections; None where nothing does."""
    for step in _steps(where):
        match value:
            case dict():
                value = value.get(step)
            case list() if isinstance(step, int):
                value = value[step]
            case msgspec.Struct():
                names = {field.encode_name: field.name for field in msgspec.structs.fields(value)}
                value = getattr(value, names[str(step)])
            case _:
                return None
    return value


def keys_at(where: str) -> list[str]:
    """The keys of the section at a path."""
    kind: Any = msgspec.inspect.type_info(FileText)
    for step in _steps(where):
        if isinstance(step, int):
            kind = kind.item_type
        else:
            kind = next(field.type for field in kind.fields if field.encode_name == step)
        if isinstance(kind, msgspec.inspect.UnionType):
            kind = next(each for each in kind.types if isinstance(each, _NESTED))
    return [field.encode_name for field in kind.fields]


_NESTED: Final = (msgspec.inspect.StructType, msgspec.inspect.ListType)


def _all_keys(kind: Any) -> Iterator[str]:
    match kind:
        case msgspec.inspect.StructType():
            for field in kind.fields:
                yield field.encode_name
                yield from _all_keys(field.type)
        case msgspec.inspect.ListType():
            yield from _all_keys(kind.item_type)
        case msgspec.inspect.UnionType():
            for each in kind.types:
                yield from _all_keys(each)
        case _:
            pass


_SPELLINGS: Final = {key.lower(): key for key in _all_keys(msgspec.inspect.type_info(FileText))}


def canonical(key: str) -> str:
    """The spelling in the schema: the reference decodes with Go's encoding/json, for which case does not matter."""
    return _SPELLINGS.get(key.lower(), key)
