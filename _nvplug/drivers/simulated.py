"""GPUs on paper: for the demo, for tests, and for clusters without hardware.

``--device-discovery-strategy simulated:8xH100`` takes a machine from the table in `machines`, and nothing
about it ever changes. ``simulated:FILE`` reads a JSON file, and reads it again whenever it changes while
nvplug runs. What is in the file is what is so: a fault breaks its GPU for as long as the file lists it. ::

    {
      "machine": "8xH100",
      "count": 8,
      "node": "worker-3",
      "gpus": [{"name": "NVIDIA H200", "memory": 150754820096, "numa": null}],
      "links": [{"among": [0, 1], "nvlinks": 4, "switched": false, "path": "PIX"}],
      "faults": {"3": {"xid": 79}, "5": {"reason": "fell off the bus", "remedy": "reset the GPU"}}
    }

Every field may be left out, and a field that is not one of these is an error:

machine
    A name from the table, ``8xH100`` if left out. The GPUs and their links are this machine's, but for what
    the other fields say.
count
    How many GPUs, up to 100,000. If left out, the length of ``gpus``; without that, the machine's own number.
    GPUs beyond the machine's sit on more boards of the same kind.
node
    A name that goes into the UUIDs, so that nodes differ. Without it, equal machines have equal UUIDs on all
    nodes.
gpus
    One object per GPU in index order, with what differs from the machine's: ``uuid``, ``name``, ``pci``,
    ``minor``, ``numa``, ``memory`` in bytes. ``minor`` and ``numa`` may be null and ``pci`` empty: not known
    to the driver. ``mig`` enables MIG and lists the profiles of the MIG devices, ``["1g.10gb", "3g.40gb"]``, or
    none, ``[]``. It may be shorter than ``count``.
links
    Groups of GPU indices. What an entry says holds between any two GPUs of its group; what it leaves out
    stays as it was, and later entries win. ``path`` is as in ``nvidia-smi topo -m``: PIX, PXB, PHB, NODE,
    SYS; or BOARD for GPUs on one card. More than 64 GPUs have no links.
faults
    By index or UUID: the ``xid`` that the driver reports, or the ``reason`` (and ``remedy``) of any other
    fault.
"""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import msgspec
import trio

from _nvplug.drivers.machines import MACHINES_ALLOWED, MAX_LINKED, Machine, find_machine
from _nvplug.errors import OptionError
from _nvplug.happenings import DriverFound, DriverTrouble
from _nvplug.hardware import Fault, Gpu, Hardware, Link, MigDevice, PciPath, Restored, Xid
from _nvplug.mig import parse_profile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from _nvplug.happenings import Publish
    from _nvplug.hardware import GpuEvent
    from _nvplug.latest import Latest

__all__ = ["SimulatedDriver", "SimulatedFile", "Simulation", "decode", "parse_simulated", "simulate"]

POLL_INTERVAL = 0.1
"""Seconds between two looks at the file."""

CONTROL_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")


@dataclass(frozen=True, slots=True)
class SimulatedFile:
    """A path whose content describes the GPUs."""

    path: str


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a machine or a file stands for.

    Attributes:
        hardware: the GPUs.
        faults: those at fault, by UUID and in index order.
    """

    hardware: Hardware
    faults: Mapping[str, Xid | Fault] = field(default_factory=dict)


def parse_simulated(strategy: str) -> Machine | SimulatedFile:
    """What ``simulated:…``, a value of ``--device-discovery-strategy``, stands for.

    A file is read once, so that one that says nothing sensible is found at start.

    Raises:
        OptionError: neither a known machine nor a file that can be read and understood.
    """
    _, _, what = strategy.partition(":")
    try:
        return find_machine(what)
    except OptionError as error:
        if "/" not in what and not what.endswith(".json") and not os.path.isfile(what):  # noqa: PTH113 - a long name is no error
            raise OptionError(
                f"--device-discovery-strategy={strategy}: there is no such file, and {error}",
                remedy=f"name {MACHINES_ALLOWED}, or the path of a JSON file that describes the GPUs",
            ) from None
    content = _Watched(what).news() or b""
    decode(content, what)
    return SimulatedFile(what)


class SimulatedDriver:
    """A `Driver` whose hardware is on paper."""

    def __init__(self, source: Machine | SimulatedFile) -> None:
        self._source = source

    async def run(self, hardware: Latest[Hardware], report: Callable[[GpuEvent], None], publish: Publish) -> None:
        """See `Driver.run`. The first snapshot is there before the first wait."""
        stage = _Stage(hardware, report, publish)
        if isinstance(self._source, Machine):
            stage.show(simulate(self._source))
            await trio.sleep_forever()
        file = _Watched(self._source.path)
        while True:
            try:
                content = file.news()
                if content is not None:
                    stage.show(decode(content, self._source.path))
            except OptionError as error:
                stage.trouble(str(error), error.remedy)
            await trio.sleep(POLL_INTERVAL)


class _Stage:
    """Turns one simulation after another into snapshots, and the differences between them into events."""

    def __init__(self, hardware: Latest[Hardware], report: Callable[[GpuEvent], None], publish: Publish) -> None:
        self._hardware = hardware
        self._report = report
        self._publish = publish
        self._shown: tuple[Gpu, ...] | None = None
        self._faults: dict[str, Xid | Fault] = {}
        self._trouble: str | None = None

    def show(self, simulation: Simulation) -> None:
        gpus = simulation.hardware.gpus
        # The snapshot first: a report is about a GPU that its reader can look up.
        self._hardware.set(simulation.hardware)
        if gpus != self._shown or self._trouble is not None:
            self._publish(DriverFound(driver="simulated", version="", gpus=len(gpus)))
        self._shown = gpus
        self._trouble = None
        # A GPU that is gone is not restored: it must be there, and well. Until then its fault is remembered.
        present = {gpu.uuid for gpu in gpus} if self._faults else set()
        for uuid, fault in list(self._faults.items()):
            if uuid in present and simulation.faults.get(uuid) != fault:
                del self._faults[uuid]
                self._report(Restored(uuid, evidence=f"the description no longer lists its {_named(fault)}"))
        for uuid, fault in simulation.faults.items():
            if uuid not in self._faults:
                self._faults[uuid] = fault
                self._report(fault)

    def trouble(self, reason: str, remedy: str) -> None:
        if reason != self._trouble:
            self._trouble = reason
            self._publish(DriverTrouble(reason, remedy))


def _named(fault: Xid | Fault) -> str:
    return f"XID {fault.code}" if isinstance(fault, Xid) else f"fault ({fault.reason})"


_Signature = tuple[int, int, int, int]


class _Watched:
    """A file that may be replaced, rewritten in place, missing or half-written.

    It is looked at in the Trio thread, at the cost of one stat(2). A thread for each look would cost a
    hundred times as much, and nobody keeps such a file on a file system that hangs.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._signature: _Signature | None = None
        self._content: bytes | None = None
        self._settled = False

    def news(self) -> bytes | None:
        """The content if it is not what the last call saw, else None.

        Raises:
            OptionError: there is no file, or it cannot be read.
        """
        try:
            # Time stamps are as coarse as a kernel tick, up to 10 ms: two writes of equal length within one
            # look alike. So what is new is read once more at the next look, when a later write has a later
            # tick.
            found = _read(self._path, unless=self._signature if self._settled else None)
        except OptionError:
            self._signature, self._content, self._settled = None, None, False
            raise
        if found is None:
            return None
        signature, content = found
        self._settled = signature == self._signature
        self._signature = signature
        if content == self._content:
            return None
        self._content = content
        return content


def _signature(status: os.stat_result) -> _Signature:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _read(path: str, unless: _Signature | None = None) -> tuple[_Signature, bytes] | None:
    """The content of a file and its signature; None if that is ``unless``."""
    remedy = "put a JSON file that describes the GPUs there"
    try:
        if unless is not None and _signature(Path(path).stat()) == unless:
            return None
        # Not blocking, for the path may be a FIFO, whose opening would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OptionError(f"{path} is not a regular file", remedy=remedy)
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                return _signature(status), file.read()
        finally:
            os.close(descriptor)
    except OSError as error:
        raise OptionError(f"cannot read {path}: {error.strerror}", remedy=remedy) from error


def simulate(machine: Machine) -> Simulation:
    """The GPUs of a machine of the table, all of them well."""
    gpus = tuple(machine.gpu(index) for index in range(machine.count))
    return Simulation(_hardware(gpus, machine.links(machine.count)))


def _hardware(gpus: tuple[Gpu, ...], links: tuple[tuple[Link, ...], ...]) -> Hardware:
    return Hardware(gpus=gpus, links=links, control_nodes=CONTROL_NODES)


# What the file can say. Field by field as the module's docstring has it.


class _GpuText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    uuid: Annotated[str, msgspec.Meta(pattern=r"\AGPU(-[0-9a-f]{8})(-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z")] | None = None
    name: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    pci: Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7])?\Z")] | None = None
    # The bounds are Linux's: 20 bits of minor number, 1,024 NUMA nodes.
    minor: Annotated[int, msgspec.Meta(ge=0, lt=2**20)] | msgspec.UnsetType | None = msgspec.UNSET
    numa: Annotated[int, msgspec.Meta(ge=0, lt=1024)] | msgspec.UnsetType | None = msgspec.UNSET
    memory: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None
    mig: tuple[str, ...] | None = None


_PATHS = {
    "BOARD": PciPath.SAME_BOARD,
    "PIX": PciPath.ONE_SWITCH,
    "PXB": PciPath.SWITCHES,
    "PHB": PciPath.HOST_BRIDGE,
    "NODE": PciPath.NUMA_NODE,
    "SYS": PciPath.SYSTEM,
}


class _LinkText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    among: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(min_length=2)]
    nvlinks: Annotated[int, msgspec.Meta(ge=0, le=1024)] | None = None
    switched: bool | None = None
    path: Literal["BOARD", "PIX", "PXB", "PHB", "NODE", "SYS"] | None = None


class _FaultText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    xid: Annotated[int, msgspec.Meta(ge=1, lt=2**31)] | None = None
    reason: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    remedy: Annotated[str, msgspec.Meta(min_length=1)] | None = None

    def __post_init__(self) -> None:
        if (self.xid is None) == (self.reason is None):
            raise ValueError("Expected either `xid` or `reason`")
        if self.xid is not None and self.remedy is not None:
            raise ValueError("Expected no `remedy` besides `xid`")


class _FileText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    machine: str = "8xH100"
    count: Annotated[int, msgspec.Meta(ge=0, le=100_000)] | None = None
    node: str = ""
    gpus: tuple[_GpuText, ...] | None = None
    links: tuple[_LinkText, ...] = ()
    # Decoded one by one: msgspec names no keys of a dict in the path of an error.
    faults: dict[str, msgspec.Raw] = {}


def decode(content: bytes, path: str) -> Simulation:
    """What a file stands for; the same bytes always stand for the same.

    Args:
        content: JSON, as the module's docstring describes it.
        path: of the file, for messages.

    Raises:
        OptionError: the message says what is wrong and where, as ``$.gpus[0].numa``.
    """
    try:
        return _simulate(_decode(content, _FileText, "$"))
    except _WrongError as wrong:
        raise OptionError(
            f"{path}: {wrong}",
            remedy="correct it; its fields are machine, count, node, gpus, links and faults, all optional",
        ) from None


class _WrongError(Exception):
    """The description is wrong at ``where``."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"at {where}: {what}")


_Struct = TypeVar("_Struct", bound=msgspec.Struct)


def _decode(content: bytes | msgspec.Raw, kind: type[_Struct], where: str) -> _Struct:
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        # msgspec appends " - at `$.a.b`", and nothing where the trouble is at the root.
        what, found, below = str(error).rpartition(" - at `$")
        if not found:
            raise _WrongError(where, str(error)) from error
        raise _WrongError(where + below.removesuffix("`"), what) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise _WrongError(where, str(error)) from error


def _simulate(text: _FileText) -> Simulation:
    try:
        machine = find_machine(text.machine)
    except OptionError as error:
        raise _WrongError("$.machine", f"{error}; expected {MACHINES_ALLOWED}") from error
    gpus = _gpus(text, machine)
    return Simulation(_hardware(gpus, _links(text, machine, len(gpus))), _faults(text, gpus))


def _gpus(text: _FileText, machine: Machine) -> tuple[Gpu, ...]:
    written = text.gpus or ()
    default = machine.count if text.gpus is None else len(text.gpus)
    count = default if text.count is None else text.count
    if len(written) > count:
        raise _WrongError("$.gpus", f"Expected no more than `count`, which is {count}, got {len(written)}")
    gpus = [machine.gpu(index, text.node) for index in range(count)]
    for index, changes in enumerate(written):
        fields = msgspec.structs.asdict(changes)
        profiles = fields.pop("mig")
        gpus[index] = replace(
            gpus[index],
            # In minor and numa, null is a value.
            **{
                name: value
                for name, value in fields.items()
                if value is not msgspec.UNSET and (value is not None or name in {"minor", "numa"})
            },
        )
        if profiles is not None:
            gpus[index] = replace(gpus[index], mig_enabled=True, mig_devices=_mig_devices(gpus[index], profiles))
    if written:
        for name in ("uuid", "pci", "minor"):
            _different(gpus, name)
    return tuple(gpus)


def _mig_devices(gpu: Gpu, profiles: Sequence[str]) -> tuple[MigDevice, ...]:
    """One compute instance in a GPU instance of its own for each profile."""
    devices: list[MigDevice] = []
    for index, written in enumerate(profiles):
        where = f"$.gpus[{gpu.index}].mig[{index}]"
        try:
            profile, memory = parse_profile(written, gpu.memory)
        except ValueError as error:
            raise _WrongError(where, f"{error}, got {written!r}") from error
        digest = hashlib.sha256(f"{gpu.uuid}\n{index}\n{written}".encode()).hexdigest()
        # Minors as drivers give them: 1 and 2 are for the node as a whole, then come those of each GPU.
        minor = 3 + 2 * (_MOST_MIG_DEVICES * gpu.index + index)
        devices.append(
            MigDevice(
                index=index,
                uuid=f"MIG-{digest[:8]}-{digest[8:12]}-{digest[12:16]}-{digest[16:20]}-{digest[20:32]}",
                gpu_instance=index + 1,
                compute_instance=0,
                gpu_instance_profile=profile.number,
                gpu_slices=profile.gpu_slices,
                compute_slices=profile.compute_slices,
                memory=memory,
                gpu_instance_minor=minor,
                compute_instance_minor=minor + 1,
            )
        )
        if sum(device.gpu_slices for device in devices) > _MOST_MIG_DEVICES:
            raise _WrongError(where, f"a GPU has {_MOST_MIG_DEVICES} slices, got more")
    return tuple(devices)


# B300 and the like have 8 slices, all others 7.
_MOST_MIG_DEVICES = 8


def _different(gpus: Sequence[Gpu], name: str) -> None:
    """Ensures that what identifies a GPU, where it is known, identifies one."""
    first: dict[object, int] = {}
    for gpu in gpus:
        value = getattr(gpu, name)
        if value not in {"", None} and first.setdefault(value, gpu.index) != gpu.index:
            raise _WrongError("$.gpus", f"GPUs {first[value]} and {gpu.index} have the same `{name}`, {value}")


def _links(text: _FileText, machine: Machine, count: int) -> tuple[tuple[Link, ...], ...]:
    if text.links and count > MAX_LINKED:
        raise _WrongError("$.links", f"Expected no links among more than {MAX_LINKED} GPUs, of which there are {count}")
    matrix = [list(row) for row in machine.links(count)]
    for position, entry in enumerate(text.links):
        if len(set(entry.among)) != len(entry.among) or max(entry.among) >= count:
            raise _WrongError(
                f"$.links[{position}].among",
                f"Expected different indices of the {count} GPUs, got {list(entry.among)}",
            )
        for one, other in combinations(entry.among, 2):
            old = matrix[one][other]
            matrix[one][other] = matrix[other][one] = Link(
                old.path if entry.path is None else _PATHS[entry.path],
                old.nvlinks if entry.nvlinks is None else entry.nvlinks,
                old.switched if entry.switched is None else entry.switched,
            )
    return tuple(map(tuple, matrix))


def _faults(text: _FileText, gpus: tuple[Gpu, ...]) -> dict[str, Xid | Fault]:
    if not text.faults:
        return {}
    names = {str(gpu.index): gpu for gpu in gpus} | {gpu.uuid: gpu for gpu in gpus}
    found: dict[int, Xid | Fault] = {}
    for name, raw in text.faults.items():
        where = f"$.faults[{name!r}]"
        entry = _decode(raw, _FaultText, where)
        gpu = names.get(name)
        if gpu is None:
            raise _WrongError(where, "Expected the index or UUID of a GPU that there is")
        if gpu.index in found:
            raise _WrongError(where, f"GPU {gpu.index} is named twice, by its index and by its UUID")
        if entry.xid is not None:
            found[gpu.index] = Xid(gpu.uuid, entry.xid)
        else:
            found[gpu.index] = Fault(
                gpu.uuid,
                entry.reason or "",
                entry.remedy or "remove the fault from the file that describes the GPU",
            )
    return {found[index].uuid: found[index] for index in sorted(found)}
