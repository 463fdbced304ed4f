"""Random caches, queues and counters for the tests of both planners."""

from __future__ import annotations

import random

import torch
from control_plane import ManualLink

from specter_core.memory.expert_cache import ExpertCache
from specter_core.memory.expert_loader import ExpertLoader
from specter_core.memory.link import Priority
from specter_core.types import ExpertKey

EXPERTS = 9


def loaded_world(slots_per_layer: list[int], staging: int, seed: int) -> tuple[ExpertLoader, ManualLink]:
    """A cache with empty, resident, protected, issued and queued slots."""
    rng = random.Random(seed)
    cache = ExpertCache(slots_per_layer, staging)
    link = ManualLink(1024)
    loader = ExpertLoader(cache, link)
    for layer, slots in enumerate(slots_per_layer):
        for slot, expert in zip(cache.layer_slots(layer), rng.sample(range(EXPERTS), slots), strict=True):
            if rng.random() < 0.8:
                loader.load(ExpertKey(layer, expert), slot, Priority.DEMAND)
    loader.drain()
    for layer in range(len(slots_per_layer)):
        for slot in cache.layer_slots(layer):
            absent = [e for e in range(EXPERTS) if cache.lookup(ExpertKey(layer, e)) is None]
            if absent and rng.random() < 0.4:
                loader.load(ExpertKey(layer, rng.choice(absent)), slot, Priority.PREFETCH)
            elif cache.key(slot) is not None and rng.random() < 0.15:
                cache.protect(slot)
    for _ in range(rng.randrange(4)):
        link.step()
    return loader, link


def random_counters(layers: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    counters = torch.randint(-3, 4, (layers, EXPERTS), generator=generator)
    return counters.clamp(min=0).to(torch.int32)
