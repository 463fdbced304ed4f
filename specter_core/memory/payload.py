"""One expert as opaque bytes: its matrices in some encoding, then a trailer that says whose they are."""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specter_core.errors import WrongExpertError
from specter_core.types import ExpertKey

ENTRY_ALIGNMENT_BYTES = 256
TRAILER_BYTES = 32
ENCODING_IDS = {"plain": 1, "nested": 2}

_MAGIC = b"SPXEXPRT"
# magic, layer, expert, encoding id, crc32 of the payload, payload bytes mod 2^32, reserved
_TRAILER = struct.Struct("<8sIIIIII")
assert _TRAILER.size == TRAILER_BYTES


class ExpertViews(NamedTuple):
    """Matrices of one expert, sharing memory with its entry: gate, up [I, H] and down [H, I]."""

    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class PayloadLayout:
    """Byte layout of an entry.

    [0, payload_bytes)                     plain: gate [I, H] | up [I, H] | down [H, I], contiguous, in `dtype`
                                           nested: see specter_core/nested/layout.py; `dtype` is what it decodes to
    [payload_bytes, entry_bytes − 32)      zero padding up to a multiple of 256 bytes
    [entry_bytes − 32, entry_bytes)        trailer: the last bytes to arrive, so a short copy is seen too

    nested_bytes: payload size of encoding "nested", which depends on the weights.
    """

    hidden: int
    width: int
    dtype: torch.dtype
    encoding: str = "plain"
    nested_bytes: int = 0

    def __post_init__(self) -> None:
        assert self.hidden > 0 and self.width > 0, (self.hidden, self.width)
        assert self.encoding in ENCODING_IDS, f"unknown encoding {self.encoding!r}, known: {sorted(ENCODING_IDS)}"
        assert (self.encoding == "nested") == (self.nested_bytes > 0), (self.encoding, self.nested_bytes)

    @property
    def payload_bytes(self) -> int:
        if self.encoding == "nested":
            return self.nested_bytes
        return 3 * self.hidden * self.width * self.dtype.itemsize

    @property
    def entry_bytes(self) -> int:
        return math.ceil((self.payload_bytes + TRAILER_BYTES) / ENTRY_ALIGNMENT_BYTES) * ENTRY_ALIGNMENT_BYTES

    def views(self, entry: Tensor) -> ExpertViews:
        """Matrices inside `entry` (uint8 [entry_bytes]) of encoding "plain"; no copy."""
        assert self.encoding == "plain", self.encoding
        assert entry.dtype == torch.uint8 and entry.numel() == self.entry_bytes, (entry.dtype, entry.shape)
        flat = entry[: self.payload_bytes].view(self.dtype)
        size = self.hidden * self.width
        return ExpertViews(
            flat[:size].view(self.width, self.hidden),
            flat[size : 2 * size].view(self.width, self.hidden),
            flat[2 * size :].view(self.hidden, self.width),
        )

    def write(self, entry: Tensor, key: ExpertKey, gate: Tensor, up: Tensor, down: Tensor) -> None:
        """Fill `entry` (uint8 [entry_bytes], host memory) with an expert: gate, up [I, H], down [H, I] of
        `dtype`.
        """
        views = self.views(entry)
        for target, source in zip(views, (gate, up, down), strict=True):
            assert source.shape == target.shape and source.dtype == self.dtype, (
                source.shape,
                target.shape,
                source.dtype,
            )
            target.copy_(source)
        self.seal(entry, key)

    def seal(self, entry: Tensor, key: ExpertKey, *, checksum: bool = True) -> None:
        """Padding and trailer for the payload that `entry` (uint8 [entry_bytes], host memory) holds. checksum: a second
        per GB and more; without, the trailer's CRC is 0."""
        entry[self.payload_bytes : self.entry_bytes - TRAILER_BYTES] = 0
        fields = (
            _MAGIC,
            key.layer,
            key.expert,
            ENCODING_IDS[self.encoding],
            self._crc(entry) if checksum else 0,
            self._size_check,
            0,
        )
        trailer = torch.frombuffer(bytearray(_TRAILER.pack(*fields)), dtype=torch.uint8)
        entry[self.entry_bytes - TRAILER_BYTES :] = trailer

    def check(self, entry: Tensor, key: ExpertKey) -> None:
        """Raise WrongExpertError unless the entry's trailer names `key`, this encoding and size. Reads 32
        bytes.
        """
        self.check_trailer(entry[self.entry_bytes - TRAILER_BYTES :], key)

    def check_trailer(self, trailer: Tensor, key: ExpertKey) -> None:
        """`check` for a trailer alone: uint8 [32]."""
        magic, layer, expert, encoding, _, size, _ = _TRAILER.unpack(trailer.cpu().numpy().tobytes())
        if magic != _MAGIC:
            raise WrongExpertError(f"slot asked for layer {key.layer} expert {key.expert} holds no complete expert")
        wanted = (key.layer, key.expert, ENCODING_IDS[self.encoding], self._size_check)
        if (layer, expert, encoding, size) != wanted:
            raise WrongExpertError(
                f"slot asked for layer {key.layer} expert {key.expert} encoding {wanted[2]} size {wanted[3]} "
                f"holds layer {layer} expert {expert} encoding {encoding} size {size}"
            )

    def verify_crc(self, entry: Tensor) -> None:
        """Raise WrongExpertError when the payload's CRC-32 is not the trailer's. Reads the whole payload."""
        stored = _TRAILER.unpack(entry[self.entry_bytes - TRAILER_BYTES :].cpu().numpy().tobytes())[4]
        computed = self._crc(entry)
        if stored != computed:
            raise WrongExpertError(f"expert payload is damaged: crc32 {computed:08x}, trailer says {stored:08x}")

    @property
    def _size_check(self) -> int:
        return self.payload_bytes & 0xFFFFFFFF

    def _crc(self, entry: Tensor) -> int:
        return zlib.crc32(entry[: self.payload_bytes].cpu().numpy().data)


def trailer_words(layout: PayloadLayout) -> tuple[int, int, int, int]:
    """What kernels compare in a trailer read as eight int32: magic (words 0, 1), payload size (6), encoding (4).

    Words 2 and 3 are layer and expert. All as signed 32-bit values.
    """
    low, high = struct.unpack("<ii", _MAGIC)
    (size,) = struct.unpack("<i", struct.pack("<I", layout.payload_bytes & 0xFFFFFFFF))
    return low, high, size, ENCODING_IDS[layout.encoding]
