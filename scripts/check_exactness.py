"""Compares Specter token by token with the plain target: python scripts/check_exactness.py --model reference/…

The reference of each prompt is the same engine with K = 0, B = 1 and every expert resident; on small models also
transformers in float32. Every combination of depth, slots per layer and batch is run, first those that hold every
depth and every number of slots once; --limit-s starts no further engine after that time. The last stdout line is JSON;
exit code 1 on any mismatch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from specter_core.assembly import build_engine
from specter_core.errors import exit_code
from specter_core.opening import LoadedModel, open_model
from specter_core.options import ENCODINGS, EngineOptions
from specter_core.text import TextCodec
from specter_core.types import Request

TRANSFORMERS_LIMIT_PARAMS = 50_000_000
PROMPTS = (
    "The history of the town begins with a small harbour at the mouth of the river, where",
    'def count_vowels(text):\n    """Return the number of vowels in text."""\n',
    "A farmer has 24 apples. He sells 9 of them and then buys 5 more. How many apples",
    "Question: Which of the following particles has a negative charge?\n(A)",
    "To install the program, open a terminal and",
    "import os\n\nclass Reader:\n    def __init__(self, path):",
    "The river Danube rises in the Black Forest and flows through",
    "Once upon a time, in a small house near the sea, there lived",
)


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    torch.set_num_threads(1)
    return _check(args)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers; give them like 1,4,16") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--draft", type=Path, help="INT4 draft folder; default MODEL/draft, else an RTN draft")
    parser.add_argument("--depths", type=_numbers, default=[1, 4, 16])
    parser.add_argument("--slots", type=_numbers, default=[1, 3, 8], help="slots per layer")
    parser.add_argument("--batches", type=_numbers, default=[1, 3])
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per prompt")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--noise", type=float, default=0.0, help="sigma added to the draft's codes: forces rejections")
    parser.add_argument("--variant", choices=("default", "paper"), default="default")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--encoding", choices=ENCODINGS, default="plain", help="of the experts in host store and slots")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--single-prompts", type=int, help="prompts run with B = 1, which takes longest; default all")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first pairs of depth and slots: run before")
    parser.add_argument("--limit-s", type=float, default=1e9, help="start no further engine after this many seconds")
    return parser


def _check(args: argparse.Namespace) -> int:
    codec = TextCodec(args.model)
    texts = list(itertools.islice(itertools.cycle(PROMPTS), args.prompts))
    requests = [
        Request(f"prompt-{i}", tuple(codec.encode(text)), args.tokens, ignore_eos=True) for i, text in enumerate(texts)
    ]
    context = max(len(r.prompt) for r in requests) + args.tokens
    options = EngineOptions(context_tokens=context, max_batch=max(args.batches), prefill_chunk_tokens=64)
    totals = {"tokens": 0, "mismatches": 0, "tested": 0, "rejected": 0, "runs": 0, "skipped": 0}
    begin = time.perf_counter()
    with open_model(args.model, args.draft, device=args.device, rtn_if_missing=True, noise=args.noise,
                    encoding=args.encoding) as model:  # fmt: skip
        reference = _reference(model, options, requests)
        for depth, slots in list(diagonals(args.depths, args.slots))[args.skip :]:
            if time.perf_counter() - begin > args.limit_s:
                totals["skipped"] += len(args.batches)
                continue
            chosen = replace(options, depth=depth)
            chosen = chosen.paper() if args.variant == "paper" else chosen
            with build_engine(model, chosen, slots_per_layer=slots) as engine:
                for batch in args.batches:
                    for group in _groups(requests[: args.single_prompts] if batch == 1 else requests, batch):
                        for result in engine.generate(group).results:
                            expected = reference[result.request_id]
                            totals["tokens"] += len(expected)
                            totals["mismatches"] += differences(result.tokens, expected)
                            totals["tested"] += result.tested
                            totals["rejected"] += result.tested - result.accepted
                        totals["runs"] += 1
                    _progress(f"K {depth:3d}  M {slots:3d}  B {batch:2d}", totals, begin)
        against = _transformers(args, model, requests, reference)
    report = {"model": args.model.name, "device": args.device, "encoding": args.encoding, "draft": model.draft_kind}
    report |= {**totals, **against}
    print(json.dumps(report | {"seconds": round(time.perf_counter() - begin, 1)}))
    return 1 if totals["mismatches"] or against["transformers_mismatches"] else 0


def diagonals(depths: Sequence[int], slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Every pair; the first max(len, len) of them hold every value of both."""
    count = max(len(depths), len(slots))
    for shift in range(count):
        for i in range(count):
            a, b = i, (i + shift) % count
            if a < len(depths) and b < len(slots):
                yield depths[a], slots[b]


def _progress(which: str, totals: Mapping[str, int], begin: float) -> None:
    spent = time.perf_counter() - begin
    print(f"{which}  {totals['tokens']} tokens, {totals['mismatches']} mismatches, {spent:.0f} s", file=sys.stderr)


def _groups(requests: Sequence[Request], batch: int) -> Iterator[list[Request]]:
    for start in range(0, len(requests), batch):
        yield list(requests[start : start + batch])


def differences(found: Sequence[int], expected: Sequence[int]) -> int:
    return sum(a != b for a, b in zip(found, expected, strict=False)) + abs(len(found) - len(expected))


def _reference(model: LoadedModel, options: EngineOptions, requests: Sequence[Request]) -> dict[str, list[int]]:
    resident = replace(options, depth=0, max_batch=1)
    with build_engine(model, resident, slots_per_layer=model.decoder.config.num_experts) as engine:
        return {r.request_id: engine.generate([r]).results[0].tokens for r in requests}


def _transformers(
    args: argparse.Namespace, model: LoadedModel, requests: Sequence[Request], reference: dict[str, list[int]]
) -> dict[str, int]:
    """Greedy tokens of the family's transformers class in float32, for models below 50 M parameters on the CPU."""
    config = model.decoder.config
    params = config.expert_params * config.num_experts * len(config.moe_layers)
    if args.no_transformers or args.device != "cpu" or params > TRANSFORMERS_LIMIT_PARAMS:
        return {"transformers_tokens": 0, "transformers_mismatches": 0}
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokens = mismatches = 0
    peer.generation_config.eos_token_id = None  # our requests run to their length too
    for request in requests:
        prompt = torch.tensor([request.prompt])
        tokens_out = peer.generate(prompt, max_new_tokens=request.max_new_tokens, do_sample=False)
        output = tokens_out[0, prompt.shape[1] :].tolist()
        mismatches += differences(output, reference[request.request_id])
        tokens += len(output)
    return {"transformers_tokens": tokens, "transformers_mismatches": mismatches}


if __name__ == "__main__":
    sys.exit(exit_code(main))
