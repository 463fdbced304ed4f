"""Writes a synthetic checkpoint in Hugging Face format: python scripts/make_synthetic_checkpoint.py model=qwen15_moe

config.json, model-0000N-of-0000M.safetensors of at most 5 GB, model.safetensors.index.json, tokenizer.json (of bytes,
harness/synthetic/text.py; --tokenizer FILE: another) and synthetic.json (seed, knobs, hash, kind of device) go to
.work/synthetic/MODEL or --output. Tensors are made one after the other, on the GPU where there is one; host memory for
one shard is enough. Engines of this repository need no such folder: they make the same weights in memory. A draft
beside it: initialization/quantize_draft.py --method rtn; without one, runs round to nearest when they load.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.synthetic import SyntheticSpec, spec_for, tensor_names, tensors
from harness.synthetic.text import byte_tokenizer
from specter_core.errors import UserError, exit_code
from specter_core.model.families import family_named

ROOT = Path(__file__).resolve().parents[1]
SHARD_BYTES = 5_000_000_000
_SPARE_BYTES = 100_000_000


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="model=NAME or NAME: deepseek_v2_lite, qwen15_moe, phi35_moe")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shard-bytes", type=int, default=SHARD_BYTES)
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="a tokenizer.json; default: one of bytes")
    options = parser.parse_args(argv)
    name = options.model.removeprefix("model=")
    spec = spec_for(name, seed=options.seed)
    folder = options.output or ROOT / ".work" / "synthetic" / name
    write(spec, folder, options.device, options.shard_bytes, options.tokenizer)
    return 0


def write(
    spec: SyntheticSpec, folder: Path, device: str, shard_bytes: int = SHARD_BYTES, tokenizer: Path | None = None
) -> None:
    """The checkpoint, complete or not at all: it is made beside its place and renamed. UserError: too little room on
    the disk, a folder that is there already, or a tokenizer file that is not."""
    text = _tokenizer(spec, tokenizer)
    sizes = _sizes(spec)
    total = sum(sizes.values())
    if folder.exists():
        raise UserError(f"{folder} exists; remove it or choose another --output")
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    free = shutil.disk_usage(partial).free
    if total + _SPARE_BYTES > free:
        partial.rmdir()
        raise UserError(
            f"{spec.model} needs {(total + _SPARE_BYTES) / 1e9:.1f} GB on the disk, {folder.parent} has"
            f" {free / 1e9:.1f} GB free; free space or choose another --output"
        )
    shards = _shards(sizes, shard_bytes)
    started, done, shard = time.perf_counter(), 0, 0
    held: dict[str, torch.Tensor] = {}
    for name, tensor in tensors(spec, device):
        held[name] = tensor.cpu().contiguous()
        done += tensor.nbytes
        if len(held) == len(shards[shard]):
            assert set(held) == set(shards[shard]), shard
            save_file(held, partial / _file(shard, len(shards)), metadata={"format": "pt"})
            held, shard = {}, shard + 1
            rate = done / (time.perf_counter() - started)
            print(f"{done / 1e9:.1f} of {total / 1e9:.1f} GB, {(total - done) / rate:.0f} s left", file=sys.stderr)
    assert shard == len(shards) and not held
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: _file(n, len(shards)) for n, names in enumerate(shards) for name in names},
    }
    card = {
        "weights": "synthetic", "model": spec.model, "seed": spec.seed, "hash": spec.hash, "knobs": asdict(spec.knobs),
        "made_on": torch.device(device).type,
    }  # fmt: skip
    for file, content in (
        ("config.json", dict(spec.config)),
        ("model.safetensors.index.json", index),
        ("synthetic.json", card),
    ):
        (partial / file).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (partial / "tokenizer.json").write_text(text, encoding="utf-8")
    partial.rename(folder)


def _tokenizer(spec: SyntheticSpec, file: Path | None) -> str:
    if file is None:
        return byte_tokenizer(spec.model_config.vocab_size).to_str()
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"--tokenizer {file}: {error.strerror}; name the model's tokenizer.json") from error


def _sizes(spec: SyntheticSpec) -> dict[str, int]:
    """Name -> bytes, in the order in which `tensors` yields."""
    config = spec.model_config
    shapes = family_named(config.family).expected_tensors(config)
    names = tensor_names(spec)
    assert set(names) == set(shapes), set(names) ^ set(shapes)
    return {name: prod(shapes[name]) * config.dtype.itemsize for name in names}


def _shards(sizes: dict[str, int], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    room = limit
    for name, size in sizes.items():
        if shards[-1] and size > room:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= size
    return shards


def _file(number: int, count: int) -> str:
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


if __name__ == "__main__":
    sys.exit(exit_code(main))
