"""Command line of the engine: `python -m specter_core generate --model DIR --prompt TEXT …`."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from specter_core.assembly import build_engine
from specter_core.errors import UserError, exit_code
from specter_core.memory.budget import SlotPlan
from specter_core.memory.pin_limit import PinLimit
from specter_core.model.config import ModelConfig
from specter_core.opening import open_model
from specter_core.options import ENCODING_CHOICES, VARIANTS, EngineOptions, resolve_encoding
from specter_core.text import TextCodec
from specter_core.trace import Trace
from specter_core.types import GenerationRun, Request, WindowStats


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for bad input (one line on stderr)."""
    args = _parser().parse_args(argv)
    return exit_code(lambda: _generate(args))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m specter_core", description="Specter's engine on its own.")
    commands = parser.add_subparsers(dest="command", required=True)
    gen = commands.add_parser("generate", help="write a continuation of a prompt and a table of what it took")
    gen.add_argument("--model", type=Path, required=True, help="folder with config.json, safetensors, tokenizer.json")
    gen.add_argument("--draft", type=Path, help="folder of the INT4 draft; default MODEL/draft")
    gen.add_argument("--prompt", required=True)
    gen.add_argument("--max-new-tokens", type=int, default=64)
    gen.add_argument("--depth", type=int, default=8, metavar="K", help="draft tokens per window; 0: no draft")
    memory = gen.add_mutually_exclusive_group()
    memory.add_argument("--slots", type=int, metavar="M", help="expert-cache slots per layer")
    memory.add_argument("--budget-gb", type=float, metavar="G", help="device bytes for everything, in 1e9 bytes")
    gen.add_argument("--link-gb-s", type=float, metavar="R", help="pace the link to R * 1e9 bytes/s")
    gen.add_argument("--temperature", type=float, default=0.0)
    gen.add_argument("--top-p", type=float, default=1.0)
    gen.add_argument("--top-k", type=int, default=0)
    gen.add_argument("--seed", type=int, default=0)
    gen.add_argument("--variant", choices=VARIANTS, default="default")
    gen.add_argument(
        "--encoding", choices=ENCODING_CHOICES, default="auto",
        help="of the experts in host store and slots; auto: nested on a GPU for BF16 experts with a draft, else plain",
    )  # fmt: skip
    gen.add_argument("--nested-dir", type=Path, help="folder that keeps nested experts for the next start")
    gen.add_argument("--device", default="cpu")
    gen.add_argument("--threads", type=int, default=1, help="CPU compute threads; small models gain nothing from more")
    gen.add_argument("--trace", type=Path, help="write a Chrome trace of compute and link")
    gen.add_argument("--pin-limit-gb", type=float, metavar="G", help="refuse to page-lock more host memory (1e9 bytes)")
    gen.add_argument("--numa-node", type=int, metavar="N", help="host memory of the experts; default: the GPU's node")
    return parser


def _check(args: argparse.Namespace) -> None:
    for name in ("budget_gb", "link_gb_s", "pin_limit_gb"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"--{name.replace('_', '-')} {value} is no size or rate; give a number above 0")
    if args.seed < 0:
        raise UserError(f"--seed {args.seed} is below 0; give 0 or more")
    if args.trace is not None and not args.trace.parent.is_dir():
        raise UserError(f"--trace {args.trace}: folder {args.trace.parent} does not exist; make it or name another")


def _generate(args: argparse.Namespace) -> int:
    _check(args)
    torch.set_num_threads(max(1, args.threads))
    codec = TextCodec(args.model)
    prompt = tuple(codec.encode(args.prompt))
    context = len(prompt) + max(args.max_new_tokens, 1)
    options = EngineOptions(depth=args.depth, context_tokens=max(context, 2))
    options = options.paper() if args.variant == "paper" else options
    config = ModelConfig.from_file(args.model / "config.json")
    experts = config.num_experts
    if args.slots is not None and args.slots > experts:
        raise UserError(f"--slots {args.slots} exceed the model's {experts} experts per layer; give 1 … {experts}")
    args.encoding = _encoding(args, config)
    trace = Trace(enabled=args.trace is not None)
    rate = None if args.link_gb_s is None else args.link_gb_s * 1e9
    pins = None if args.pin_limit_gb is None else PinLimit(round(args.pin_limit_gb * 1e9))
    with open_model(
        args.model, args.draft, need_draft=args.depth > 0, device=args.device, pin_limit=pins, numa_node=args.numa_node,
        encoding=args.encoding, nested_dir=args.nested_dir,
    ) as model:  # fmt: skip
        codec.check_context(context, model.decoder.config.max_positions)
        budget = None if args.budget_gb is None else round(args.budget_gb * 1e9)
        if args.slots is None and budget is None:
            args.slots = max(1, experts // 4)
        with build_engine(
            model, options, slots_per_layer=args.slots, budget_bytes=budget, rate_bytes_per_s=rate, trace=trace
        ) as engine:
            request = Request(
                "prompt", prompt, args.max_new_tokens, args.temperature, args.top_p, args.top_k, args.seed
            )
            stream = _Stream(codec)
            run = engine.generate([request], on_commit=stream.show)
            stream.end()
            if args.trace is not None:
                trace.add_link(engine.experts.loader.link.counters.intervals)
                trace.write(args.trace, model=str(args.model), device=args.device, depth=options.depth)
        print(_table(run, args, _slots(engine.slots)), file=sys.stderr)
    return 0


def _encoding(args: argparse.Namespace, config: ModelConfig) -> str:
    dtype = str(config.dtype).removeprefix("torch.")
    with_draft = args.depth > 0 and (args.draft or args.model / "draft").is_dir()
    return resolve_encoding(args.encoding, device=args.device, dtype=dtype, with_draft=with_draft, variant=args.variant)


class _Stream:
    """Prints a row's text as it grows."""

    def __init__(self, codec: TextCodec) -> None:
        self.codec = codec
        self.shown = 0

    def show(self, row: int, tokens: list[int]) -> None:
        text = self.codec.decode(tokens)
        stable = len(text.rstrip("\N{REPLACEMENT CHARACTER}"))
        print(text[self.shown : stable], end="", flush=True)
        self.shown = max(self.shown, stable)

    def end(self) -> None:
        print()


def _total(windows: Sequence[WindowStats], name: str) -> float:
    return float(sum(getattr(w, name) for w in windows))


def _layer_total(windows: Sequence[WindowStats], name: str) -> int:
    return sum(sum(getattr(w, name)) for w in windows)


def _table(run: GenerationRun, args: argparse.Namespace, slots: str) -> str:
    result, windows = run.results[0], run.windows
    distinct = _layer_total(windows, "distinct")
    planned = _total(windows, "prefetch_planned")
    moved = _total(windows, "h2d_bytes")
    rows = [
        ("tokens", f"{len(result.tokens)} in {len(windows)} windows ({result.finish.value})"),
        ("slots per layer", slots),
        ("experts", args.encoding),
        ("acceptance", f"{result.acceptance:.3f} ({result.accepted} of {result.tested} tested)"),
        ("coverage", _share(_layer_total(windows, "hits"), distinct)),
        ("access hit rate", _share(_total(windows, "access_hits"), _total(windows, "accesses"))),
        ("prefetch precision", _share(_total(windows, "prefetch_planned_used"), planned)),
        ("moved", f"{moved / 1e6:.1f} MB, {moved / 1e6 / max(1, len(result.tokens)):.2f} MB per token"),
        ("TTFT / TPOT", f"{result.ttft_ms:.1f} / {result.tpot_ms:.1f} ms"),
    ]
    if args.device == "cpu":
        rows.append(("note", "CPU run: checks behaviour, not GPU performance"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)


def _slots(plan: SlotPlan) -> str:
    text = f"{plan.mean_slots:.3g}, staging {plan.staging}; " + ", ".join(
        f"{part} {size / 1e6:.1f}" for part, size in plan.parts.items()
    )
    return f"{text} = {plan.total / 1e6:.1f} MB"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.3f} ({part:.0f} of {whole:.0f})" if whole else "none"
