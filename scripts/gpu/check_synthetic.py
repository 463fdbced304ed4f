"""Synthetic weights at full size on CUDA: python -m scripts.gpu.check_synthetic --models deepseek_v2_lite,qwen15_moe

Per model and per line of --grid (JSON: a list of objects of knobs): acceptance, agreement of the routers, reuse, LRU
coverage, experts per window, tokens changed without routed experts, on text that walks along the ring, every layer's
experts made on the device and dropped. With --engine the calibrated weights then go through the engine with every
expert resident: acceptance at the model's K, repeated tokens, seconds to fill the store and to make the draft.
Writes synthetic.jsonl to $OUT (or outputs/), prints one line per measurement, the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.synthetic import open_synthetic, spec_for
from harness.synthetic.measure import Behaviour, behaviour
from harness.synthetic.spec import SyntheticSpec
from harness.synthetic.vocabulary import walk
from specter_core.assembly import build_engine
from specter_core.options import EngineOptions
from specter_core.types import Request

SLOTS = {"deepseek_v2_lite": (6, 12, 16, 18, 24, 32), "qwen15_moe": (4, 8, 12, 16), "phi35_moe": (2, 4, 6, 8)}
DEPTHS = {"deepseek_v2_lite": 16, "qwen15_moe": 8, "phi35_moe": 16}
PROMPT_TOKENS = 16


def line(found: Behaviour) -> str:
    rounded = {key: round(value, 3) for key, value in found.lru.items()}
    windows = {key: round(value, 1) for key, value in found.distinct.items()}
    return (
        f"acc {found.acceptance:.4f} noisy {found.noisy_acceptance} zeroed {found.zeroed_change:.3f} "
        f"sets {found.set_agreement:.3f} (first {found.by_layer[0]:.3f} last {found.by_layer[-1]:.3f}) "
        f"reuse {found.reuse:.3f} lru {rounded} "
        f"distinct {windows} cand {found.candidates:.4f} classes {found.classes} popular {found.popularity:.2f}"
    )


def on_walk(spec: SyntheticSpec, sequences: int, tokens: int, noises: tuple[float, ...]) -> Behaviour:
    text = walk(spec, sequences, tokens)
    return behaviour(spec, "cuda", text, slots=SLOTS.get(spec.model, (4, 8)), noises=noises)


def on_engine(spec: SyntheticSpec, prompts: int, new_tokens: int) -> dict[str, Any]:
    started = time.perf_counter()
    with open_synthetic(spec, "cuda") as model:
        torch.cuda.synchronize()
        filled = time.perf_counter() - started
        vocab, depth = model.decoder.config.vocab_size, DEPTHS.get(spec.model, 8)
        options = EngineOptions(depth=depth, context_tokens=PROMPT_TOKENS + new_tokens + 32)
        tested = accepted = repeated = wrong = windows = committed = 0
        texts: list[list[int]] = []
        with build_engine(model, options) as engine:
            for number in range(prompts):
                generator = torch.Generator().manual_seed(number)
                ids = torch.randint(10, vocab - 1000, (PROMPT_TOKENS,), generator=generator).tolist()
                run = engine.generate([Request(f"r{number}", tuple(ids), new_tokens, ignore_eos=True)])
                result = run.results[0]
                tested, accepted = tested + result.tested, accepted + result.accepted
                windows, committed = windows + len(run.windows), committed + sum(w.committed for w in run.windows)
                repeated += len(result.tokens) - len(set(result.tokens))
                texts.append(list(result.tokens))
            distinct_ = [sum(w.distinct) / len(w.distinct) for w in run.windows if w.depth == depth]
        with build_engine(model, EngineOptions(depth=0, context_tokens=options.context_tokens)) as engine:
            plain = engine.generate([Request("p", tuple(ids), new_tokens, ignore_eos=True)]).results[0]
            wrong = sum(a != b for a, b in zip(plain.tokens, result.tokens, strict=True))
    del model
    torch.cuda.empty_cache()
    found = behaviour(spec, "cuda", torch.tensor(texts), slots=SLOTS.get(spec.model, (4, 8)))
    return {
        "seconds_to_open": round(filled, 1), "acceptance": accepted / max(tested, 1), "tested": tested,
        "tokens_per_window": committed / max(windows, 1), "repeated_tokens": repeated, "mismatches": wrong,
        "distinct_verified": sum(distinct_) / max(len(distinct_), 1), "on_its_text": asdict(found),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="deepseek_v2_lite,qwen15_moe")
    parser.add_argument("--grid", default="[{}]", help="JSON list of knob objects; a `models` entry names those of one")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=320)
    parser.add_argument("--noise", type=float, nargs="*", default=[])
    parser.add_argument("--engine", default="", help="models to run through the engine as well")
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=128)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here; run this on a machine that has one", file=sys.stderr)
        return 2
    out = Path(os.environ.get("OUT") or "outputs")
    out.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    print(f"start {time.process_time():.1f} s", flush=True)
    started = time.perf_counter()
    with (out / "synthetic.jsonl").open("a", encoding="utf-8") as file:

        def attempt(name: str, knobs: dict[str, Any], measure: Any) -> None:
            before = time.perf_counter()
            try:
                found = measure()
            except Exception:
                failed.append(name)
                traceback.print_exc(limit=-5)
                return
            spent = round(time.perf_counter() - before, 1)
            values = asdict(found) if isinstance(found, Behaviour) else found
            print(
                name,
                knobs,
                line(found) if isinstance(found, Behaviour) else json.dumps(found),
                f"[{spent} s]",
                flush=True,
            )
            file.write(json.dumps({"what": name, "knobs": knobs, "seconds": spent, **values}) + "\n")
            file.flush()

        models = [model for model in options.models.split(",") if model]
        for entry in json.loads(options.grid):
            knobs = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items() if k != "models"}
            for model in entry.get("models", models):
                attempt(
                    f"walk {model}",
                    knobs,
                    lambda m=model, k=knobs: on_walk(
                        spec_for(m, **k), options.sequences, options.tokens, tuple(options.noise)
                    ),
                )
        for model in filter(None, options.engine.split(",")):
            attempt(f"engine {model}", {}, lambda m=model: on_engine(spec_for(m), options.prompts, options.new_tokens))
    print(json.dumps({"device": torch.cuda.get_device_name(), "failed": failed, "s": time.perf_counter() - started}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
