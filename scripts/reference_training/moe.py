"""Routers and experts in a form that trains fast: every expert runs, unselected outputs get weight zero.

At these widths all experts of a layer together are one [T, H] x [H, E*2I] product, cheaper than dispatch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig


class Mlp(nn.Module):
    """Gated SiLU MLP (dense layer, shared expert)."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """Routed experts, fused as transformers keeps them in memory."""

    def __init__(self, experts: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.experts, self.inner = experts, inner
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, hidden))  # [E, 2I, H]
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, inner))  # [E, H, I]

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [T, H], weights [T, E] (zero where not selected) -> [T, H]."""
        gate_up = F.linear(x, self.gate_up_proj.flatten(0, 1))  # [T, E*2I]
        gate, up = gate_up.view(-1, self.experts, 2, self.inner).unbind(2)  # [T, E, I]
        inner = F.silu(gate) * up * weights.to(gate.dtype)[..., None]
        return F.linear(inner.flatten(1), self.down_proj.transpose(0, 1).flatten(1))


def top_k_mask(scores: torch.Tensor, k: int) -> torch.Tensor:
    """True at the k largest of [T, E]; ties go to the lowest id."""
    rank_id = torch.arange(scores.shape[-1], device=scores.device)
    mine, other = scores[..., :, None], scores[..., None, :]  # [T, E, 1], [T, 1, E]
    beaten_by = (other > mine) | ((other == mine) & (rank_id[None, :] < rank_id[:, None]))
    return beaten_by.sum(-1) < k


def softmax_weights(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax top-k router (DeepSeek, Qwen; no renormalisation) -> weights [T, E], selected mask [T, E]."""
    scores = logits.softmax(-1)
    mask = top_k_mask(scores, k)
    return scores * mask, mask


def _sparsemixer_pick(
    logits: torch.Tensor, available: torch.Tensor, jitter: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One argmax pass: weight of the chosen expert at its place in [T, E], and its mask.

    The value is the inference one of modeling_phimoe.py: a softmax over near ties alone, almost always 1. It
    has hardly any gradient, so the backward pass sees the softmax over all available experts instead.
    """
    masked = logits.masked_fill(~available, -torch.inf)
    best = masked.amax(-1, keepdim=True)
    chosen = top_k_mask(masked, 1)
    with torch.no_grad():
        near = available & ~((best - logits) / torch.maximum(logits.abs(), best) > 2 * jitter)
        value = logits.masked_fill(~near, -torch.inf).softmax(-1) * chosen
    smooth = masked.softmax(-1) * chosen
    return value + (smooth - smooth.detach()), chosen


def sparsemixer_weights(logits: torch.Tensor, jitter: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Phi's router, two argmax passes -> weights [T, E], selected mask [T, E]."""
    first, first_mask = _sparsemixer_pick(logits, torch.ones_like(logits, dtype=torch.bool), jitter)
    second, second_mask = _sparsemixer_pick(logits, ~first_mask, jitter)
    return first + second, first_mask | second_mask


class Router(nn.Module):
    """A bias-free linear router; logits are always computed in float32."""

    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), self.weight.float())  # [T, E]


class MoeBlock(nn.Module):
    """One MoE layer of any of the three families, with transformers' parameter names."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.family = config.model_type
        hidden = config.hidden_size
        if self.family == "phimoe":
            self.top_k = 2
            self.jitter = config.router_jitter_noise
            self.router = Router(hidden, config.num_local_experts)
            self.experts = Experts(config.num_local_experts, hidden, config.intermediate_size)
            return
        self.top_k = config.num_experts_per_tok
        self.gate = Router(hidden, config.num_experts)
        self.experts = Experts(config.num_experts, hidden, config.moe_intermediate_size)
        if self.family == "qwen2_moe":
            self.shared_expert = Mlp(hidden, config.shared_expert_intermediate_size)
            self.shared_expert_gate = nn.Linear(hidden, 1, bias=False)
        else:
            self.shared_experts = Mlp(hidden, config.moe_intermediate_size * config.n_shared_experts)
            self.scaling = config.routed_scaling_factor

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [B, S, H] -> output [B, S, H], load [E] (share of tokens x E / k, 1 when even), balance loss."""
        flat = x.flatten(0, 1)  # [T, H]
        logits = self.router(flat) if self.family == "phimoe" else self.gate(flat)
        if self.family == "phimoe":
            weights, mask = sparsemixer_weights(logits, self.jitter)
            out = self.experts(flat, weights)
        elif self.family == "qwen2_moe":
            weights, mask = softmax_weights(logits, self.top_k)
            shared = torch.sigmoid(self.shared_expert_gate(flat)) * self.shared_expert(flat)
            out = self.experts(flat, weights) + shared
        else:
            weights, mask = softmax_weights(logits, self.top_k)
            out = self.experts(flat, weights * self.scaling) + self.shared_experts(flat)
        load = mask.float().mean(0) * (mask.shape[1] / self.top_k)  # [E]
        balance = (load.detach() * logits.softmax(-1).mean(0)).sum()
        return out.view_as(x), load.detach(), balance
