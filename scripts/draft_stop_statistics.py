"""What `draft_stop` saves on real prompts: python scripts/draft_stop_statistics.py --data downloads --output FILE.csv

For each model, K and threshold: Specter's greedy continuations, every expert resident, and the counts of its windows,
which do not depend on the device. Exits with 1 when a token differs from that of K = 0.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.reference_prompts import add_prompt_arguments, chosen_prompts
from specter_core.assembly import build_engine
from specter_core.errors import exit_code
from specter_core.opening import LoadedModel, open_model
from specter_core.options import EngineOptions
from specter_core.types import GenerationRun, Request


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_prompt_arguments(parser, prompts=3, new_tokens=64)
    parser.add_argument("--depths", default="8,16")
    parser.add_argument("--thresholds", default="0,0.3,0.5,0.7,0.85")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    for name in args.models.split(","):
        rows += _model(name, args)
        table = pd.DataFrame(rows)
        args.output.parent.mkdir(parents=True, exist_ok=True)
        table.to_csv(args.output, index=False)
    print(table.to_string(index=False))
    return int(table["mismatches"].sum() > 0)


def _model(name: str, args: argparse.Namespace) -> list[dict[str, object]]:
    folder = Path("reference") / name
    requests = [
        Request(f"{p.dataset} {p.prompt_id}", p.token_ids, args.new_tokens, ignore_eos=True)
        for p in chosen_prompts(folder, args)
    ]
    context = args.prefix_tokens + args.new_tokens
    with open_model(folder) as model:
        expected = _run(model, requests, EngineOptions(depth=0, context_tokens=context))
        rows = []
        for depth in map(int, args.depths.split(",")):
            for stop in map(float, args.thresholds.split(",")):
                found = _run(model, requests, EngineOptions(depth=depth, draft_stop=stop, context_tokens=context))
                rows.append({"model": name, "weights": "reference", "K": depth, "draft_stop": stop})
                rows[-1] |= {"requests": len(requests)} | _counts(found, expected, depth)
                print(rows[-1], file=sys.stderr)
    return rows


def _run(model: LoadedModel, requests: Sequence[Request], options: EngineOptions) -> list[GenerationRun]:
    with build_engine(model, options) as engine:
        return [engine.generate([request]) for request in requests]


def _counts(found: Sequence[GenerationRun], expected: Sequence[GenerationRun], depth: int) -> dict[str, object]:
    """Sums over all windows and what follows from them; the first token, which the prefill gives, is not counted."""
    windows, early = [], 0
    for run in found:
        left = len(run.results[0].tokens) - 1
        for w in run.windows:
            early += 0 < w.depth < min(depth, left - 1)
            left -= w.committed
        windows += run.windows
    committed, drafted = sum(w.committed for w in windows), sum(w.drafted for w in windows)
    accepted, tested = sum(w.accepted for w in windows), sum(w.tested for w in windows)
    distinct = sum(sum(w.distinct) / len(w.distinct) for w in windows)
    pairs = [(f.results[0].tokens, e.results[0].tokens) for f, e in zip(found, expected, strict=True)]
    return {
        "windows": len(windows),
        "committed": committed,
        "drafted": drafted,
        "tested": tested,
        "accepted": accepted,
        "ended_early": early,
        "drafted_per_token": round(drafted / committed, 3),
        "tokens_per_window": round(committed / len(windows), 3),
        "rejected_share": round(1 - accepted / drafted, 3),
        "distinct_per_window": round(distinct / len(windows), 3),
        "distinct_per_token": round(distinct / committed, 3),
        "mismatches": sum(a != b for f, e in pairs for a, b in zip(f, e, strict=True)),
    }


if __name__ == "__main__":
    sys.exit(exit_code(main))
