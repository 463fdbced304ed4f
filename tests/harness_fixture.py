"""A run of fake systems on a model that needs no checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import runner
from harness.cells import expand
from harness.config import run_config
from harness.entries import RunConfig, SystemEntry
from harness.grid import PlannedGroup, RunPlan, _planned
from harness.prompts import BenchPrompt
from harness.system import ModelShape, ModelSpec

SHAPE = ModelShape(128, 4, 4, 16, 3, 128, 4096, 1_000_000, 1024)
TESTS = Path(__file__).parent


class FixedPrompts:
    """Two prompts for each of two labels; the dataset `secret` is private."""

    def absent(self, dataset: str) -> str | None:
        return "dataset=gone is not here; fetch it with: fetch gone" if dataset == "gone" else None

    def select(self, model: ModelSpec, dataset: str, prefix_tokens: int) -> list[BenchPrompt]:
        private = dataset == "secret"
        return [
            BenchPrompt(dataset, label, f"{dataset}-{label}-{i}", tuple(range(i, i + prefix_tokens)), private)
            for label, numbers in (("GK", (1, 2)), ("C4", (11, 12)))
            for i in numbers
        ]

    def warmup(self, model: ModelSpec, prefix_tokens: int) -> BenchPrompt:
        return BenchPrompt("warmup", "warmup", "warmup", (0,) * prefix_tokens)


def raw_config(out: Path, systems: dict[str, dict[str, Any]] | None = None, **changes: Any) -> dict[str, Any]:
    fake = {"module": "fake_systems", "label": "Fake", "colour": "#0072B2", "order": 1}
    systems = {"specter": {}} if systems is None else systems
    return {
        "sweep": "main",
        "profile": "reference",
        "models": {
            "tiny": {
                "label": "Tiny",
                "family": "deepseek_v2",
                "depth": 8,
                "default_weights": "reference",
                "weights": {"reference": {"path": "nowhere"}},
            }
        },
        "systems": {name: fake | {"order": i} | system for i, (name, system) in enumerate(systems.items())},
        "memories": {"tight": {"label": "tight", "slots_per_layer": 3}},
        "links": {"scaled": {"rate_bytes_per_s": 1e8}},
        "datasets": {"builtin": {}},
        "launcher": {"load_timeout_s": 60.0, "generate_timeout_s": 60.0, "restarts": 1},
        "depth": ["model"],
        "batch": [1],
        "prefix_tokens": [4],
        "new_tokens": [6],
        "prompts": 2,
        "repeats": 1,
        "temperature": 0.0,
        "seed": 0,
        "device": "cpu",
        "threads": 1,
        "weights": None,
        "output": str(out),
        "fresh": False,
        "figures": [],
    } | changes


def plan(config: RunConfig) -> RunPlan:
    """Like `plan_run`, with one model spec for every model and no look at the disk."""
    specs = {
        m.name: ModelSpec(m.name, m.family, "", None, "reference", "bfloat16", "cafe", SHAPE) for m in config.models
    }
    grid = expand(config, "cpu")
    here: dict[str, str | None] = dict.fromkeys(config.datasets)
    blocks: list[list[PlannedGroup]] = [
        [_planned(g, config, FixedPrompts(), specs[g.setting.model.name], "cpu", here, grid.skips) for g in block]
        for block in grid.blocks
    ]
    return RunPlan("cpu", specs, blocks, grid.skips)


@contextmanager
def no_store(spec: ModelSpec, threads: int | None) -> Iterator[ModelSpec]:
    yield spec


def run(raw: dict[str, Any], reference: SystemEntry | None = None) -> dict[str, Any]:
    config = run_config(raw)
    return runner.run(config, plan(config), FixedPrompts(), reference=reference, store=no_store)
