"""Values that figures and tables derive from records, traces, model configurations and the paper's own numbers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pandas as pd
import pytest
from artifact_fixture import DEPTH, batch_rows, write_all

from figures import (
    fig07_depth,
    fig09_timeline,
    fig16_working_set,
    paper,
    results,
    table2_models,
    table3_batch32,
    traces,
)

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return results.read(write_all(tmp_path_factory.mktemp("results")))


def test_the_depth_of_least_tpot_is_chosen(found):
    chosen = fig07_depth.best(found.records["depth"]).set_index("model")["K"].to_dict()
    assert chosen == DEPTH


def test_the_working_set_follows_from_slots_and_ceiling_unless_it_was_counted(found):
    rows = found.records["batch"].drop(columns="distinct_experts")
    derived = fig16_working_set.working_set(rows)
    own = derived[(derived["model"] == "qwen15_moe")].groupby("B")["distinct"].mean()
    assert own[2] / own[1] == pytest.approx(1.52)
    counted = fig16_working_set.working_set(rows.assign(distinct_experts=7.0))
    assert set(counted["distinct"]) == {7.0}


def test_windows_that_fit_the_slots_tell_no_working_set(found):
    rows = found.records["batch"].assign(coverage_ceiling=1.0, distinct_experts=None)
    assert fig16_working_set.working_set(rows).empty


def test_planner_phases_follow_from_the_plans(tmp_path, found):
    table = traces.events(found.traces[0])
    window = traces.windows(table).iloc[0]
    own = traces.between(table, window["start_ms"], window["end_ms"])
    spans = fig09_timeline.phases(own, window["draft_end_ms"] - window["start_ms"])
    assert [s.phase for s in spans] == ["Cold Start", "Prefetch Overlap", "Final Cleanup"]
    assert all(a.end_ms == b.start_ms for a, b in itertools.pairwise(spans))
    one_plan = own[(own["name"] != "plan") | (own["drafted"] == 2)]
    spans = fig09_timeline.phases(one_plan, window["draft_end_ms"] - window["start_ms"])
    assert [s.phase for s in spans] == ["Cold Start", "Final Cleanup"]


def test_a_file_that_is_no_trace_is_one_line(tmp_path):
    path = tmp_path / "expertwise.json"
    path.write_text(json.dumps({"events": []}))
    with pytest.raises(SystemExit, match="is no trace"):
        traces.events(path)


def test_model_sizes_are_those_of_the_configurations():
    table = table2_models.models(ROOT / "conf" / "model").set_index("model")
    assert table.loc["deepseek_v2_lite", "total"] == 15_706_484_224
    assert table.loc["qwen15_moe", "routed"] == 12_457_082_880
    assert table.loc["phi35_moe", "active"] == 6_640_999_744
    assert table.loc["deepseek_v2_lite", "expert_bytes"] == 17_301_504
    assert table.loc["phi35_moe", "draft_bytes"] == pytest.approx(22.331 * 2**30, rel=1e-4)


def test_shipped_models_count_every_element_of_their_checkpoint():
    safetensors = pytest.importorskip("safetensors")
    table = table2_models.models(ROOT / "conf" / "model").set_index("model")
    for name in ("deepseek_v2_mini", "qwen2_moe_mini", "phimoe_mini"):
        total = 0
        for path in (ROOT / "reference" / name).glob("*.safetensors"):
            with safetensors.safe_open(path, "pt") as file:
                for key in file.keys():  # noqa: SIM118
                    count = 1
                    for extent in file.get_slice(key).get_shape():
                        count *= extent
                    total += count
        assert table.loc[name, "total"] == total


def test_table3_takes_the_largest_batch_where_32_was_not_run():
    rows = pd.DataFrame(batch_rows())
    assert set(table3_batch32.table(rows)["B"]) == {32}
    assert set(table3_batch32.table(rows[rows["B"] < 16])["B"]) == {8}


def test_only_stated_averages_of_the_paper_are_marked():
    assert paper.value("tpot_ms", model="phi35_moe", memory="high", system="specter") == 163.3
    assert paper.value("tpot_ms", model="phi35_moe", memory="low", system="specter") is None
    assert paper.value("tpot_ms", model="deepseek_v2_lite", memory="high", system="vllm") is None
    assert paper.value("tpot_ms", model="phimoe_mini", memory="high", system="specter") is None
