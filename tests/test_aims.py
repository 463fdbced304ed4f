"""Aims: what counts as met, what the benches write, and what is computed from records."""

from __future__ import annotations

import csv

import pytest

from harness import aim
from harness.aim import Aim
from scripts.gpu import bench_decode_kernels, bench_draft, bench_link, bench_nested, window_aims


@pytest.mark.parametrize(
    ("value", "target", "met"),
    [(2.0, "<= 2.0", True), (2.01, "<= 2.0", False), (0.9, ">= 0.9", True), (0.89, ">= 0.9", False), (5.0, "", None)],
)
def test_an_aim_is_met_on_its_side_of_the_target(value, target, met):
    assert Aim("x", value, "ms", target, "c").met is met


def test_what_was_not_measured_or_does_not_count_is_not_met():
    assert Aim("x", None, "ms", "<= 2", "c").met is None
    assert Aim("x", 1.0, "ms", "<= 2", "c", "over budget", void=True).met is False


def test_aims_are_written_as_the_report_reads_them(tmp_path):
    aim.write(tmp_path / "none_aims.csv", [])
    assert not list(tmp_path.iterdir())
    aim.write(
        tmp_path / "a" / "b_aims.csv", [Aim("x, y", 1.23456789, "ms", "<= 2", "c", "n"), Aim("z", None, "", "", "")]
    )
    with (tmp_path / "a" / "b_aims.csv").open() as file:
        rows = list(csv.reader(file))
    assert rows == [list(aim.FIELDS), ["x, y", "1.23457", "ms", "<= 2", "true", "c", "n"], ["z", *[""] * 6]]


def window_summary(needed: float, where: str = "24 GB") -> list[dict]:
    def row(what, value, note=""):
        return {"model": "m", "where": where, "what": what, "value": value, "unit": "share", "note": note}

    return [
        row(window_aims.BOUND, 50.0, f"needed {needed:.1f}, compute 32.0"),
        row(window_aims.LINK_USE, 0.8),
        row("window over bound", 1.1),
        row("positions with other logit bits", 2.0),
        row("token mismatches", 1.0),
    ]


def test_the_links_aim_holds_only_where_the_window_is_link_bound():
    by_name = {a.aim: a for a in window_aims.aims(window_summary(45.8), "m", "c")}
    assert by_name["link use from b_1 to the end of verification, m, 24 GB"].met is False
    assert by_name["window over (cold start + bound), m, 24 GB"].met is True
    loose = {a.aim: a for a in window_aims.aims(window_summary(30.0), "m", "c")}
    assert loose["link use from b_1 to the end of verification, m, 24 GB"].met is None


def test_differences_of_a_budget_are_one_aim_and_compared_switches_none():
    found = window_aims.aims(window_summary(45.8), "m", "c")
    differences = [a for a in found if a.aim.startswith("tokens, logits")]
    assert [(a.value, a.met) for a in differences] == [(3.0, False)]
    assert not window_aims.aims(window_summary(45.8, "24 GB not staged"), "m", "c")


def test_every_other_bench_writes_its_aims():
    draft = [
        {"model": m, "batch": b, "ms_per_token": 1.6, "floor_ms": 0.7}
        for m in ("deepseek_v2_lite", "q")
        for b in (1, 4)
    ]
    assert [a.met for a in bench_draft.aims(draft, "c")] == [True, None]
    link = [{"row": bench_link.PAGE_LOCKING, "value": 3.4, "unit": "GiB/s", "note": "3 GB"}, {"row": "x", "value": 1}]
    assert [a.met for a in bench_link.aims(link, "c")] == [False]
    case = {"model": "m", "kernel": "grouped experts 56 of 64", "rows": 17, "ratio": 0.98, "us": 227.0}
    others = [case | {"rows": 1}, case | {"kernel": "grouped experts 56 of 64 listed"}]
    assert [a.met for a in bench_decode_kernels.aims([case, *others], "c")] == [True]
    rows = [
        {"shape": "m", "what": f"gauss: {bench_nested.BITS}", "value": 9.7, "note": ""},
        {"shape": "m", "what": f"student5: {bench_nested.BITS}", "value": 9.0, "note": ""},
        {"shape": "checks", "what": "rebuilt weights that differ: gauss", "value": 0, "note": ""},
        {"shape": "m", "what": "gauss: decode kernel, weights that differ", "value": 1, "note": ""},
        {"shape": "m", "what": bench_nested.OTHER_BITS, "value": 0, "note": ""},
    ]
    assert [(a.value, a.met) for a in bench_nested.aims(rows, "c")] == [(9.7, False), (1, False), (0, True)]
