"""Traces for figures 8, 9 and 12: python -m scripts.record_traces --model reference/deepseek_v2_mini --out DIR

Runs one prompt twice, verification expert-wise (Specter's) and token-wise, and writes DIR/traces/expertwise.json and
tokenwise.json (Chrome traces of compute and link). otherData says what was run and what each window drafted, accepted
and committed. `--slots`, `--depth` and `--link-gb-s` as for `python -m specter_core generate`; `--windows N` keeps
windows of full depth from the middle of the run only. A full-size model without a checkpoint, on a GPU:

python -m scripts.record_traces --weights synthetic --model deepseek_v2_lite --device cuda --budget-gb 24 --depth 16 \
    --link-gb-s 0 --windows 4 --out DIR
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from specter_core.assembly import build_engine
from specter_core.errors import exit_code
from specter_core.opening import LoadedModel, open_model
from specter_core.options import EngineOptions
from specter_core.text import TextCodec
from specter_core.trace import Trace
from specter_core.types import GenerationRun, Request, WindowStats

PROMPT = "The city lies on the river, and the old road that leads from the harbour to the market"
PROMPT_TOKENS = 16
ORDERS = ("expertwise", "tokenwise")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 when the two orders generate different tokens, or 2 for bad input (one line on stderr)."""
    args = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    folder = args.out / "traces"
    folder.mkdir(parents=True, exist_ok=True)
    with _open(args) as model:
        tokens = [record(model, args, order, folder / f"{order}.json") for order in ORDERS]
    print(f"{folder}: {len(tokens[0])} tokens, the same in both orders: {tokens[0] == tokens[1]}")
    return 0 if tokens[0] == tokens[1] else 1


def record(model: LoadedModel, args: argparse.Namespace, order: str, path: Path) -> list[int]:
    """One run with verification in `order`, its trace written to path. Returns the generated tokens."""
    request = Request("prompt", _prompt(model, args), args.new_tokens, ignore_eos=True)
    options = EngineOptions(depth=args.depth, context_tokens=PROMPT_TOKENS + args.new_tokens)
    options = replace(options.paper() if args.variant == "paper" else options, verify=order)
    trace = Trace()
    memory: dict[str, Any] = {"slots_per_layer": args.slots}
    if args.budget_gb:
        memory = {"budget_bytes": round(args.budget_gb * 1e9)}
    rate = args.link_gb_s * 1e9 or None
    with build_engine(model, options, **memory, rate_bytes_per_s=rate, trace=trace) as engine:
        engine.generate([request])  # warm-up
        engine.reset_cache()
        link = engine.experts.loader.link
        link.counters.intervals.clear()
        trace.events.clear()
        run = engine.generate([request])
        trace.add_link(link.counters.intervals)
        slots = engine.slots.mean_slots
    first, last = kept_windows(run.windows, args.windows)
    if args.windows:
        _cut(trace, first, last)
    trace.write(path, **_metadata(args, run, order, slots, first, last))
    return run.results[0].tokens


def kept_windows(windows: Sequence[WindowStats], wanted: int) -> tuple[int, int]:
    """[first, last) of `wanted` successive windows of full depth from the middle; all of them where 0 are wanted."""
    if not wanted:
        return 0, len(windows)
    depth = max(w.depth for w in windows)
    full = [i for i, w in enumerate(windows) if w.depth == depth]
    start = full[max(0, (len(full) - wanted) // 2)]
    return start, min(start + wanted, len(windows))


def _cut(trace: Trace, first: int, last: int) -> None:
    """Keeps what begins between the first kept window's draft and the end of the last one's verification."""
    passes = sorted((e.start_ns, e.end_ns) for e in trace.events if e.name == "verify")
    prefill_ns = max(e.end_ns for e in trace.events if e.name == "prefill")
    begin_ns = passes[first - 1][1] if first else prefill_ns
    end_ns = passes[last - 1][1]
    trace.events[:] = [e for e in trace.events if begin_ns <= e.start_ns < end_ns]


def _open(args: argparse.Namespace) -> LoadedModel:
    if args.weights != "synthetic":
        return open_model(Path(args.model), device=args.device)
    from harness.synthetic import open_synthetic, spec_for

    return open_synthetic(spec_for(args.model), args.device)


def _prompt(model: LoadedModel, args: argparse.Namespace) -> tuple[int, ...]:
    """Of a synthetic model: text of its own kind."""
    if args.weights != "synthetic":
        return tuple(TextCodec(Path(args.model)).encode(PROMPT)[:PROMPT_TOKENS])
    from harness.synthetic import spec_for
    from harness.synthetic.vocabulary import walk

    return tuple(walk(spec_for(args.model), 1, PROMPT_TOKENS, seed=3)[0].tolist())


def _metadata(
    args: argparse.Namespace, run: GenerationRun, order: str, slots: float, first: int, last: int
) -> dict[str, Any]:
    return {
        "model": Path(args.model).name,
        "weights": args.weights,
        "device": args.device,
        "depth": args.depth,
        "slots": round(slots, 1),
        "budget": f"{args.budget_gb:g} GB" if args.budget_gb else None,
        "link": "native" if not args.link_gb_s else f"paced to {args.link_gb_s:g} GB/s",
        "verify": order,
        "variant": args.variant,
        "tpot_ms": round(run.results[0].tpot_ms, 3),
        "first_window": first,
        "committed_before": 1 + sum(w.committed for w in run.windows[:first]),
        "windows": [
            {"drafted": w.drafted, "tested": w.tested, "accepted": w.accepted, "committed": w.committed}
            for w in run.windows[first:last]
        ],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.record_traces",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="reference/deepseek_v2_mini", help="folder, or a name for synthetic")
    parser.add_argument("--out", type=Path, required=True, help="a results folder")
    parser.add_argument("--weights", default="reference", help="official | synthetic | reference")
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--slots", type=int, default=3)
    parser.add_argument("--budget-gb", type=float, default=0.0, help="device bytes for everything; 0: --slots")
    parser.add_argument("--link-gb-s", type=float, default=0.1, help="0: native")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--windows", type=int, default=0, help="keep so many windows; 0: all")
    parser.add_argument("--variant", choices=("default", "paper"), default="default")
    parser.add_argument("--device", default="cpu")
    return parser


if __name__ == "__main__":
    sys.exit(exit_code(main))
