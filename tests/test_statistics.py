"""Outliers, estimates and routing statistics."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from harness_fixture import plan, raw_config, run
from records_fixture import main_run, row
from tiny_models import tiny_checkpoint

from harness import listing
from harness.config import run_config
from harness.estimate import Speeds
from harness.frame import typed
from harness.kernel_sweep import kernels_table
from harness.outliers import flags
from harness.records import cell
from harness.routing import measure, statistics
from harness.routing.trace import routing_of
from harness.summary import summarise

pytestmark = pytest.mark.usefixtures("fakes_on_the_path")


def frame(rows) -> pd.DataFrame:
    return typed([{name: cell(value) for name, value in r.items()} for r in rows])


def cells(times, **changes):
    return [row(prompt_id=f"p{i}", tpot_ms=t) | changes for i, t in enumerate(times)]


def test_a_request_far_from_its_cell_is_flagged_and_stays_in_the_mean():
    times = [20.0, 21.0, 19.0, 20.5, 19.5, 20.0, 21.0, 19.0, 20.5, 80.0]
    rows = frame(cells(times))
    assert flags(rows).tolist() == [False] * 9 + [True]
    line = summarise(rows).iloc[0]
    assert (line["outliers"], line["n"]) == (1, 10) and line["tpot_ms"] == pytest.approx(np.mean(times))
    assert not flags(frame(cells(times[1:]))).any(), "nine requests are too few"
    assert not flags(frame(cells([20.0, 20.001] * 5 + [20.05]))).any(), "noise of the clock"


def test_with_repeats_a_slow_prompt_is_no_outlier_and_a_slow_repeat_is():
    rows = [
        row(prompt_id=p, repeat=r, tpot_ms=base * (1 + 0.01 * r))
        for p, base in (("a", 20.0), ("b", 60.0), ("c", 21.0), ("d", 22.0))
        for r in range(3)
    ]
    assert not flags(frame(rows)).any()
    rows[1] |= {"tpot_ms": 40.0}
    assert flags(frame(rows)).tolist() == [False, True, *[False] * 10]


def test_failed_requests_are_no_outliers():
    failed = row(prompt_id="x", status="oom", reason="no room", tpot_ms=None, ttft_ms=None, throughput=None)
    assert not flags(frame([*cells([20.0] * 10), failed])).any()


def test_ratios_are_over_the_default_variant():
    rows = frame([*main_run(), *(r | {"variant": "no_prefetch", "tpot_ms": 2 * r["tpot_ms"], "config_hash": "n"}
                                 for r in main_run() if r["system"] == "specter")])  # fmt: skip
    table = summarise(rows).set_index(["system", "variant"])
    assert table.loc[("specter", "default"), "ratio"] == pytest.approx(1)
    assert table.loc[("specter", "no_prefetch"), "ratio"] == pytest.approx(2)


def test_a_system_with_fewer_tokens_is_compared_with_specters_rows_of_the_same_prompts():
    slow = [
        r | {"system": "transformers", "new_tokens": 4, "tpot_ms": 7 * r["tpot_ms"], "config_hash": "s"}
        for r in main_run()
        if r["system"] == "specter"
    ]
    rows = [r for r in main_run() if r["system"] != "transformers"]
    table = summarise(frame([*rows, *slow[:3]])).set_index(["system", "new_tokens"])
    assert table.loc[("transformers", 4), "ratio"] == pytest.approx(7) and table.loc[("transformers", 4), "n"] == 3
    assert table.loc[("specter", 32), "ratio"] == pytest.approx(1)


def test_a_plan_tells_minutes_from_the_same_cell_before_similar_ones_before_rough_figures(tmp_path):
    raw = raw_config(tmp_path / "a", {"specter": {"depth": "model"}})
    [planned] = plan(run_config(raw)).groups
    assert Speeds([], "cpu").request(planned).basis == "rough"
    run(raw | {"new_tokens": [3]})
    similar = Speeds([tmp_path / "a/records.csv"], "cpu").request(planned)
    assert similar.basis == "similar" and 0 < similar.seconds < 0.1
    run(raw)
    speeds = Speeds([tmp_path / "a/records.csv"], "cpu")
    found = speeds.request(planned)
    assert found.basis == "recorded" and found.seconds == pytest.approx(0.005 + 5 * 0.0022, rel=0.3)
    assert speeds.cell_s(planned, 0).seconds == 0 < speeds.cell_s(planned, 1).seconds
    assert Speeds([tmp_path / "a/records.csv"], "cuda").request(planned).basis == "rough"
    lines = "\n".join(listing.plan_lines(run_config(raw), plan(run_config(raw)), tmp_path / "a/records.csv"))
    assert "0 of 4 requests" in lines and "GiB on the device" in lines and "experts in host memory" in lines
    older, torn = tmp_path / "older.csv", tmp_path / "torn.csv"
    text = (tmp_path / "a/records.csv").read_text()
    older.write_text(text.replace("ttft_ms", "ttft", 1))
    torn.write_text(text + "specter,default\n")
    assert Speeds([older, torn], "cpu").request(planned).basis == "rough", "files of no use are passed over"


def test_routing_statistics_of_traces_that_can_be_counted_by_hand():
    ids = np.array([[[0, 1], [0, 1], [2, 3], [2, 3]]])  # [L = 1, T = 4, k = 2]
    assert statistics.distinct([ids[0]], 2) == 2 and statistics.distinct([ids[0]], 4) == 4
    assert statistics.reuse(ids) == pytest.approx(2 / 3)
    assert statistics.lru(ids, 2) == 0.5 and statistics.lru(ids, 1) == 0
    other = np.array([[[4, 5]] * 4])
    pairs = {(a, b): v for a, b, v in statistics.divergences({"GK": [ids, ids], "C4": [other]}, 6)}
    assert pairs == {("GK", "GK"): 0, ("GK", "C4"): pytest.approx(1)}, "one request has no halves"


@pytest.mark.parametrize("family", ["deepseek_v2", "phimoe"])
def test_traced_routing_is_that_of_the_plain_pass_and_one_row_per_statistic_is_written(family, tmp_path):
    import torch
    from plain_model import PlainRoutedExperts

    from specter_core.model.experts_loader import ExpertWeights
    from specter_core.model.rows import Rows
    from specter_core.opening import open_model
    from specter_core.state.kv_cache import KVCache

    folder = tiny_checkpoint(family, tmp_path / "model")
    tokens = [5, 9, 2, 7, 11, 3]
    with open_model(folder, rtn_if_missing=True) as model:
        found = routing_of(model, tokens)
        decoder, layout = model.decoder, model.store.layout
        experts = PlainRoutedExperts(lambda key: ExpertWeights(*layout.views(model.store.entry(key))))
        kv, rows = KVCache(decoder.config, 1, 6, "cpu", decoder.dtype), Rows.prefill(0, 0, 6, 6)
        x, expected = decoder.embed(torch.tensor([tokens])), []
        for layer in decoder.layers:
            x = layer.attend(x, kv, rows)
            if layer.moe_index is None:
                x = layer.dense(x)
                continue
            routing = layer.route(x, rows)
            expected.append(routing.ids.numpy())
            x = layer.combine(x, routing.normed, experts(layer.moe_index, routing))
        assert (found == np.stack(expected)).all()
        prompts = {"GK": [(1, 2, 3), (4, 5, 6)], "C4": [(7, 8, 9), (3, 1, 2)]}
        common = {"model": "m", "weights": "reference", "device": "cpu"}
        routing, accepted = measure.measure(model, prompts, common, depth=2, new_tokens=6)
    measure.write(tmp_path, routing, accepted)
    measure.write(tmp_path, [r | {"model": "n"} for r in routing], [a | {"model": "n"} for a in accepted])
    measure.write(tmp_path, routing, accepted)
    written = pd.read_csv(tmp_path / "routing.csv")
    assert len(written) == 2 * len(routing) and set(written["model"]) == {"m", "n"}
    assert set(written["kind"]) == {"distinct", "reuse", "lru", "divergence"}
    assert written[written["kind"] == "distinct"]["window"].eq(3).all()
    assert "GK" in measure.tables(tmp_path)


def test_the_kernel_bench_becomes_rows_that_the_figures_read():
    from figures.results import KERNELS

    bench = pd.DataFrame(
        [
            ["deepseek_v2_lite", "both launches", 1, 16.3, 1.6, 0.4],
            ["deepseek_v2_lite", "both launches, dependent launch", 1, 15.5, 1.7, 0.42],
            ["deepseek_v2_lite", "gate_up alone", 1, 9.0, 1.7, 0.42],
            ["deepseek_v2_lite", "per choice", 4, None, None, None],
        ],
        columns=["model", "form", "tokens", "us", "tb_per_s", "share_of_ceiling"],
    )
    table = kernels_table(bench)
    assert list(table.columns) == list(KERNELS)
    assert table["us"].tolist() == [15.5] and table["shape"].tolist() == ["moe deepseek_v2_lite"]
