"""One routed expert on the CPU: SwiGLU in fixed 16-row blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from specter_core.model.linear import row_invariant_linear, silu


def expert_ffn(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """down(silu(gate·x) * up·x): x [R, H], gate and up [I, H], down [H, I] -> [R, H] float32.

    Weights of another dtype than x are converted to x's first. A row's bits depend on the row and the
    weights alone: not on R, its position, or the other rows.
    """
    gate, up, down = gate.to(x.dtype), up.to(x.dtype), down.to(x.dtype)
    inner = silu(row_invariant_linear(x, gate)) * row_invariant_linear(x, up)  # [R, I]
    return row_invariant_linear(inner, down).to(torch.float32)
