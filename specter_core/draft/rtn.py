"""Round-to-nearest INT4 with MSE-optimal scales: our own quantizer, without calibration. It is not GPTQ."""

from __future__ import annotations

import torch
from torch import Tensor

from specter_core.draft.int4 import GROUP, Int4Matrix, pack
from specter_core.errors import UserError

# Scales tried, as multiples of absmax / 8. 8/7 = 1.143 is the largest that is ever useful: it clips nothing.
_RATIOS = (*(0.50 + 0.02 * step for step in range(33)), 8 / 7)
_BLOCK_WEIGHTS = 1 << 22


def quantize(weight: Tensor, name: str = "weight") -> Int4Matrix:
    """[out, in] of any float type -> Int4Matrix; `in` is a multiple of 128.

    For each group of 128 inputs the scale with the least squared error is taken among multiples of
    absmax / 8, judged after its rounding to float16. A group of zeros gets scale 0 and codes 0. Raises
    UserError for a weight that is not finite, or whose scale would not fit float16.
    """
    outputs, inputs = weight.shape
    assert inputs % GROUP == 0, weight.shape
    rows = max(1, _BLOCK_WEIGHTS // inputs)
    codes, scales = [], []
    for start in range(0, outputs, rows):
        block = weight[start : start + rows].to(torch.float32).view(-1, inputs // GROUP, GROUP)
        block_codes, block_scales = _quantize_groups(block, name)
        codes.append(pack(block_codes.flatten(1)))
        scales.append(block_scales)
    return Int4Matrix(torch.cat(codes), torch.cat(scales))


def _quantize_groups(groups: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """float32 [rows, G, 128] -> codes int8 [rows, G, 128], scales float16 [rows, G]."""
    absmax = groups.abs().amax(dim=-1)  # [rows, G]
    largest = float(absmax.max())
    limit = 7 * torch.finfo(torch.float16).max
    if not largest < limit:
        raise UserError(
            f"{name} holds {largest}, INT4 with float16 scales needs finite values below {limit:.0f}: "
            "use a sound checkpoint"
        )
    best_error = torch.full_like(absmax, float("inf"))
    best_scale = torch.zeros_like(absmax)
    for ratio in _RATIOS:
        scale = (absmax * (ratio / 8)).to(torch.float16).to(torch.float32)
        codes = _round(groups, scale)
        error = (codes * scale.unsqueeze(-1)).sub_(groups).square_().sum(dim=-1)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
    return _round(groups, best_scale).to(torch.int8), best_scale.to(torch.float16)


def _round(groups: Tensor, scale: Tensor) -> Tensor:
    """Codes of `groups` at `scale`, as float32; where the scale is 0 every code is 0."""
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    return (groups * inverse.unsqueeze(-1)).round_().clamp_(-8, 7)
