"""Blanks the machine code of every other card in CUDA libraries, so that they pack into a third of their size:

    python scripts/gpu/one_card.py 90 FILE…

A library holds each kernel for many cards, one entry (a header, then code) per card. A driver reads the headers, takes
the entry of its own card and never looks into another. Code for other cards becomes zeros. PTX, which a driver would
compile for a card without an entry of its own, becomes zeros too, and its header names a later card, so that such
kernels (quantised ones, in vLLM) are missing instead of broken. What remains is what the library had.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SECTION = b".nv_fatbin"
MAGIC = 0xBA55ED50
PTX, CODE = 1, 2
ARCH_AT = 28
"""Of an entry's header: uint32, 10 * major + minor."""
NO_CARD = 255


class Entry(NamedTuple):
    """kind: PTX or CODE; header, body, end: offsets in the file."""

    kind: int
    card: int
    header: int
    body: int
    end: int


def entries(library: bytes | bytearray) -> Iterator[Entry]:
    """Of every container in the library's section, in order; none where there is no such section."""
    at, end = _section(library)
    while at < end:
        magic, _, header, size = struct.unpack_from("<IHHQ", library, at)
        if magic != MAGIC:  # padding between containers
            at += 8
            continue
        at, last = at + header, at + header + size
        while at < last:
            kind, _, length, body = struct.unpack_from("<HHIQ", library, at)
            (card,) = struct.unpack_from("<I", library, at + ARCH_AT)
            yield Entry(kind, card, at, at + length, at + length + body)
            at += length + body


def keep_one(library: bytearray, card: int) -> int:
    """Blanks in place; returns the bytes blanked. card: 90 for sm_90 and sm_90a."""
    blanked = 0
    for entry in list(entries(library)):
        if entry.kind == CODE and entry.card == card:
            continue
        library[entry.body : entry.end] = bytes(entry.end - entry.body)
        blanked += entry.end - entry.body
        if entry.kind == PTX:
            struct.pack_into("<I", library, entry.header + ARCH_AT, NO_CARD)
    return blanked


def _section(library: bytes | bytearray) -> tuple[int, int]:
    """(begin, end) of SECTION in an ELF file of 64 bits."""
    if library[:5] != b"\x7fELF\x02":
        return 0, 0
    (table,) = struct.unpack_from("<Q", library, 40)
    size, count, names = struct.unpack_from("<HHH", library, 58)
    headers = [struct.unpack_from("<IIQQQQ", library, table + size * n) for n in range(count)]
    strings = headers[names][4]
    for name, _, _, _, offset, length in headers:
        begin = strings + name
        if library[begin : begin + len(SECTION) + 1] == SECTION + b"\0":
            return offset, offset + length
    return 0, 0


def main(card: str, *files: str) -> None:
    for name in files:
        library = bytearray(Path(name).read_bytes())
        blanked = keep_one(library, int(card))
        if blanked:
            Path(name).write_bytes(library)
            print(f"{name}: {blanked / 1e6:.1f} of {len(library) / 1e6:.1f} MB blanked")


if __name__ == "__main__":
    main(*sys.argv[1:])
