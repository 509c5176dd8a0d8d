"""What can be seen of GPUs without asking their driver: in sysfs and /dev, which answer at once."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from _nvplug.hardware import Gpu, Sign

__all__ = ["Outside"]

_NVIDIA: Final = "0x10de"
_DISPLAY: Final = "0x03"


@dataclass(slots=True)
class _Aspect:
    """One thing to look for.

    Attributes:
        name: as in ``Sign``.
        path: what should be there.
        trouble: what is wrong if it is not.
        remedy: what a person can do.
        seen: whether it ever was.
        missing: whether it was, and is not.
        inode: of what is there; 0 if nothing is.
    """

    name: str
    path: str
    trouble: str
    remedy: str
    seen: bool = False
    missing: bool = False
    inode: int = 0


class Outside:
    """The bus and the device nodes.

    What was never seen is not missed: sysfs may not be mounted, and /dev of a container may hold nothing.
    """

    def __init__(self, sysfs: Path, dev: Path, proc: Path = Path("/proc")) -> None:
        """Sets up; nothing but the name of this boot is read before the first look."""
        self._devices = sysfs / "bus" / "pci" / "devices"
        self._module = str(sysfs / "module" / "nvidia")
        self._dev = dev
        self._boot = _text(proc / "sys" / "kernel" / "random" / "boot_id")
        self._life = ""
        self._addresses: frozenset[str] = frozenset()
        self._aspects: dict[Gpu, tuple[_Aspect, ...]] = {}
        self._buses: dict[str, _Aspect] = {}

    def look(self, gpus: Iterable[Gpu]) -> Iterator[Sign]:
        """Looks for each GPU, and yields what has changed since the last time."""
        self._life = f"{self._boot}/{_inode(self._module)}"
        for gpu in gpus:
            if gpu not in self._aspects:
                self._aspects[gpu] = tuple(self._aspects_of(gpu))
            for aspect in self._aspects[gpu]:
                aspect.inode = _inode(aspect.path)
                aspect.seen = aspect.seen or aspect.inode > 0
                missing = aspect.seen and not aspect.inode
                if missing != aspect.missing:
                    aspect.missing = missing
                    trouble, remedy = (aspect.trouble, aspect.remedy) if missing else ("", "")
                    yield Sign(gpu.uuid, aspect.name, trouble, remedy, ends_in_reset=aspect.name == "bus")

    def _aspects_of(self, gpu: Gpu) -> Iterator[_Aspect]:
        if gpu.pci:
            trouble = f"it is gone from the PCI bus at {gpu.pci}"
            remedy = "look for it with lspci; rescan the bus, reboot the node, or reseat or replace the GPU"
            bus = _Aspect("bus", str(self._devices / gpu.pci), trouble, remedy)
            # What is known of a place on the bus outlasts a new reading of the GPU.
            if gpu.uuid not in self._buses or self._buses[gpu.uuid].path != bus.path:
                self._buses[gpu.uuid] = bus
            yield self._buses[gpu.uuid]
        if gpu.minor is not None:
            node = f"nvidia{gpu.minor}"
            remedy = f"make it anew with nvidia-modprobe -c {gpu.minor}"
            yield _Aspect("node", str(self._dev / node), f"its device node /dev/{node} is gone", remedy)

    def is_away(self, uuid: str) -> bool:
        """Whether a GPU that was on the bus was not, at the last look."""
        return uuid in self._buses and self._buses[uuid].missing

    def life(self, uuid: str) -> str:
        """Names the boot, the load of the kernel module and the GPU's entry on the bus, as of the last look.

        The kernel numbers what it puts into sysfs, and gives a number to what takes its place that is not used again
        for long.
        """
        return f"{self._life}/{self._buses[uuid].inode if uuid in self._buses else 0}"

    def has_new_gpu(self) -> bool:
        """Whether an NVIDIA GPU appeared on the bus since the last time that this was asked."""
        try:
            addresses = frozenset(os.listdir(self._devices))  # noqa: PTH208 - of the names only, and often
        except OSError:
            return False
        new, self._addresses = addresses - self._addresses, addresses
        # The first time, all are.
        return new != addresses and any(self._is_gpu(address) for address in new)

    def _is_gpu(self, address: str) -> bool:
        place = self._devices / address
        return _text(place / "vendor") == _NVIDIA and _text(place / "class").startswith(_DISPLAY)


def _inode(path: str) -> int:
    try:
        return os.stat(path).st_ino  # noqa: PTH116 - by far the most frequent thing that is done to files here
    except OSError:
        return 0


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
