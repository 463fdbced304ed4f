"""Writes a zip archive with the classic (ZipCrypto) encryption, which Python's zipfile can read but not write."""

from __future__ import annotations

import random
import struct
import zlib

TABLE = [0] * 256
for _value in range(256):
    _crc = _value
    for _ in range(8):
        _crc = _crc >> 1 ^ (0xEDB88320 if _crc & 1 else 0)
    TABLE[_value] = _crc


class _Keys:
    def __init__(self, password: bytes) -> None:
        self.k0, self.k1, self.k2 = 0x12345678, 0x23456789, 0x34567890
        for byte in password:
            self._update(byte)

    def _update(self, byte: int) -> None:
        self.k0 = self.k0 >> 8 ^ TABLE[(self.k0 ^ byte) & 0xFF]
        self.k1 = ((self.k1 + (self.k0 & 0xFF)) * 134775813 + 1) & 0xFFFFFFFF
        self.k2 = self.k2 >> 8 ^ TABLE[(self.k2 ^ self.k1 >> 24) & 0xFF]

    def encrypt(self, plain: bytes) -> bytes:
        out = bytearray()
        for byte in plain:
            temp = (self.k2 | 2) & 0xFFFF
            out.append(byte ^ (temp * (temp ^ 1) >> 8 & 0xFF))
            self._update(byte)
        return bytes(out)


def encrypted_zip(members: dict[str, bytes], password: bytes, seed: int = 0, method: int = 8) -> bytes:
    """The bytes of an archive. seed: of the random salt. method: as written in the headers (8 = deflate)."""
    salt = random.Random(seed)
    body, directory = b"", b""
    for name, plain in members.items():
        packer = zlib.compressobj(wbits=-15)
        packed = packer.compress(plain) + packer.flush()
        crc = zlib.crc32(plain)
        secret = _Keys(password).encrypt(salt.randbytes(11) + bytes([crc >> 24]) + packed)
        common = struct.pack("<5H3I2H", 20, 1, method, 0, 33, crc, len(secret), len(plain), len(name), 0)
        directory += (
            b"PK\1\2" + struct.pack("<H", 20) + common + struct.pack("<3H2I", 0, 0, 0, 0, len(body)) + name.encode()
        )
        body += b"PK\3\4" + common + name.encode() + secret
    end = struct.pack("<4H2IH", 0, 0, len(members), len(members), len(directory), len(body), 0)
    return body + directory + b"PK\5\6" + end
