"""What is written somewhere, before anything is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

__all__ = ["FileContent", "Written"]


@dataclass(frozen=True, slots=True)
class Written:
    """A text, and its place: a flag, a variable, or a key with its file and line."""

    origin: str
    text: str


@dataclass(frozen=True, slots=True)
class FileContent:
    """What a configuration file says.

    Attributes:
        values: by key, those that flags and variables can say as well.
        sections: by field of Config, what only a file can say.
        origins: where those stand.
        obeyed: keys that NVIDIA's plugin accepts and ignores, and nvplug obeys.
    """

    values: Mapping[str, Written] = field(default_factory=lambda: MappingProxyType({}))
    sections: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    origins: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    obeyed: tuple[str, ...] = ()
