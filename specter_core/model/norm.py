"""The two norms, bound to their weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from specter_core.model.config import ModelConfig, NormKind
from specter_core.model.ops import DecoderOps
from specter_core.model.tensor_source import TensorSource


class Norm(Protocol):
    def __call__(self, x: Tensor) -> Tensor: ...

    def tensors(self) -> Iterator[Tensor]: ...


@dataclass(frozen=True, slots=True)
class RMSNorm:
    weight: Tensor  # [H]
    eps: float
    ops: DecoderOps

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def tensors(self) -> Iterator[Tensor]:
        yield self.weight


@dataclass(frozen=True, slots=True)
class LayerNorm:
    weight: Tensor  # [H]
    bias: Tensor  # [H]
    eps: float
    ops: DecoderOps

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)

    def tensors(self) -> Iterator[Tensor]:
        yield self.weight
        yield self.bias


def load_norm(prefix: str, config: ModelConfig, source: TensorSource, ops: DecoderOps) -> Norm:
    """The norm whose tensors are `prefix`.weight (and .bias for LayerNorm)."""
    weight = source.get(f"{prefix}.weight")
    if config.norm is NormKind.LAYER:
        return LayerNorm(weight, source.get(f"{prefix}.bias"), config.norm_eps, ops)
    return RMSNorm(weight, config.norm_eps, ops)
