"""What the operator asked for: flags and environment become one frozen Config.

A flag wins over its variable, and that over the default. Names, values and variables are those of NVIDIA's plugin
wherever it has the option, and so are the spellings, which are Go's: one dash or two, ``=true`` and ``=false`` for
switches, lists by comma or by repetition, and an empty variable counts as unset.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from _nvplug.errors import OptionError

__all__ = ["Config", "Option", "options", "read_config"]

KUBELET_SOCKET = "/var/lib/kubelet/device-plugins/kubelet.sock"


@dataclass(frozen=True, slots=True)
class Config:
    """The options in force.

    Attributes:
        kubelet_socket: where the kubelet listens; our own sockets are made in the same directory.
        device_discovery_strategy: ``auto``, ``nvml``, or ``simulated:`` and a machine or a file.
        driver_root_ctr_path: where the driver's root is mounted, if not at ``/``.
        device_list_strategy: how a container is told its devices.
        device_id_strategy: whether it is told UUIDs or indices.
        pass_device_specs: whether it is given the device nodes as well.
        dev_root: the directory on the host that holds ``dev``.
    """

    kubelet_socket: Path
    device_discovery_strategy: str
    driver_root_ctr_path: str
    device_list_strategy: tuple[str, ...]
    device_id_strategy: str
    pass_device_specs: bool
    dev_root: str


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Option(Generic[T]):
    """One thing that can be asked for.

    Attributes:
        flags: without dashes; the first is the name, the others are aliases.
        variables: in order of precedence.
        default: as it would be written.
        parse: from what was written to the value. It raises ValueError that says what is allowed.
        help: one line.
    """

    flags: tuple[str, ...]
    variables: tuple[str, ...]
    default: str
    parse: Callable[[str], T]
    help: str

    @property
    def is_switch(self) -> bool:
        """Whether the flag alone means true, and never takes the next word."""
        return self.parse is _switch


def _switch(text: str) -> bool:
    # Go's strconv.ParseBool.
    if text in {"1", "t", "T", "true", "True", "TRUE"}:
        return True
    if text in {"0", "f", "F", "false", "False", "FALSE"}:
        return False
    raise ValueError("allowed are true and false")


def _one_of(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text in allowed:
            return text
        raise ValueError(_allowed(text, allowed))

    return parse


def _some_of(*allowed: str) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        words = tuple(word.strip() for word in text.split(",") if word.strip())
        for word in words:
            if word not in allowed:
                raise ValueError(_allowed(word, allowed))
        if not words:
            raise ValueError(_allowed("", allowed))
        return tuple(dict.fromkeys(words))

    return parse


def _allowed(text: str, allowed: Sequence[str]) -> str:
    near = difflib.get_close_matches(text, allowed, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"allowed {'is' if len(allowed) == 1 else 'are'} {', '.join(allowed)}{hint}"


def _socket(text: str) -> Path:
    path = Path(text)
    if not path.is_absolute():
        raise ValueError("it must be an absolute path")
    # sun_path holds 108 bytes, the last of them zero; our own sockets need room for their names beside this one.
    if len(str(path.parent).encode()) > 70:
        raise ValueError("the directory's path is too long for sockets in it: 70 bytes at most")
    return path


def _discovery(text: str) -> str:
    if text in {"auto", "nvml"} or (text.startswith("simulated:") and text != "simulated:"):
        return text
    if text in {"tegra", "vfio"}:
        raise ValueError("nvplug does not support it; allowed are auto, nvml and simulated:MACHINE or simulated:FILE")
    raise ValueError("allowed are auto, nvml and simulated:MACHINE or simulated:FILE")


def _directory(text: str) -> str:
    if not text.startswith("/"):
        raise ValueError("it must be an absolute path")
    return text


options: tuple[Option[object], ...] = (
    Option(
        ("kubelet-socket",),
        ("KUBELET_SOCKET",),
        KUBELET_SOCKET,
        _socket,
        "where the kubelet listens; our own sockets are made beside it",
    ),
    Option(
        ("device-discovery-strategy",),
        ("DEVICE_DISCOVERY_STRATEGY",),
        "auto",
        _discovery,
        "where GPUs come from: auto, nvml, simulated:8xH100 or simulated:FILE",
    ),
    Option(
        ("driver-root-ctr-path", "container-driver-root"),
        ("DRIVER_ROOT_CTR_PATH", "CONTAINER_DRIVER_ROOT"),
        "/driver-root",
        _directory,
        "where the driver's root is mounted; without one, / is searched",
    ),
    Option(
        ("device-list-strategy",),
        ("DEVICE_LIST_STRATEGY",),
        "envvar",
        _some_of("envvar"),
        "how a container is told its devices: envvar",
    ),
    Option(
        ("device-id-strategy",),
        ("DEVICE_ID_STRATEGY",),
        "uuid",
        _one_of("uuid", "index"),
        "what a container is told: uuid or index",
    ),
    Option(
        ("pass-device-specs",),
        ("PASS_DEVICE_SPECS",),
        "false",
        _switch,
        "whether a container is given the device nodes as well",
    ),
    Option(
        ("dev-root", "nvidia-dev-root"),
        ("NVIDIA_DEV_ROOT",),
        "/",
        _directory,
        "the directory on the host that holds dev",
    ),
)
"""In the order of Config's fields."""


@dataclass(frozen=True, slots=True)
class _NotYet:
    """An option of NVIDIA's plugin that nvplug does not have: accepted only where it asks for nothing."""

    flag: str
    variable: str
    harmless: frozenset[str]


_NOT_YET = (
    _NotYet("mig-strategy", "MIG_STRATEGY", frozenset({"none"})),
    # Whatever it says, nvplug waits for the driver: an exit would take the node's GPUs away.
    _NotYet("fail-on-init-error", "FAIL_ON_INIT_ERROR", frozenset({"true", "false"})),
    _NotYet("driver-root", "NVIDIA_DRIVER_ROOT", frozenset({"/"})),
    _NotYet("nvidia-driver-root", "NVIDIA_DRIVER_ROOT", frozenset({"/"})),
    _NotYet("gdrcopy-enabled", "GDRCOPY_ENABLED", frozenset({"false"})),
    _NotYet("gds-enabled", "GDS_ENABLED", frozenset({"false"})),
    _NotYet("mofed-enabled", "MOFED_ENABLED", frozenset({"false"})),
    _NotYet("mps-root", "MPS_ROOT", frozenset()),
    _NotYet("shared-devices-allocation-policy", "SHARED_DEVICES_ALLOCATION_POLICY", frozenset({"distributed"})),
    _NotYet("imex-channel-ids", "IMEX_CHANNEL_IDS", frozenset()),
    _NotYet("imex-required", "IMEX_REQUIRED", frozenset({"false"})),
    _NotYet("config-file", "CONFIG_FILE", frozenset()),
)


def read_config(arguments: Sequence[str], environment: Mapping[str, str]) -> Config:
    """Makes the Config from the command line and the environment.

    Args:
        arguments: the flags, without the program and the command.
        environment: the variables.

    Raises:
        OptionError: naming the flag or variable, what it says, and what is allowed.
    """
    given = dict(_flags(arguments))
    for absent in _NOT_YET:
        _refuse_unless_harmless(absent, given, environment)
    values: list[object] = []
    for option in options:
        origin, text = _written(option, given, environment)
        try:
            values.append(option.parse(text))
        except ValueError as error:
            raise OptionError(f"{origin} is {text!r}: {error}", remedy=f"correct or remove {origin}") from None
    return Config(*values)  # type: ignore[arg-type]  # the table is in the order of the fields; a test checks it


def _written(option: Option[object], given: Mapping[str, str], environment: Mapping[str, str]) -> tuple[str, str]:
    for flag in option.flags:
        if flag in given:
            return f"--{flag}", given[flag]
    for variable in option.variables:
        if environment.get(variable):
            return variable, environment[variable]
    return f"--{option.flags[0]}", option.default


def _flags(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    known = {flag: option for option in options for flag in option.flags}
    absent = {option.flag: option for option in _NOT_YET}
    lists: dict[str, list[str]] = {}
    words = iter(arguments)
    for word in words:
        if not word.startswith("-") or not word.lstrip("-"):
            raise OptionError(f"{word!r} is not a flag", remedy="see nvplug run --help")
        name, equals, value = word.removeprefix("-").removeprefix("-").partition("=")
        if name not in known and name not in absent:
            raise OptionError(f"there is no flag --{name}", remedy=_nearest_flag(name, [*known, *absent]))
        if not equals:
            value = _value(name, known, words)
        lists.setdefault(name, []).append(value)
    for name, written in lists.items():
        # As in Go: a list grows with every repetition, and of anything else the last one counts.
        yield name, ",".join(written) if name in known and _is_list(known[name]) else written[-1]


def _value(name: str, known: Mapping[str, Option[object]], words: Iterator[str]) -> str:
    switches = {"fail-on-init-error", "gdrcopy-enabled", "gds-enabled", "mofed-enabled", "imex-required"}
    if name in switches or (name in known and known[name].is_switch):
        return "true"
    value = next(words, None)
    if value is None:
        raise OptionError(f"--{name} needs a value", remedy=f"write --{name}=VALUE")
    return value


def _is_list(option: Option[object]) -> bool:
    return option.flags[0] == "device-list-strategy"


def _nearest_flag(name: str, flags: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, flags, n=1)
    return f"did you mean --{near[0]}?" if near else "see nvplug run --help"


def _refuse_unless_harmless(absent: _NotYet, given: Mapping[str, str], environment: Mapping[str, str]) -> None:
    for origin, text in (
        (f"--{absent.flag}", given.get(absent.flag, "")),
        (absent.variable, environment.get(absent.variable, "")),
    ):
        if text and text not in absent.harmless:
            raise OptionError(
                f"{origin} is {text!r}: nvplug does not support this option yet",
                remedy=f"remove {origin}, or stay with NVIDIA's plugin on this node for now",
            )
