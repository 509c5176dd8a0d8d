"""What a node has: pure, immutable data, written by a driver and read by everyone else."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Fault", "Gpu", "GpuEvent", "Hardware", "LeftOut", "Link", "MigDevice", "PciPath", "Restored", "Xid"]


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


GpuEvent = Xid | Fault | Restored
"""What a driver reports between snapshots, each about one physical GPU."""
