"""What the operator asked for, as data."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from _nvplug.hardware import Gpu

__all__ = [
    "HEALTH_SOCKET",
    "KUBELET_SOCKET",
    "MOST_REPLICAS",
    "XID_ACTIONS",
    "Config",
    "NamingRule",
    "Selection",
    "Selector",
    "SharedResource",
    "TimeSlicing",
    "XidRule",
    "resource_name",
]

HEALTH_SOCKET: Final = "@nvplug"

KUBELET_SOCKET: Final = "/var/lib/kubelet/device-plugins/kubelet.sock"

MOST_REPLICAS: Final = 60_000
"""What a list that a kubelet reads has room for; see kubelet/wire.py."""


XID_ACTIONS: Final = ("ignore", "reset", "reboot", "ask-driver")
"""What can be said of an XID: it takes no GPU away; it does, until a reset or a reboot; or the driver decides."""


class XidRule(NamedTuple):
    """What becomes of a GPU with this XID, whatever the table of XIDs says: one of ``XID_ACTIONS``."""

    code: int
    action: str


@dataclass(frozen=True, slots=True)
class NamingRule:
    """Which devices are offered under which name.

    Attributes:
        pattern: of the product name, or of the MIG profile. ``*`` stands for any text, and nothing else is special.
        name: of the resource, such as ``nvidia.com/a100``.
    """

    pattern: str
    name: str

    def matches(self, text: str) -> bool:
        """Whether the pattern fits the whole of ``text``."""
        return _fits(self.pattern, text)


@dataclass(frozen=True, slots=True)
class SharedResource:
    """Some devices of a resource that several containers share, taking turns.

    Attributes:
        name: of the resource.
        replicas: how many containers share one device.
        devices: which of them: None for all, a number for the first so many, else indices (``3``, of MIG devices
            ``3:0``) and UUIDs. What an earlier entry took is not shared again.
        offered_as: the name under which the replicas are offered.
    """

    name: str
    replicas: int
    devices: tuple[str, ...] | int | None
    offered_as: str


@dataclass(frozen=True, slots=True)
class TimeSlicing:
    """How devices are shared.

    Attributes:
        resources: in order of precedence.
        fail_requests_greater_than_one: whether a container that asks for several replicas is refused. They would give
            it no more time.
    """

    resources: tuple[SharedResource, ...] = ()
    fail_requests_greater_than_one: bool = False


@dataclass(frozen=True, slots=True)
class Selector:
    """One way to point at GPUs. ``kind`` is ``index``, ``uuid``, ``pci`` or ``product``, ``value`` fits it."""

    kind: str
    value: str

    def matches(self, gpu: Gpu) -> bool:
        """Whether it points at this one."""
        match self.kind:
            case "index":
                return str(gpu.index) == self.value
            case "uuid":
                return gpu.uuid == self.value
            case "pci":
                return gpu.pci == self.value
            case _:
                return _fits(self.value, gpu.name)

    def __str__(self) -> str:
        return f"{self.kind}: {self.value}"


@dataclass(frozen=True, slots=True)
class Selection:
    """Which GPUs are nvplug's business: those that are included, where any are, less those that are excluded."""

    include: tuple[Selector, ...] | None = None
    exclude: tuple[Selector, ...] = ()


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that is asked for. By itself it is what NVIDIA's plugin does when nothing is asked of it.

    Attributes:
        kubelet_socket: where the kubelet listens; our own sockets are made in the same directory.
        config_file: where the rest was read from, ``""`` for none.
        device_discovery_strategy: ``auto``, ``nvml``, or ``simulated:`` and a machine or a file.
        driver_root_ctr_path: where the driver's root is mounted, if not at ``/``.
        device_list_strategy: how a container comes by its devices; see container/answers.py.
        device_id_strategy: whether it is told UUIDs or indices.
        pass_device_specs: whether it is given the device nodes as well.
        driver_root: the driver's root on the host.
        dev_root: the directory on the host that holds ``dev``.
        mig_strategy: ``none``: whole GPUs; ``single``: MIG devices of one shape under the name of GPUs; ``mixed``: a
            resource for each shape.
        shared_devices_allocation_policy: whether the replicas and MIG devices of one container are ``distributed`` over
            GPUs, ``packed``, or above all of ``distinct`` ones.
        dp_disable_healthchecks, dp_enable_healthchecks: see health_policy.
        health_socket: the name in the abstract namespace, with ``@`` in front, where `nvplug health` asks.
        forget_health: whether verdicts from before a restart of nvplug are dropped.
        health_silence: seconds without an answer from the driver after which a GPU is unhealthy.
        gdrcopy_enabled, gds_enabled, mofed_enabled: whether containers are given what the node has of these.
        imex_channel_ids: the IMEX channels that they are given.
        imex_required: whether that they do not exist is an error.
        cdi_annotation_prefix: with the slash.
        nvidia_cdi_hook_path: of nvidia-ctk or nvidia-cdi-hook on the host.
        cdi_disable_hooks: names of hooks, or ``all``.
        cdi_feature_flags: as NVIDIA's plugin has them.
        cdi_remove_at_exit: whether documents are removed when nvplug ends.
        direct_host_path: a directory of the host with the driver's ``lib64`` and ``bin``; ``""``: to be looked for.
        direct_container_path: where containers see it.
        gpu_names, mig_names: the first that matches counts; without any, names are those of the MIG strategy.
        time_slicing: which devices are shared.
        selection: which GPUs are offered at all.
        health_xids: what is said of XIDs, in order of their numbers.
    """

    kubelet_socket: Path = Path(KUBELET_SOCKET)
    config_file: str = ""
    device_discovery_strategy: str = "auto"
    driver_root_ctr_path: str = "/driver-root"
    device_list_strategy: tuple[str, ...] = ("envvar",)
    device_id_strategy: str = "uuid"
    pass_device_specs: bool = False
    driver_root: str = "/"
    dev_root: str = "/"
    mig_strategy: str = "none"
    shared_devices_allocation_policy: str = "distributed"
    dp_disable_healthchecks: str = ""
    dp_enable_healthchecks: str = ""
    health_socket: str = HEALTH_SOCKET
    forget_health: bool = False
    health_silence: int = 30
    gdrcopy_enabled: bool = False
    gds_enabled: bool = False
    mofed_enabled: bool = False
    imex_channel_ids: tuple[str, ...] = ()
    imex_required: bool = False
    cdi_annotation_prefix: str = "cdi.k8s.io/"
    nvidia_cdi_hook_path: str = "/usr/bin/nvidia-ctk"
    cdi_disable_hooks: tuple[str, ...] = ()
    cdi_feature_flags: tuple[str, ...] = ()
    cdi_remove_at_exit: bool = False
    direct_host_path: str = ""
    direct_container_path: str = "/usr/local/nvidia"
    gpu_names: tuple[NamingRule, ...] = ()
    mig_names: tuple[NamingRule, ...] = ()
    time_slicing: TimeSlicing = TimeSlicing()
    selection: Selection = Selection()
    health_xids: tuple[XidRule, ...] = ()


def resource_name(text: str) -> str:
    """The full name of a resource, with ``nvidia.com/`` in front where no other domain is.

    Raises:
        ValueError: the kubelet would refuse it (its IsExtendedResourceName, in all versions).
    """
    name = text if "/" in text else f"nvidia.com/{text}"
    domain, _, part = name.partition("/")
    if not DOMAIN.fullmatch(domain) or len(domain) > _LONGEST_DOMAIN or domain.startswith("requests."):
        raise ValueError(
            "before the slash stands a domain: lower-case letters, digits, '-' and '.', without requests. in front"
        )
    if "kubernetes.io/" in name:
        raise ValueError("names in kubernetes.io are Kubernetes' own")
    if not _PART.fullmatch(part):
        raise ValueError(
            "a name has up to 63 letters, digits, '-', '_' and '.', and begins and ends with a letter or digit"
        )
    return name


# As "requests." and the domain, together, must be a DNS name.
_LONGEST_DOMAIN: Final = 253 - len("requests.")
DOMAIN: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_PART: Final = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")


def _fits(pattern: str, text: str) -> bool:
    """Matches from left to right, in linear time; as a regular expression, a pattern of many stars would not end."""
    first, *rest = pattern.split("*")
    if not rest:
        return text == pattern
    *middle, last = rest
    at = len(first)
    if not text.startswith(first):
        return False
    for piece in middle:
        at = text.find(piece, at)
        if at < 0:
            return False
        at += len(piece)
    return len(text) - len(last) >= at and text.endswith(last)
