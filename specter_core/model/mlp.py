"""SwiGLU blocks of the shared instance: dense layers and shared experts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from specter_core.model.ops import DecoderOps
from specter_core.model.tensor_source import TensorSource

_GATE_ROWS = 16
"""Rows that the one-row gate is padded to: a product with a single output is another kernel."""


class SwiGLU:
    """down(silu(gate·x) · up·x), optionally scaled by sigmoid(scalar gate·x) as Qwen2-MoE's shared expert
    is.
    """

    def __init__(self, gate_up: Tensor, down: Tensor, ops: DecoderOps, scalar_gate: Tensor | None = None) -> None:
        self._width = down.shape[1]
        self._gated = scalar_gate is not None
        if scalar_gate is not None:
            padding = scalar_gate.new_zeros(_GATE_ROWS - 1, scalar_gate.shape[1])
            gate_up = torch.cat([gate_up, scalar_gate, padding])
        self._gate_up = gate_up  # [2·I (+ 16), H]
        self._down = down  # [H, I]
        self._ops = ops

    def __call__(self, x: Tensor) -> Tensor:
        """x [R, H] -> [R, H]."""
        width = self._width
        inner = self._ops.linear(x, self._gate_up)
        y = self._ops.linear(self._ops.silu_mul(inner[:, :width], inner[:, width : 2 * width]), self._down)
        return self._ops.sigmoid(inner[:, 2 * width : 2 * width + 1]) * y if self._gated else y

    def tensors(self) -> Iterator[Tensor]:
        yield self._gate_up
        yield self._down


def load_swiglu(prefix: str, source: TensorSource, ops: DecoderOps, scalar_gate: str | None = None) -> SwiGLU:
    """From `prefix`.{gate,up,down}_proj.weight and, if named, the [1, H] tensor of the scalar gate."""
    gate_up = source.stack(f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight")
    gate = source.get(scalar_gate) if scalar_gate is not None else None
    return SwiGLU(gate_up, source.get(f"{prefix}.down_proj.weight"), ops, gate)
