"""What a part of a GPU is called: MIG profiles, as ``nvidia-smi mig -lgip`` and NVIDIA's plugin write them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from _nvplug.hardware import Gpu, MigDevice

__all__ = ["Profile", "parse_profile", "profile_of"]

_MIB: Final = 1 << 20
_GIB: Final = 1 << 30

# What a GPU instance has beyond its slices, by NVML_GPU_INSTANCE_PROFILE_…: media engines or none, graphics. (9, REV2,
# is one slice with twice the memory, which the figure of the memory tells.)
_EXTRAS: Final = {
    7: "+me",
    8: "+me",
    10: "+gfx",
    11: "+gfx",
    12: "+gfx",
    13: "-me",
    14: "-me",
    15: "+me.all",
    16: "+me.all",
    17: "+gfx",
}

# The other way round: slices and extras to the number of the profile.
_NUMBERS: Final = {
    (1, ""): 0,
    (2, ""): 1,
    (3, ""): 2,
    (4, ""): 3,
    (7, ""): 4,
    (8, ""): 5,
    (6, ""): 6,
    (1, "+me"): 7,
    (2, "+me"): 8,
    (1, "+gfx"): 10,
    (2, "+gfx"): 11,
    (4, "+gfx"): 12,
    (1, "-me"): 13,
    (2, "-me"): 14,
    (1, "+me.all"): 15,
    (2, "+me.all"): 16,
    (3, "+gfx"): 17,
}

_WRITTEN: Final = re.compile(r"(?:([1-8])c\.)?([1-8])g\.([1-9][0-9]{0,3})gb([+-][a-z.]+)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Profile:
    """The shape of a MIG device.

    Attributes:
        compute_slices, gpu_slices: of the compute instance, and of the GPU instance around it.
        gigabytes: of memory, rounded as the name has it.
        extras: ``""``, or what sets it apart from others of the same size: ``+me``, ``-me``, ``+me.all``, ``+gfx``.
    """

    compute_slices: int
    gpu_slices: int
    gigabytes: int
    extras: str = ""

    def __str__(self) -> str:
        part = f"{self.compute_slices}c." if self.compute_slices != self.gpu_slices else ""
        return f"{part}{self.gpu_slices}g.{self.gigabytes}gb{self.extras}"

    @property
    def resource(self) -> str:
        """The name of its resource, as the strategy ``mixed`` has it: a plus sign cannot stand in one."""
        return f"nvidia.com/mig-{self}".replace("+", ".")

    @property
    def number(self) -> int:
        """NVML_GPU_INSTANCE_PROFILE_… of the GPU instance; -1 if no GPU has such a one."""
        return _NUMBERS.get((self.gpu_slices, self.extras), -1)


def profile_of(gpu: Gpu, mig: MigDevice) -> Profile:
    """The profile of a MIG device."""
    return Profile(
        mig.compute_slices,
        mig.gpu_slices,
        _gigabytes(mig.memory, gpu.memory),
        _EXTRAS.get(mig.gpu_instance_profile, ""),
    )


def _gigabytes(megabytes: int, total: int) -> int:
    """The figure in a profile's name: as many eighths of the GPU's memory as the device has begun, in whole GB.

    The formula is that of NVIDIA's plugin, halves rounded up, here without floating point.

    Args:
        megabytes: MiB of the device.
        total: bytes of the GPU; where it is unknown, the device's own memory counts, rounded up.
    """
    if not total:
        return -(-megabytes * _MIB // _GIB)
    eighths = -(-megabytes * _MIB * 8 // total)
    return (eighths * -(-total // _GIB) + 4) // 8


def parse_profile(text: str, total: int) -> tuple[Profile, int]:
    """A profile as it is written, and how many MiB such a device has.

    Args:
        text: such as ``1g.10gb+me`` or ``1c.3g.40gb``.
        total: bytes of the GPU.

    Raises:
        ValueError: no GPU with so much memory has such a profile.
    """
    found = _WRITTEN.fullmatch(text)
    if found is None:
        raise ValueError("a profile is written like 1g.10gb, 1g.10gb+me or 1c.3g.40gb")
    compute, slices, gigabytes, extras = found.groups(default="")
    profile = Profile(int(compute or slices), int(slices), int(gigabytes), extras)
    if profile.number < 0 or profile.compute_slices > profile.gpu_slices:
        raise ValueError("no GPU has such a profile")
    memories = [eighths * total // 8 // _MIB for eighths in range(1, 9)]
    sizes = {_gigabytes(memory, total): memory for memory in memories}
    if profile.gigabytes not in sizes:
        raise ValueError(f"the GB of this GPU's profiles are {', '.join(map(str, sizes))}")
    return profile, sizes[profile.gigabytes]
