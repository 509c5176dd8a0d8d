"""Which devices belong together: the answer to GetPreferredAllocation."""

from __future__ import annotations

from _nvplug.placement.choice import preferred
from _nvplug.placement.plan import Plan, keep_plan

__all__ = ["Plan", "keep_plan", "preferred"]
