"""What a container is given: environment, mounts, device nodes, annotations and CDI names."""

from __future__ import annotations

from _nvplug.container.answers import edits_for
from _nvplug.container.edits import ContainerEdits, DeviceNode, Mount

__all__ = ["ContainerEdits", "DeviceNode", "Mount", "edits_for"]
