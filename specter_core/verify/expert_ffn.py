"""One routed expert on the CPU: SwiGLU in fixed 16-row blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from specter_core.model.linear import pad_rows, row_invariant_linear, silu


def expert_ffn(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """down(silu(gate·x) * up·x): x [R, H], gate and up [I, H], down [H, I] -> [R, H] float32.

    Weights of another dtype than x are converted to x's first. A row's bits depend on the row and the
    weights alone: not on R, its position, or the other rows.
    """
    rows, x = x.shape[0], pad_rows(x)
    inner = silu(row_invariant_linear(x, gate.to(x.dtype))) * row_invariant_linear(x, up.to(x.dtype))  # [R', I]
    return row_invariant_linear(inner, down.to(x.dtype))[:rows].to(torch.float32)
