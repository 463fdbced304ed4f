"""The trainable decoder of all three families; its state dict is that of the transformers class.

The loss is next-token cross entropy plus Switch Transformer's load-balancing loss (arXiv:2101.03961, eq. 4).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import PretrainedConfig

from .attention import GroupedAttention, LatentAttention
from .moe import Mlp, MoeBlock
from .norms import make_norm
from .rope import Tables
from .settings import Settings


class Output(NamedTuple):
    """Logits [B, S, V], expert loads [L, E] (1 = even) and the mean balance loss (1 = even)."""

    logits: torch.Tensor
    loads: torch.Tensor
    balance: torch.Tensor


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP or MoE."""

    def __init__(self, config: PretrainedConfig, index: int) -> None:
        super().__init__()
        latent = config.model_type == "deepseek_v2"
        self.self_attn = LatentAttention(config) if latent else GroupedAttention(config)
        dense = latent and index < config.first_k_dense_replace
        self.mlp = Mlp(config.hidden_size, config.intermediate_size) if dense else MoeBlock(config)
        self.input_layernorm = make_norm(config)
        self.post_attention_layernorm = make_norm(config)

    def forward(self, x: torch.Tensor, rope: Tables) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
        x = x + self.self_attn(self.input_layernorm(x), rope)
        normed = self.post_attention_layernorm(x)
        if isinstance(self.mlp, Mlp):
            return x + self.mlp(normed), None
        out, load, balance = self.mlp(normed)
        return x + out, (load, balance)


class Body(nn.Module):
    """Embeddings, layers and final norm (the `model.` prefix of the checkpoint)."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = make_norm(config)


class TrainableMoe(nn.Module):
    """A causal language model whose parameters map one to one to the transformers class of its config."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        bias = getattr(config, "lm_head_bias", False)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=bias)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        initialise(self)

    def forward(self, tokens: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Output:
        """tokens [B, S] int64; cos, sin [B or 1, S, D/2] float32."""
        x = self.model.embed_tokens(tokens)
        stats = []
        for layer in self.model.layers:
            x, stat = layer(x, (cos, sin))
            if stat is not None:
                stats.append(stat)
        logits = self.lm_head(self.model.norm(x))
        return Output(logits, torch.stack([s[0] for s in stats]), torch.stack([s[1] for s in stats]).mean())

    def loss(
        self, tokens: torch.Tensor, targets: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Mean cross entropy (nats per token), balance loss, loads [L, E]."""
        out = self(tokens, cos, sin)
        nll = F.cross_entropy(out.logits.float().flatten(0, 1), targets.flatten())
        return nll, out.balance, out.loads


def initialise(model: TrainableMoe) -> None:
    """Normal weights of std fan_in^-0.5 (residual outputs / sqrt(2 layers)), small router, zero biases."""
    depth = math.sqrt(2 * model.config.num_hidden_layers)
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(p)
        elif p.ndim == 1:
            nn.init.ones_(p)
        elif "embed_tokens" in name:
            nn.init.normal_(p, std=0.06 if model.config.tie_word_embeddings else 0.3)
        elif "lm_head" in name or ".gate.weight" in name or ".router.weight" in name:
            nn.init.normal_(p, std=0.03)
        else:
            std = p.shape[-1] ** -0.5
            nn.init.normal_(
                p,
                std=std / depth if name.endswith(("o_proj.weight", "down_proj", "down_proj.weight")) else std,
            )


def make_config(settings: Settings, **changes: object) -> PretrainedConfig:
    """The transformers config of a model's settings; id 0 ends a text."""
    config_class = getattr(transformers, settings.model_class).config_class
    values = {**settings.config, **changes}
    config = config_class(**values, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    config.architectures = list(settings.architectures)
    return config
