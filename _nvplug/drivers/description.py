"""What a file says about GPUs on paper.

It is JSON::

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
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import msgspec

from _nvplug.drivers.machines import MACHINES_ALLOWED, MAX_LINKED, Machine, find_machine
from _nvplug.errors import OptionError
from _nvplug.hardware import Fault, Gpu, Hardware, Link, MigDevice, PciPath, Xid
from _nvplug.mig import parse_profile

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Simulation", "decode", "simulate"]

CONTROL_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a machine or a file stands for.

    Attributes:
        hardware: the GPUs.
        faults: those at fault, by UUID and in index order.
    """

    hardware: Hardware
    faults: Mapping[str, Xid | Fault] = field(default_factory=dict)


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
