"""Held-out perplexity by source and expert balance of the weights that ship."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from .data import Corpus
from .model import TrainableMoe
from .rope import Tables

WINDOW = 512
ROWS = 32


@torch.no_grad()
def evaluate(
    model: TrainableMoe, corpus: Corpus, tables: Tables, device: torch.device, most_tokens: int
) -> dict[str, Any]:
    """Perplexity per token and bits per byte for every source and overall, and the experts' loads.

    Windows are WINDOW ids long and every position counts; `tables` are [S, D/2] with S >= WINDOW.
    """
    sources: dict[str, Any] = {}
    loads: list[torch.Tensor] = []
    cos, sin = (t[None, :WINDOW].to(device) for t in tables)
    for source in corpus.sources:
        inputs, targets = corpus.valid_rows(source, WINDOW, most_tokens)
        nll, size_bytes, count = 0.0, 0, 0
        for start in range(0, inputs.shape[0], ROWS):
            x, y = inputs[start : start + ROWS].to(device), targets[start : start + ROWS]
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                out = model(x, cos[:, : x.shape[1]], sin[:, : x.shape[1]])
            nll += F.cross_entropy(out.logits.float().flatten(0, 1), y.to(device).flatten(), reduction="sum").item()
            size_bytes += int(corpus.token_bytes[y].sum())
            count += y.numel()
            loads.append(out.loads.cpu() * y.numel())
        sources[source["name"]] = {
            "style": source["style"],
            "tokens": count,
            "bytes": size_bytes,
            "nll_nats": nll,
            "perplexity": math.exp(nll / count),
            "bits_per_byte": nll / math.log(2) / max(1, size_bytes),
        }
    tokens = sum(s["tokens"] for s in sources.values())
    total = sum(s["nll_nats"] for s in sources.values())
    load = torch.stack(loads).sum(0) / tokens  # [L, E], 1 = even
    return {
        "sources": sources,
        "tokens": tokens,
        "perplexity": math.exp(total / tokens),
        "bits_per_byte": total / math.log(2) / sum(s["bytes"] for s in sources.values()),
        "load_max": load.max().item(),
        "load_min": load.min().item(),
        "load_max_by_layer": [round(v, 3) for v in load.amax(1).tolist()],
    }
