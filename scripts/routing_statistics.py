"""Acceptance and routing of models on real prompts: python scripts/routing_statistics.py --data downloads --output DIR

For each model and dataset: Specter's greedy continuations (K draft tokens per window, every expert resident), then one
plain pass over prompt and continuation, whose routing gives

    distinct     distinct experts per layer in a window of K + 1 consecutive tokens, mean
    reuse        share of a token's experts that the token before it used too
    lru M        share of accesses that a per-layer LRU of M slots would hold
    divergence   Jensen-Shannon divergence (base 2) of two datasets' routing distributions, mean over layers

Writes routing.csv (columns: figures/results.py) and acceptance.csv, prints tables last.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy.spatial.distance import jensenshannon

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.datasets import load_texts, select_prompts
from specter_core.assembly import LoadedModel, build_engine, open_model
from specter_core.errors import UserError
from specter_core.model.plain_forward import ExpertWeights, PlainRoutedExperts
from specter_core.model.rows import Rows
from specter_core.options import EngineOptions
from specter_core.state.kv_cache import KVCache
from specter_core.text import TextCodec
from specter_core.types import ExpertKey, Request

SLOTS = (2, 3, 4, 6, 8)


@dataclass
class DatasetRouting:
    """What one dataset's continuations did. ids: one int64 [L, T, k] array per request."""

    ids: list[np.ndarray] = field(default_factory=list)
    tested: int = 0
    accepted: int = 0
    windows: int = 0
    committed: int = 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="deepseek_v2_mini,qwen2_moe_mini,phimoe_mini")
    parser.add_argument("--datasets", default="c4,wikitext2,humaneval,gsm8k,gpqa")
    parser.add_argument("--data", type=Path, default=Path("downloads"))
    parser.add_argument("--prompts", type=int, default=5, help="per dataset")
    parser.add_argument("--prefix-tokens", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    try:
        rows, acceptance = [], []
        for name in args.models.split(","):
            part, accepted = _model(name, args)
            rows += part
            acceptance += accepted
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    args.output.mkdir(parents=True, exist_ok=True)
    routing, accepted_table = pd.DataFrame(rows), pd.DataFrame(acceptance)
    routing.to_csv(args.output / "routing.csv", index=False)
    accepted_table.to_csv(args.output / "acceptance.csv", index=False)
    means = routing[routing.kind != "divergence"].copy()
    means["kind"] = [f"{k} {w}" for k, w in zip(means.kind, means.window, strict=True)]
    print(
        means.pivot_table(index=["model", "dataset"], columns="kind", values="value", sort=False).round(3).to_string()
    )
    print(accepted_table.round(3).to_string(index=False))
    return 0


def _model(name: str, args: argparse.Namespace) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    folder = Path("reference") / name
    codec = TextCodec(folder)
    found: dict[str, DatasetRouting] = {}
    with open_model(folder) as model:
        for dataset in args.datasets.split(","):
            texts = load_texts(dataset, args.data)
            prompts = select_prompts(texts, codec.encode, count=args.prompts, prefix_len=args.prefix_tokens, seed=0)
            print(f"{name} {dataset}: {len(prompts)} prompts", file=sys.stderr)
            found[prompts[0].label] = _continue(model, [p.token_ids for p in prompts], args)
        experts = model.decoder.config.num_experts
    common = {"model": name, "weights": "reference", "device": "cpu"}
    rows = [{**common, **row} for row in _statistics(found, experts, args.depth + 1)]
    accepted = [
        {
            **common,
            "dataset": label,
            "depth": args.depth,
            "tested": d.tested,
            "acceptance": d.accepted / d.tested,
            "tokens_per_window": d.committed / d.windows,
        }
        for label, d in found.items()
    ]
    return rows, accepted


def _continue(model: LoadedModel, prompts: Sequence[tuple[int, ...]], args: argparse.Namespace) -> DatasetRouting:
    result = DatasetRouting()
    options = EngineOptions(depth=args.depth, context_tokens=args.prefix_tokens + args.new_tokens)
    with build_engine(model, options) as engine:
        for i, prompt in enumerate(prompts):
            run = engine.generate([Request(f"r{i}", prompt, args.new_tokens, ignore_eos=True)])
            found = run.results[0]
            result.tested += found.tested
            result.accepted += found.accepted
            result.windows += len(run.windows)
            result.committed += sum(w.committed for w in run.windows)
            result.ids.append(_routing(model, [*prompt, *found.tokens]))
    return result


def _routing(model: LoadedModel, tokens: Sequence[int]) -> np.ndarray:
    """Target routing of a sequence: int64 [L, T, k]."""
    decoder, layout = model.decoder, model.store.layout

    def weights(key: ExpertKey) -> ExpertWeights:
        return ExpertWeights(*layout.views(model.store.entry(key)))

    experts = PlainRoutedExperts(weights)
    kv = KVCache(decoder.config, 1, len(tokens), "cpu", decoder.dtype)
    rows = Rows.prefill(0, 0, len(tokens), len(tokens))
    x, ids = decoder.embed(torch.tensor([list(tokens)])), []
    for layer in decoder.layers:
        x = layer.attend(x, kv, rows)
        if layer.moe_index is None:
            x = layer.dense(x)
            continue
        routing = layer.route(x, rows)
        ids.append(routing.ids.numpy())
        x = layer.combine(x, routing.normed, experts(layer.moe_index, routing))
    return np.stack(ids)


def _statistics(found: dict[str, DatasetRouting], experts: int, window: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []

    def row(kind: str, dataset: str, value: float, size: int | None, layer: int | None = None, other: str = "") -> None:
        rows.append({"kind": kind, "dataset": dataset, "other": other, "layer": layer, "window": size, "value": value})

    for label, data in found.items():
        layers = data.ids[0].shape[0]
        for layer in range(layers):
            row("distinct", label, _distinct([ids[layer] for ids in data.ids], window), window, layer)
        row("reuse", label, float(np.mean([_reuse(ids) for ids in data.ids])), 1)
        for slots in SLOTS:
            row("lru", label, float(np.mean([_lru(ids, slots) for ids in data.ids])), slots)
    labels = list(found)
    shares = {label: _shares(data.ids, experts) for label, data in found.items()}
    halves = {label: (_shares(d.ids[::2], experts), _shares(d.ids[1::2], experts)) for label, d in found.items()}
    for i, first in enumerate(labels):
        for second in labels[i:]:
            pair = halves[first] if first == second else (shares[first], shares[second])
            value = np.mean([jensenshannon(p, q, base=2) ** 2 for p, q in zip(*pair, strict=True)])
            row("divergence", first, float(value), None, None, second)
    return rows


def _distinct(sequences: Sequence[np.ndarray], window: int) -> float:
    counts = [len(np.unique(ids[t : t + window])) for ids in sequences for t in range(0, len(ids) - window + 1, window)]
    return float(np.mean(counts))


def _reuse(ids: np.ndarray) -> float:
    """ids [L, T, k]."""
    before, after = ids[:, :-1, None, :], ids[:, 1:, :, None]
    return float((before == after).any(-1).mean())


def _lru(ids: np.ndarray, slots: int) -> float:
    hits = accesses = 0
    for layer in ids:
        held: dict[int, None] = {}
        for choices in layer.tolist():
            for expert in choices:
                hits += expert in held
                accesses += 1
                held.pop(expert, None)
                held[expert] = None
                if len(held) > slots:
                    del held[next(iter(held))]
    return hits / accesses


def _shares(ids: Sequence[np.ndarray], experts: int) -> np.ndarray:
    """Routing distribution per layer: [L, E]."""
    layers = ids[0].shape[0]
    counts = [np.bincount(np.concatenate([r[j].ravel() for r in ids]), minlength=experts) for j in range(layers)]
    return np.stack(counts) / np.stack(counts).sum(1, keepdims=True)


if __name__ == "__main__":
    sys.exit(main())
