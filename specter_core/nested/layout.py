"""What a nested payload holds, and where."""

from __future__ import annotations

import math
from dataclasses import dataclass

from specter_core.draft.int4 import GROUP

ALIGNMENT_BYTES = 256
OVERREAD_BYTES = 12
"""Kernels read so far behind the last tail, but not past an entry's trailer."""


@dataclass(frozen=True, slots=True)
class NestedLayout:
    """Byte ranges of one expert's payload; rows are gate 0 … I-1, up I … 2I-1, down 2I … 2I+H-1.

    [0, 4·rows)                      starts int32: the byte of `tails` where a row's begin
    [flags_at, flags_at + 4·rows)    flags int32 (nested/code.py)
    [symbols_at, tails_at)           symbols uint8, gate_up [2I, H] then down [H, I], in stored order (nested/code.py)
    [tails_at, …)                    tails uint8

    Kernels count bits from `tails_at` in 32 bits.
    """

    hidden: int
    width: int

    def __post_init__(self) -> None:
        assert self.hidden % GROUP == self.width % GROUP == 0, (self.hidden, self.width)
        assert self.weights < 1 << 29, f"{self.weights} weights: a tail's first bit must be counted in 32 bits"

    @property
    def rows(self) -> int:
        return 2 * self.width + self.hidden

    @property
    def weights(self) -> int:
        return 3 * self.hidden * self.width

    @property
    def flags_at(self) -> int:
        return 4 * self.rows

    @property
    def symbols_at(self) -> int:
        return math.ceil(8 * self.rows / ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    @property
    def tails_at(self) -> int:
        return self.symbols_at + self.weights

    def payload_bytes(self, tails: int) -> int:
        """Size of a payload with room for so many bytes of tails."""
        return math.ceil((self.tails_at + tails) / ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def capacity(self, payload_bytes: int) -> int:
        """Bytes of tails that fit into a payload of this size; negative when not even the symbols do."""
        return payload_bytes - self.tails_at
