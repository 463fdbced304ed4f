"""Argmax whose ties go to the lowest id, on any device."""

from __future__ import annotations

import torch
from torch import Tensor


def argmax_lowest(scores: Tensor) -> Tensor:
    """scores [R, V] -> int64 [R]: the lowest index among the maxima of each row. V - 1 for a row of NaN."""
    width = scores.shape[-1]
    ids = torch.arange(width, device=scores.device)
    best = scores.amax(dim=-1, keepdim=True)
    return torch.where(scores == best, ids, width - 1).amin(dim=-1)
