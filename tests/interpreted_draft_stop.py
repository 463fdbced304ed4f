"""One window of the CUDA draft pass with `draft_stop`, kernels interpreted, for each way of sampling: one JSON line.

TRITON_INTERPRET=1 python tests/interpreted_draft_stop.py FAMILY FOLDER
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from specter_core.assembly import build_engine
from specter_core.draft.draft_graph import GraphDraftPass
from specter_core.draft.stopping import agreement
from specter_core.engine import SpecterEngine
from specter_core.opening import open_model
from specter_core.options import EngineOptions
from specter_core.types import Request, WindowStats
from tests.host_runtime import HostRuntime
from tests.tiny_models import interpreter_checkpoint

DEPTH = 5
STOP = 0.6


def window(engine: SpecterEngine, requests: list[Request]) -> dict[str, Any]:
    """depths and tokens of the first window; agreement of every row in each step that was begun."""
    draft, chances = engine.draft, []
    assert isinstance(draft, GraphDraftPass)
    inner = draft.step

    def step() -> None:
        inner()
        chances.append(agreement(draft._step.step.logits).tolist())

    draft.step = step  # type: ignore[method-assign]
    engine._prefill(requests)
    found = engine._draft(WindowStats())
    counters = engine.analyzer.elb.counters if engine.analyzer else torch.zeros(1)
    return {"depths": found.depths, "tokens": found.tokens.tolist(), "chances": chances, "left": int(counters.sum())}


def main(family: str, folder: Path) -> None:
    torch.set_num_threads(1)
    path = interpreter_checkpoint(family, folder)
    runtime = HostRuntime(folder / "stub")
    options = EngineOptions(depth=DEPTH, context_tokens=32, max_batch=3)
    rows = [Request(f"r{i}", tuple(range(5 + i, 9 + i)), DEPTH + 2 - i, ignore_eos=True, seed=3) for i in range(3)]
    result: dict[str, Any] = {}
    with open_model(path, rtn_if_missing=True) as model:
        for name, stop, temperature in (("whole", 0.0, 0.0), ("greedy", STOP, 0.0), ("sampled", STOP, 0.8)):
            requests = [replace(r, temperature=temperature) for r in rows]
            own = replace(options, draft_stop=stop)
            with build_engine(model, own, slots_per_layer=4, runtime=runtime) as engine:
                result[name] = window(engine, requests)
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
