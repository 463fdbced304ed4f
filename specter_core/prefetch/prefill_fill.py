"""Loads ahead of a prefill, which needs nearly every expert: the link works while the first layers' attention does."""

from __future__ import annotations

from specter_core.memory.expert_loader import ExpertLoader
from specter_core.memory.link import Priority
from specter_core.model.config import ModelConfig
from specter_core.types import ExpertKey

PAIRS_PER_EXPERT = 4
"""From so many (token, choice) pairs per expert on, even routing leaves 2 % of the experts out."""


def fill_ahead(loader: ExpertLoader, config: ModelConfig, prompt_tokens: int) -> None:
    """Empty slots take absent experts, layer after layer; what a router asks for overtakes these loads. Nothing
    happens before a short prompt, or when no slot is empty.
    """
    if prompt_tokens * config.top_k < PAIRS_PER_EXPERT * config.num_experts:
        return
    cache = loader.cache
    for layer in range(len(config.moe_layers)):
        keys = (ExpertKey(layer, expert) for expert in range(config.num_experts))
        absent = [key for key in keys if cache.lookup(key) is None]
        loader.load_all(list(zip(absent, cache.free_slots(layer), strict=False)), Priority.PREFETCH)
