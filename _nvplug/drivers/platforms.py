"""Platforms on which GPUs are not found and given as everywhere else."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from _nvplug.errors import OptionError

__all__ = ["check_platform"]


def check_platform(roots: Sequence[str], exists: Callable[[str], bool] = os.path.exists) -> None:
    """Refuses the platforms that nvplug does not know how to serve.

    What it would offer there, no container could use.

    Args:
        roots: where the driver may be mounted, and the root of the file system.
        exists: whether there is a file.

    Raises:
        OptionError: this is WSL2 or Tegra.
    """
    if exists("/dev/dxg"):
        raise OptionError(
            "this is WSL2 (there is a /dev/dxg), where nvplug cannot offer GPUs yet",
            remedy="run NVIDIA's plugin on this node",
        )
    for root in roots:
        mark = os.path.join(root, "etc/nv_tegra_release")  # noqa: PTH118 - a text, nothing is opened
        if exists(mark):
            raise OptionError(
                f"this is a Tegra system (there is a {mark}), whose integrated GPU nvplug cannot offer yet",
                remedy="run NVIDIA's plugin on this node, or choose --device-discovery-strategy=nvml for GPUs in slots",
            )
