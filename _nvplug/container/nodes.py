"""Which device nodes a device needs."""

from __future__ import annotations

from collections.abc import Iterator

from _nvplug.resources import Device

__all__ = ["node_paths"]


def node_paths(device: Device) -> Iterator[str]:
    """The nodes of one device: its GPU's, and of a MIG device those that grant access to its two instances."""
    if device.gpu.minor is not None:
        yield f"/dev/nvidia{device.gpu.minor}"
    if device.mig is not None:
        for minor in (device.mig.gpu_instance_minor, device.mig.compute_instance_minor):
            if minor is not None:
                yield f"/dev/nvidia-caps/nvidia-cap{minor}"
