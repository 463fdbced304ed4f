"""A run goes on whatever its systems do, and a second one does only what is missing."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from harness_fixture import TESTS, FixedPrompts, plan, raw_config, run

from harness import frame
from harness.cells import batches, expand
from harness.config import run_config
from harness.entries import SystemEntry
from harness.records import read_rows
from harness.reference_tokens import ReferenceTokens, reference_key
from harness.summary import ratio, summarise

pytestmark = pytest.mark.usefixtures("fakes_on_the_path")


def statuses(out: Path) -> dict[str, list[str]]:
    rows = frame.load(out / "records.csv")
    return rows.groupby("system")["status"].apply(list).to_dict()


def reference(**options) -> SystemEntry:
    return SystemEntry("reference", "fake_systems", "Reference", "#000000", 10, options=options)


def test_a_run_leaves_records_environment_summary_and_a_closing_line(tmp_path):
    outcome = run(raw_config(tmp_path, {"specter": {"depth": "model"}, "mo_sm": {}}))
    assert outcome["rows"] == outcome["new_rows"] == 8 and outcome["failed_rows"] == 0
    rows = frame.load(tmp_path / "records.csv")
    assert set(rows["K"][rows["system"] == "specter"]) == {8}
    assert rows["stall_ms"].tolist() == [1.75] * 8
    assert json.loads(rows["stall_by_cause"][0]) == {"late": 0.5, "miss": 1.25}
    assert rows["within_budget"].all() and rows["budget_bytes"].nunique() == 1
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["weights"] == {"tiny": "cafe"} and "torch" in environment["packages"]
    summary = pd.read_csv(tmp_path / "summary.csv")
    assert summary["n"].tolist() == [4, 4]
    assert (tmp_path / "systems.csv").exists()


def test_a_second_run_measures_nothing_again(tmp_path):
    raw = raw_config(tmp_path, {"specter": {"options": {"counter": str(tmp_path / "count")}}})
    run(raw)
    before = (tmp_path / "records.csv").read_bytes(), (tmp_path / "count").stat().st_size
    outcome = run(raw)
    assert outcome["new_rows"] == 0 and outcome["rows"] == 4
    assert ((tmp_path / "records.csv").read_bytes(), (tmp_path / "count").stat().st_size) == before


def test_another_option_is_another_cell_and_fresh_keeps_the_old_file_aside(tmp_path):
    run(raw_config(tmp_path))
    assert run(raw_config(tmp_path, {"specter": {"options": {"tpot_ms": 3}}}))["new_rows"] == 4
    assert len(read_rows(tmp_path / "records.csv")) == 8
    assert run(raw_config(tmp_path, fresh=True))["new_rows"] == 4
    assert len(read_rows(tmp_path / "records.csv.1")) == 8


@pytest.mark.parametrize(
    ("behaviour", "status"),
    [("kill", "crashed"), ("exit", "crashed"), ("memory", "oom"), ("bug", "failed"), ("hang", "timeout")],
)
def test_a_worker_that_fails_once_costs_one_row_and_the_rest_is_measured(tmp_path, behaviour, status):
    options = {"behaviour": behaviour, "at": 2, "counter": str(tmp_path / "count")}
    launcher = {"load_timeout_s": 60.0, "generate_timeout_s": 2.0, "restarts": 1}
    raw = raw_config(tmp_path, {"specter": {"options": options}, "mo_sm": {}}, launcher=launcher)
    outcome = run(raw)
    assert sorted(statuses(tmp_path)["specter"]) == sorted(["ok", status, "ok", "ok"])
    assert statuses(tmp_path)["mo_sm"] == ["ok"] * 4
    assert outcome["failed_rows"] == 1
    row = next(r for r in read_rows(tmp_path / "records.csv") if r["status"] == status)
    assert row["reason"] and row["tpot_ms"] == ""
    assert run(raw)["new_rows"] == 1, "a failed row is measured again"


def test_a_worker_that_always_dies_gets_status_rows_and_the_run_goes_on(tmp_path):
    options = {"behaviour": "kill", "at": "always", "counter": str(tmp_path / "count")}
    run(raw_config(tmp_path, {"specter": {"options": options}, "mo_sm": {}}))
    assert statuses(tmp_path) == {"specter": ["crashed"] * 4, "mo_sm": ["ok"] * 4}
    assert (tmp_path / "count").stat().st_size == 2, "one worker and one restart"
    reasons = [r["reason"] for r in read_rows(tmp_path / "records.csv") if r["system"] == "specter"]
    assert sum("not measured" in r for r in reasons) == 2


@pytest.mark.parametrize(("behaviour", "status"), [("refuse", "refused"), ("memory", "oom"), ("bug", "failed")])
def test_a_system_that_cannot_load_gets_a_row_per_prompt(tmp_path, behaviour, status):
    run(raw_config(tmp_path, {"specter": {"options": {"behaviour": behaviour, "at": "load"}}, "mo_sm": {}}))
    assert statuses(tmp_path) == {"specter": [status] * 4, "mo_sm": ["ok"] * 4}


def test_a_refused_request_costs_its_row_alone_and_no_worker(tmp_path):
    options = {"behaviour": "refuse", "at": 1, "counter": str(tmp_path / "count")}
    run(raw_config(tmp_path, {"specter": {"options": options}}))
    assert statuses(tmp_path)["specter"] == ["refused", "ok", "ok", "ok"]


def test_exact_match_compares_with_one_untimed_reference_run_per_prompt(tmp_path):
    raw = raw_config(tmp_path, {"specter": {}, "mo_sm": {"options": {"wrong_tokens": True}}})
    runs = reference(counter=str(tmp_path / "runs"))
    outcome = run(raw, runs)
    rows = frame.load(tmp_path / "records.csv")
    assert rows.groupby("system")["exact_match"].all().to_dict() == {"specter": True, "mo_sm": False}
    assert set(rows["system"]) == {"specter", "mo_sm"} and outcome["specter_exact_match"] is True
    run(raw_config(tmp_path, {"mo_sc": {}}), runs)
    assert (tmp_path / "runs").stat().st_size == 4, "tokens of the first run serve the second"


def test_a_failing_reference_run_leaves_exact_match_empty_and_the_run_goes_on(tmp_path):
    run(raw_config(tmp_path), reference(behaviour="kill", at=3, counter=str(tmp_path / "runs")))
    rows = frame.load(tmp_path / "records.csv")
    assert rows["status"].tolist() == ["ok"] * 4
    assert rows["exact_match"].tolist()[:2] == [True, True] and rows["exact_match"].isna().sum() == 2


def test_sampled_rows_are_compared_with_nothing(tmp_path):
    run(raw_config(tmp_path, temperature=0.7), reference())
    assert frame.load(tmp_path / "records.csv")["exact_match"].isna().all()
    assert not (tmp_path / "reference_tokens.jsonl").exists()


def test_reference_tokens_of_private_prompts_are_stored_as_a_hash_only(tmp_path):
    path = tmp_path / "reference_tokens.jsonl"
    secret, shown = (FixedPrompts().select(None, d, 4)[0] for d in ("secret", "builtin"))
    ReferenceTokens(path).put(reference_key("m", secret, 3), secret, [7, 8, 9])
    line = json.loads(path.read_text())
    assert "tokens" not in line and len(line["tokens_sha256"]) == 64
    with path.open("a") as file:
        file.write('{"model": "m", "tok')
    again = ReferenceTokens(path)
    assert again.matches(reference_key("m", secret, 3), [7, 8, 9]) is True
    assert again.matches(reference_key("m", secret, 3), [7, 8, 1]) is False
    again.put(reference_key("m", shown, 2), shown, [1, 2])
    assert ReferenceTokens(path).matches(reference_key("m", shown, 2), [1, 2]) is True
    assert json.loads(path.read_text().splitlines()[-1])["tokens"] == [1, 2]


def test_systems_of_a_block_run_in_an_order_that_only_the_seed_decides(tmp_path):
    systems = {name: {} for name in "abcdef"}

    def order(seed: int) -> list[str]:
        return [g.system.name for g in expand(run_config(raw_config(tmp_path, systems, seed=seed)), "cpu").blocks[0]]

    assert order(0) == order(0) and sorted(order(1)) == list("abcdef")
    assert len({tuple(order(seed)) for seed in range(5)}) > 1


def test_the_grid_covers_every_combination_once_and_fixed_depths_ignore_the_axis(tmp_path):
    raw = raw_config(
        tmp_path,
        {"specter": {"depth": "model"}, "mo_sm": {}},
        depth=[2, 4, "model"],
        batch=[1, 2],
        prefix_tokens=[4, 8],
        repeats=2,
    )
    grid = expand(run_config(raw), "cpu")
    assert len(grid.blocks) == 2 * 2 * 2
    assert all(sorted(g.depth for g in block) == [0, 2, 4, 8] for block in grid.blocks)
    hashes = [h for p in plan(run_config(raw)).groups for h in p.hashes.values()]
    assert len(set(hashes)) == len(hashes) / 2, "repeats share their config hash, nothing else does"


def test_systems_that_cannot_run_in_a_setting_are_skipped_with_the_reason(tmp_path):
    systems = {
        "a": {"links": {"cpu": ["native"]}},
        "b": {"available": False, "reason": "not built yet"},
        "c": {},
    }
    grid = expand(run_config(raw_config(tmp_path, systems)), "cpu")
    assert [g.system.name for g in grid.blocks[0]] == ["c"]
    assert [s.reason for s in grid.skips] == [
        "runs on cpu with link native only, not scaled",
        "not built yet",
    ]


def test_batches_are_full_and_hold_every_prompt():
    assert batches([1, 2, 3], 2) == [[1, 2], [3, 1]]
    assert batches([1, 2], 4) == [[1, 2, 1, 2]]


def test_a_batched_run_records_each_prompt_once(tmp_path):
    outcome = run(raw_config(tmp_path, batch=[3]))
    assert len((tmp_path / "records.csv").read_text().splitlines()) == 1 + 4
    rows = frame.load(tmp_path / "records.csv")
    assert outcome["rows"] == 4 and rows["prompt_id"].is_unique and set(rows["B"]) == {3}


def test_the_ratio_is_paired_over_prompts_and_its_interval_covers_it():
    base = pd.Series([10.0, 20.0, 40.0], index=["a", "b", "c"])
    mean, low, high = ratio(pd.Series([20.0, 44.0, 72.0, 1.0], index=["a", "b", "c", "d"]), base)
    assert mean == pytest.approx((2.0 * 2.2 * 1.8) ** (1 / 3))
    assert low < mean < high
    assert ratio(base * 3, base) == pytest.approx((3, 3, 3))
    assert all(math.isnan(x) for x in ratio(base, base[:0]))


def test_the_summary_counts_failures_and_leaves_them_out_of_the_means(tmp_path):
    options = {"behaviour": "kill", "at": 1, "counter": str(tmp_path / "count")}
    run(raw_config(tmp_path, {"specter": {}, "mo_sm": {"options": {"tpot_ms": 4.0, **options}}}))
    summary = summarise(frame.load(tmp_path / "records.csv")).set_index("system")
    assert summary["failed"].to_dict() == {"specter": 0, "mo_sm": 1}
    assert summary["n"]["mo_sm"] == 3 and summary["tpot_ms"]["mo_sm"] > 4
    assert summary["ratio"]["specter"] == 1 and summary["ratio"]["mo_sm"] > 1


def test_a_run_killed_in_the_middle_resumes_where_it_was(tmp_path):
    """kill -9 of the whole harness while a request is measured: recorded rows stay, the rest follows."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path; from harness_fixture import raw_config, run\n"
        "out = Path(sys.argv[2])\n"
        "options = {'behaviour': 'hang', 'at': 3, 'counter': str(out / 'count')}\n"
        "run(raw_config(out, {'specter': {'options': options}}))\n"
    )
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(TESTS), str(TESTS.parent)]))
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(TESTS), str(tmp_path)], env=env, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    count = tmp_path / "count"
    while not (count.exists() and count.stat().st_size == 3) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert [r["status"] for r in read_rows(tmp_path / "records.csv")] == ["ok", "ok"]
    options = {"behaviour": "hang", "at": 3, "counter": str(count)}
    outcome = run(raw_config(tmp_path, {"specter": {"options": options}}))
    assert outcome["new_rows"] == 2 and outcome["rows"] == 4
