"""The models' decode shapes, random tensors for them, and what a case is: launches, and the bytes one must move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specter_core.model.kernels.linear import NormWeights
from specter_core.model.kernels.rope import RowTensors

Launch = Callable[[], object]


@dataclass(frozen=True)
class Shape:
    """One model's decode shapes; rank 0: grouped-query attention."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    nope: int
    rope: int
    rank: int
    experts: int
    top_k: int
    width: int
    shared: int
    dense: int
    vocab: int
    moe_layers: int
    layer_norm: bool = False
    qkv_bias: bool = False
    jitter: float | None = None


SHAPES = (
    Shape("deepseek_v2_lite", 2048, 16, 16, 128, 128, 64, 512, 64, 6, 1408, 2816, 10944, 102400, 26),
    Shape("qwen1.5_moe", 2048, 16, 16, 128, 0, 128, 0, 60, 4, 1408, 5632, 0, 151936, 24, qkv_bias=True),
    Shape("phi3.5_moe", 4096, 32, 8, 128, 0, 128, 0, 16, 2, 6400, 0, 0, 32064, 32, True, True, 0.01),
)


@dataclass(frozen=True)
class Case:
    """build(n): n launches with weights of their own. bytes: what one launch must read and write at least."""

    name: str
    rows: int
    bytes: int
    build: Callable[[int], list[Launch]]


@dataclass(frozen=True)
class Maker:
    """Random tensors on a device; meta tensors have no content and need none."""

    device: str
    dtype: torch.dtype

    def randn(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        if self.device == "meta":
            return self.empty(*shape, dtype=dtype)
        return torch.randn(*shape, device=self.device, dtype=dtype or self.dtype) * scale

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(*shape, device=self.device, dtype=dtype or self.dtype)

    def rows(self, steps: int, position: int) -> RowTensors:
        positions = torch.arange(steps, device=self.device) + position
        valid = torch.ones(steps, dtype=torch.bool, device=self.device)
        return RowTensors(positions, valid, positions + 1, steps)


def norm_of(shape: Shape, make: Maker) -> NormWeights:
    shift = make.randn(shape.hidden, scale=0.1) if shape.layer_norm else None
    return NormWeights(1.0 + make.randn(shape.hidden, scale=0.1), shift, 1e-5, shape.layer_norm)
