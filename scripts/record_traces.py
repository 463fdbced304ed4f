"""Traces for figures 8, 9 and 12: python -m scripts.record_traces --model reference/deepseek_v2_mini --out DIR

Runs one prompt twice, verification expert-wise (Specter's) and token-wise, and writes DIR/traces/expertwise.json and
tokenwise.json (Chrome traces of compute and link). otherData says what was run and what each window drafted, accepted
and committed. `--slots`, `--depth` and `--link-gb-s` as for `python -m specter_core generate`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from specter_core.assembly import LoadedModel, build_engine, open_model
from specter_core.errors import UserError
from specter_core.options import EngineOptions
from specter_core.text import TextCodec
from specter_core.trace import Trace
from specter_core.types import GenerationRun, Request

PROMPT = "The city lies on the river, and the old road that leads from the harbour to the market"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 for bad input (one line on stderr)."""
    args = _parser().parse_args(arguments)
    try:
        torch.set_num_threads(1)
        folder = args.out / "traces"
        folder.mkdir(parents=True, exist_ok=True)
        with open_model(args.model, device=args.device) as model:
            for order in ("expertwise", "tokenwise"):
                print(record(model, args, order, folder / f"{order}.json"))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def record(model: LoadedModel, args: argparse.Namespace, order: str, path: Path) -> Path:
    """One run with verification in `order`, its trace written to path."""
    prompt = tuple(TextCodec(args.model).encode(PROMPT)[:16])
    request = Request("prompt", prompt, args.new_tokens, ignore_eos=True)
    options = EngineOptions(depth=args.depth, context_tokens=len(prompt) + args.new_tokens)
    options = replace(options.paper() if args.variant == "paper" else options, verify=order)
    trace = Trace()
    rate = args.link_gb_s * 1e9 or None
    with build_engine(model, options, slots_per_layer=args.slots, rate_bytes_per_s=rate, trace=trace) as engine:
        engine.generate([request])  # warm-up
        engine.reset_cache()
        trace.events.clear()
        link = engine.experts.loader.link
        link.counters.intervals.clear()
        run = engine.generate([request])
        trace.add_link(link.counters.intervals)
    trace.write(path, **_metadata(args, run, order))
    return path


def _metadata(args: argparse.Namespace, run: GenerationRun, order: str) -> dict[str, Any]:
    return {
        "model": args.model.name,
        "weights": args.weights,
        "device": args.device,
        "depth": args.depth,
        "slots": args.slots,
        "link": "native" if not args.link_gb_s else f"paced to {args.link_gb_s:g} GB/s",
        "verify": order,
        "variant": args.variant,
        "tpot_ms": round(run.results[0].tpot_ms, 3),
        "windows": [
            {"drafted": w.drafted, "tested": w.tested, "accepted": w.accepted, "committed": w.committed}
            for w in run.windows
        ],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scripts.record_traces", description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("reference/deepseek_v2_mini"))
    parser.add_argument("--out", type=Path, required=True, help="a results folder")
    parser.add_argument("--weights", default="reference", help="official | synthetic | reference")
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--slots", type=int, default=3)
    parser.add_argument("--link-gb-s", type=float, default=0.1, help="0: native")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--variant", choices=("default", "paper"), default="default")
    parser.add_argument("--device", default="cpu")
    return parser


if __name__ == "__main__":
    sys.exit(main())
