"""Stands for typing_extensions in the frozen program, where betterproto2 and msgspec ask it for what typing has.

The true one has thousands of lines for Pythons older than ours: 8 ms at each start.
"""

from __future__ import annotations

from typing import NotRequired, Required, Self, get_type_hints

__all__ = ["NotRequired", "Required", "Self", "get_type_hints"]
