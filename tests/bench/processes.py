"""What the kernel knows about a plugin's processes."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Memory", "cpu_seconds", "family", "memory"]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes: all that is in memory, and the same with each shared page divided among those who share it."""

    resident: int
    proportional: int


def family(leader: int) -> frozenset[int]:
    """The processes of a session, and the descendants of its leader that have left it."""
    parents: dict[int, tuple[int, int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name in brackets may hold anything, brackets and blanks too.
            words = path.read_text().rpartition(")")[2].split()
            parents[int(path.parent.name)] = int(words[1]), int(words[3])
    found = {pid for pid, (_, session) in parents.items() if leader in (pid, session)}
    grew = True
    while grew:
        children = {pid for pid, (parent, _) in parents.items() if parent in found}
        grew = not children <= found
        found |= children
    return frozenset(found)


def cpu_seconds(pid: int) -> float:
    """CPU time of a process since its start, all its threads together, those that have ended too.

    By its CPU clock, in nanoseconds (the number is what clock_getcpuclockid(3) returns on Linux): the ticks of
    /proc/PID/stat are 10 ms, ten seconds' worth of a quiet process; schedstat forgets threads that ended.

    Raises:
        OSError: there is no such process.
    """
    return time.clock_gettime(~pid << 3 | 2)


def memory(pids: Iterable[int]) -> Memory:
    """What the processes hold, all together; those that are gone hold nothing."""
    resident = proportional = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            sizes = dict(
                re.findall(r"^(Rss|Pss): +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
            )
            resident += int(sizes["Rss"]) * 1024
            proportional += int(sizes["Pss"]) * 1024
    return Memory(resident, proportional)
