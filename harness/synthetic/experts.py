"""Routed experts: Gaussian, with one direction in which the up projection listens and the down projection votes."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from harness.synthetic.random import normal
from harness.synthetic.spec import SyntheticSpec
from harness.synthetic.vocabulary import basis
from specter_core.model.config import RouterConfig
from specter_core.model.router import softmax_top_k, sparsemixer
from specter_core.types import ExpertKey

SILU_MEAN = 0.2066
"""Mean of silu of a standard normal."""
INNER_RMS = 0.597
"""RMS of silu(a) * b for independent standard normals."""
_SAMPLES = 4096


class Expert(NamedTuple):
    """bfloat16: gate and up [I, H], down [H, I]."""

    gate: Tensor
    up: Tensor
    down: Tensor


def expert(spec: SyntheticSpec, key: ExpertKey, device: torch.device | str) -> Expert:
    """One routed expert. key.layer counts MoE layers.

    up listens to the common direction with random signs t over its I outputs, down adds t along the expert's own
    vote: the I products silu(gate) * t * t have the same sign, so the sum is steady, and all else averages out. Every
    row stays a sum of Gaussian rows.
    """
    config, knobs = spec.model_config, spec.knobs
    hidden, width, parts = config.hidden, config.expert_width, basis(spec, device)
    stem = f"expert {key.layer} {key.expert}"
    signs = normal(spec.seed, f"{stem} signs", (width,), device)
    vote = normal(spec.seed, f"{stem} vote", (knobs.classes,), device)
    vote = (vote - vote.mean()) * (knobs.classes / (knobs.classes - 1)) ** 0.5 * layer_vote(spec, key.layer)
    gate = normal(spec.seed, f"{stem} gate", (width, hidden), device) * hidden**-0.5
    up = normal(spec.seed, f"{stem} up", (width, hidden), device)
    up *= ((1 - knobs.vote_coherence**2) / hidden) ** 0.5
    up += torch.outer(signs * (knobs.vote_coherence / (knobs.common_share * hidden) ** 0.5), parts.common)
    down = normal(spec.seed, f"{stem} down", (hidden, width), device) * (knobs.expert_gain / INNER_RMS * width**-0.5)
    down += torch.outer(parts.votes @ vote, signs / (width * SILU_MEAN * knobs.vote_coherence))
    return Expert(*(matrix.to(config.dtype) for matrix in (gate, up, down)))


def expert_layer(spec: SyntheticSpec, layer: int, device: torch.device | str) -> Expert:
    """All experts of a MoE layer: gate and up bfloat16 [E, I, H], down [E, H, I]."""
    config = spec.model_config
    wide = (config.num_experts, config.expert_width, config.hidden)
    found = Expert(*(torch.empty(shape, dtype=config.dtype, device=device) for shape in (wide, wide, _tall(wide))))
    for number in range(config.num_experts):
        for target, matrix in zip(found, expert(spec, ExpertKey(layer, number), device), strict=True):
            target[number] = matrix
    return found


def layer_vote(spec: SyntheticSpec, layer: int) -> float:
    """What a vote of a MoE layer is multiplied by, so that all votes together have the wanted standard deviation."""
    knobs, layers = spec.knobs, len(spec.model_config.moe_layers)
    total = sum(knobs.vote_decay ** (2 * n) for n in range(layers)) ** 0.5
    return knobs.vote * knobs.vote_decay**layer / (total * routed_norm(spec))


@lru_cache(maxsize=64)
def routed_norm(spec: SyntheticSpec) -> float:
    """Root of the mean sum of squared routing weights, for Gaussian router logits."""
    config = spec.model_config
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(_SAMPLES, config.num_experts, generator=generator) * spec.knobs.router_gain
    if config.router.jitter is not None:
        weights = sparsemixer(scores, config.router.jitter).weights
    else:
        weights = softmax_top_k(
            scores.softmax(1), config.top_k, RouterConfig(normalise=config.router.normalise)
        ).weights
    return float(weights.square().sum(1).mean().sqrt())


def _tall(wide: tuple[int, int, int]) -> tuple[int, int, int]:
    return wide[0], wide[2], wide[1]
