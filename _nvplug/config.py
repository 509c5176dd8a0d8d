"""What the operator asked for: flags and environment become one frozen Config.

A flag wins over its variable, and that over the default. Names, values and variables are those of NVIDIA's plugin
wherever it has the option, and so are the spellings, which are those of Go's package flag:

- one dash or two, and the value behind ``=`` or in the next word;
- a switch alone means true; it takes its value behind ``=`` only, as the next word is not its;
- of a repeated flag the last one counts, but a list grows by repetition as well as by commas;
- aliases are the same flag;
- an empty variable counts as unset.

Go stops at the first word that is no flag, and ignores the rest. That is how ``--pass-device-specs false`` comes to
mean true, so here it is an error.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from _nvplug.errors import OptionError

__all__ = ["INERT", "OPTIONS", "Config", "Kind", "Option", "read_config"]

KUBELET_SOCKET: Final = "/var/lib/kubelet/device-plugins/kubelet.sock"

# sun_path holds 108 bytes, the last of them zero. Our own sockets need room for their names in the same directory.
LONGEST_SOCKET: Final = 107
LONGEST_DIRECTORY: Final = 70


@dataclass(frozen=True, slots=True)
class Config:
    """The options in force, each under the name of its flag.

    Attributes:
        kubelet_socket: where the kubelet listens; our own sockets are made in the same directory.
        device_discovery_strategy: ``auto``, ``nvml``, or ``simulated:`` and a machine or a file.
        driver_root_ctr_path: where the driver's root is mounted, if not at ``/``.
        device_list_strategy: how a container is told its devices.
        device_id_strategy: whether it is told UUIDs or indices.
        pass_device_specs: whether it is given the device nodes as well.
        driver_root: the driver's root on the host.
        dev_root: the directory on the host that holds ``dev``.
    """

    kubelet_socket: Path
    device_discovery_strategy: str
    driver_root_ctr_path: str
    device_list_strategy: tuple[str, ...]
    device_id_strategy: str
    pass_device_specs: bool
    driver_root: str
    dev_root: str


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """How a value is written.

    Attributes:
        parse: from what was written to the value. It raises ValueError that says what is allowed.
        is_switch: the flag alone means true, and never takes the next word.
        is_list: repetitions add up.
    """

    parse: Callable[[str], T]
    is_switch: bool = False
    is_list: bool = False


@dataclass(frozen=True, slots=True)
class Option(Generic[T]):
    """One thing that can be asked for.

    Attributes:
        flags: without dashes; the first is the name, the others are aliases. None of them: by variable only.
        variables: in order of precedence.
        default: as it would be written.
        kind: how it is written.
        help: one line.
    """

    flags: tuple[str, ...]
    variables: tuple[str, ...]
    default: str
    kind: Kind[T]
    help: str

    @property
    def field(self) -> str:
        """The attribute of Config that holds the value."""
        return self.flags[0].replace("-", "_")

    @property
    def written(self) -> str:
        """Every spelling, for a person to read."""
        return ", ".join([*(f"--{flag}" for flag in self.flags), *self.variables])


# --- kinds


def _one_of(*allowed: str, unsupported: Sequence[str] = ()) -> Kind[str]:
    def parse(text: str) -> str:
        return _checked(text, allowed, unsupported)

    return Kind(parse)


def _some_of(*allowed: str, unsupported: Sequence[str] = ()) -> Kind[tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        words = (word.strip() for word in text.split(","))
        return tuple(dict.fromkeys(_checked(word, allowed, unsupported) for word in words))

    return Kind(parse, is_list=True)


def _only(harmless: T, kind: Kind[T]) -> Kind[T]:
    def parse(text: str) -> T:
        value = kind.parse(text)
        if value != harmless:
            raise ValueError("nvplug does not support that yet")
        return value

    return replace(kind, parse=parse)


def _checked(text: str, allowed: Sequence[str], unsupported: Sequence[str]) -> str:
    if text in allowed:
        return text
    problem = "nvplug does not support that yet; " if text in unsupported else ""
    near = difflib.get_close_matches(text, allowed, n=1) if not problem else []
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise ValueError(f"{problem}allowed {'is' if len(allowed) == 1 else 'are'} {', '.join(allowed)}{hint}")


def _bool(text: str) -> bool:
    # Go's strconv.ParseBool.
    if text in {"1", "t", "T", "true", "True", "TRUE"}:
        return True
    if text in {"0", "f", "F", "false", "False", "FALSE"}:
        return False
    raise ValueError("allowed are true and false")


def _directory(text: str) -> str:
    if not text.startswith("/"):
        raise ValueError("it must be an absolute path")
    return text


def _socket(text: str) -> Path:
    path = Path(_directory(text))
    if len(os.fsencode(path.parent)) > LONGEST_DIRECTORY:
        raise ValueError(f"the directory's path is too long for sockets in it: {LONGEST_DIRECTORY} bytes at most")
    if len(os.fsencode(path)) > LONGEST_SOCKET:
        raise ValueError(f"the path is too long for a socket: {LONGEST_SOCKET} bytes at most")
    return path


def _discovery(text: str) -> str:
    if text.startswith("simulated:") and text != "simulated:":
        return text
    return _checked(text, ("auto", "nvml", "simulated:MACHINE", "simulated:FILE"), ("tegra", "vfio"))


_SWITCH: Final = Kind(_bool, is_switch=True)
_OFF: Final = _only(harmless=False, kind=_SWITCH)
_TEXT: Final = Kind(str)
_NOTHING: Final = _only("", _TEXT)
_DIRECTORY: Final = Kind(_directory)


# --- the tables

OPTIONS: Final[tuple[Option[Any], ...]] = (
    Option(
        ("kubelet-socket",),
        ("KUBELET_SOCKET",),
        KUBELET_SOCKET,
        Kind(_socket),
        "where the kubelet listens; our own sockets are made beside it",
    ),
    Option(
        ("device-discovery-strategy",),
        ("DEVICE_DISCOVERY_STRATEGY",),
        "auto",
        Kind(_discovery),
        "where GPUs come from: auto, nvml, simulated:8xH100 or simulated:FILE",
    ),
    Option(
        ("driver-root-ctr-path", "container-driver-root"),
        ("DRIVER_ROOT_CTR_PATH", "CONTAINER_DRIVER_ROOT"),
        "/driver-root",
        _DIRECTORY,
        "where the driver's root is mounted; without one, / is searched",
    ),
    Option(
        ("device-list-strategy",),
        ("DEVICE_LIST_STRATEGY",),
        "envvar",
        _some_of("envvar", unsupported=("volume-mounts", "cdi-annotations", "cdi-cri")),
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
        _SWITCH,
        "whether a container is given the device nodes as well",
    ),
    Option(
        ("driver-root", "nvidia-driver-root"),
        ("NVIDIA_DRIVER_ROOT",),
        "/",
        _DIRECTORY,
        "the driver's root on the host",
    ),
    Option(
        ("dev-root", "nvidia-dev-root"),
        ("NVIDIA_DEV_ROOT",),
        "",
        Kind(lambda text: _directory(text) if text else ""),
        "the directory on the host that holds dev; the same as driver-root if empty",
    ),
)
"""What nvplug has: one for each field of Config."""

INERT: Final[tuple[Option[Any], ...]] = (
    Option(
        ("mig-strategy",),
        ("MIG_STRATEGY",),
        "none",
        _one_of("none", unsupported=("single", "mixed")),
        "not supported yet",
    ),
    Option(
        ("fail-on-init-error",),
        ("FAIL_ON_INIT_ERROR",),
        "true",
        _SWITCH,
        "nvplug waits for the driver in both cases: an end would take the node's GPUs away",
    ),
    Option(("gdrcopy-enabled",), ("GDRCOPY_ENABLED",), "false", _OFF, "not supported yet"),
    Option(("gds-enabled",), ("GDS_ENABLED",), "false", _OFF, "not supported yet"),
    Option(("mofed-enabled",), ("MOFED_ENABLED",), "false", _OFF, "not supported yet"),
    Option(("imex-channel-ids",), ("IMEX_CHANNEL_IDS",), "", replace(_NOTHING, is_list=True), "not supported yet"),
    Option(("imex-required",), ("IMEX_REQUIRED",), "false", _OFF, "not supported yet"),
    Option(("config-file",), ("CONFIG_FILE",), "", _NOTHING, "not supported yet"),
    Option((), ("DP_DISABLE_HEALTHCHECKS",), "", _NOTHING, "not supported yet"),
    Option((), ("DP_ENABLE_HEALTHCHECKS",), "", _NOTHING, "not supported yet"),
    # Charts and operators set these on every node, whether or not it uses what they are for.
    Option(
        ("cdi-annotation-prefix",),
        ("CDI_ANNOTATION_PREFIX",),
        "cdi.k8s.io/",
        _TEXT,
        "for --device-list-strategy=cdi-annotations, which is refused",
    ),
    Option(
        ("nvidia-cdi-hook-path", "nvidia-ctk-path"),
        ("NVIDIA_CDI_HOOK_PATH", "NVIDIA_CTK_PATH"),
        "/usr/bin/nvidia-ctk",
        _TEXT,
        "for --device-list-strategy=cdi-*, which is refused",
    ),
    Option(
        ("cdi-feature-flags",),
        ("CDI_FEATURE_FLAGS",),
        "",
        replace(_TEXT, is_list=True),
        "for --device-list-strategy=cdi-*, which is refused",
    ),
    Option(
        ("cdi-disable-hooks",),
        ("CDI_DISABLE_HOOKS",),
        "",
        replace(_TEXT, is_list=True),
        "for --device-list-strategy=cdi-*, which is refused",
    ),
    Option(("mps-root",), ("MPS_ROOT",), "", _TEXT, "for shared GPUs, which only a --config-file asks for"),
    Option(
        ("shared-devices-allocation-policy",),
        ("SHARED_DEVICES_ALLOCATION_POLICY",),
        "distributed",
        _one_of("distributed", "packed"),
        "for shared GPUs, which only a --config-file asks for",
    ),
)
"""What NVIDIA's plugin has and nvplug has not: accepted where it asks for nothing, refused by name otherwise."""


# --- reading


def read_config(arguments: Sequence[str], environment: Mapping[str, str]) -> Config:
    """Makes the Config from the command line and the environment.

    Args:
        arguments: the flags, without the program and the command.
        environment: the variables.

    Raises:
        OptionError: naming the flag or variable, what it says, and what is allowed.
    """
    given = _read_flags(arguments)
    for option in INERT:
        _value(option, given, environment)
    values = {option.field: _value(option, given, environment) for option in OPTIONS}
    return Config(**{**values, "dev_root": values["dev_root"] or values["driver_root"]})


@dataclass(frozen=True, slots=True)
class _Written:
    origin: str
    text: str


def _value(option: Option[T], given: Mapping[Option[Any], _Written], environment: Mapping[str, str]) -> T:
    variables = (_Written(name, environment[name]) for name in option.variables if environment.get(name))
    written = given.get(option) or next(variables, None)
    if written is None:
        return option.kind.parse(option.default)
    try:
        return option.kind.parse(written.text)
    except ValueError as error:
        raise OptionError(
            f"{written.origin} is {written.text!r}: {error}", remedy=f"correct or remove {written.origin}"
        ) from None


def _read_flags(arguments: Sequence[str]) -> Mapping[Option[Any], _Written]:
    known = {flag: option for option in (*OPTIONS, *INERT) for flag in option.flags}
    given: dict[Option[Any], _Written] = {}
    words = iter(arguments)
    for word in words:
        spelling, equals, text = word.partition("=")
        name = spelling.removeprefix("-").removeprefix("-")
        if word in {"-", "--"} or name == spelling:
            _refuse_words([word, *words])
            break
        if name not in known:
            raise OptionError(f"there is no flag {spelling!r}", remedy=_nearest_flag(name, known))
        option = known[name]
        if not equals:
            text = "true" if option.kind.is_switch else _next_word(name, words)
        if option.kind.is_list and option in given:
            text = f"{given[option].text},{text}"
        given[option] = _Written(f"--{name}", text)
    return given


def _next_word(name: str, words: Iterator[str]) -> str:
    for word in words:
        return word
    raise OptionError(f"--{name} needs a value", remedy=f"write --{name}=VALUE")


def _refuse_words(words: Sequence[str]) -> None:
    """Refuses what is left after the flags; ``--`` alone is their end."""
    extra = words[1:] if words[0] == "--" else words
    if not extra:
        return
    raise OptionError(
        f"{extra[0]!r} is not a flag",
        remedy="remove it; the value of a switch stands behind an equals sign, as in --pass-device-specs=false",
    )


def _nearest_flag(name: str, flags: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, flags, n=1)
    return f"did you mean --{near[0]}?" if near else "see nvplug run --help"
