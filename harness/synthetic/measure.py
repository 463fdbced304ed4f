"""Behaviour of a spec's weights on given text: one pass per variant, layer by layer, without a store.

Each layer's experts are made, used by all variants and dropped, so a full-size model is measured in the memory of one
layer. The text is usually `vocabulary.walk`. Routing figures are of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness.synthetic.experts import Expert, expert_layer
from harness.synthetic.model import build_decoder
from harness.synthetic.spec import SyntheticSpec
from harness.synthetic.store import noisy, rounded_to_nearest
from harness.synthetic.vocabulary import ring
from specter_core.draft.int4 import dequantize
from specter_core.model.argmax import argmax_lowest
from specter_core.model.decoder import Decoder
from specter_core.model.layer import Routing
from specter_core.model.rows import Rows
from specter_core.state.kv_cache import KVCache

WINDOWS = (9, 17)
_LOGIT_ROWS = 256
_LRU_LAYERS = 8

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Behaviour:
    """acceptance: share of positions where the INT4 draft's greedy token is the target's, after the same text.
    noisy_acceptance: by sigma added to the codes. zeroed_change: share where the token differs without routed experts.
    set_agreement: share of token-layers where draft and target choose the same experts; by_layer its L values.
    reuse: share of a token's experts that the token before used. lru: slots -> share of accesses found in a cache of so
    many experts per layer, before the token's own are loaded. distinct: window -> experts per layer in so many tokens.
    candidates: share of positions whose token is a candidate successor. classes: their shares among these.
    popularity: largest expert's accesses over the even share, mean over layers."""

    acceptance: float
    noisy_acceptance: dict[float, float]
    zeroed_change: float
    set_agreement: float
    by_layer: tuple[float, ...]
    reuse: float
    lru: dict[int, float]
    distinct: dict[int, float]
    candidates: float
    classes: tuple[float, ...]
    popularity: float


class _Variant:
    """One forward of the text: its hidden states, KV and what its experts are."""

    def __init__(self, decoder: Decoder, tokens: Tensor, sigma: float | None) -> None:
        self.sigma = sigma  # of the draft's codes; None: the target's own experts
        self.x = decoder.embed(tokens)
        batch, length = tokens.shape
        self.kv = KVCache(decoder.config, batch, length, decoder.device, decoder.dtype)
        self.ids: list[Tensor] = []


def behaviour(
    spec: SyntheticSpec,
    device: torch.device | str,
    tokens: Tensor,
    *,
    slots: Sequence[int] = (),
    noises: Sequence[float] = (),
    skip: int = 8,
) -> Behaviour:
    """tokens int64 [B, T], all of ordinary ids. slots: cache sizes of `lru`. noises: sigmas. skip: first positions that
    do not count for acceptance."""
    decoder = build_decoder(spec, device)
    tokens = tokens.to(decoder.device)
    batch, length = tokens.shape
    rows = Rows.decode([0] * batch, length, device=str(decoder.device))
    target, draft = _Variant(decoder, tokens, None), _Variant(decoder, tokens, 0.0)
    zeroed = _Variant(decoder, tokens, None)
    rest = [_Variant(decoder, tokens, sigma) for sigma in noises]
    every = [target, draft, zeroed, *rest]
    for layer in decoder.layers:
        matrices = None if layer.moe_index is None else expert_layer(spec, layer.moe_index, device)
        for variant in every:
            variant.x = layer.attend(variant.x, variant.kv, rows)
            if matrices is None:
                variant.x = layer.dense(variant.x)
                continue
            routing = layer.route(variant.x, rows)
            variant.ids.append(routing.ids.view(batch, length, -1).cpu())
            if variant is zeroed:
                routed = torch.zeros_like(routing.normed, dtype=torch.float32)
            else:
                routed = _routed(matrices, routing, variant.sigma, layer.moe_index or 0)
            variant.x = layer.combine(variant.x, routing.normed, routed)
    chosen = [_tokens(decoder, variant.x).view(batch, length)[:, skip:] for variant in every]
    ids = torch.stack(target.ids).numpy()  # [L, B, T, k]
    same = (torch.stack(target.ids) == torch.stack(draft.ids)).all(-1).float().mean((1, 2))
    steps = _steps(spec, tokens[:, skip:].cpu(), chosen[0].cpu())
    found = torch.stack([(steps == step).float().mean() for step in spec.knobs.steps])
    experts = spec.model_config.num_experts
    counts = np.stack([np.bincount(layer_ids.ravel(), minlength=experts) for layer_ids in ids])
    return Behaviour(
        acceptance=_same(chosen[1], chosen[0]),
        noisy_acceptance={v: _same(c, chosen[0]) for v, c in zip(noises, chosen[3:], strict=True)},
        zeroed_change=1 - _same(chosen[2], chosen[0]),
        set_agreement=float(same.mean()),
        by_layer=tuple(round(float(v), 4) for v in same),
        reuse=reuse(ids),
        lru=token_lru(ids[:: max(1, len(ids) // _LRU_LAYERS)], slots),
        distinct={window: distinct(ids, window) for window in WINDOWS if length >= window},
        candidates=float(found.sum()),
        classes=tuple(round(float(v), 3) for v in found / found.sum().clamp(min=1e-9)),
        popularity=float((counts.max(1) / counts.mean(1)).mean()),
    )


def reuse(ids: Ids) -> float:
    """ids [L, B, T, k] -> share of accesses that the token before made too."""
    return float((ids[:, :, :-1, None, :] == ids[:, :, 1:, :, None]).any(-1).mean())


def distinct(ids: Ids, window: int) -> float:
    """ids [L, B, T, k] -> experts per layer in non-overlapping windows, mean."""
    starts = range(0, ids.shape[2] - window + 1, window)
    parts = [ids[:, :, t : t + window].reshape(*ids.shape[:2], -1) for t in starts]
    return float(np.mean([1 + (np.diff(np.sort(part), axis=-1) > 0).sum(-1) for part in parts]))


def token_lru(ids: Ids, slots: Sequence[int]) -> dict[int, float]:
    """ids [L, B, T, k]; a token's experts enter the cache together, as arXiv:2505.16056 counts: with k slots this is
    the reuse. The first tenth of a sequence only fills the cache."""
    hits, accesses = dict.fromkeys(slots, 0), 0
    for sequence in ids.reshape(-1, *ids.shape[2:]):
        recent: list[int] = []  # most recent first
        for number, token in enumerate(sequence.tolist()):
            depth = [recent.index(expert) if expert in recent else len(recent) + 10**6 for expert in token]
            if number >= len(sequence) // 10:
                accesses += len(token)
                for size in slots:
                    hits[size] += sum(d < size for d in depth)
            recent = [*token, *(expert for expert in recent if expert not in token)]
    return {size: hits[size] / max(accesses, 1) for size in slots}


def _routed(matrices: Expert, routing: Routing, sigma: float | None, seed: int) -> Tensor:
    """Weighted sum of the routed experts, or of their rounded forms, float32 [R, H]."""
    normed, ids, weights = routing
    total = torch.zeros(normed.shape, dtype=torch.float32, device=normed.device)
    generator = torch.Generator(normed.device).manual_seed(seed)
    for number in ids.unique().tolist():
        gate, up, down = (matrix[number] for matrix in matrices)
        if sigma is not None:
            gate, up, down = (dequantize(noisy(rounded_to_nearest(m), sigma, generator)) for m in (gate, up, down))
        gate, up, down = gate.to(normed.dtype), up.to(normed.dtype), down.to(normed.dtype)
        row, choice = torch.nonzero(ids == number, as_tuple=True)
        x = normed[row]
        result = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
        total[row] += result.float() * weights[row, choice].unsqueeze(1)
    return total


def _tokens(decoder: Decoder, x: Tensor) -> Tensor:
    """Greedy tokens of logits in float32, as the captured passes have them; `Decoder.logits` rounds to its dtype."""
    head, bias = decoder._head.float(), decoder._head_bias
    parts = decoder._norm(decoder.ops.pad(x))[: x.shape[0]].float().split(_LOGIT_ROWS)
    return torch.cat([argmax_lowest(part @ head.T + (0.0 if bias is None else bias.float())) for part in parts])


def _same(left: Tensor, right: Tensor) -> float:
    return float((left == right).float().mean())


def _steps(spec: SyntheticSpec, tokens: Tensor, chosen: Tensor) -> Tensor:
    """How far on the ring the chosen token lies behind its own."""
    places = ring(spec)
    return (places.position[chosen] - places.position[tokens]) % len(places.token)
