"""What devices are called in CDI: the names of NVIDIA's plugin, so that what its documents name ours name, too.

A fully qualified name is ``vendor/class=device``. Vendor and class together are the kind of a document.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = [
    "ALL",
    "GDRCOPY",
    "GDS",
    "GPU",
    "IMEX_CHANNEL",
    "MOFED",
    "annotation_key",
    "device_name",
    "document_file",
    "kind",
    "qualified",
]

VENDOR: Final = "k8s.device-plugin.nvidia.com"

# The classes. Of the last three there is one device, ALL, on a node that has what it is for.
GPU: Final = "gpu"
IMEX_CHANNEL: Final = "imex-channel"
GDRCOPY: Final = "gdrcopy"
GDS: Final = "gds"
MOFED: Final = "mofed"

ALL: Final = "all"

# What Kubernetes allows behind the slash of an annotation's key, less what is in front of the device.
_OWNER: Final = "nvidia-device-plugin"
_ROOM: Final = 63 - len(_OWNER) - 1


def kind(device_class: str) -> str:
    """Of the document that describes the devices of a class."""
    return f"{VENDOR}/{device_class}"


def document_file(device_class: str) -> str:
    """The name of that document's file."""
    return f"{VENDOR}-{device_class}.json"


def device_name(device_id: str) -> str:
    """A UUID or an index as the name of a device.

    A name may hold letters, digits and ``_``, ``-``, ``.``, ``:``. The UUIDs that drivers before 470 give MIG devices
    have slashes, for which NVIDIA's plugin could not start.
    """
    return device_id.replace("/", "_")


def qualified(device_class: str, name: str) -> str:
    """The name by which a runtime finds a device in all documents of the node."""
    return f"{kind(device_class)}={name}"


def annotation_key(prefix: str, uuid: str) -> str:
    """The key of an annotation that names CDI devices.

    The kubelet merges the annotations of all resources of a container, and keeps one of each key. NVIDIA's plugin has
    a random UUID in it. Here it is the UUID of the first device: no other resource has that one, and the same
    question has the same answer.

    Args:
        prefix: the part up to the slash, with it.
        uuid: of the first device.
    """
    return f"{prefix}{_OWNER}_{re.sub('[^A-Za-z0-9.-]', '_', uuid)[-_ROOM:]}"
