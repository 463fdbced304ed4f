"""Routers: scores in float32, ties to the lowest id, ids ascending per row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specter_core.model.argmax import argmax_lowest
from specter_core.model.config import RouterConfig
from specter_core.model.ops import DecoderOps


class Selection(NamedTuple):
    """ids int64 [R, k] ascending per row, weights float32 [R, k] in the same order."""

    ids: Tensor
    weights: Tensor


class Router:
    """weight [E, H] float32. Softmax with top-k (DeepSeek-V2, Qwen2-MoE) or sparsemixer (PhiMoE, jitter
    set).
    """

    def __init__(self, weight: Tensor, top_k: int, config: RouterConfig, ops: DecoderOps) -> None:
        assert weight.dtype == torch.float32
        self.weight = weight
        self._top_k = top_k
        self._config = config
        self._ops = ops

    def scores(self, normed: Tensor) -> Tensor:
        """normed [R, H] -> logits float32 [R, E]."""
        return self._ops.linear(normed.float(), self.weight)

    def select(self, scores: Tensor) -> Selection:
        """scores [R, E] -> the experts of every row and their weights."""
        if self._config.jitter is not None:
            return sparsemixer(scores, self._config.jitter)
        return softmax_top_k(self._ops.softmax(scores), self._top_k, self._config)


def softmax_top_k(probabilities: Tensor, top_k: int, config: RouterConfig) -> Selection:
    """Top-k of softmax probabilities [R, E], for groups > 1 only inside the best groups (arXiv:2405.04434,
    2.2.2).
    """
    candidates = probabilities
    if config.groups > 1:
        grouped = probabilities.unflatten(1, (config.groups, -1))  # [R, groups, E/groups]
        best = _top(grouped.amax(dim=2), config.top_groups)
        allowed = torch.zeros_like(grouped[:, :, 0], dtype=torch.bool).scatter_(1, best, True)
        candidates = torch.where(allowed.unsqueeze(2), grouped, 0.0).flatten(1)
    ids = _top(candidates, top_k).sort(dim=1).values
    weights = candidates.gather(1, ids)
    if config.normalise:
        weights = weights / weights.sum(dim=1, keepdim=True)
    return Selection(ids, weights * config.scaling if config.scaling != 1.0 else weights)


def sparsemixer(scores: Tensor, jitter: float) -> Selection:
    """PhiMoE's inference-time sparsemixer (arXiv:2409.12136) on scores [R, E]: always two experts.

    Each weight is a softmax over the scores within a relative distance of 2·jitter of the expert's own,
    the second one's with the first expert taken out. They do not sum to 1.
    """
    magnitude = scores.abs()
    remaining = scores
    ids, weights = [], []
    for _ in range(2):
        expert = argmax_lowest(remaining).unsqueeze(1)  # [R, 1]
        best = remaining.gather(1, expert)
        far = (best - scores) / torch.maximum(magnitude, best) > 2 * jitter
        near = torch.softmax(remaining.masked_fill(far, -torch.inf), dim=1)
        ids.append(expert)
        weights.append(near.gather(1, expert))
        remaining = remaining.scatter(1, expert, -torch.inf)
    chosen, order = torch.cat(ids, dim=1).sort(dim=1)
    return Selection(chosen, torch.cat(weights, dim=1).gather(1, order))


def _top(values: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest per row, equal ones by lowest index, in descending order of value."""
    return torch.sort(values, stable=True, dim=1, descending=True).indices[:, :count]
