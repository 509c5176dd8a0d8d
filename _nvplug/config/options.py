"""Everything that can be asked for by a flag, a variable or a key of the file: one table."""

from __future__ import annotations

import difflib
import os
import posixpath
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from _nvplug.config.model import DOMAIN, HEALTH_SOCKET, KUBELET_SOCKET

__all__ = ["INERT", "OPTIONS", "Kind", "Option"]

# sun_path holds 108 bytes, the last of them zero. Our own sockets need room for their names in the same directory.
LONGEST_SOCKET: Final = 107
LONGEST_DIRECTORY: Final = 70

# Seconds. Every GPU is looked at every five seconds, and a healthy one may take ten to answer.
_SHORTEST_SILENCE: Final = 10
_LONGEST_SILENCE: Final = 3600

# As Go writes one, in whole seconds.
_DURATION: Final = re.compile(r"(?:([0-9]{1,4})h)?(?:([0-9]{1,4})m)?(?:([0-9]{1,4})s)?", re.ASCII)

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
        key: its place in the file, ``""`` if it has none.
        lasting: whether it holds for as long as the process runs, whatever is configured later.
    """

    flags: tuple[str, ...]
    variables: tuple[str, ...]
    default: str
    kind: Kind[T]
    help: str
    key: str = ""
    lasting: bool = False

    @property
    def name(self) -> str:
        """What it is called: by its first flag, else by its variable."""
        return (self.flags or self.variables)[0]

    @property
    def field(self) -> str:
        """The attribute of Config that holds the value."""
        return self.name.lower().replace("-", "_")

    @property
    def written(self) -> str:
        """Every spelling on the command line and in the environment, for a person to read."""
        return ", ".join([*(f"--{flag}" for flag in self.flags), *self.variables])


# --- kinds


def _one_of(*allowed: str, unsupported: Sequence[str] = ()) -> Kind[str]:
    def parse(text: str) -> str:
        return _checked(text, allowed, unsupported)

    return Kind(parse)


def _some_of(*allowed: str) -> Kind[tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        words = (word.strip() for word in text.split(","))
        return tuple(dict.fromkeys(_checked(word, allowed, ()) for word in words))

    return Kind(parse, is_list=True)


def _any_of(*allowed: str) -> Kind[tuple[str, ...]]:
    some = _some_of(*allowed)
    return replace(some, parse=lambda text: some.parse(text) if text else ())


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


def _directory_in_container(text: str) -> str:
    path = posixpath.normpath(_directory(text))
    if path.strip("/") == "":
        raise ValueError("it must not be the root: what is mounted there hides everything")
    return path


def _annotation_prefix(text: str) -> str:
    # NVIDIA's plugin takes anything. What is no domain is no annotation, and no runtime reads it.
    if text[-1:] != "/" or not DOMAIN.fullmatch(text[:-1]):
        raise ValueError("it must be a domain with a slash behind it, such as cdi.k8s.io/")
    return text


def _socket(text: str) -> Path:
    path = Path(_directory(text))
    if len(os.fsencode(path.parent)) > LONGEST_DIRECTORY:
        raise ValueError(f"the directory's path is too long for sockets in it: {LONGEST_DIRECTORY} bytes at most")
    if len(os.fsencode(path)) > LONGEST_SOCKET:
        raise ValueError(f"the path is too long for a socket: {LONGEST_SOCKET} bytes at most")
    return path


def _abstract(text: str) -> str:
    if not text.startswith("@") or text == "@" or len(os.fsencode(text)) > LONGEST_SOCKET:
        raise ValueError(
            f"it must be a name that needs no file: @ and up to {LONGEST_SOCKET - 1} bytes, such as @nvplug"
        )
    return text


def _silence(text: str) -> int:
    found = _DURATION.fullmatch(text)
    hours, minutes, seconds = (int(part or 0) for part in found.groups()) if found else (0, 0, 0)
    total = 3600 * hours + 60 * minutes + seconds
    if not _SHORTEST_SILENCE <= total <= _LONGEST_SILENCE:
        raise ValueError("allowed are 10s to 1h, written as 45s or 2m30s")
    return total


def _discovery(text: str) -> str:
    if text.startswith("simulated:") and text != "simulated:":
        return text
    return _checked(text, ("auto", "nvml", "simulated:MACHINE", "simulated:FILE"), ("tegra", "vfio"))


_SWITCH: Final = Kind(_bool, is_switch=True)
_TEXT: Final = Kind(str)
_DIRECTORY: Final = Kind(_directory)


# --- the tables

OPTIONS: Final[tuple[Option[Any], ...]] = (
    Option(
        ("kubelet-socket",),
        ("KUBELET_SOCKET",),
        KUBELET_SOCKET,
        Kind(_socket),
        "where the kubelet listens; our own sockets are made beside it",
        lasting=True,
    ),
    Option(
        ("config-file",),
        ("CONFIG_FILE",),
        "",
        _TEXT,
        "YAML or JSON as NVIDIA's plugin reads it; read again when it changes, and at SIGHUP",
        lasting=True,
    ),
    Option(
        ("device-discovery-strategy",),
        ("DEVICE_DISCOVERY_STRATEGY",),
        "auto",
        Kind(_discovery),
        "where GPUs come from: auto, nvml, simulated:8xH100 or simulated:FILE",
        "flags.deviceDiscoveryStrategy",
        lasting=True,
    ),
    Option(
        ("driver-root-ctr-path", "container-driver-root"),
        ("DRIVER_ROOT_CTR_PATH", "CONTAINER_DRIVER_ROOT"),
        "/driver-root",
        _DIRECTORY,
        "where the driver's root is mounted; without one, / is searched",
        "flags.plugin.containerDriverRoot",
        lasting=True,
    ),
    Option(
        ("device-list-strategy",),
        ("DEVICE_LIST_STRATEGY",),
        "envvar",
        _some_of("envvar", "volume-mounts", "cdi-annotations", "cdi-cri", "direct"),
        "how a container comes by its devices: envvar, volume-mounts, cdi-annotations, cdi-cri, direct; or several",
        "flags.plugin.deviceListStrategy",
    ),
    Option(
        ("device-id-strategy",),
        ("DEVICE_ID_STRATEGY",),
        "uuid",
        _one_of("uuid", "index"),
        "what a container is told: uuid or index",
        "flags.plugin.deviceIDStrategy",
    ),
    Option(
        ("pass-device-specs",),
        ("PASS_DEVICE_SPECS",),
        "false",
        _SWITCH,
        "whether a container is given the device nodes as well",
        "flags.plugin.passDeviceSpecs",
    ),
    Option(
        ("driver-root", "nvidia-driver-root"),
        ("NVIDIA_DRIVER_ROOT",),
        "/",
        _DIRECTORY,
        "the driver's root on the host",
        "flags.nvidiaDriverRoot",
    ),
    Option(
        ("dev-root", "nvidia-dev-root"),
        ("NVIDIA_DEV_ROOT",),
        "",
        Kind(lambda text: _directory(text) if text else ""),
        "the directory on the host that holds dev; the same as driver-root if empty",
        "flags.nvidiaDevRoot",
    ),
    Option(
        ("mig-strategy",),
        ("MIG_STRATEGY",),
        "none",
        _one_of("none", "single", "mixed"),
        "which parts of a GPU are offered: none, single or mixed",
        "flags.migStrategy",
    ),
    Option(
        ("shared-devices-allocation-policy",),
        ("SHARED_DEVICES_ALLOCATION_POLICY",),
        "distributed",
        _one_of("distributed", "packed", "distinct"),
        "how replicas and MIG devices are chosen: distributed over GPUs, packed, or of distinct GPUs",
        "flags.plugin.sharedDevicesAllocationPolicy",
    ),
    Option(
        (),
        ("DP_DISABLE_HEALTHCHECKS",),
        "",
        _TEXT,
        "XIDs that take no GPU away, by commas; xids: none does; all: checks do not either",
        lasting=True,
    ),
    Option(
        (),
        ("DP_ENABLE_HEALTHCHECKS",),
        "",
        _TEXT,
        "XIDs that do, whatever is disabled; xids or all: every one",
        lasting=True,
    ),
    Option(
        (),
        ("HEALTH_SOCKET",),
        HEALTH_SOCKET,
        Kind(_abstract),
        "where nvplug health asks: a name that needs no file, for each network namespace",
        lasting=True,
    ),
    Option(
        ("forget-health",),
        ("FORGET_HEALTH",),
        "false",
        _SWITCH,
        "whether GPUs that were unhealthy before a restart of nvplug begin as healthy",
        lasting=True,
    ),
    Option(
        ("health-silence",),
        ("HEALTH_SILENCE",),
        "30s",
        Kind(_silence),
        "how long the driver may give no answer for a GPU before that is unhealthy: 10s to 1h",
        "health.silence",
        lasting=True,
    ),
    Option(
        ("gdrcopy-enabled",),
        ("GDRCOPY_ENABLED",),
        "false",
        _SWITCH,
        "whether containers are given GDRCopy",
        "flags.gdrcopyEnabled",
    ),
    Option(
        ("gds-enabled",),
        ("GDS_ENABLED",),
        "false",
        _SWITCH,
        "whether containers are given GPUDirect Storage",
        "flags.gdsEnabled",
    ),
    Option(
        ("mofed-enabled",),
        ("MOFED_ENABLED",),
        "false",
        _SWITCH,
        "whether containers are given the InfiniBand devices of Mellanox OFED",
        "flags.mofedEnabled",
    ),
    Option(
        ("imex-channel-ids",),
        ("IMEX_CHANNEL_IDS",),
        "",
        _any_of("0"),
        "the IMEX channels that containers are given: none, or 0",
        "imex.channelIDs",
    ),
    Option(
        ("imex-required",),
        ("IMEX_REQUIRED",),
        "false",
        _SWITCH,
        "whether an IMEX channel that does not exist is an error, instead of left out",
        "imex.required",
    ),
    Option(
        ("cdi-annotation-prefix",),
        ("CDI_ANNOTATION_PREFIX",),
        "cdi.k8s.io/",
        Kind(_annotation_prefix),
        "of the annotations of cdi-annotations",
        "flags.plugin.cdiAnnotationPrefix",
    ),
    Option(
        ("nvidia-cdi-hook-path", "nvidia-ctk-path"),
        ("NVIDIA_CDI_HOOK_PATH", "NVIDIA_CTK_PATH"),
        "/usr/bin/nvidia-ctk",
        _TEXT,
        "where the host has the program for the hooks of CDI documents",
        "flags.plugin.nvidiaCTKPath",
    ),
    Option(
        ("cdi-disable-hooks",),
        ("CDI_DISABLE_HOOKS",),
        "",
        _any_of(
            "all",
            "chmod",
            "create-symlinks",
            "disable-device-node-modification",
            "enable-cuda-compat",
            "update-application-profile",
            "update-ldcache",
        ),
        "hooks that CDI documents are to do without, by name; all: every one",
    ),
    Option(
        ("cdi-feature-flags",),
        ("CDI_FEATURE_FLAGS",),
        "",
        # Any word: later generators of NVIDIA's will have others.
        Kind(lambda text: tuple(text.split(",")) if text else (), is_list=True),
        "of NVIDIA's generator of CDI documents: disable-ipc-discoverer leaves out the sockets of daemons",
    ),
    Option(
        ("cdi-remove-at-exit",),
        ("CDI_REMOVE_AT_EXIT",),
        "false",
        _SWITCH,
        "whether CDI documents are removed when nvplug ends; containers then start no more",
    ),
    Option(
        ("direct-host-path",),
        ("DIRECT_HOST_PATH",),
        "",
        Kind(lambda text: _directory(text) if text else ""),
        "for direct: the host's directory with the driver's lib64 and bin; found by looking if empty",
        "flags.plugin.directHostPath",
    ),
    Option(
        ("direct-container-path",),
        ("DIRECT_CONTAINER_PATH",),
        "/usr/local/nvidia",
        Kind(_directory_in_container),
        "for direct: where a container sees that directory",
        "flags.plugin.directContainerPath",
    ),
)
"""What nvplug has: one for each field of Config that is not a section of the file."""

INERT: Final[tuple[Option[Any], ...]] = (
    Option(
        ("fail-on-init-error",),
        ("FAIL_ON_INIT_ERROR",),
        "true",
        _SWITCH,
        "nvplug waits for the driver in both cases: an end would take the node's GPUs away",
        "flags.failOnInitError",
    ),
    # Charts and operators set it on every node.
    Option(("mps-root",), ("MPS_ROOT",), "", _TEXT, "for sharing.mps, which is refused", "flags.mpsRoot"),
)
"""What NVIDIA's plugin has and nvplug has not: accepted where it asks for nothing, refused by name otherwise."""
