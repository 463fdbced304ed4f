"""Attention of the three families for training (no cache), with transformers' parameter names."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig

from .norms import RmsNorm
from .rope import Tables, rotate_halves, rotate_pairs


class GroupedAttention(nn.Module):
    """Grouped-query attention (Qwen2-MoE: biases on q, k, v; PhiMoE: on o as well)."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        phi = config.model_type == "phimoe"
        bias = config.attention_bias if phi else config.qkv_bias
        hidden, self.heads, self.kv_heads = (
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
        )
        self.head_dim = hidden // self.heads
        self.q_proj = nn.Linear(hidden, self.heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, hidden, bias=bias and phi)

    def forward(self, x: torch.Tensor, rope: Tables) -> torch.Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )  # [B, A, S, D]
        q, k = rotate_halves(q, *rope), rotate_halves(k, *rope)
        groups = self.heads // self.kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class LatentAttention(nn.Module):
    """Multi-head latent attention of DeepSeek-V2 without query compression, in expanded form."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        assert config.q_lora_rank is None
        self.heads, self.rank = config.num_attention_heads, config.kv_lora_rank
        self.nope, self.rope, self.v_dim = (
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
            config.v_head_dim,
        )
        hidden = config.hidden_size
        self.q_proj = nn.Linear(hidden, self.heads * (self.nope + self.rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, self.rank + self.rope, bias=False)
        self.kv_a_layernorm = RmsNorm(self.rank, 1e-6)
        self.kv_b_proj = nn.Linear(self.rank, self.heads * (self.nope + self.v_dim), bias=False)
        self.o_proj = nn.Linear(self.heads * self.v_dim, hidden, bias=False)
        self.scale = softmax_scale(config)

    def forward(self, x: torch.Tensor, rope: Tables) -> torch.Tensor:
        q = self.q_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, A, S, nope+rope]
        q_nope, q_rope = q.split([self.nope, self.rope], dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([self.rank, self.rope], dim=-1)
        k_rope = rotate_pairs(k_rope[:, None], *rope).expand(-1, self.heads, -1, -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k_nope, v = kv.split([self.nope, self.v_dim], dim=-1)
        q = torch.cat((q_nope, rotate_pairs(q_rope, *rope)), dim=-1)
        k = torch.cat((k_nope, k_rope.to(k_nope.dtype)), dim=-1)
        v = F.pad(v, (0, q.shape[-1] - self.v_dim))  # flash attention wants one head width
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)[..., : self.v_dim]
        return self.o_proj(out.transpose(1, 2).flatten(2))


def softmax_scale(config: PretrainedConfig) -> float:
    """(nope + rope)^-0.5 times the square of yarn's mscale, as modeling_deepseek_v2.py."""
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import yarn_apply_mscale

    return yarn_apply_mscale(config.rope_parameters, (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5)
