"""scripts/gpu/one_card.py: what a card runs stays as it was, other cards' code becomes zeros."""

from __future__ import annotations

import struct

from scripts.gpu.one_card import CODE, PTX, entries, keep_one, main


def entry(kind: int, card: int, body: bytes) -> bytes:
    header = struct.pack("<HHIQ", kind, 0x101, 64, len(body)) + struct.pack("<IIII", 0, 0, 0, card) + bytes(32)
    return header + body


def container(*parts: bytes) -> bytes:
    body = b"".join(parts)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(section: bytes, name: bytes = b".nv_fatbin") -> bytearray:
    """An ELF file with this section and that of the names."""
    names = b"\0" + name + b"\0.shstrtab\0"
    begin = 64
    at = begin + len(section)
    table = at + len(names)

    def header(string: int, offset: int, size: int) -> bytes:
        return struct.pack("<IIQQQQIIQQ", string, 1, 0, 0, offset, size, 0, 0, 8, 0)

    elf = (
        b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, table, 0, 64, 0, 0, 64, 3, 2)
    )
    headers = bytes(64) + header(1, begin, len(section)) + header(2 + len(name), at, len(names))
    return bytearray(elf + section + names + headers)


FIRST = container(entry(CODE, 80, b"a" * 24), entry(CODE, 90, b"b" * 40), entry(PTX, 90, b"c" * 16))
SECOND = container(entry(PTX, 80, b"d" * 8), entry(CODE, 120, b"e" * 8))


def test_code_of_one_card_stays_and_everything_else_is_blank():
    made = library(FIRST + bytes(8) + SECOND)
    before = bytes(made)
    found = list(entries(made))
    assert [(e.kind, e.card) for e in found] == [(CODE, 80), (CODE, 90), (PTX, 90), (PTX, 80), (CODE, 120)]
    assert keep_one(made, 90) == 24 + 16 + 8 + 8
    assert len(made) == len(before)
    bodies = [bytes(made[e.body : e.end]) for e in found]
    assert bodies == [bytes(24), b"b" * 40, bytes(16), bytes(8), bytes(8)]
    assert [(e.kind, e.card) for e in entries(made)] == [(CODE, 80), (CODE, 90), (PTX, 255), (PTX, 255), (CODE, 120)]
    changed = [i for i, (old, new) in enumerate(zip(before, made, strict=True)) if old != new]
    inside = [range(e.header, e.end) for e in found if e.kind == PTX] + [range(e.body, e.end) for e in found]
    assert all(any(i in spot for spot in inside) for i in changed)


def test_files_without_device_code_are_left_alone(tmp_path):
    for number, content in enumerate((bytes(library(FIRST, b".data")), b"not a library")):
        path = tmp_path / f"{number}.so"
        path.write_bytes(content)
        stamp = path.stat().st_mtime_ns
        main("90", str(path))
        assert path.read_bytes() == content and path.stat().st_mtime_ns == stamp
