"""The sections that only a file can have: naming, sharing, selection, errors of GPUs."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import msgspec

from _nvplug.config.model import (
    MOST_REPLICAS,
    XID_ACTIONS,
    NamingRule,
    Selection,
    Selector,
    SharedResource,
    TimeSlicing,
    XidRule,
    resource_name,
)
from _nvplug.config.schema import RuleText, SelectionText, SelectorText, TimeSlicingText

__all__ = ["SECTIONS", "WrongError"]


class WrongError(Exception):
    """What stands at ``where``, a path as msgspec writes it, cannot be obeyed."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(what)
        self.where = where
        self.what = what


T = TypeVar("T")


def _made(make: Callable[[Any], T], value: Any, where: str) -> T:
    try:
        return make(value)
    except ValueError as error:
        raise WrongError(where, str(error)) from None


def _names(rules: list[RuleText], where: str, obeyed: list[str]) -> tuple[NamingRule, ...]:
    if rules:
        obeyed.append(where[2:])
    return tuple(
        NamingRule(
            _made(_pattern, rule.pattern, f"{where}[{position}].pattern"),
            _made(resource_name, rule.name, f"{where}[{position}].name"),
        )
        for position, rule in enumerate(rules)
    )


def _pattern(text: str) -> str:
    if not text:
        raise ValueError("it must not be empty; * matches everything")
    return text


def _time_slicing(section: TimeSlicingText, where: str, obeyed: list[str]) -> TimeSlicing:
    if not section.resources:
        raise WrongError(where, "it needs resources, each with a name and a number of replicas")
    shared: list[SharedResource] = []
    for position, each in enumerate(section.resources):
        here = f"{where}.resources[{position}]"
        name = _made(resource_name, each.name, f"{here}.name")
        if not 2 <= each.replicas <= MOST_REPLICAS:
            raise WrongError(f"{here}.replicas", f"allowed are 2 to {MOST_REPLICAS}")
        devices = None if each.devices is None else _made(_devices, each.devices, f"{here}.devices")
        if any(earlier.name == name and earlier.devices is None for earlier in shared):
            raise WrongError(f"{here}.name", "an entry before this one shares all of its devices")
        offered_as = name
        if each.rename:
            offered_as = _made(resource_name, each.rename, f"{here}.rename")
        elif section.rename_by_default:
            offered_as = _made(resource_name, f"{name}.shared", f"{here}.name")
        shared.append(SharedResource(name, each.replicas, devices, offered_as))
        obeyed += [f"{here[2:]}.devices"] * (devices is not None) + [f"{here[2:]}.rename"] * bool(each.rename)
    return TimeSlicing(tuple(shared), section.fail_requests_greater_than_one or False)


_ANY_CASE: Final = re.IGNORECASE | re.ASCII
_UUID: Final = "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_DEVICE: Final = re.compile(rf"([0-9]+)(?::([0-9]+))?|((?:GPU|MIG)-{_UUID}|MIG-GPU-{_UUID}/[0-9]+/[0-9]+)", _ANY_CASE)


def _devices(value: str | int | list[str | int]) -> tuple[str, ...] | int | None:
    match value:
        case "all":
            return None
        case str():
            raise ValueError("allowed are all, a number of devices, or a list of them")
        case int():
            if value < 1:
                raise ValueError("a number of devices is 1 or more")
            return value
        case _:
            if not value:
                raise ValueError("the list is empty; all is the word for all devices")
            return tuple(dict.fromkeys(map(_device, value)))


def _device(value: str | int) -> str:
    found = _DEVICE.fullmatch(str(value))
    if found is None:
        raise ValueError(f"{value!r} is neither an index (3, of a MIG device 3:0) nor a UUID (GPU-… or MIG-…)")
    gpu, mig, uuid = found.groups()
    if uuid:
        return _uuid(str(uuid))
    return f"{int(gpu)}:{int(mig)}" if mig else str(int(gpu))


def _uuid(text: str) -> str:
    # As NVML writes it.
    return text.lower().replace("gpu-", "GPU-").replace("mig-", "MIG-")


def _selection(section: SelectionText, where: str, _obeyed: list[str]) -> Selection:
    if section.include is not None and not section.include:
        raise WrongError(f"{where}.include", "an empty list would exclude every GPU")
    include = None if section.include is None else _selectors(section.include, f"{where}.include")
    return Selection(include, _selectors(section.exclude or [], f"{where}.exclude"))


def _selectors(selectors: list[SelectorText], where: str) -> tuple[Selector, ...]:
    made = []
    for position, each in enumerate(selectors):
        given = {kind: value for kind, value in msgspec.structs.asdict(each).items() if value is not None}
        if len(given) != 1:
            raise WrongError(f"{where}[{position}]", "expected exactly one of index, uuid, pci and product")
        ((kind, value),) = given.items()
        made.append(Selector(kind, _made(_SELECTORS[kind], value, f"{where}[{position}].{kind}")))
    return tuple(made)


def _gpu_index(value: int) -> str:
    if value < 0:
        raise ValueError("an index is 0 or more")
    return str(value)


def _gpu_uuid(text: str) -> str:
    if not re.fullmatch(f"GPU-{_UUID}", text, _ANY_CASE):
        raise ValueError("expected the UUID of a GPU, as nvidia-smi -L prints it; MIG devices go with their GPU")
    return _uuid(text)


def _pci(text: str) -> str:
    found = re.fullmatch(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}:[01][0-9a-f]\.[0-7])", text, _ANY_CASE)
    if found is None:
        raise ValueError("expected a PCI address, such as 0000:1b:00.0")
    domain, rest = found.groups()
    return f"{int(domain or '0', 16):04x}:{rest.lower()}"


_SELECTORS: Final[Mapping[str, Callable[[Any], str]]] = {
    "index": _gpu_index,
    "uuid": _gpu_uuid,
    "pci": _pci,
    "product": _pattern,
}


def _xids(section: Mapping[str, Any], where: str, _obeyed: list[str]) -> tuple[XidRule, ...]:
    rules = {}
    for key, word in section.items():
        here = f"{where}.{key}"
        if not re.fullmatch("[0-9]{1,9}", key):
            raise WrongError(here, "expected the number of an XID, and what it asks for, such as 63: reset")
        if int(key) in rules:
            raise WrongError(here, f"XID {int(key)} is given twice")
        if word is not None:
            rules[int(key)] = XidRule(int(key), _made(_xid_action, word, here))
    return tuple(rules[code] for code in sorted(rules))


def _xid_action(word: Any) -> str:
    if word in XID_ACTIONS:
        return str(word)
    near = difflib.get_close_matches(str(word), XID_ACTIONS, n=1)
    raise ValueError(f"allowed are {', '.join(XID_ACTIONS)}{f' (did you mean {near[0]}?)' if near else ''}")


def _no_mps(_section: Any, where: str, _obeyed: list[str]) -> None:
    raise WrongError(where, "nvplug does not support MPS yet; sharing.timeSlicing is the way to share")


SECTIONS: Final[tuple[tuple[str, str, Callable[[Any, str, list[str]], Any]], ...]] = (
    ("gpu_names", "$.resources.gpus", _names),
    ("mig_names", "$.resources.mig", _names),
    ("mps", "$.sharing.mps", _no_mps),
    ("time_slicing", "$.sharing.timeSlicing", _time_slicing),
    ("selection", "$.selection", _selection),
    ("health_xids", "$.health.xids", _xids),
)
