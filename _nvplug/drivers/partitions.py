"""How a GPU is cut into MIG devices."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import pynvml

from _nvplug.errors import DriverCallError
from _nvplug.hardware import MigDevice

__all__ = ["capability_minors", "mig_devices", "mig_uuids"]

# Where the profile itself cannot be read: the plain one of so many slices.
_PLAIN: Final[Mapping[int, int]] = {
    1: pynvml.NVML_GPU_INSTANCE_PROFILE_1_SLICE,
    2: pynvml.NVML_GPU_INSTANCE_PROFILE_2_SLICE,
    3: pynvml.NVML_GPU_INSTANCE_PROFILE_3_SLICE,
    4: pynvml.NVML_GPU_INSTANCE_PROFILE_4_SLICE,
    6: pynvml.NVML_GPU_INSTANCE_PROFILE_6_SLICE,
    7: pynvml.NVML_GPU_INSTANCE_PROFILE_7_SLICE,
    8: pynvml.NVML_GPU_INSTANCE_PROFILE_8_SLICE,
}


def mig_uuids(call: Callable[..., Any], handle: Any) -> dict[int, tuple[str, Any]]:
    """The UUIDs and handles of a GPU's MIG devices, by NVML's number of each. Blocks.

    Args:
        call: calls a function of ``pynvml``, and raises DriverCallError.
        handle: of the GPU.

    Raises:
        DriverCallError: it has none to be read.
    """
    found = {}
    for number in range(call(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle)):
        try:
            device = call(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)
        except DriverCallError as error:
            if error.code != pynvml.NVML_ERROR_NOT_FOUND:
                raise
            continue
        found[number] = (call(pynvml.nvmlDeviceGetUUID, device), device)
    return found


def mig_devices(
    call: Callable[..., Any], handle: Any, found: Mapping[int, tuple[str, Any]], minors: Mapping[str, int]
) -> tuple[MigDevice, ...]:
    """Describes a GPU's MIG devices. One that cannot be read, or is being destroyed, is left out. Blocks.

    Args:
        call: as above.
        handle: of the GPU.
        found: by ``mig_uuids``.
        minors: of this GPU, by ``capability_minors``.
    """
    devices = []
    for number, (uuid, device) in found.items():
        try:
            gpu_instance = call(pynvml.nvmlDeviceGetGpuInstanceId, device)
            compute_instance = call(pynvml.nvmlDeviceGetComputeInstanceId, device)
            attributes = call(pynvml.nvmlDeviceGetAttributes_v2, device)
        except DriverCallError:
            continue
        slices = int(attributes.gpuInstanceSliceCount)
        profile = _profile(call, handle, gpu_instance)
        devices.append(
            MigDevice(
                index=number,
                uuid=uuid,
                gpu_instance=gpu_instance,
                compute_instance=compute_instance,
                gpu_instance_profile=_PLAIN.get(slices, -1) if profile is None else profile,
                gpu_slices=slices,
                compute_slices=int(attributes.computeInstanceSliceCount),
                memory=int(attributes.memorySizeMB),
                gpu_instance_minor=minors.get(f"gi{gpu_instance}"),
                compute_instance_minor=minors.get(f"gi{gpu_instance}/ci{compute_instance}"),
            )
        )
    return tuple(devices)


def _profile(call: Callable[..., Any], handle: Any, gpu_instance: int) -> int | None:
    """NVML_GPU_INSTANCE_PROFILE_… of a GPU instance. Its info has another number, which each product makes up."""
    try:
        info = call(pynvml.nvmlGpuInstanceGetInfo, call(pynvml.nvmlDeviceGetGpuInstanceById, handle, gpu_instance))
    except DriverCallError:
        return None
    for profile in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        try:
            # The second version of the struct has a name besides, which older libraries do not fill.
            known = call(pynvml.nvmlDeviceGetGpuInstanceProfileInfo, handle, profile, 1)
        except DriverCallError:
            continue
        if known.id == info.profileId:
            return profile
    return None


def capability_minors(text: str, gpu: int) -> dict[str, int]:
    """Reads /proc/driver/nvidia-caps/mig-minors for one GPU.

    Args:
        text: of the file, with lines such as ``gpu0/gi7/ci0/access 31``.
        gpu: the GPU's own minor number, by which the file calls it.

    Returns:
        N of /dev/nvidia-caps/nvidia-capN, by ``gi7`` and ``gi7/ci0``.
    """
    lines = re.findall(rf"^gpu{gpu}/(gi[0-9]+(?:/ci[0-9]+)?)/access ([0-9]+)$", text, re.MULTILINE)
    return {name: int(minor) for name, minor in lines}
