"""Windows that end early: tokens stay the target's, a row's end is its own affair, and the last plan fits."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from specter_core.assembly import build_engine
from specter_core.draft.draft_pass import DraftPass
from specter_core.draft.stopping import SHARPNESS, agreement
from specter_core.engine import SpecterEngine
from specter_core.errors import UserError
from specter_core.opening import LoadedModel, open_model
from specter_core.options import EngineOptions
from specter_core.text import TextCodec
from specter_core.types import GenerationRun, Request
from tests.tiny_models import tiny_checkpoint

ROOT = Path(__file__).resolve().parents[1]
NEW_TOKENS = 24
STOP = 0.6
BASE = EngineOptions(depth=9, draft_stop=STOP, context_tokens=96, max_batch=3, prefill_chunk_tokens=10)
REQUESTS = [Request(f"r{i}", tuple(range(5 + i, 18 + 3 * i)), NEW_TOKENS, ignore_eos=True) for i in range(3)]
HOT = [replace(r, temperature=0.8, top_p=0.9, seed=5) for r in REQUESTS]
TEXTS = ("The old lighthouse keeper", "def area(width, height):", "Ann has 12 apples and gives")


@pytest.fixture(scope="module", params=["deepseek_v2", "qwen2_moe", "phimoe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    torch.set_num_threads(1)
    folder = tiny_checkpoint(request.param, tmp_path_factory.mktemp("tiny"), seed=3, layers=2, experts=8)
    with open_model(folder, rtn_if_missing=True, noise=0.3) as loaded:
        yield loaded


def plain(model: LoadedModel, requests: list[Request] = REQUESTS) -> list[list[int]]:
    """Tokens of the plain target: K = 0, B = 1, all experts resident."""
    with build_engine(model, replace(BASE, depth=0)) as engine:
        return [engine.generate([r]).results[0].tokens for r in requests]


def run(engine: SpecterEngine, requests: list[Request], batch: int) -> list[GenerationRun]:
    found = [engine.generate(requests[start : start + batch]) for start in range(0, len(requests), batch)]
    engine.experts.cache.check_integrity()
    return found


def tokens(runs: list[GenerationRun]) -> list[list[int]]:
    return [result.tokens for run in runs for result in run.results]


def drafted(runs: list[GenerationRun]) -> list[int]:
    return [result.drafted for run in runs for result in run.results]


def ended_early(engine: SpecterEngine, runs: list[GenerationRun]) -> int:
    """Windows below K that were not the last ones of their batch."""
    deepest = engine.options.depth
    return sum(w.depth < deepest for run in runs for w in run.windows[:-2])


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"prefetch": False},
        {"shared_kv": False},
        {"prefetch_under_verify": False},
        {"planning": "top_m"},
        {"initial_chunk_tokens": 1},
        {"initial_chunk_tokens": 5},
    ],
    ids=lambda change: ",".join(f"{k}={v}" for k, v in change.items()) or "default",
)
def test_greedy_tokens_are_the_targets_wherever_windows_end(model: LoadedModel, change: dict[str, object]) -> None:
    expected = plain(model)
    options = replace(BASE, **change)  # type: ignore[arg-type]
    for batch in (1, 3):
        with build_engine(model, options, slots_per_layer=3, rate_bytes_per_s=4e9) as engine:
            found = run(engine, REQUESTS, batch)
            assert tokens(found) == expected
            assert batch > 1 or ended_early(engine, found) > 0


@pytest.mark.parametrize("name", ["deepseek_v2_mini", "qwen2_moe_mini", "phimoe_mini"])
def test_reference_models_give_the_targets_tokens_with_fewer_drafted(name: str) -> None:
    torch.set_num_threads(1)
    codec = TextCodec(ROOT / "reference" / name)
    requests = [Request(text, tuple(codec.encode(text)), 16, ignore_eos=True) for text in TEXTS]
    with open_model(ROOT / "reference" / name) as model:
        expected = plain(model, requests)
        options = replace(BASE, depth=12)
        with build_engine(model, replace(options, draft_stop=0.0), slots_per_layer=8) as engine:
            whole = run(engine, requests, 1)
        for batch in (1, 3):
            with build_engine(model, options, slots_per_layer=8) as engine:
                found = run(engine, requests, batch)
            assert tokens(found) == tokens(whole) == expected
            assert sum(drafted(found)) < sum(drafted(whole))


def test_sampled_tokens_and_ends_do_not_depend_on_the_batch_nor_on_steps_ahead(model: LoadedModel) -> None:
    with build_engine(model, BASE, slots_per_layer=3, rate_bytes_per_s=1e11) as engine:
        alone = run(engine, HOT, 1)
        together = run(engine, HOT, 3)
        engine._ahead = 2
        ahead = run(engine, HOT, 1)
        assert ended_early(engine, alone) > 0
    assert tokens(together) == tokens(ahead) == tokens(alone)
    assert drafted(together) == drafted(ahead) == drafted(alone)


def test_a_row_ends_with_the_token_that_made_it_unlikely(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was drafted is verified: leaving out a token for its own sake would bend the sampled distribution."""
    steps: list[float] = []
    lines: list[tuple[int, list[float]]] = []

    def seen(logits: torch.Tensor) -> torch.Tensor:
        found = agreement(logits)
        steps.append(float(found[0]))
        return found

    def candidates(self: DraftPass) -> tuple[list[int], torch.Tensor, torch.Tensor | None]:
        depths, drafts, probs = inner(self)
        assert drafts.shape[1] == depths[0]
        lines.append((depths[0], steps.copy()))
        steps.clear()
        return depths, drafts, probs

    inner = DraftPass.candidates
    monkeypatch.setattr("specter_core.draft.draft_pass.agreement", seen)
    monkeypatch.setattr(DraftPass, "candidates", candidates)
    with build_engine(model, BASE, slots_per_layer=3) as engine:
        runs = run(engine, HOT, 1)
    assert len(lines) == sum(w.depth > 0 for r in runs for w in r.windows)
    for depth, chances in lines:
        products = torch.tensor(chances).cumprod(0).tolist()
        assert len(products) == depth and all(p >= STOP for p in products[:-1])
    assert any(depth < BASE.depth and torch.tensor(chances).prod() < STOP for depth, chances in lines)


def test_private_kv_ends_where_the_draft_ended(model: LoadedModel) -> None:
    with build_engine(model, replace(BASE, shared_kv=False), slots_per_layer=3) as engine:
        assert isinstance(engine.draft, DraftPass)
        reach = []
        engine.depth_policy.observe = lambda stats: reach.append(  # type: ignore[method-assign]
            engine.draft.reach[0] - engine.state.boundaries[0] + stats.committed - stats.depth  # type: ignore[union-attr]
        )
        runs = run(engine, REQUESTS[:1], 1)
        assert ended_early(engine, runs) > 0
    assert set(reach) == {0}


def test_the_script_counts_fewer_drafted_tokens_and_no_mismatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scripts.draft_stop_statistics import main

    monkeypatch.chdir(ROOT)
    output = tmp_path / "counts.csv"
    command = ["--models", "phimoe_mini", "--datasets", "builtin", "--prompts", "1", "--new-tokens", "16"]
    assert main([*command, "--depths", "12", "--thresholds", "0,0.7", "--output", str(output)]) == 0
    whole, stopped = pd.read_csv(output).to_dict("records")
    assert whole["ended_early"] == 0 < stopped["ended_early"] <= stopped["windows"]
    assert stopped["drafted"] < whole["drafted"] and stopped["committed"] == whole["committed"] > 0


def test_agreement_is_half_between_equals_and_grows_with_the_lead() -> None:
    logits = torch.tensor([[1.0, 1.0, -3.0], [0.0, 2.0, 1.5], [5.0, -5.0, -5.0], [float("nan"), 0.0, 0.0]])
    found = agreement(logits)
    assert found[0] == 0.5 and 0.5 < found[1] < found[2] <= 1 and not found[3] >= 0
    assert found[1] == torch.sigmoid(torch.tensor(0.5 * SHARPNESS))


@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan")])
def test_a_threshold_outside_its_range_is_refused_with_the_remedy(value: float) -> None:
    with pytest.raises(UserError, match=r"draft_stop is .*\[0, 1\); use 0"):
        EngineOptions(draft_stop=value)


def test_the_papers_variant_drafts_to_the_end() -> None:
    assert BASE.paper().draft_stop == 0


@pytest.mark.slow
def test_the_device_ends_rows_as_the_rule_says_and_begins_no_step_in_vain(tmp_path: Path) -> None:
    """Interpreted kernels; the rule on the very logits of each step."""
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    script = str(Path(__file__).with_name("interpreted_draft_stop.py"))
    command = [sys.executable, "-W", "ignore", script, "qwen2_moe", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    whole = found["whole"]
    for case in (found["greedy"], found["sampled"]):
        assert len(case["chances"]) == max(case["depths"]) and case["left"] == 0
        for b, (depth, most) in enumerate(zip(case["depths"], whole["depths"], strict=True)):
            products = [math.prod(step[b] for step in case["chances"][:t]) for t in range(1, depth + 1)]
            assert all(p >= STOP for p in products[:-1]) and (depth == most or products[-1] < STOP)
        assert case["depths"] != whole["depths"]
    for b, depth in enumerate(found["greedy"]["depths"]):
        assert found["greedy"]["tokens"][b][:depth] == whole["tokens"][b][:depth]
