"""Which tile a linear layer runs in: a table by weight shape that never looks at the number of rows."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Preset(Enum):
    """DRAFT serves 1 to 16 rows a pass best, TARGET the K + 1 rows of a window; each is row-invariant in
    itself.
    """

    DRAFT = "draft"
    TARGET = "target"


@dataclass(frozen=True, slots=True)
class LinearTile:
    """rows x block_n outputs per program, block_k inputs per step; split > 1 cuts the inputs over that
    many programs.
    """

    rows: int
    block_n: int
    block_k: int
    split: int = 1
    warps: int = 4
    stages: int = 4

    def __post_init__(self) -> None:
        for value in (self.rows, self.block_n, self.block_k):
            assert value >= 16 and value & (value - 1) == 0, self


@dataclass(frozen=True, slots=True)
class GemvTile:
    """block_n whole rows of the weight per program; block_k: the inputs, padded to a power of two."""

    block_n: int
    block_k: int
    warps: int = 4

    def __post_init__(self) -> None:
        for value in (self.block_n, self.block_k):
            assert value > 0 and value & (value - 1) == 0, self


def power_of_two(n: int) -> int:
    """Smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def linear_tile(out_features: int, in_features: int, *, pair: bool, preset: Preset) -> LinearTile:
    """Tile of a weight [out, in] (pair: gate and up of out rows each).

    A product with few rows is a stream of the weight: enough programs to fill 132 multiprocessors with at
    least 32 KiB in flight on each.
    """
    rows = 16 if preset is Preset.DRAFT else 32
    block_k = 256 if in_features % 256 == 0 and in_features >= 1024 else 128
    block_k = min(block_k, max(16, power_of_two(in_features)))
    streams = out_features * (2 if pair else 1)
    if streams >= 32768:
        return LinearTile(rows, 64, min(block_k, 128), warps=4, stages=4)
    if out_features <= 128 and in_features >= 1024:
        return LinearTile(rows, 16, block_k, split=4, warps=4, stages=4)
    if out_features <= 1024 and in_features >= 1024:
        return LinearTile(rows, 16, block_k, split=2, warps=4, stages=4)
    return LinearTile(rows, 16, block_k, warps=4, stages=3 if pair else 4)


def prefill_tile(out_features: int, in_features: int, *, pair: bool) -> LinearTile:
    """Tile of a weight [out, in] for the rows of a prompt: each weight is read once per 128 rows."""
    block_n = min(64 if pair else 128, max(16, power_of_two(out_features)))
    return LinearTile(128, block_n, min(64, max(16, power_of_two(in_features))), warps=8, stages=3)


def gemv_tile(out_features: int, in_features: int, *, pair: bool) -> GemvTile:
    """Tile of the draft's products: 16 to 64 KiB of weights in flight per program, whose input row (and norm) must
    be few bytes beside them; enough programs to give every multiprocessor the same share.
    """
    block_k = power_of_two(max(in_features, 16))
    if block_k > 4096:
        return GemvTile(1 if pair else 2, block_k, 8)
    warps = 8 if in_features > 3072 else 4
    if pair:
        return GemvTile(2, block_k, warps)
    return GemvTile(8, block_k, 8) if out_features >= 32768 else GemvTile(4, block_k, warps)
