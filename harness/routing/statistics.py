"""Statistics of routing traces.

distinct     distinct experts per layer in a window of consecutive tokens, mean
reuse        share of a token's experts that the token before it used too
lru M        share of accesses that a per-layer LRU of M slots would hold
divergence   Jensen-Shannon divergence (base 2) of two datasets' routing distributions, mean over layers
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import jensenshannon

SLOTS = (2, 3, 4, 6, 8)

Ids = NDArray[np.int64]
Row = dict[str, object]


def rows(found: Mapping[str, Sequence[Ids]], experts: int, window: int) -> list[Row]:
    """found: label -> one int64 [L, T, k] per request. Rows of routing.csv less model, weights and device: distinct per
    layer, reuse, lru per number of slots, divergence per pair of labels (the same label twice: of its two halves)."""
    made: list[Row] = []

    def add(kind: str, dataset: str, value: float, size: int | None, layer: int | None = None, other: str = "") -> None:
        made.append({"kind": kind, "dataset": dataset, "other": other, "layer": layer, "window": size, "value": value})

    for label, traces in found.items():
        for layer in range(traces[0].shape[0]):
            add("distinct", label, distinct([ids[layer] for ids in traces], window), window, layer)
        add("reuse", label, float(np.mean([reuse(ids) for ids in traces])), 1)
        for slots in SLOTS:
            add("lru", label, float(np.mean([lru(ids, slots) for ids in traces])), slots)
    for first, second, value in divergences(found, experts):
        add("divergence", first, value, None, None, second)
    return made


def distinct(sequences: Sequence[Ids], window: int) -> float:
    """sequences: [T, k] of one layer. Windows do not overlap; a rest shorter than a window does not count."""
    counts = [len(np.unique(ids[t : t + window])) for ids in sequences for t in range(0, len(ids) - window + 1, window)]
    return float(np.mean(counts))


def reuse(ids: Ids) -> float:
    """ids [L, T, k]."""
    before, after = ids[:, :-1, None, :], ids[:, 1:, :, None]
    return float((before == after).any(-1).mean())


def lru(ids: Ids, slots: int) -> float:
    """ids [L, T, k]: hits over accesses."""
    hits = accesses = 0
    for layer in ids:
        held: dict[int, None] = {}
        for expert in layer.ravel().tolist():
            hits += expert in held
            accesses += 1
            held.pop(expert, None)
            held[expert] = None
            if len(held) > slots:
                del held[next(iter(held))]
    return hits / accesses


def divergences(found: Mapping[str, Sequence[Ids]], experts: int) -> list[tuple[str, str, float]]:
    """Every pair of labels; a label with itself compares its even with its odd requests (left out below two)."""
    whole = {label: shares(traces, experts) for label, traces in found.items()}
    made = []
    for i, first in enumerate(found):
        for second in list(found)[i:]:
            pair = (whole[first], whole[second])
            if first == second:
                if len(found[first]) < 2:
                    continue
                pair = (shares(found[first][::2], experts), shares(found[first][1::2], experts))
            value = np.mean([jensenshannon(p, q, base=2) ** 2 for p, q in zip(*pair, strict=True)])
            made.append((first, second, float(value)))
    return made


def shares(traces: Sequence[Ids], experts: int) -> NDArray[np.float64]:
    """Routing distribution per layer: [L, E]."""
    layers = traces[0].shape[0]
    counts = [np.bincount(np.concatenate([r[j].ravel() for r in traces]), minlength=experts) for j in range(layers)]
    return np.stack(counts) / np.stack(counts).sum(1, keepdims=True)
