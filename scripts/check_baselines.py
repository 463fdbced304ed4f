"""Compares llama.cpp and vLLM with the target on the reference models: python scripts/check_baselines.py

Logits after a fixed prompt show whether the weights were converted rightly: float32 agrees to rounding, one swapped
matrix does not. Greedy tokens show what rounding does over a whole text: the first difference of every prompt, and how
far apart the target's two best tokens were there. The target is the checkpoint in transformers, float32, to which
Specter's plain target is equal token by token (scripts/check_exactness.py). One row per model, system and dtype.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from baselines.llama_cpp_offload import system as llama_cpp
from baselines.vllm_offload import system as vllm
from harness.system import MemorySpec, ModelSpec
from harness.weights import read_shape, weights_hash
from scripts.check_exactness import PROMPTS
from specter_core.errors import exit_code
from specter_core.model.config import ModelConfig
from specter_core.text import TextCodec
from specter_core.types import Request

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("deepseek_v2_mini", "qwen2_moe_mini", "phimoe_mini")
COLUMNS = (
    "model", "system", "version", "dtype", "device", "logit_difference", "logit_spread", "prompts", "tokens",
    "equal_prompts", "equal_tokens", "first_difference", "margin_there",
)  # fmt: skip


class Target(NamedTuple):
    """Of one prompt: greedy tokens, and the logits that each was chosen from [T, V], float32."""

    tokens: list[int]
    logits: torch.Tensor


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=lambda t: t.split(","), default=list(MODELS))
    parser.add_argument("--systems", type=lambda t: t.split(","), default=["llama_cpp"], help="llama_cpp, vllm")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--python", help="the system's interpreter; default: that of .venvs/<system>")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--out", type=Path, help="a CSV; rows of other models, systems and devices in it stay")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    for name in options.models:
        rows += list(compare(ROOT / "reference" / name, options))
    if options.out is not None:
        write(options.out, rows)
    print(json.dumps(rows))
    return 0


def compare(folder: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    codec = TextCodec(folder)
    prompts = [tuple(codec.encode(text)) for text in PROMPTS[: options.prompts]]
    targets = [target(folder, prompt, options.tokens) for prompt in prompts]
    family = ModelConfig.from_file(folder).family
    shape = read_shape(folder)
    spec = ModelSpec(folder.name, family, str(folder), None, "reference", "bfloat16", weights_hash([folder]), shape)
    length = max(map(len, prompts)) + options.tokens
    memory = MemorySpec("resident", None, None, "native", None, options.device, 1, length)
    for name, dtype, system in _systems(options):
        system.load(spec, memory)
        try:
            logits = torch.tensor(system.process.logits(prompts[0]))
            found = [
                system.generate([Request(str(i), prompt, options.tokens, ignore_eos=True)])[0].tokens
                for i, prompt in enumerate(prompts)
            ]
        finally:
            system.close()
        version = getattr(system, "facts", {}).get("version", "")
        yield {
            "model": folder.name, "system": name, "version": version, "dtype": dtype, "device": options.device,
            **logit_columns(logits, targets[0].logits[0]), **token_columns(found, targets),
        }  # fmt: skip


def target(folder: Path, prompt: Sequence[int], tokens: int) -> Target:
    model = _loaded(folder)
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([list(prompt)]), max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    return Target(out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits))


_models: dict[Path, Any] = {}


def _loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    if folder not in _models:
        _models.clear()
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        _models[folder] = loaded.eval()
    return _models[folder]


def _systems(options: argparse.Namespace) -> Iterator[tuple[str, str, Any]]:
    for name in options.systems:
        if name == "llama_cpp":
            for dtype in ("float32", "bfloat16"):
                yield name, dtype, llama_cpp.create({"variant": "resident", "dtype": dtype, "python": options.python})
        else:
            for dtype in ("float32", "bfloat16"):
                chosen = {"variant": "resident", "compile": False, "dtype": dtype, "python": options.python}
                yield name, dtype, vllm.create(chosen)


def logit_columns(found: torch.Tensor, wanted: torch.Tensor) -> dict[str, float]:
    """Largest difference after taking each one's mean away (log-probabilities are logits up to a constant), beside the
    standard deviation of the target's logits."""
    difference = (found - found.mean()) - (wanted - wanted.mean())
    return {"logit_difference": float(difference.abs().max()), "logit_spread": float(wanted.std())}


def token_columns(found: Sequence[Sequence[int]], targets: Sequence[Target]) -> dict[str, Any]:
    """equal_tokens counts those before each prompt's first difference. first_difference: the earliest of all prompts, a
    position; margin_there: how much better the target's best token was than its second there."""
    firsts = [
        next((i for i, (a, b) in enumerate(zip(own, t.tokens, strict=True)) if a != b), None)
        for own, t in zip(found, targets, strict=True)
    ]
    different = [(first, t) for first, t in zip(firsts, targets, strict=True) if first is not None]
    earliest = min(different, key=lambda pair: pair[0], default=None)
    margin = None
    if earliest is not None:
        best = earliest[1].logits[earliest[0]].topk(2).values
        margin = float(best[0] - best[1])
    return {
        "prompts": len(targets),
        "tokens": sum(len(t.tokens) for t in targets),
        "equal_prompts": firsts.count(None),
        "equal_tokens": sum(len(t.tokens) if f is None else f for f, t in zip(firsts, targets, strict=True)),
        "first_difference": None if earliest is None else earliest[0],
        "margin_there": margin,
    }


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Replaces the rows of the same (model, system, dtype, device)."""
    key = ("model", "system", "dtype", "device")
    kept: list[dict[str, Any]] = []
    if path.exists():
        with path.open(newline="") as file:
            new = {tuple(str(r[k]) for k in key) for r in rows}
            kept = [r for r in csv.DictReader(file) if tuple(r[k] for k in key) not in new]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in [*kept, *rows]:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(exit_code(main))
