"""Stands for decimal in the frozen program: msgspec asks for its one class, and no file of ours has such numbers."""

from __future__ import annotations

__all__ = ["Decimal"]


class Decimal:
    """Nothing is an instance of it."""
