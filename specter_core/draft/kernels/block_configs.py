"""Tile choices of the tensor-core kernels by weight shape; the table holds what was measured best (results/h200)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """One program: `bands` blocks of 16 weight rows; `split` warps share the inputs of each. The weights of the first
    `ahead` groups of each warp are requested before any is used (the compiler hoists more where registers allow).
    """

    split: int
    bands: int = 1
    ahead: int = 4

    def __post_init__(self) -> None:
        assert 1 <= self.warps <= 32 and self.warps & (self.warps - 1) == 0 and self.ahead > 0, self

    @property
    def warps(self) -> int:
        return self.split * self.bands


@dataclass(frozen=True, slots=True)
class BlockPathConfig:
    """The two launches of one model shape."""

    gate_up: BlockConfig
    down: BlockConfig


# (H, I, k) -> measured choice.
_MEASURED: dict[tuple[int, int, int], BlockPathConfig] = {
    (2048, 1408, 6): BlockPathConfig(BlockConfig(4), BlockConfig(16)),  # DeepSeek-V2-Lite
    (2048, 1408, 4): BlockPathConfig(BlockConfig(4), BlockConfig(16, 1, 3)),  # Qwen1.5-MoE
    (4096, 6400, 2): BlockPathConfig(BlockConfig(4, 1, 8), BlockConfig(8)),  # Phi-3.5-MoE
}


def block_path_config(hidden: int, width: int, top_k: int) -> BlockPathConfig:
    """The measured configuration of a shape, else one with about four groups of inputs per warp."""
    measured = _MEASURED.get((hidden, width, top_k))
    if measured is not None:
        return measured
    gate_up, down = _power_of_two(hidden // 512), _power_of_two(top_k * width // 512)
    return BlockPathConfig(BlockConfig(gate_up, max(1, 8 // gate_up)), BlockConfig(down, max(1, 8 // down)))


def _power_of_two(wanted: int) -> int:
    """The power of two from 1 to 16 that is at most `wanted`, or 1."""
    return 1 << min(4, max(1, wanted).bit_length() - 1)
