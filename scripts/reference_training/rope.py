"""Rotary tables of the three families, as transformers computes them."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

Tables = tuple[torch.Tensor, torch.Tensor]


def _table(inv_freq: torch.Tensor, scale: float, positions: int) -> Tables:
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * inv_freq.float()[None]  # [S, D/2]
    return angles.cos() * scale, angles.sin() * scale


def rope_tables(config: PretrainedConfig, positions: int) -> list[Tables]:
    """Cosine and sine tables, each [S, D/2] float32.

    One pair for yarn and plain rope. Three pairs for longrope: short factors, long factors, and what a row
    meets that is decoded across the original length (short below it, long from it on).
    """
    rope = config.rope_parameters
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if rope["rope_type"] == "default":
        inv_freq = 1.0 / (rope["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim))
        return [_table(inv_freq, 1.0, positions)]
    if rope["rope_type"] == "yarn":
        inv_freq, scale = ROPE_INIT_FUNCTIONS["yarn"](config, None)
        return [_table(inv_freq, scale, positions)]
    assert rope["rope_type"] == "longrope", rope["rope_type"]
    original = rope["original_max_position_embeddings"]
    short, _ = ROPE_INIT_FUNCTIONS["longrope"](config, None)
    long, _ = ROPE_INIT_FUNCTIONS["longrope"](config, None, seq_len=original + 1)
    tables = [_table(short, rope["short_mscale"], positions), _table(long, rope["long_mscale"], positions)]
    below = (torch.arange(positions) < original)[:, None]
    crossing = tuple(torch.where(below, s, lg) for s, lg in zip(*tables, strict=True))
    return [*tables, (crossing[0], crossing[1])]


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [B, A, S, D] with first and second half paired (Qwen, Phi); cos and sin are [B or 1, S, D/2]."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [B, A, S, D] with neighbouring elements paired (DeepSeek); cos and sin are [B or 1, S, D/2]."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(x.dtype)
