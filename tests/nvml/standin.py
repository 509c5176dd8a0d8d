"""Builds the stand-in libnvidia-ml.so.1 and tells it, while it runs, what to play.

Tests, the benchmark and black-box checks use it alike: ``Control`` makes a driver root in a directory, whose
library any number of processes may load, and commands them through one file.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import os
import re
import shutil
import struct
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    import pytest

__all__ = ["NOT_SUPPORTED", "Control", "build", "refuse_soname"]

NOT_SUPPORTED = 3
"""NVML_ERROR_NOT_SUPPORTED: the commonest of NVML's errors."""

_SOURCE = Path(__file__).with_name("nvml.c")
_CACHE = Path(__file__).parents[2] / "build" / "nvml"
_RECORD = struct.Struct("56sQ")
_RECORDS = 128


def build(*, without: Collection[str] = ()) -> Path:
    """Compiles the library, unless that was done before, and returns its path.

    Args:
        without: functions to leave out, as an old driver would. (They get another name, so that their
            signatures are still checked.)

    Raises:
        subprocess.CalledProcessError: the compiler did not like it; what it said is on stderr.
    """
    header = _header()
    compiler = os.environ.get("CC", "cc")
    command = [
        *compiler.split(),
        "-std=gnu11",
        "-O2",
        "-shared",
        "-fPIC",
        "-pthread",
        "-Wall",
        "-Wextra",
        "-Werror",
    ]
    command += ["-Wl,-soname,libnvidia-ml.so.1", *(f"-D{name}=absent_{name}" for name in sorted(without))]
    # Also of the platform: a checkout may be shared by several.
    key = hashlib.sha256(b"\0".join([_SOURCE.read_bytes(), header.read_bytes(), repr(command).encode()]))
    key.update(sysconfig.get_platform().encode())
    library = _CACHE / f"libnvidia-ml-{key.hexdigest()[:16]}.so"
    if not library.exists():
        _CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_CACHE) as scratch:
            made = Path(scratch) / library.name
            subprocess.run([*command, f"-I{header.parent}", str(_SOURCE), "-o", str(made)], check=True)
            # Whoever builds at the same time makes the same file.
            made.replace(library)
    return library


def refuse_soname(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Has the dynamic loader know no library by the bare soname.

    It would hand out any that is in this process already, and tests before this one have loaded some.

    Returns:
        A list that grows with each refusal.
    """
    load = ctypes.CDLL
    refused: list[str] = []

    def load_path(name: str | None) -> ctypes.CDLL:
        if name == "libnvidia-ml.so.1":
            refused.append(name)
            raise OSError(f"{name}: cannot open shared object file: No such file or directory")
        return load(name)

    monkeypatch.setattr(ctypes, "CDLL", load_path)
    return refused


def _header() -> Path:
    """nvml.h, wherever the package nvidia-nvml-dev put it."""
    for file in importlib.metadata.files("nvidia-nvml-dev") or ():
        if file.name == "nvml.h":
            return Path(str(file.locate()))
    raise FileNotFoundError("nvml.h is not in the package nvidia-nvml-dev; install that anew")


class Control:
    """One driver on paper: its root directory, its control file and a sysfs for its GPUs.

    Every change takes effect at once in all processes that loaded the library, also in a wait for events.

    Attributes:
        root: what ``--driver-root-ctr-path`` may point to; the library is in ``usr/lib64``.
        libraries: what ``LD_LIBRARY_PATH`` may point to.
        sysfs: stands for /sys, with the NUMA nodes given to ``numa``.
        environment: what a process needs to be moved by this object.
    """

    def __init__(self, directory: Path, *, gpus: int = 2, driver: str = "570.86.15") -> None:
        self.root = directory / "root"
        self.libraries = self.root / "usr" / "lib64"
        self.sysfs = directory / "sys"
        self._file = directory / "standin" / "control"
        self._calls = self._file.with_name("control.calls")
        self.environment = {"NVML_STANDIN": str(self._file)}
        self._lines: dict[tuple[str, ...], str] = {}
        self._events: list[str] = []
        self._file.parent.mkdir(parents=True)
        self._calls.write_bytes(bytes(_RECORD.size * _RECORDS))
        self.gpus(gpus)
        self.driver(driver)

    def install(self, *, without: Collection[str] = ()) -> Path:
        """Puts the library in place, as an installer of the driver does; returns the path of its soname."""
        self.libraries.mkdir(parents=True, exist_ok=True)
        version = self._lines["driver",].split()[1]
        library = self.libraries / f"libnvidia-ml.so.{version}"
        # A copy of its own, so that no two tests share what the dynamic loader knows as one library.
        shutil.copy(build(without=without), library)
        soname = self.libraries / "libnvidia-ml.so.1"
        soname.unlink(missing_ok=True)
        soname.symlink_to(library.name)
        return soname

    def gpus(self, count: int) -> None:
        """This many GPUs exist."""
        self._set(("gpus",), f"gpus {count}")

    def count(self, count: int | None) -> None:
        """What nvmlDeviceGetCount says, where that is not how many there are."""
        self._set(("count",), None if count is None else f"count {count}")

    def driver(self, version: str) -> None:
        """The version of the driver."""
        self._set(("driver",), f"driver {version}")

    def gpu(self, index: int, **properties: str | int) -> None:
        """Changes properties of one GPU.

        Args:
            index: of the GPU.
            properties: uuid, name, pci, minor, memory (bytes), events (a mask); action (the recovery action), ecc
                (uncorrectable errors), energy (millijoules), rows ("failure pending"), pages, mig ("current pending").
        """
        for name, value in properties.items():
            self._lines[name, str(index)] = f"{name} {index} {value}"
        self._write()

    def cut(self, index: int, *devices: str) -> None:
        """Cuts a GPU into MIG devices: ``UUID GI CI PROFILE GPU_SLICES COMPUTE_SLICES MIB`` of each."""
        self._lines["mig", str(index)] = f"mig {index} 1 1"
        lines = (f"cut {index} {number} {device}" for number, device in enumerate(devices))
        self._set(("cut", str(index)), "\n".join(lines))

    def remove(self, index: int) -> None:
        """Takes a GPU off the bus: those after it move up, and sysfs loses it."""
        self._set(("gone", str(index)), f"gone {index}")
        shutil.rmtree(self._device(index), ignore_errors=True)

    def put_back(self, index: int) -> None:
        """Takes ``remove`` back."""
        self.plug(index)
        self._set(("gone", str(index)), None)

    def plug(self, index: int) -> None:
        """Has sysfs show a GPU, whose address is the one that it has by default."""
        device = self._device(index)
        device.mkdir(parents=True, exist_ok=True)
        (device / "vendor").write_text("0x10de\n")
        (device / "class").write_text("0x030200\n")

    def lose(self, index: int) -> None:
        """Has a GPU answer everything with ERROR_GPU_IS_LOST, until ``heal("*", index)``."""
        self.error("*", 15, index)

    def attached(self, process: int | str = "self") -> set[int]:
        """The GPUs that a process holds open."""
        found = set()
        for link in Path("/proc", str(process), "fd").iterdir():
            try:
                file = link.readlink()
            except FileNotFoundError:
                continue
            if file.parent == self._file.parent and file.name.startswith("nvidia"):
                found.add(int(file.name.removeprefix("nvidia")))
        return found

    def numa(self, index: int, text: str) -> None:
        """What sysfs has as the NUMA node of a GPU, whose address is the one that it has by default."""
        node = self._device(index) / "numa_node"
        node.parent.mkdir(parents=True, exist_ok=True)
        node.write_text(text)

    def path(self, one: int, other: int, level: int) -> None:
        """How two GPUs meet over PCI Express: a value of nvmlGpuTopologyLevel_t."""
        self._set(("path", str(one), str(other)), f"path {one} {other} {level}")

    def links(self, index: int, *addresses: str) -> None:
        """The active NVLinks of one GPU: the PCI address at the far end of each."""
        self._set(("links", str(index)), "\n".join(f"link {index} {address}" for address in addresses))

    def error(self, function: str, code: int, index: int | str = "*") -> None:
        """Makes a function fail, for one GPU or all."""
        self._set(("rule", function, str(index)), f"error {function} {index} {code}")

    def hang(self, function: str, index: int | str = "*") -> None:
        """Makes a function not return until ``heal``, for one GPU or all."""
        self._set(("rule", function, str(index)), f"hang {function} {index}")

    def heal(self, function: str, index: int | str = "*") -> None:
        """Takes ``error`` or ``hang`` back."""
        self._set(("rule", function, str(index)), None)

    def heal_all(self) -> None:
        """Takes every ``error`` and ``hang`` back."""
        self._lines = {key: line for key, line in self._lines.items() if key[0] != "rule"}
        self._write()

    def xid(self, index: int | str, code: int, *instances: int) -> None:
        """An XID of one GPU (``?``: of none that exists), perhaps of a GPU and a compute instance."""
        words = ["event", len(self._events) + 1, index, code, *instances]
        self._events.append(" ".join(map(str, words)))
        self._write()

    def notice(self, index: int, event_type: int) -> None:
        """An event of one GPU that is no XID: an nvmlEventType."""
        self._events.append(f"notice {len(self._events) + 1} {index} {event_type}")
        self._write()

    def calls(self) -> dict[str, int]:
        """How often each function has been called, all processes together; and crimes, as ``misuse_...``."""
        records = _RECORD.iter_unpack(self._calls.read_bytes())
        return {name.rstrip(b"\0").decode(): count for name, count in records if count}

    def crimes(self) -> dict[str, int]:
        """What the callers did that the real library would not survive: empty, or something is wrong."""
        return {name: count for name, count in self.calls().items() if re.match("misuse_", name)}

    def _device(self, index: int) -> Path:
        return self.sysfs / "bus" / "pci" / "devices" / f"0000:{0x10 + index:02x}:00.0"

    def _set(self, key: tuple[str, ...], line: str | None) -> None:
        self._lines.pop(key, None)
        if line is not None:
            self._lines[key] = line
        self._write()

    def _write(self) -> None:
        new = self._file.with_name("control.new")
        new.write_text("\n".join([*self._lines.values(), *self._events, ""]))
        new.replace(self._file)
