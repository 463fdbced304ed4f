"""Runs a tiny model on the CUDA engine's parts with interpreted kernels, and on the CPU engine: one JSON line.

TRITON_INTERPRET=1 python tests/interpreted_engine.py FAMILY DEPTH SLOTS BATCH FOLDER
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from specter_core.assembly import build_engine
from specter_core.opening import open_model
from specter_core.options import EngineOptions
from specter_core.types import Request
from tests.host_runtime import HostRuntime
from tests.tiny_models import tiny_checkpoint


def main(family: str, depth: int, slots: int, batch: int, folder: Path) -> None:
    torch.set_num_threads(1)
    path = tiny_checkpoint(
        family, folder, layers=2, hidden=128, experts=4, expert_width=128, heads=2, vocab=64, top_k=2,
        original_positions=32, dtype=torch.float32,
    )  # fmt: skip
    runtime = HostRuntime(folder / "stub")
    base = EngineOptions(depth=0, context_tokens=64, max_batch=2, prefill_chunk_tokens=8)
    requests = [Request(f"r{i}", tuple(range(5 + i, 12 + 2 * i)), 3, ignore_eos=True) for i in range(2)]
    with open_model(path, rtn_if_missing=True) as model:
        with build_engine(model, base) as engine:
            cpu = [engine.generate([r]).results[0].tokens for r in requests]
        with build_engine(model, base, runtime=runtime) as engine:
            plain = [engine.generate([r]).results[0].tokens for r in requests]
        found, misses = [], 0
        with build_engine(model, replace(base, depth=depth), slots_per_layer=slots, runtime=runtime) as engine:
            for start in range(0, len(requests), batch):
                run = engine.generate(requests[start : start + batch])
                found += [r.tokens for r in run.results]
                misses += sum(sum(w.misses) for w in run.windows)
            engine.experts.cache.check_integrity()
    print(json.dumps({"cpu": cpu, "plain": plain, "device": found, "misses": misses, "graphs": runtime.captured}))


if __name__ == "__main__":
    main(sys.argv[1], *(int(a) for a in sys.argv[2:5]), Path(sys.argv[5]))  # type: ignore[misc]
