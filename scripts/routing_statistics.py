"""Acceptance and routing of models on real prompts: python scripts/routing_statistics.py --data downloads --output DIR

What `python run.py sweep=routing` measures, with datasets from any folder. For each model and dataset: Specter's greedy
continuations (K draft tokens per window, every expert resident), then one plain pass over prompt and continuation,
whose routing gives the statistics of harness/routing/statistics.py. Writes routing.csv (columns: figures/results.py)
and acceptance.csv, prints tables last.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.routing import measure
from scripts.reference_prompts import add_prompt_arguments, chosen_prompts
from specter_core.errors import exit_code
from specter_core.opening import open_model


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_prompt_arguments(parser, prompts=5, new_tokens=128)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    for name in args.models.split(","):
        _model(name, args)
    print(measure.tables(args.output))
    return 0


def _model(name: str, args: argparse.Namespace) -> None:
    folder = Path("reference") / name
    prompts: dict[str, list[tuple[int, ...]]] = {}
    for p in chosen_prompts(folder, args):
        prompts.setdefault(p.label, []).append(p.token_ids)
    print(f"{name}: {sum(map(len, prompts.values()))} prompts", file=sys.stderr)
    with open_model(folder) as model:
        common = {"model": name, "weights": "reference", "device": "cpu"}
        found = measure.measure(model, prompts, common, depth=args.depth, new_tokens=args.new_tokens)
    measure.write(args.output, *found)


if __name__ == "__main__":
    sys.exit(exit_code(main))
