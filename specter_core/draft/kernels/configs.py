"""Tile choices of the kernels by weight shape; the table holds what was measured best (results/h200)."""

from __future__ import annotations

from dataclasses import dataclass

# Tokens from which an expert's weights are read once for all its tokens instead of once per (token, choice). Measured
# on one H200 at 1 … 64 tokens: once per choice is faster throughout, by 1.5 to 5 times (results/h200/kernels).
GROUPED_FROM_TOKENS = 65


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """One program: block_n output features, 8 groups of inputs per warp and step.

    Every thread reads 4 words of each of the block's rows, for gate and up alike, against 32 activations.
    The warps lie along the inputs, so that activations are loaded where they are used, without a trip
    through shared memory. unroll: all steps in straight line, their loads in flight together; otherwise a
    loop that Triton pipelines over `stages`.
    """

    block_n: int
    warps: int
    unroll: bool = True
    stages: int = 2

    def __post_init__(self) -> None:
        for value in (self.block_n, self.warps):
            assert value > 0 and value & (value - 1) == 0, self

    @property
    def lanes(self) -> int:
        return 32 * self.warps


@dataclass(frozen=True, slots=True)
class GroupedConfig:
    """One program: block_n output features and 16 token rows of one expert, one group of inputs per step."""

    block_n: int = 32
    warps: int = 4
    stages: int = 3


@dataclass(frozen=True, slots=True)
class PathConfig:
    """The four launches of one model shape."""

    gate_up: GemvConfig
    down: GemvConfig
    grouped_gate_up: GroupedConfig = GroupedConfig()
    grouped_down: GroupedConfig = GroupedConfig(block_n=16)
    grouped_from_tokens: int = GROUPED_FROM_TOKENS


# (H, I, k) -> measured choice.
_MEASURED: dict[tuple[int, int, int], PathConfig] = {
    (2048, 1408, 6): PathConfig(GemvConfig(2, 1, unroll=False, stages=3), GemvConfig(4, 4)),  # DeepSeek-V2-Lite
    (2048, 1408, 4): PathConfig(GemvConfig(8, 2), GemvConfig(2, 2)),  # Qwen1.5-MoE
    (4096, 6400, 2): PathConfig(GemvConfig(4, 2, unroll=False, stages=1), GemvConfig(4, 2)),  # Phi-3.5-MoE
}


def path_config(hidden: int, width: int, top_k: int) -> PathConfig:
    """The measured configuration of a shape, else one whose programs take the inputs in one step or few."""
    measured = _MEASURED.get((hidden, width, top_k))
    if measured is not None:
        return measured
    return PathConfig(GemvConfig(4, _warps(hidden // 1024)), GemvConfig(4, _warps(top_k * width // 4096)))


def _warps(wanted: int) -> int:
    """The power of two from 1 to 4 that is at most `wanted`."""
    return 4 if wanted >= 4 else 2 if wanted >= 2 else 1
