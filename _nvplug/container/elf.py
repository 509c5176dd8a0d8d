"""What a shared library says of itself, as ldconfig reads it."""

from __future__ import annotations

import struct
from typing import BinaryIO, Final, NamedTuple

__all__ = ["Elf", "read_elf"]

_PT_LOAD: Final = 1
_PT_DYNAMIC: Final = 2
_DT_STRTAB: Final = 5
_DT_SONAME: Final = 14

# More than any driver's library has; a damaged file must not make us read all of it.
_MOST_SEGMENTS: Final = 64
_LARGEST_DYNAMIC: Final = 1 << 16
_LONGEST_NAME: Final = 256


class Elf(NamedTuple):
    """An ELF file.

    Attributes:
        machine: EM_…: 62 is x86-64, 183 is AArch64, 3 is the 32-bit x86.
        soname: the name under which the dynamic loader knows a 64-bit library, ``""`` if it has none.
    """

    machine: int
    soname: str


def read_elf(path: str) -> Elf | None:
    """Reads the head of a library; None if it is another kind of file, or cannot be read. Blocks."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - opened by the hundred
            return _read(file)
    # The last one: a place in the file that no file can have.
    except (OSError, struct.error, ValueError):
        return None


def _read(file: BinaryIO) -> Elf | None:
    head = file.read(64)
    if head[:4] != b"\x7fELF":
        return None
    machine = int.from_bytes(head[18:20], "little")
    # 64-bit, little-endian, shared object.
    if head[4:6] != b"\x02\x01" or head[16:18] != b"\x03\x00":
        return Elf(machine, "")
    (table,) = struct.unpack_from("<Q", head, 32)
    size, count = struct.unpack_from("<HH", head, 54)
    file.seek(table)
    segments = file.read(size * min(count, _MOST_SEGMENTS))
    loads, dynamic = [], b""
    for at in range(0, len(segments), size or 1):
        kind, _, offset, address, _, length = struct.unpack_from("<IIQQQQ", segments, at)
        if kind == _PT_LOAD:
            loads.append((address, length, offset))
        elif kind == _PT_DYNAMIC:
            file.seek(offset)
            dynamic = file.read(min(length, _LARGEST_DYNAMIC))
    entries = dict(struct.iter_unpack("<QQ", dynamic[: len(dynamic) // 16 * 16]))
    if _DT_SONAME not in entries:
        return Elf(machine, "")
    strings = entries.get(_DT_STRTAB, 0)
    for address, length, offset in loads:
        if address <= strings < address + length:
            file.seek(strings - address + offset + entries[_DT_SONAME])
            name = file.read(_LONGEST_NAME).partition(b"\0")[0]
            return Elf(machine, name.decode(errors="replace"))
    return Elf(machine, "")
