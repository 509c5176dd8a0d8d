"""Well-known machines with NVIDIA GPUs: a table, and what follows from it.

The layouts follow machines that are sold, as ``nvidia-smi topo -m`` shows them; the memory sizes are those
that ``nvidia-smi`` prints there.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from _nvplug.errors import OptionError
from _nvplug.hardware import Gpu, Link, PciPath

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "MACHINES_ALLOWED",
    "MAX_COUNT",
    "MAX_LINKED",
    "PRODUCTS",
    "Board",
    "Machine",
    "Product",
    "Slot",
    "find_machine",
]

MAX_COUNT = 16
"""The most GPUs that one machine of the table has."""

MAX_LINKED = 64
"""With more GPUs no links are made: the matrix grows with their square, and no real node has as many."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where on a board a GPU sits.

    Attributes:
        bus: the PCI bus number.
        numa: the NUMA node, which is the CPU socket.
        switch: GPUs with the same number share PCIe switches, and none with another.
        domain: the PCI domain on the first board.
    """

    bus: int
    numa: int
    switch: int
    domain: int = 0


@dataclass(frozen=True, slots=True)
class Board:
    """How a number of GPUs are wired. A machine with more than one board has each in PCI domains of its own.

    Attributes:
        slots: in the order of PCI addresses.
        shared_path: the PCIe path between GPUs on the same switches.
        nvlinks: how many NVLinks lead from a GPU to each other GPU that it reaches.
        switched: whether they go through NVSwitches.
        reach: how many GPUs, in index order, NVLink joins.
        mesh: where not every GPU reaches every other one: a row for each, with a digit of NVLinks for each other.
    """

    slots: tuple[Slot, ...]
    shared_path: PciPath = PciPath.NUMA_NODE
    nvlinks: int = 0
    switched: bool = False
    reach: int = 1
    mesh: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Product:
    """A model of GPU.

    Attributes:
        name: as ``nvidia-smi -L`` prints it.
        memory: bytes.
        board: the usual wiring; a machine with fewer GPUs is a part of it, as virtual machines are.
        special: the wiring of machines with exactly so many, where they are sold with another.
    """

    name: str
    memory: int
    board: Board
    special: Mapping[int, Board] = field(default_factory=dict)


def _slots(*buses: int, per_switch: int) -> tuple[Slot, ...]:
    half = len(buses) // 2
    return tuple(Slot(bus, position // half, position // per_switch) for position, bus in enumerate(buses))


_MIB = 2**20

# DGX H100, and the HGX machines since: each GPU has PCIe switches of its own, shared with its network card.
_HOPPER = Board(
    _slots(0x1B, 0x43, 0x52, 0x61, 0x9D, 0xC3, 0xD1, 0xDF, per_switch=1), nvlinks=18, switched=True, reach=8
)
_HOPPER_OF_FOUR = Board(_slots(0x4E, 0x5F, 0xCB, 0xDB, per_switch=1), nvlinks=6, reach=4)

# DGX-1: a cube, with more NVLinks along some of its edges than along others, and diagonals in two of its sides.
_CUBE = Board(
    _slots(0x06, 0x07, 0x0A, 0x0B, 0x85, 0x86, 0x89, 0x8A, per_switch=2),
    shared_path=PciPath.ONE_SWITCH,
    reach=8,
    mesh=("01122000", "10210200", "12020010", "21200001", "20000112", "02001021", "00101202", "00012120"),
)
# DGX-2: its NVSwitches join two boards of eight.
_DGX_2 = Board(
    _slots(
        0x34, 0x36, 0x39, 0x3B, 0x57, 0x59, 0x5C, 0x5E, 0xB7, 0xB9, 0xBC, 0xBE, 0xE0, 0xE2, 0xE5, 0xE7, per_switch=4
    ),
    shared_path=PciPath.SWITCHES,
    nvlinks=6,
    switched=True,
    reach=16,
)

PRODUCTS: Mapping[str, Product] = {
    "V100": Product("Tesla V100-SXM2-32GB", 32768 * _MIB, _CUBE, {16: _DGX_2}),
    "A100": Product(
        "NVIDIA A100-SXM4-80GB",
        81920 * _MIB,
        # HGX A100: pairs share PCIe switches; with 16 GPUs the NVSwitches join both boards.
        Board(
            _slots(0x07, 0x0F, 0x47, 0x4E, 0x87, 0x90, 0xB7, 0xBD, per_switch=2),
            shared_path=PciPath.SWITCHES,
            nvlinks=12,
            switched=True,
            reach=16,
        ),
        {4: Board(_slots(0x01, 0x41, 0x81, 0xC1, per_switch=1), nvlinks=4, reach=4)},
    ),
    "H100": Product("NVIDIA H100 80GB HBM3", 81559 * _MIB, _HOPPER, {4: _HOPPER_OF_FOUR}),
    "H200": Product("NVIDIA H200", 143771 * _MIB, _HOPPER, {4: _HOPPER_OF_FOUR}),
    # Sold on boards of eight only: four are half of one.
    "B200": Product("NVIDIA B200", 183359 * _MIB, _HOPPER),
    "GB200": Product(
        "NVIDIA GB200",
        189471 * _MIB,
        # A tray of an NVL72: the NVSwitches are in trays of their own. Two GPUs on each Grace CPU.
        Board(
            tuple(
                Slot(0x01, numa, number, domain)
                for number, (numa, domain) in enumerate(((0, 0x08), (0, 0x09), (1, 0x18), (1, 0x19)))
            ),
            nvlinks=18,
            switched=True,
            reach=16,
        ),
    ),
    "L40S": Product(
        "NVIDIA L40S",
        46068 * _MIB,
        # One large PCIe switch per socket.
        Board(
            _slots(0x18, 0x2A, 0x3A, 0x5D, 0x9A, 0xAB, 0xBA, 0xDB, per_switch=4),
            shared_path=PciPath.ONE_SWITCH,
        ),
    ),
    "T4": Product(
        "Tesla T4",
        15360 * _MIB,
        # Two cards behind each PCIe switch.
        Board(
            _slots(0x18, 0x19, 0x35, 0x36, 0xE7, 0xE8, 0xF4, 0xF5, per_switch=2),
            shared_path=PciPath.ONE_SWITCH,
        ),
    ),
}
"""By the name used in ``simulated:8xH100``."""

MACHINES_ALLOWED = f"NxMODEL with N from 1 to {MAX_COUNT} and MODEL one of {', '.join(PRODUCTS)}"
"""What `find_machine` takes, in words, for messages."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine of the table: ``count`` GPUs of the model ``model``, a key of ``PRODUCTS``."""

    count: int
    model: str

    @property
    def product(self) -> Product:
        """The model's row in the table."""
        return PRODUCTS[self.model]

    @property
    def board(self) -> Board:
        """How the GPUs are wired."""
        return self.product.special.get(self.count, self.product.board)

    def gpu(self, index: int, node: str = "") -> Gpu:
        """The GPU at ``index``, which may exceed ``count``: then of one more board of the same kind.

        Its UUID depends on ``node``, the model and the index alone. A restart changes none, and a machine
        that gains or loses its last GPUs keeps the others.
        """
        board, position = divmod(index, len(self.board.slots))
        slot = self.board.slots[position]
        domain = slot.domain + board * (1 + max(each.domain for each in self.board.slots))
        digest = hashlib.sha256(f"{node}\n{self.model}\n{index}".encode()).hexdigest()
        return Gpu(
            index=index,
            uuid=f"GPU-{digest[:8]}-{digest[8:12]}-{digest[12:16]}-{digest[16:20]}-{digest[20:32]}",
            name=self.product.name,
            pci=f"{domain:04x}:{slot.bus:02x}:00.0",
            minor=index,
            numa=slot.numa,
            memory=self.product.memory,
        )

    def links(self, count: int) -> tuple[tuple[Link, ...], ...]:
        """How ``count`` GPUs reach each other, as in `Hardware.links`; empty for more than ``MAX_LINKED``."""
        if count > MAX_LINKED:
            return ()
        return tuple(
            tuple(Link() if one == other else self._link(one, other) for other in range(count)) for one in range(count)
        )

    def _link(self, one: int, other: int) -> Link:
        board = self.board
        domain, position = divmod(one, len(board.slots))
        other_domain, other_position = divmod(other, len(board.slots))
        slot, other_slot = board.slots[position], board.slots[other_position]
        if (domain, slot.switch) == (other_domain, other_slot.switch):
            path = board.shared_path
        elif slot.numa == other_slot.numa:
            path = PciPath.NUMA_NODE
        else:
            path = PciPath.SYSTEM
        if one // board.reach != other // board.reach:
            return Link(path)
        nvlinks = int(board.mesh[position][other_position]) if board.mesh else board.nvlinks
        return Link(path, nvlinks, board.switched)


def find_machine(name: str) -> Machine:
    """The machine that ``name``, such as ``8xH100``, stands for.

    Raises:
        OptionError: there is none; the message names the nearest.
    """
    found = re.fullmatch(r"([1-9][0-9]?)x([A-Z0-9]+)", name)
    if found is not None and int(found[1]) <= MAX_COUNT and found[2] in PRODUCTS:
        return Machine(int(found[1]), found[2])
    nearest = _nearest(name)
    hint = f"; the nearest is {nearest}" if nearest else ""
    raise OptionError(f"no machine is called {name!r}{hint}", remedy=f"name {MACHINES_ALLOWED}")


def _nearest(name: str) -> str | None:
    written, _, model = name.casefold().rpartition("x")
    models = {model.casefold(): model for model in PRODUCTS}
    close = difflib.get_close_matches(model, models, n=1)
    if not close:
        return None
    # Eight is what most machines have.
    count = min(max(int(written[:3]), 1), MAX_COUNT) if written.isdecimal() else 8
    return f"{count}x{models[close[0]]}"
