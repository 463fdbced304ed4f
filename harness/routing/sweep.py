"""python run.py sweep=routing"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from harness import environment, timings
from harness.catalogue import ROOT, shown
from harness.entries import RunConfig
from harness.grid import PlannedGroup, RunPlan
from harness.progress import RunProgress
from harness.routing import measure
from specter_core.opening import open_model


def run(config: RunConfig, plan: RunPlan) -> dict[str, Any]:
    """One model after the other, in this process: the first cell of each says prompts, K and, on a GPU, the budget; on
    a CPU every expert is resident. Writes routing.csv, acceptance.csv, environment.json, timings.csv and figure 13;
    returns what run.py prints as its last line."""
    out = ROOT / config.output
    out.mkdir(parents=True, exist_ok=True)
    commit, counted = environment.git_commit(), [0]
    hashes = {name: spec.weights_hash for name, spec in plan.models.items()}
    first = {planned.model.name: planned for planned in reversed(list(plan.groups))}
    with RunProgress(sum(p.requests for p in first.values())) as progress:
        environment.write(out / "environment.json", environment.capture(plan.device, config.threads, hashes, commit))
        for skip in plan.skips:
            progress.notice(f"skipped: {skip.what}: {skip.reason}")
        for name, planned in first.items():
            spec = planned.model
            progress.begin(f"{name}: continuations and their routing")
            what = timings.Timed(config.sweep, name, spec.weights, planned.memory.link, plan.device, commit)
            with timings.timed(out / "timings.csv", what, lambda: sum(counted)):
                _one(planned, plan.device, config, out)
                counted.append(planned.requests)
            progress.advance(planned.requests)
    print(measure.tables(out), file=sys.stderr)
    return {
        "sweep": config.sweep,
        "output": config.output,
        "rows": sum(counted),
        "skipped": len(plan.skips),
        "device": plan.device,
        "figures": _draw(config, out),
    }


def _one(planned: PlannedGroup, device: str, config: RunConfig, out: Path) -> None:
    import torch

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    spec = planned.model
    prompts: dict[str, list[tuple[int, ...]]] = {}
    for chosen in planned.prompts.values():
        for prompt in chosen:
            prompts.setdefault(prompt.label, []).append(prompt.tokens)
    draft = None if spec.draft_path is None else Path(spec.draft_path)
    with open_model(Path(spec.path), draft, device=device) as model:
        routing, accepted = measure.measure(
            model,
            prompts,
            {"model": spec.name, "weights": spec.weights, "device": device},
            depth=planned.group.depth,
            new_tokens=planned.group.setting.new_tokens,
            budget_bytes=planned.memory.budget_bytes if device == "cuda" else None,
        )
    measure.write(out, routing, accepted)


def _draw(config: RunConfig, out: Path) -> list[str]:
    redraw, results = importlib.import_module("figures.redraw"), importlib.import_module("figures.results")
    found = results.read(out)
    return [shown(p) for o in redraw.redraw(found, out / "figures", list(config.figures)) for p in o.paths]
