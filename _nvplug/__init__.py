"""The rooms of nvplug, and which nvplug this is."""

from __future__ import annotations

from typing import Final

__all__ = ["COMMIT", "VERSION"]

VERSION = "0.1.0"
"""As in the changelog. pyproject.toml takes it from here."""

COMMIT: Final = ""
"""What the executable was built from, as ``git describe`` has it; ``make binary`` fills it in."""
