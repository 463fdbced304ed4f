"""The paper's claims: each holds on a results folder made after the paper, and each turns when its rows do."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from artifact_fixture import base, main_rows, write_all, write_records, write_table

from figures import results
from figures.results import ACCEPTANCE, EXACTNESS
from harness import claims
from harness.claim_cells import Cells, Setting
from harness.claim_data import Evidence
from harness.claim_verdict import Claim, Verdict, judge, load

ALL = {c.id: c for c in load(claims.CLAIMS)}
PAPER_SETTING = Setting("official", "native", "cuda")
Flip = Callable[[results.Results], None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module")
def found(folder):
    return results.read(folder)


@pytest.fixture(scope="module")
def unchanged(found):
    """id -> verdict on the paper's numbers."""
    return {f.claim.id: f.verdict for f in claims.evaluate(list(ALL.values()), found, draws=0)}


def part(found: results.Results, claim: Claim) -> results.Results:
    """A copy of what this claim reads, to be changed."""
    source = {"acceptance": "depth", "working_set": "batch", "exact": "main"}.get(claim.data, claim.data)
    tables = {name: table.copy() for name, table in found.tables.items()}
    return results.Results(found.folder, {k: v.copy() for k, v in found.records.items() if k == source}, tables)


def written(found: results.Results, folder: Path) -> results.Results:
    """The same rows as CSV files, read back."""
    for name, rows in found.records.items():
        (folder / name).mkdir()
        rows.to_csv(folder / name / "records.csv", index=False)
    for name, rows in found.tables.items():
        rows.to_csv(folder / f"{name}.csv", index=False)
    return results.read(folder)


def scaled(source: str, column: str, factor: float, /, **where: Any) -> Flip:
    """Multiplies a column of the rows that meet all conditions."""

    def flip(found: results.Results) -> None:
        rows = found.records[source] if source in found.records else found.tables[source]
        chosen = rows[column].notna()
        for name, value in where.items():
            chosen &= rows[name].str.startswith(value) if name == "shape" else rows[name] == value
        assert chosen.any(), where
        rows[column] = rows[column].astype(float)
        rows.loc[chosen, column] *= factor

    return flip


def acceptance_halved(found: results.Results) -> None:
    scaled("depth", "acceptance", 0.5)(found)


def datasets_alike(found: results.Results) -> None:
    rows = found.tables["routing"]
    rows.loc[rows["kind"] == "distinct", "value"] = 10.0 + rows["layer"]


def halves_apart(found: results.Results) -> None:
    rows = found.tables["routing"]
    rows.loc[rows["dataset"] == rows["other"], "value"] *= 100


def one_output_differs(found: results.Results) -> None:
    rows = found.records["main"]
    rows.loc[rows.index[rows["system"] == "specter"][0], "exact_match"] = False


def shallow_best(model: str) -> Flip:
    return scaled("depth", "tpot_ms", 0.01, model=model, K=2)


FLIPS: dict[str, Flip] = {
    "acceptance_max": acceptance_halved,
    "acceptance_mean": acceptance_halved,
    "expected_accepted": acceptance_halved,
    "lowest_average_tpot": scaled("main", "tpot_ms", 0.01, system="mo_sm", model="phi35_moe", memory="low"),
    "speedup_mean": scaled("main", "tpot_ms", 0.3, system="specmoeoff"),
    "speedup_max": scaled("main", "tpot_ms", 0.3, system="specmoeoff"),
    "speedup_transformers": scaled("main", "tpot_ms", 0.1, system="transformers"),
    "low_memory_datasets": scaled("main", "tpot_ms", 0.1, system="mo_sm", memory="low"),
    "low_memory_average": scaled("main", "tpot_ms", 0.1, system="mo_sm", memory="low"),
    "lead_in_high_memory": scaled("main", "tpot_ms", 1.5, system="specter", memory="high"),
    "batch_largest_rise": scaled("batch", "tpot_ms", 10, system="specter", B=4),
    "batch_speedup_tpot": scaled("batch", "tpot_ms", 0.1, system="specmoeoff", B=32),
    "batch_speedup_throughput": scaled("batch", "throughput", 10, system="specmoeoff", B=16),
    "fused_faster": scaled("kernels", "us", 10, variant="fused"),
    "marlin_prefill": scaled("kernels", "us", 10, backend="marlin", shape="dense"),
    "marlin_dense_decoding": scaled("kernels", "us", 10, backend="marlin", shape="dense"),
    "marlin_narrow_experts": scaled("kernels", "us", 0.1, backend="marlin", shape="expert"),
    "working_sets_differ": datasets_alike,
    "routing_differs": halves_apart,
    "main_run_minutes": scaled("timings", "minutes", 10, sweep="main"),
    "depth_sweep_minutes": scaled("timings", "minutes", 10, sweep="depth"),
    "prefix_sweep_minutes": scaled("timings", "minutes", 10, sweep="prefix"),
    "exact_output": one_output_differs,
}
for _model in ("deepseek_v2_lite", "qwen15_moe", "phi35_moe"):
    FLIPS[f"depth_{_model}"] = shallow_best(_model)
    FLIPS[f"tpot_{_model}_specter"] = scaled("main", "tpot_ms", 10, system="specter", model=_model)
    for _system in ("specmoeoff", "mo_sm", "vllm", "transformers"):
        if f"tpot_{_model}_{_system}" in ALL:
            FLIPS[f"tpot_{_model}_{_system}"] = scaled("main", "tpot_ms", 0.01, system=_system, model=_model)
for _model in ("deepseek_v2_lite", "qwen15_moe"):
    FLIPS[f"batch_tpot_{_model}"] = scaled("batch", "tpot_ms", 0.1, system="specter", model=_model, B=32)
    FLIPS[f"batch_throughput_{_model}"] = scaled("batch", "throughput", 0.05, system="specter", model=_model, B=32)
    FLIPS[f"batch_first_step_{_model}"] = scaled("batch", "tpot_ms", 0.1, system="specter", model=_model, B=2)
    FLIPS[f"working_set_{_model}"] = scaled("batch", "distinct_experts", 0.6, system="specter", model=_model, B=2)


def verdict(claim: Claim, found: results.Results) -> Verdict:
    return claims.evaluate([claim], found, draws=0)[0].verdict


def changed(found: results.Results, **columns: Any) -> results.Results:
    """A copy with these columns set everywhere they exist."""
    other = copy.deepcopy(found)
    for table in [*other.records.values(), *other.tables.values()]:
        for name, value in columns.items():
            if name in table:
                table[name] = value
    return other


def test_every_claim_has_a_flip():
    assert set(FLIPS) == set(ALL)


@pytest.mark.parametrize("name", sorted(ALL))
def test_each_claim_holds_on_the_papers_numbers_and_turns_when_its_rows_do(name, found, unchanged, tmp_path):
    claim = ALL[name]
    assert unchanged[name] is (Verdict.TREND if claim.data == "kernels" else Verdict.CONFIRMED)
    other = part(found, claim)
    FLIPS[name](other)
    assert verdict(claim, written(other, tmp_path)) is Verdict.NOT_CONFIRMED


def test_fitted_quantities_of_synthetic_weights_are_calibrated_and_the_rest_at_most_a_trend(found):
    findings = claims.evaluate(list(ALL.values()), changed(found, weights="synthetic"), draws=0)
    for finding in findings:
        assert finding.verdict is (Verdict.CALIBRATED if finding.claim.fitted else Verdict.TREND), finding.claim.id


@pytest.mark.parametrize("columns", [{"link": "pcie4"}, {"device": "cpu"}, {"weights": "reference"}])
def test_nothing_is_confirmed_off_the_papers_setting(found, columns):
    findings = claims.evaluate(list(ALL.values()), changed(found, **columns), draws=0)
    linkless = {"kernels", "routing"}
    for finding in findings:
        if "link" not in columns or finding.claim.data not in linkless:
            assert finding.verdict is not Verdict.CONFIRMED, finding.claim.id


def test_claims_that_need_a_gpu_are_not_run_on_a_cpu(found):
    for finding in claims.evaluate(list(ALL.values()), changed(found, device="cpu"), draws=0):
        assert (finding.verdict is Verdict.NOT_RUN) == ("cuda" in finding.claim.needs), finding.claim.id


def test_a_missing_baseline_or_model_bars_confirmation_and_is_named(found):
    other = copy.deepcopy(found)
    rows = other.records["main"]
    other.records["main"] = rows[(rows["system"] != "vllm") & (rows["model"] != "phi35_moe")]
    finding = claims.evaluate([ALL["lowest_average_tpot"]], other, draws=0)[0]
    assert finding.verdict is Verdict.TREND
    assert "vllm" in finding.reason and "phi35_moe high" in finding.reason


def test_a_baseline_with_fewer_datasets_or_tokens_bars_confirmation_and_is_named(found):
    other = copy.deepcopy(found)
    rows = other.records["main"]
    slow = rows["system"] == "transformers"
    rows = rows[~slow | (rows["label"] == "GK")]
    other.records["main"] = rows.assign(new_tokens=rows["new_tokens"].where(rows["system"] != "transformers", 6))
    finding = claims.evaluate([ALL["speedup_transformers"]], other, draws=0)[0]
    assert finding.verdict is Verdict.TREND
    assert "transformers not measured on" in finding.reason and "with 6 of 128 new tokens" in finding.reason


def test_a_speedup_is_taken_on_the_datasets_that_both_were_measured_on(found):
    other = copy.deepcopy(found)
    rows = other.records["main"]
    rows = rows[(rows["system"] != "specter") | (rows["label"] != "C4")]
    slow = (rows["system"] == "specmoeoff") & (rows["label"] == "C4")
    other.records["main"] = rows.assign(tpot_ms=rows["tpot_ms"] * (1 + 9 * slow))
    finding = claims.evaluate([ALL["speedup_max"]], other, draws=0)[0]
    assert finding.value == pytest.approx(1.88, rel=0.02)
    assert finding.verdict is Verdict.TREND and "specter not measured on C4" in finding.reason


def test_the_strongest_setting_counts_and_the_others_are_listed(found):
    other = copy.deepcopy(found)
    weaker = other.records["main"].assign(link="pcie4", config_hash=lambda r: r["config_hash"] + "-pcie4")
    other.records["paced"] = weaker
    finding = claims.evaluate([ALL["speedup_max"]], other, draws=0)[0]
    assert (finding.verdict, finding.link) == (Verdict.CONFIRMED, "native")
    assert [(f.verdict, f.link) for f in finding.also] == [(Verdict.TREND, "pcie4")]


def test_reference_models_stand_in_only_where_a_claim_allows_it(tmp_path):
    small = {"deepseek_v2_lite": "deepseek_v2_mini", "qwen15_moe": "qwen2_moe_mini", "phi35_moe": "phimoe_mini"}
    rows = [r | {"model": small[r["model"]], "weights": "reference"} for r in main_rows()]
    write_records(tmp_path / "main", rows)
    findings = {f.claim.id: f for f in claims.evaluate(list(ALL.values()), results.read(tmp_path), draws=0)}
    assert findings["speedup_max"].verdict is Verdict.TREND
    assert "stand-in" in findings["speedup_max"].reason
    assert findings["tpot_phi35_moe_specter"].verdict is Verdict.NOT_RUN


def test_acceptance_is_read_from_its_own_table_where_no_run_has_it(tmp_path):
    rows = [{"model": "deepseek_v2_mini", "weights": "reference", "device": "cpu", "dataset": "C4", "depth": 8}]
    write_table(tmp_path / "acceptance.csv", ACCEPTANCE, [r | {"acceptance": 0.95} for r in rows])
    (finding,) = claims.evaluate([ALL["acceptance_max"]], results.read(tmp_path), draws=0)
    assert (finding.verdict, finding.value) == (Verdict.TREND, 0.95)


@pytest.mark.parametrize(("mismatches", "expected"), [(0, Verdict.TREND), (3, Verdict.NOT_CONFIRMED)])
def test_exactness_is_read_from_its_own_table_where_no_request_has_a_reference(tmp_path, mismatches, expected):
    checks = [{"model": "m", "weights": "synthetic", "tokens": 20000, "mismatches": mismatches}]
    write_table(tmp_path / "exactness.csv", [name for name in EXACTNESS if name != "device"], checks)
    (tmp_path / "environment.json").write_text('{"gpu": "GPU X"}')
    write_records(tmp_path / "main", [r | {"weights": "reference"} for r in main_rows()])
    (finding,) = claims.evaluate([ALL["exact_output"]], results.read(tmp_path), draws=0)
    assert (finding.verdict, finding.weights) == (expected, "synthetic")
    assert [f.weights for f in finding.also] == ["reference"]


def test_working_sets_are_compared_on_records_where_no_routing_was_traced(tmp_path):
    place = {label: n for n, label in enumerate(("GK", "WT", "HE", "GP", "C4"))}
    rows = [r | {"distinct_experts": 30.0 + place[r["label"]] + 0.01 * len(r["prompt_id"])} for r in main_rows(3)]
    write_records(tmp_path / "main", [r | {"weights": "synthetic"} for r in rows])
    wanted = [ALL["working_sets_differ"], ALL["routing_differs"]]
    differ, diverge = claims.evaluate(wanted, results.read(tmp_path), draws=0)
    assert differ.verdict is Verdict.CALIBRATED and differ.value > 2
    assert diverge.verdict is Verdict.NOT_RUN


def test_what_was_tried_and_not_measured_says_why(tmp_path):
    missed = {"status": "not_run", "reason": "the time was used up", "tpot_ms": None, "config_hash": "x"}
    write_records(tmp_path / "sweeps" / "depth", [r | missed for r in main_rows() if r["system"] == "specter"])
    rows = [r | missed if r["system"] == "vllm" else r for r in main_rows() if r["model"] == "qwen15_moe"]
    write_records(tmp_path / "main", rows)
    wanted = [ALL["depth_phi35_moe"], ALL["tpot_qwen15_moe_vllm"], ALL["batch_largest_rise"]]
    depth, vllm, batch = claims.evaluate(wanted, results.read(tmp_path), draws=0)
    assert depth.verdict is vllm.verdict is batch.verdict is Verdict.NOT_RUN
    assert depth.reason.endswith("tried here: the time was used up")
    assert vllm.reason.endswith("tried here: vllm: the time was used up")
    assert "tried here" not in batch.reason and "sweep=batch" in batch.reason


def test_intervals_pair_the_prompts_of_the_systems(tmp_path):
    """Prompts differ tenfold, the ratio of the systems does not: its interval is narrow, that of a TPOT is not."""
    rows = []
    for number in range(8):
        for system, factor in (("specter", 1.0), ("specmoeoff", 1.5)):
            own = base("phi35_moe", system, "high", "C4", number, random.Random(0))
            rows.append(own | {"tpot_ms": factor * (1 + 9 * (number % 2))})
    write_records(tmp_path / "main", rows)
    findings = claims.evaluate([ALL["speedup_max"], ALL["tpot_phi35_moe_specter"]], results.read(tmp_path), draws=100)
    ratio, tpot = findings
    assert ratio.low == pytest.approx(1.5) and ratio.high == pytest.approx(1.5)
    assert tpot.low < tpot.value < tpot.high


def test_resampling_is_undone():
    evidence = Evidence(Cells(pd.DataFrame(main_rows())))
    before = evidence.tpot("specter", "phi35_moe")
    evidence.resample(np.random.default_rng(0))
    assert evidence.tpot("specter", "phi35_moe") != before
    evidence.restore()
    assert evidence.tpot("specter", "phi35_moe") == before


def test_ten_percent_off_is_within_tolerance_and_more_is_not():
    claim = ALL["speedup_max"]
    assert claim.holds(1.88 * 1.0999) and not claim.holds(1.88 * 1.101)
    for value, expected in ((2.0, Verdict.CONFIRMED), (2.5, Verdict.TREND)):
        assert judge(claim, value, value > 1, {"official"}, PAPER_SETTING, whole=True) is expected
    assert judge(claim, 0.9, False, {"official"}, PAPER_SETTING, whole=True) is Verdict.NOT_CONFIRMED


def test_an_empty_folder_runs_nothing_and_exits_with_zero(tmp_path, capsys):
    assert claims.main(["--results", str(tmp_path)]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["counts"]["NOT RUN"] == last["claims"] == len(ALL)


def test_the_json_holds_every_claim_with_both_values(folder, tmp_path, capsys):
    out = tmp_path / "claims.json"
    assert claims.main(["--results", str(folder), "--out", str(out), "--draws", "40"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(ALL) + 1
    written = {c["id"]: c for c in json.loads(out.read_text())["claims"]}
    assert set(written) == set(ALL)
    speedup = written["speedup_max"]
    assert speedup["paper"] == 1.88 and math.isclose(speedup["measured"], 1.88, rel_tol=0.02)
    assert speedup["low"] <= speedup["measured"] <= speedup["high"]
    assert speedup["weights"] == "official" and speedup["device"] == "cuda"
