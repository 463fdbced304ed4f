"""A model's greedy continuations, and the routing of every token of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from harness.routing.statistics import Ids
from specter_core.assembly import build_engine
from specter_core.model.layer import Routing
from specter_core.model.rows import Rows
from specter_core.opening import LoadedModel
from specter_core.options import EngineOptions
from specter_core.state.kv_cache import KVCache
from specter_core.types import ExpertKey, Request


@dataclass
class Continuations:
    """What a dataset's continuations did. ids: one int64 [L, T, k] per request; T: prompt and new tokens."""

    ids: list[Ids] = field(default_factory=list)
    tested: int = 0
    accepted: int = 0
    windows: int = 0
    committed: int = 0


def continuations(
    model: LoadedModel,
    prompts: Sequence[tuple[int, ...]],
    *,
    depth: int,
    new_tokens: int,
    budget_bytes: int | None = None,
) -> Continuations:
    """Specter at K = depth, one request at a time, within budget_bytes (None: every expert resident), then one plain
    pass over prompt and continuation."""
    found = Continuations()
    options = EngineOptions(depth=depth, context_tokens=max(map(len, prompts)) + new_tokens)
    with build_engine(model, options, budget_bytes=budget_bytes) as engine:
        for i, prompt in enumerate(prompts):
            run = engine.generate([Request(f"r{i}", prompt, new_tokens, ignore_eos=True)])
            result = run.results[0]
            found.tested += result.tested
            found.accepted += result.accepted
            found.windows += len(run.windows)
            found.committed += sum(w.committed for w in run.windows)
            found.ids.append(routing_of(model, [*prompt, *result.tokens]))
    return found


def routing_of(model: LoadedModel, tokens: Sequence[int]) -> Ids:
    """Target routing of a sequence: int64 [L, T, k]. One pass, experts straight from the host store."""
    decoder = model.decoder
    rows = Rows.prefill(0, 0, len(tokens), len(tokens))
    x = decoder.embed(torch.tensor([list(tokens)], device=decoder.device))
    kv = KVCache(decoder.config, 1, len(tokens), decoder.device, decoder.dtype)
    ids = []
    for layer in decoder.layers:
        x = layer.attend(x, kv, rows)
        if layer.moe_index is None:
            x = layer.dense(x)
            continue
        routing = layer.route(x, rows)
        ids.append(routing.ids.cpu().numpy())
        x = layer.combine(x, routing.normed, _routed(model, layer.moe_index, routing))
    return np.stack(ids)


def _routed(model: LoadedModel, layer: int, routing: Routing) -> torch.Tensor:
    """Weighted sum of the routed experts, float32 [R, H], by ascending id; any device."""
    normed, ids, weights = routing
    total = torch.zeros(normed.shape, dtype=torch.float32, device=normed.device)
    for expert in sorted(set(ids.flatten().tolist())):
        gate, up, down = (
            matrix.to(normed.device).to(normed.dtype)
            for matrix in model.store.layout.views(model.store.entry(ExpertKey(layer, expert)))
        )
        rows, choices = torch.nonzero(ids == expert, as_tuple=True)
        x = normed[rows]
        result = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
        total[rows] += result.float() * weights[rows, choices].unsqueeze(1)
    return total
