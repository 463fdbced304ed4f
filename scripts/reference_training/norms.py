"""RMSNorm, and LayerNorm for PhiMoE, computed in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig


class RmsNorm(nn.Module):
    """x / rms(x) * weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class LayerNorm(nn.LayerNorm):
    """LayerNorm with bias, in float32 whatever the autocast state."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x.float(), self.normalized_shape, self.weight, self.bias, self.eps)


def make_norm(config: PretrainedConfig) -> nn.Module:
    """The decoder norm of the family."""
    if config.model_type == "phimoe":
        return LayerNorm(config.hidden_size, eps=config.rms_norm_eps)
    return RmsNorm(config.hidden_size, config.rms_norm_eps)
