"""Stands for greenlet in the frozen program: trio-asyncio needs it for its synchronous loop only, which we never open.

The true one brings the C++ library along: 3 MB.
"""

from __future__ import annotations

__all__: list[str] = []
