"""What is wrong with a device, and when it is well again."""

from __future__ import annotations

from _nvplug.health.judging import Health, Verdict, judge
from _nvplug.health.policy import APPLICATION_XIDS, Policy, health_policy, policy_of
from _nvplug.health.remembering import Memory
from _nvplug.health.watching import watch

__all__ = ["APPLICATION_XIDS", "Health", "Memory", "Policy", "Verdict", "health_policy", "judge", "policy_of", "watch"]
