"""Full-size runs in small: weights generated in memory, a worker per system, ids from a file, a clock that stops it."""

from __future__ import annotations

import json
import os
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from harness import lease, weights
from harness.config import run_config
from harness.entries import RunConfig
from harness.grid import plan_run, reference_system
from harness.lease import Part
from harness.measure import Measurement
from harness.prompt_ids import IdSource
from harness.records import RecordFile, read_rows
from harness.reference_tokens import ReferenceTokens, reference_key
from harness.shared_store import shared_store
from harness.synthetic import spec_for
from harness.systems.engine_system import EngineSystem
from specter_core.errors import UserError

NAME = "small_deepseek_v2"


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ids") / "prompts.json"

    def prompt(name: str, start: int) -> dict[str, Any]:
        tokens = list(range(start, start + 8))
        return {"id": f"{name}-{start}", "label": "GK", "private": name == "gpqa", "tokens": tokens}

    prompts = {name: {"8": [prompt(name, 20 * i + len(name)) for i in (1, 2)]} for name in ("gsm8k", "gpqa")}
    path.write_text(json.dumps({NAME: {"warmup": [5, 6, 7], "prompts": prompts}}))
    return path


def shape() -> dict[str, Any]:
    config = spec_for(NAME).model_config
    return {
        "hidden": config.hidden, "decoder_layers": config.layers, "moe_layers": len(config.moe_layers),
        "experts": config.num_experts, "top_k": config.top_k, "expert_width": config.expert_width,
        "vocab_size": config.vocab_size, "shared_params": 1, "kv_bytes_per_token": 1,
    }  # fmt: skip


def config(out: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> RunConfig:
    monkeypatch.setattr(weights, "gpus", lambda: [{"name": "any"}])
    model = {
        "label": "Small", "family": "deepseek_v2", "depth": 4, "default_weights": "synthetic",
        "weights": {"synthetic": {"path": "nowhere"}}, "budgets_bytes": {"low": 14e6},
        "shape": shape(),
    }  # fmt: skip
    own = {"label": "x", "colour": "#000000", "order": 0, "needs_store": True}
    systems = {
        "specter": {"module": "harness.systems.specter", "depth": "model", "options": {}},
        "mo_sm": {"module": "baselines.mixtral_offloading.system", "options": {"capacity": "same_memory"}},
    }
    raw: dict[str, Any] = {
        "sweep": "main", "profile": "paper", "models": {NAME: model},
        "systems": {name: own | system for name, system in systems.items()},
        "memories": {"low": {"label": "low", "budget": "low"}},
        "links": {"native": {}, "fast": {"rate_bytes_per_s": 1e9}},
        "datasets": {"gsm8k": {}, "gpqa": {}}, "launcher": {"workers": "system"}, "prefix_tokens": [8],
        "new_tokens": [12], "prompts": 1, "repeats": 1, "temperature": 0.0, "seed": 0, "device": "cpu", "threads": 1,
        "weights": "synthetic", "output": str(out), "fresh": False,
    }  # fmt: skip
    return run_config(raw | changes)


def measure(chosen: RunConfig, ids: Path, out: Path, seconds: float = 300.0) -> tuple[Part, list[str]]:
    source, said = IdSource(ids, prompts=chosen.prompts), []
    plan = plan_run(chosen, source)
    until = time.monotonic() + seconds
    measurement = Measurement(
        config=chosen, records=RecordFile(out / "records.csv", said.append),
        reference=ReferenceTokens(out / "reference_tokens.jsonl"), logs=out / "workers", git_commit="abc",
        notice=said.append, advance=lambda _: None, until=until,
    )  # fmt: skip
    part = Part(measurement, list(plan.groups))
    lease.run_model(
        plan.models[NAME], [part], source=source, reference=reference_system(), store=shared_store, device="cpu",
        gpu=None, until=until, seed=0, notice=said.append,
    )  # fmt: skip
    return part, said


def test_generated_weights_run_every_system_in_one_worker_each_and_exactly(tmp_path, ids, monkeypatch):
    part, said = measure(config(tmp_path, monkeypatch), ids, tmp_path)
    rows = read_rows(tmp_path / "records.csv")
    assert len(rows) == 8 and {r["status"] for r in rows} == {"ok"}, said
    assert {r["exact_match"] for r in rows} == {"true"} and {r["weights"] for r in rows} == {"synthetic"}
    assert {(r["system"], r["link"]) for r in rows} == set(product(("specter", "mo_sm"), ("native", "fast")))
    assert len(part.measurement.loads) == 4 and len(list((tmp_path / "workers").iterdir())) == 3
    assert not list(Path("/dev/shm").glob(f"specter-experts-{os.getpid()}-*"))


def test_a_run_without_time_measures_nothing_and_writes_off_with_a_reason(tmp_path, ids, monkeypatch):
    part, _ = measure(config(tmp_path, monkeypatch), ids, tmp_path, seconds=0.0)
    assert lease.write_off(part, "no device time was left") == 8
    rows = read_rows(tmp_path / "records.csv")
    assert {(r["status"], r["reason"]) for r in rows} == {("not_run", "no device time was left")}
    assert not part.measurement.records.done


def test_systems_come_in_blocks_in_an_order_that_the_seed_decides(tmp_path, ids, monkeypatch):
    groups = list(plan_run(config(tmp_path, monkeypatch), IdSource(ids, prompts=1)).groups)
    orders = {tuple(b[0].group.system.name for b in lease.by_system(groups, seed)) for seed in range(8)}
    assert orders == {("specter", "mo_sm"), ("mo_sm", "specter")}
    assert all(len({g.group.system.name for g in block}) == 1 for block in lease.by_system(groups, 0))


def test_a_file_without_enough_prompts_of_a_length_says_so(tmp_path, ids, monkeypatch):
    plan = plan_run(config(tmp_path, monkeypatch), IdSource(ids, prompts=2))
    assert plan.requests == 16
    with pytest.raises(UserError, match="has 2 prompts of gsm8k with 8 tokens"):
        plan_run(config(tmp_path, monkeypatch), IdSource(ids, prompts=3))


def test_the_first_tokens_of_a_reference_run_are_a_reference_too(tmp_path, ids):
    prompt = IdSource(ids, prompts=1).select(type("M", (), {"name": NAME})(), "gpqa", 8)[0]
    reference = ReferenceTokens(tmp_path / "reference.jsonl")
    tokens = list(range(100, 120))
    reference.put(reference_key("w", prompt, 20), prompt, tokens)
    for again in (reference, ReferenceTokens(tmp_path / "reference.jsonl")):
        short = reference_key("w", prompt, 8)
        assert again.has(short) and again.matches(short, tokens[:8]) and not again.matches(short, tokens[1:9])
        assert not again.has(reference_key("w", prompt, 9))
    assert "100" not in (tmp_path / "reference.jsonl").read_text().split("sha256")[0]


def test_a_system_takes_over_the_weights_of_the_one_before(tmp_path):
    before, after = (EngineSystem(options, variant="default") for options in _options())
    before._model, before._opened = "loaded", None
    after.take_over(before)
    assert after._model == "loaded" and before._model is None


def _options():
    from specter_core.options import EngineOptions

    return EngineOptions(depth=0), EngineOptions(depth=4)


def test_a_plan_gives_the_slots_of_every_system_within_the_same_bytes(capsys, monkeypatch):
    from harness import listing
    from scripts.gpu import run_fig14

    monkeypatch.setattr(weights, "gpus", lambda: [{"name": "any"}])
    options = run_fig14._parser().parse_args(["--ids", "x", "--out", "y", "--device", "cuda", "--links", "native"])
    lines = list(listing.shape_lines(run_fig14.compose(options, {})))
    slots = {
        tuple(line.split(":")[0].strip().split(", ")): float(line.split("(")[1].split(" of")[0])
        for line in lines
        if "per layer" in line
    }
    for model, memory in (("deepseek_v2_lite", "high"), ("qwen15_moe", "low")):
        specter, sc, sm, moe = (slots[model, memory, s] for s in ("specter", "mo_sc", "mo_sm", "specmoeoff"))
        assert specter == sc and moe < specter < sm
    assert any("transformers" in line and "of 26 resident layers" in line for line in lines)
