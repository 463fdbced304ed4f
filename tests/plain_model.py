"""The plain pass with every routed expert in memory: what the engine's parts are compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from specter_core.model.checkpoint import Checkpoint
from specter_core.model.config import ModelConfig
from specter_core.model.decoder import Decoder
from specter_core.model.experts_loader import ExpertReader, ExpertWeights, check_experts, expert_dtype, expert_keys
from specter_core.model.layer import Routing
from specter_core.model.rows import Rows
from specter_core.state.kv_cache import KVCache
from specter_core.types import ExpertKey
from specter_core.verify.expert_ffn import expert_ffn


class RoutedExperts(Protocol):
    def __call__(self, layer: int, routing: Routing) -> Tensor:
        """The weighted sum of a MoE layer's routed experts, float32 [R, H]."""
        ...


class PlainRoutedExperts:
    """Experts one after the other, by ascending id; weights(key) gives a resident expert (a view is
    enough).
    """

    def __init__(self, weights: Callable[[ExpertKey], ExpertWeights]) -> None:
        self._weights = weights

    def __call__(self, layer: int, routing: Routing) -> Tensor:
        normed, ids, weights = routing
        total = torch.zeros(normed.shape, dtype=torch.float32)
        for expert in sorted(set(ids.flatten().tolist()) - {-1}):
            rows, choices = torch.nonzero(ids == expert, as_tuple=True)
            result = expert_ffn(normed[rows], *self._weights(ExpertKey(layer, expert)))
            total[rows] += result * weights[rows, choices].unsqueeze(1)
        return total


def plain_forward(decoder: Decoder, experts: RoutedExperts, tokens: Tensor, kv: KVCache, rows: Rows) -> Tensor:
    """tokens int64 [B, T] -> the last layer's x [R, H]. Writes KV; boundaries stay where they are."""
    x = decoder.embed(tokens)
    for layer in decoder.layers:
        x = layer.attend(x, kv, rows)
        if layer.moe_index is None:
            x = layer.dense(x)
        else:
            routing = layer.route(x, rows)
            x = layer.combine(x, routing.normed, experts(layer.moe_index, routing))
    return x


def without_experts(decoder: Decoder, kv: KVCache, tokens: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """The plain pass with routed experts that add nothing: the last layer's x [R, H], ids [layers, R, k]."""
    ids: list[Tensor] = []

    def nothing(_: int, routing: Routing) -> Tensor:
        ids.append(routing.ids)
        return torch.zeros_like(routing.normed)

    return plain_forward(decoder, nothing, tokens, kv, rows), torch.stack(ids)


def read_experts(checkpoint: Checkpoint, config: ModelConfig) -> dict[ExpertKey, ExpertWeights]:
    """Every routed expert, as stored."""
    dtype = expert_dtype(checkpoint, config)
    check_experts(checkpoint, config, dtype)
    return {key: ExpertReader(checkpoint, config, dtype).read(key) for key in expert_keys(config)}
