"""The device nodes that GPUs share, and those of MIG instances: whether they are there, and how they come there.

Nobody makes /dev/nvidia-uvm at boot on many a host: the first CUDA program as root does, by nvidia-modprobe, or none
ever. A container that is given its nodes before then goes without, and CUDA in it fails with an unknown error. So they
are missed here, when the node is looked at, and made; never while a container is being answered.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import trio

from _nvplug.drivers.lanes import Ledger, hop
from _nvplug.errors import DriverError
from _nvplug.happenings import DeviceNodesMade, DeviceNodesMissing
from _nvplug.hardware import Gpu

__all__ = ["DeviceNodes"]

# What a container is given besides its GPUs, in the reference's order. Of these CUDA needs the second and third;
# without the first there is no driver, and the last is for graphics.
_SHARED: Final = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
_NEEDED: Final = ("nvidia-uvm", "nvidia-uvm-tools")

# Seconds for nvidia-modprobe, which may load a kernel module, and between two attempts at the same.
_MADE_WITHIN: Final = 5.0
_AGAIN_AFTER: Final = 60.0

_PROGRAM: Final = "nvidia-modprobe"
_PLACES: Final = ("usr/bin", "usr/sbin", "bin", "sbin", "usr/local/bin", "run/current-system/sw/bin")


class DeviceNodes:
    """Looks at the nodes, and has those made that are missing."""

    def __init__(
        self, dev: Path, root: str, ledger: Ledger, *, within: float = _MADE_WITHIN, again: float = _AGAIN_AFTER
    ) -> None:
        """Sets up; nothing is looked at yet.

        Args:
            dev: where this process sees /dev.
            root: where it sees the driver's root, which need not exist.
            ledger: takes what is missing and what was made.
            within: seconds for nvidia-modprobe.
            again: seconds between two attempts at the same.
        """
        self._within = within
        self._again = again
        self._dev = dev
        self._root = root if Path(root).is_dir() else "/"
        self._ledger = ledger
        # A program that hangs in the kernel cannot be killed. It keeps its thread, and no other is started.
        self._lane = trio.CapacityLimiter(1)
        self._missed: tuple[str, ...] = ()
        self._trouble = ""
        self._again_at = 0.0

    async def look(self, gpus: Sequence[Gpu], count: int) -> tuple[str, ...]:
        """The shared nodes that there are, as paths. Takes microseconds; or some seconds, where one is to be made.

        Args:
            gpus: those that are known.
            count: of those that there are.
        """
        missing = self._missing(gpus, count)
        if missing and (missing != self._missed or trio.current_time() >= self._again_at):
            self._trouble = await self._make(missing, gpus)
            self._again_at = trio.current_time() + self._again
            made = [path for path in missing if path not in self._missing(gpus, count)]
            if made and not self._trouble:
                self._ledger.publish(DeviceNodesMade(",".join(made)))
            missing = self._missing(gpus, count)
        if missing:
            reason = self._trouble or f"{_PROGRAM} ended well, and they are not there"
            remedy = f"make them at every boot, before the kubelet starts: {'; '.join(_words(missing, gpus))}"
            self._ledger.say("device nodes", DeviceNodesMissing(",".join(missing), reason, remedy))
        else:
            self._ledger.forget("device nodes")
        self._missed = missing
        return tuple(f"/dev/{name}" for name in _SHARED if self._is_there(f"/dev/{name}"))

    def _missing(self, gpus: Sequence[Gpu], count: int) -> tuple[str, ...]:
        wanted = [f"/dev/{name}" for name in _NEEDED] if count else []
        wanted += [path for gpu in gpus for path, _ in _capabilities(gpu)]
        return tuple(path for path in wanted if not self._is_there(path))

    def _is_there(self, path: str) -> bool:
        # By access(2), which never raises. A container may have a /dev of its own, in which nothing appears later.
        return any(os.access(place, os.F_OK) for place in (f"{self._dev}{path[4:]}", f"{self._root}{path}"))

    async def _make(self, missing: Sequence[str], gpus: Sequence[Gpu]) -> str:
        """Has nodes made; returns what is wrong, if anything is."""
        if self._lane.borrowed_tokens:
            return f"{_PROGRAM} has not returned"
        work = partial(_run, _words(missing, gpus), self._root, self._within)
        with trio.move_on_after(self._within + 1):
            try:
                return await hop(self._lane, work)
            except DriverError as error:
                return str(error)
        return f"{_PROGRAM} has not returned within {self._within:g} s, and cannot be killed"


def _capabilities(gpu: Gpu) -> Iterator[tuple[str, str]]:
    """The nodes of a GPU's MIG instances, each with the file by which the driver describes it."""
    for mig in gpu.mig_devices:
        place = f"/proc/driver/nvidia/capabilities/gpu{gpu.minor}/mig/gi{mig.gpu_instance}"
        for minor, file in (
            (mig.gpu_instance_minor, f"{place}/access"),
            (mig.compute_instance_minor, f"{place}/ci{mig.compute_instance}/access"),
        ):
            if minor is not None:
                yield f"/dev/nvidia-caps/nvidia-cap{minor}", file


def _words(missing: Sequence[str], gpus: Iterable[Gpu]) -> list[str]:
    """The commands that make nodes."""
    files = dict(each for gpu in gpus for each in _capabilities(gpu))
    wanted = [files[path] for path in missing if path in files]
    commands = [f"{_PROGRAM} -u -c=0"] if len(wanted) < len(missing) else []
    return commands + [" ".join([_PROGRAM, *(f"-f {file}" for file in wanted)])] * bool(wanted)


def _run(commands: Sequence[str], root: str, within: float) -> str:
    """Runs commands of the driver's root, with that as their root: the nodes are to be made where the driver is."""
    program = next(
        (f"/{place}/{_PROGRAM}" for place in _PLACES if os.access(f"{root}/{place}/{_PROGRAM}", os.X_OK)), ""
    )
    if not program:
        return f"there is no {_PROGRAM} in {root}"
    for words in commands:
        command = [program, *words.split()[1:]]
        try:
            done = subprocess.run(  # noqa: S603 - of the driver
                command,
                check=False,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                errors="replace",
                # It runs modprobe. What this process was given, such as LD_LIBRARY_PATH, is not for them.
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
                cwd="/",
                timeout=within,
                # Between fork and exec: one system call, no lock.
                preexec_fn=None if root == "/" else partial(os.chroot, root),
            )
        except (OSError, subprocess.SubprocessError) as error:
            return f"{' '.join(command)}: {error}"
        if done.returncode:
            output = " ".join(done.stdout.split())[:200]
            return f"{' '.join(command)} ended with {done.returncode}{f': {output}' if output else ''}"
    return ""
