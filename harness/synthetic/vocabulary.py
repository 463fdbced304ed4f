"""Tokens of synthetic models: a ring on which text moves forward, topics along it, embeddings and LM head.

Every ordinary token has a position on a ring. Its candidate successors lie `steps` further on, one of each class
(position modulo the number of classes): the head gives all of them the same logit for the token itself and differs
between them by what the layers have written into the votes' subspace. Steps are positive and small against the ring,
so that no token comes back within some hundred: there are no cycles.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from harness.synthetic.random import normal
from harness.synthetic.spec import SyntheticSpec

_CHUNK_ROWS = 16384


@dataclass(frozen=True, slots=True)
class Basis:
    """Orthonormal directions in the hidden space: common [H], votes [H, classes], topics one [H, dims] per length."""

    common: Tensor
    votes: Tensor
    topics: tuple[Tensor, ...]

    def without(self, x: Tensor) -> Tensor:
        """x [..., H] less its part in all of these directions: where tokens are told apart."""
        every = torch.cat([self.common.unsqueeze(1), self.votes, *self.topics], dim=1)
        return x - (x @ every) @ every.T

    def own(self, noise: Tensor) -> Tensor:
        """Standard normal [..., H] -> the same without these directions, its entries of RMS 1 again."""
        hidden = noise.shape[-1]
        taken = 1 + self.votes.shape[1] + sum(topic.shape[1] for topic in self.topics)
        return self.without(noise) * (hidden / (hidden - taken)) ** 0.5


@dataclass(frozen=True, slots=True)
class Ring:
    """token [n] at a position; position [V] of a token, -1 for special ones; block [n] per topic length."""

    token: Tensor
    position: Tensor
    blocks: tuple[Tensor, ...]


def basis(spec: SyntheticSpec, device: torch.device | str) -> Basis:
    return _basis_on(spec, torch.device(device))


def ring(spec: SyntheticSpec) -> Ring:
    """On the CPU. Ids from the first special one on (beginning or end of text, but not the few lowest) stay out."""
    config, knobs = spec.model_config, spec.knobs
    special = [i for i in (*config.eos_ids, config.bos_id or 0) if i >= 0]
    first = max([i + 2 for i in special if i < 8], default=0)
    last = min([i for i in special if i >= 8], default=config.vocab_size)
    count = last - first
    assert count > max(knobs.steps), (count, knobs.steps)
    token = torch.randperm(count, generator=torch.Generator().manual_seed(spec.seed)) + first
    position = torch.full((config.vocab_size,), -1, dtype=torch.int64)
    position[token] = torch.arange(count)
    blocks = tuple((torch.arange(count) + length // 3) // length for length in knobs.topic_lengths)
    return Ring(token, position, blocks)


def embedding(spec: SyntheticSpec, device: torch.device | str) -> Tensor:
    """bfloat16 [V, H]: entries of RMS 1."""
    config, knobs = spec.model_config, spec.knobs
    parts, places = basis(spec, device), ring(spec)
    hidden, topics = config.hidden, len(knobs.topic_lengths)
    own = 1 - knobs.common_share - topics * knobs.topic_share
    codes = [
        normal(spec.seed, f"topic {i}", (int(block[-1]) + 1, knobs.topic_dims), device)
        for i, block in enumerate(places.blocks)
    ]
    found = torch.empty(config.vocab_size, hidden, dtype=config.dtype, device=device)
    for start in range(0, config.vocab_size, _CHUNK_ROWS):
        stop = min(start + _CHUNK_ROWS, config.vocab_size)
        x = parts.own(normal(spec.seed, f"token {start}", (stop - start, hidden), device)) * own**0.5
        x += parts.common * (knobs.common_share * hidden) ** 0.5
        position = places.position[start:stop]
        for block, code, topic in zip(places.blocks, codes, parts.topics, strict=True):
            here = (
                code[block[position.clamp(min=0)].to(device)] * (knobs.topic_share * hidden / knobs.topic_dims) ** 0.5
            )
            x += torch.where((position >= 0).to(device).unsqueeze(1), here, 0.0) @ topic.T
        found[start:stop] = x.to(config.dtype)
    return found


def head(spec: SyntheticSpec, table: Tensor) -> Tensor:
    """The LM head [V, H] that belongs to an embedding [V, H], on its device."""
    config, knobs = spec.model_config, spec.knobs
    device, hidden = table.device, config.hidden
    parts, places = basis(spec, device), ring(spec)
    count = len(places.token)
    own = 1 - knobs.common_share - len(knobs.topic_lengths) * knobs.topic_share
    by_class = (knobs.vote_logit / knobs.vote) * (parts.votes - parts.votes.mean(dim=1, keepdim=True)).T  # [classes, H]
    found = torch.empty_like(table)
    for start in range(0, config.vocab_size, _CHUNK_ROWS):
        stop = min(start + _CHUNK_ROWS, config.vocab_size)
        position = places.position[start:stop]
        x = torch.zeros(stop - start, hidden, device=device)
        for step in knobs.steps:
            before = places.token[(position - step) % count]
            x += table[before.to(device)].float()
        x = parts.without(x) * (knobs.identity_logit / (own * hidden))
        x += by_class[(position % knobs.classes).to(device)]
        x = torch.where((position >= 0).to(device).unsqueeze(1), x, 0.0)
        x += normal(spec.seed, f"head {start}", (stop - start, hidden), device) * (knobs.head_noise * hidden**-0.5)
        found[start:stop] = x.to(config.dtype)
    return found


def walk(spec: SyntheticSpec, sequences: int, tokens: int, seed: int = 0) -> Tensor:
    """Token ids int64 [sequences, tokens] that go forward on the ring by random steps: text as the model writes it, for
    measuring without generating."""
    places, generator = ring(spec), torch.Generator().manual_seed(seed)
    steps = torch.tensor(spec.knobs.steps)
    taken = steps[torch.randint(len(steps), (sequences, tokens), generator=generator)].cumsum(1)
    start = torch.randint(len(places.token), (sequences, 1), generator=generator)
    return places.token[(start + taken) % len(places.token)]


@lru_cache(maxsize=4)
def _basis_on(spec: SyntheticSpec, device: torch.device) -> Basis:
    knobs, hidden = spec.knobs, spec.model_config.hidden
    widths = [1, knobs.classes, *(knobs.topic_dims for _ in knobs.topic_lengths)]
    assert sum(widths) <= hidden // 2, (sum(widths), hidden)
    q = torch.linalg.qr(normal(spec.seed, "basis", (hidden, sum(widths)), "cpu")).Q.to(device)
    common, votes, *topics = q.split(widths, dim=1)
    return Basis(common[:, 0].contiguous(), votes.contiguous(), tuple(topics))
