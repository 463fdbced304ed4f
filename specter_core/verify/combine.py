"""The final pass of a MoE layer: every (row, choice) result summed in one fixed order."""

from __future__ import annotations

import torch
from torch import Tensor


def combine_rows(out: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Sum out [R, k, H] x weights [R, k] over k in FP32, choice after choice -> [R, H] float32.

    ids [R, k] are ascending per row, so the order is by ascending expert id; a choice with id −1
    contributes nothing, whatever its result row holds. Multiplication and addition are separate elementwise
    ops: row-invariant.
    """
    assert out.shape[:2] == weights.shape == ids.shape, (out.shape, weights.shape, ids.shape)
    total = torch.zeros(out.shape[0], out.shape[2], dtype=torch.float32, device=out.device)  # [R, H]
    for choice in range(out.shape[1]):
        term = out[:, choice].float() * weights[:, choice, None].float()
        total += torch.where(ids[:, choice, None] >= 0, term, 0.0)
    return total
