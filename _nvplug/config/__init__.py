"""What the operator asked for: flags, variables and a file become one frozen Config."""

from __future__ import annotations

from _nvplug.config.model import KUBELET_SOCKET, Config
from _nvplug.config.options import INERT, OPTIONS, Kind, Option
from _nvplug.config.reading import Settings, read_config, read_settings

__all__ = [
    "INERT",
    "KUBELET_SOCKET",
    "OPTIONS",
    "Config",
    "Kind",
    "Option",
    "Settings",
    "read_config",
    "read_settings",
]
