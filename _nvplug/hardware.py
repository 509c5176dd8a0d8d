"""What a node has: pure, immutable data, written by a driver and read by everyone else."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = [
    "Checkup",
    "Fault",
    "Gpu",
    "GpuEvent",
    "Hardware",
    "LeftOut",
    "Link",
    "MigDevice",
    "Notice",
    "NoticeKind",
    "PciPath",
    "RecoveryAction",
    "Restored",
    "Sign",
    "Xid",
]


class PciPath(enum.IntEnum):
    """The closest thing that two GPUs have in common, with the values of ``nvmlGpuTopologyLevel_t``."""

    SAME_BOARD = 0
    ONE_SWITCH = 10
    SWITCHES = 20
    HOST_BRIDGE = 30
    NUMA_NODE = 40
    SYSTEM = 50
    UNKNOWN = 255


@dataclass(frozen=True, slots=True)
class Link:
    """How one GPU reaches another.

    Attributes:
        path: over PCI Express.
        nvlinks: how many active NVLinks lead there, straight or through NVSwitches.
        switched: whether those go through NVSwitches, so that all GPUs of the fabric share them.
    """

    path: PciPath = PciPath.UNKNOWN
    nvlinks: int = 0
    switched: bool = False


@dataclass(frozen=True, slots=True)
class MigDevice:
    """A part of a GPU: one compute instance in one GPU instance.

    Attributes:
        index: j of ``i:j``, NVML's number within its GPU.
        uuid: ``MIG-`` and a UUID: the device id that the kubelet sees.
        gpu_instance, compute_instance: ids within the GPU, and within the GPU instance.
        gpu_instance_profile: NVML_GPU_INSTANCE_PROFILE_…, which tells +me, -me and gfx apart.
        gpu_slices, compute_slices: of the GPU instance, and of the compute instance.
        memory: MiB, as NVML's device attributes say.
        gpu_instance_minor, compute_instance_minor: N of /dev/nvidia-caps/nvidia-capN; None if unknown.
    """

    index: int
    uuid: str
    gpu_instance: int
    compute_instance: int
    gpu_instance_profile: int
    gpu_slices: int
    compute_slices: int
    memory: int
    gpu_instance_minor: int | None = None
    compute_instance_minor: int | None = None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One physical GPU.

    Attributes:
        index: NVML's, 0-based and in the order of PCI addresses. It may change at a reboot.
        uuid: ``GPU-`` and a UUID: the device id that the kubelet sees.
        name: the product name, such as ``NVIDIA H100 80GB HBM3``.
        pci: domain, bus, device and function as sysfs writes them: ``0000:1b:00.0``; ``""`` if unknown.
        minor: N of /dev/nvidiaN; None where the driver does not say (WSL2).
        numa: the NUMA node of its PCI slot; None where there is none, sysfs's -1 included.
        memory: bytes in all, 0 if unknown.
        mig_enabled: whether it is cut into MIG devices, of which there may be none yet.
        mig_devices: in index order.
    """

    index: int
    uuid: str
    name: str
    pci: str
    minor: int | None
    numa: int | None
    memory: int
    mig_enabled: bool = False
    mig_devices: tuple[MigDevice, ...] = ()


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A GPU that the driver counts, but of which not enough could be read to offer it."""

    index: int
    reason: str


@dataclass(frozen=True, slots=True)
class Hardware:
    """A snapshot of one node.

    Attributes:
        gpus: in index order.
        links: a square matrix over ``gpus``, by position; ``links[i][i]`` means nothing. Empty where unknown.
        control_nodes: those of /dev/nvidiactl, /dev/nvidia-uvm, … that exist, as paths, in the reference's order.
        left_out: GPUs that were found and could not be read.
        driver_version: as NVML writes it, ``""`` if unknown.
    """

    gpus: tuple[Gpu, ...] = ()
    links: tuple[tuple[Link, ...], ...] = ()
    control_nodes: tuple[str, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    driver_version: str = ""


@dataclass(frozen=True, slots=True)
class Xid:
    """The driver reported a critical error of a GPU, or of a part of it.

    Attributes:
        uuid: of the physical GPU.
        code: the XID, as in NVIDIA's catalogue.
        gpu_instance, compute_instance: the MIG instances at fault; None for the whole GPU.
    """

    uuid: str
    code: int
    gpu_instance: int | None = None
    compute_instance: int | None = None


@dataclass(frozen=True, slots=True)
class Fault:
    """A GPU was seen to be unusable, by other means than an XID."""

    uuid: str
    reason: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Restored:
    """A GPU that was at fault was seen to work again; ``evidence`` says how that is known."""

    uuid: str
    evidence: str


class NoticeKind(enum.Enum):
    """What a driver reports of a whole GPU besides XIDs, named as in NVML."""

    DOUBLE_BIT_ECC_ERROR = "double-bit ECC error"
    DRAM_RETIREMENT = "DRAM retirement"
    DRAM_RETIREMENT_FAILURE = "DRAM retirement failure"
    NON_FATAL_POISON = "non-fatal poison error"
    FATAL_POISON = "fatal poison error"
    UNAVAILABLE = "GPU unavailable"
    RECOVERY_ACTION = "recovery action changed"


@dataclass(frozen=True, slots=True)
class Notice:
    """The driver reported something of a whole GPU that is no XID."""

    uuid: str
    kind: NoticeKind


@dataclass(frozen=True, slots=True)
class Sign:
    """One aspect of a GPU turned out well or badly.

    Attributes:
        uuid: of the GPU.
        aspect: ``answer`` (the driver, about it), ``listed`` (by the driver), ``bus`` (sysfs), ``node`` (/dev).
        trouble: what is wrong; ``""`` if it is well.
        remedy: what a person can do.
        ends_in_reset: whether a GPU that is well again after this has been reset in between.
    """

    uuid: str
    aspect: str
    trouble: str = ""
    remedy: str = ""
    ends_in_reset: bool = False


class RecoveryAction(enum.IntEnum):
    """What the driver says must be done before a GPU works again, with the values of its field 230."""

    UNREADABLE = -1
    NONE = 0
    GPU_RESET = 1
    NODE_REBOOT = 2
    DRAIN_P2P = 3
    DRAIN_AND_RESET = 4
    RECOVER_IMEX_DOMAIN = 5
    BUS_RESET = 6
    SYSTEM_REBOOT = 7


@dataclass(frozen=True, slots=True)
class Checkup:
    """A GPU answered, and this is how it is. What a device or its driver does not have, or did not tell, is None.

    Attributes:
        uuid: of the GPU.
        life: names the boot, the load of the kernel module and the GPU's entry on the bus: another one after any of
            these began anew.
        action: a ``RecoveryAction``, or a newer value of the field; None where the driver does not have the field.
        remap_failure: whether remapping a row of its memory failed.
        remap_pending: whether one waits for a reset.
        retired_pages: how many pages of its memory are out of use, on GPUs that do not remap rows.
        uncorrectable: ECC errors since it was reset.
        energy: millijoules used since it was reset, or since the driver was loaded.
        mig_pending: whether a change of its MIG mode waits for a reset.
    """

    uuid: str
    life: str = ""
    action: int | None = None
    remap_failure: bool | None = None
    remap_pending: bool | None = None
    retired_pages: int | None = None
    uncorrectable: int | None = None
    energy: int | None = None
    mig_pending: bool = False


GpuEvent = Xid | Notice | Sign | Checkup | Fault | Restored
"""What a driver reports between snapshots, each about one physical GPU."""
