"""Aims that records answer: nested experts against peers at equal memory, peaks against budgets; one table of all."""

from __future__ import annotations

import json

import pytest
from artifact_fixture import write_records, write_table
from records_fixture import LABELS, row

from figures import results
from figures.results import AIMS
from harness import aims

TIMES = {"specter": 9.0, "mo_sm": 10.0, "specmoeoff": 16.0, "transformers": 8.0, "llama_cpp": 12.0}
PLACE = "qwen15_moe, 20 GB, native link"


def measured(system: str, tpot_ms: float, **changes) -> list[dict]:
    """One row per dataset, TPOT 10 % up and down around tpot_ms by dataset."""
    shared = {"model": "qwen15_moe", "weights": "synthetic", "memory": "high", "link": "native", "device": "cuda"}
    shared |= {"budget_bytes": 20 * 10**9, "peak_device_bytes": 19 * 10**9, "within_budget": True, "git_commit": "c"}
    key = "".join([system, *(str(changes.get(name, "")) for name in ("encoding", "link", "status", "memory", "B"))])
    return [
        row(system=system, label=label, dataset=label, prompt_id=label, config_hash=key + label)
        | shared
        | {"tpot_ms": tpot_ms * (0.9 + 0.05 * number)}
        | changes
        for number, label in enumerate(LABELS)
    ]


def nested(tpot_ms: float = 5.0, **changes) -> list[dict]:
    return measured("specter", tpot_ms, **{"encoding": "nested", "variant": "nested"} | changes)


def comparison(**changes: list[dict]) -> list[dict]:
    """Systems by name -> rows; `changes` replace a system's."""
    rows = {system: measured(system, ms) for system, ms in TIMES.items() if system != "transformers"}
    rows["transformers"] = measured("transformers", 8.0, within_budget=False, peak_device_bytes=26 * 10**9)
    rows["nested"] = nested()
    return [r for block in (rows | changes).values() for r in block]


def found(folder, rows):
    write_records(folder / "comparison", rows)
    return {a.aim: a for a in aims.computed(results.read(folder))}


def test_the_best_peer_within_its_budget_counts(tmp_path):
    best = found(tmp_path, comparison())[f"TPOT of the best peer over nested, {PLACE}"]
    assert best.value == pytest.approx(10 / 5) and best.met
    assert "MO-SM, 10 ms: 2 [2, 2]" in best.note and "not counted: Transformers" in best.note


def test_ratios_pair_the_prompts_that_both_have(tmp_path):
    few = [r | {"tpot_ms": r["tpot_ms"] * 0.9} for r in measured("mo_sm", 10.0)[:2]]
    best = found(tmp_path, comparison(mo_sm=few))[f"TPOT of the best peer over nested, {PLACE}"]
    assert best.value == pytest.approx(1.8) and best.met is False


def test_without_common_prompts_means_are_compared_and_the_note_says_so(tmp_path):
    others = [r | {"prompt_id": r["prompt_id"] + "-b"} for r in measured("mo_sm", 7.0)]
    best = found(tmp_path, comparison(mo_sm=others))[f"TPOT of the best peer over nested, {PLACE}"]
    assert best.value == pytest.approx(1.4) and "MO-SM (other prompts)" in best.note


def test_what_was_not_measured_is_named_and_no_peer(tmp_path):
    missed = measured("vllm", 1.0, status="not_run", reason="no time", within_budget=None)
    found_aims = found(tmp_path, comparison(vllm=missed))
    best = found_aims[f"TPOT of the best peer over nested, {PLACE}"]
    assert best.value == pytest.approx(2.0) and "not measured: vLLM" in best.note


def test_specter_itself_is_no_peer_and_other_memory_settings_and_links_are_apart(tmp_path):
    faster = measured("mo_sm", 1.0, memory="low", budget_bytes=16 * 10**9)
    paced = measured("mo_sm", 2.0, link="pcie4") + nested(4.0, link="pcie4")
    by_name = found(tmp_path, comparison(specter=measured("specter", 1.0), faster=faster, paced=paced))
    assert by_name[f"TPOT of the best peer over nested, {PLACE}"].value == pytest.approx(2.0)
    assert by_name["TPOT of the best peer over nested, qwen15_moe, 20 GB, pcie4 link"].value == pytest.approx(0.5)


def test_adapted_specmoeoff_and_the_time_have_aims_of_their_own(tmp_path):
    by_name = found(tmp_path, comparison())
    assert by_name[f"TPOT nested, {PLACE}"].met and by_name[f"TPOT nested, {PLACE}"].value == pytest.approx(5.0)
    adapted = by_name[f"TPOT of SpecMoEOff (adapted) over nested, {PLACE}"]
    assert adapted.value == pytest.approx(3.2) and adapted.met
    without = found(tmp_path / "b", comparison(specmoeoff=[]))[f"TPOT of SpecMoEOff (adapted) over nested, {PLACE}"]
    assert without.value is None and without.met is None and "no such row" in without.note


@pytest.mark.parametrize("flaw", [{"within_budget": False, "peak_device_bytes": 21 * 10**9}, {"exact_match": False}])
def test_beyond_its_own_budget_or_inexact_nothing_is_met(flaw, tmp_path):
    by_name = found(tmp_path, comparison(nested=nested(**flaw)))
    judged = [a for name, a in by_name.items() if "nested" in name and not name.startswith("peak")]
    assert len(judged) == 3 and all(a.value is not None and a.met is False for a in judged)
    peak = by_name[f"peak device bytes over budget by NVML, Specter (nested), {PLACE}"]
    assert peak.met is ("exact_match" in flaw)


def test_nested_cells_that_were_not_run_give_their_reason(tmp_path):
    by_name = found(tmp_path, comparison(nested=nested(status="not_run", reason="no time", encoding=None)))
    own = [a for name, a in by_name.items() if "nested" in name]
    assert len(own) == 3 and all(a.value is None and a.met is None and a.note == "no time" for a in own)
    assert by_name[f"peak device bytes over budget by NVML, Specter, {PLACE}"].value == pytest.approx(0.95)


def test_cpu_rows_batches_and_sweeps_answer_no_aim(tmp_path):
    write_records(tmp_path / "sweeps" / "memory", nested(memory="14 GB"))
    assert not found(tmp_path, comparison(nested=nested(device="cpu") + nested(B=4)))


def test_every_aim_below_a_folder_is_gathered_once(tmp_path, capsys):
    write_records(tmp_path / "comparison", comparison())
    (tmp_path / "window").mkdir()
    line = {"aim": "w", "value": 1, "target": "<= 2", "met": "True"}
    write_table(tmp_path / "window" / "aims.csv", AIMS, [line])
    write_table(tmp_path / "window" / "window_m_aims.csv", AIMS, [line | {"value": 3, "met": "false"}])
    tables = []
    for _ in range(2):
        assert aims.main([str(tmp_path)]) == 0
        tables.append((tmp_path / "aims.csv").read_bytes())
    assert tables[0] == tables[1]
    gathered = results.read(tmp_path).tables["aims"]
    assert list(gathered[gathered["source"] == "window"]["value"]) == [3]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["aims"] == len(gathered) == 6
