"""scripts/gpu/run_serving_baselines.py: the faster placement of every cell is the one that figures see, an answer is
compared with a reference run that comes later, and a run stops in time and goes on."""

from __future__ import annotations

import csv
import itertools
import json

import pytest

from harness.columns import NAMES
from harness.isolated import missing_environment
from harness.prompts import BenchPrompt
from harness.records import read_rows
from harness.reference_tokens import ReferenceTokens, reference_key, token_digest
from scripts.gpu import run_serving_baselines as script
from scripts.gpu.serving_report import report_better

NUMBERS = itertools.count()


def row(variant: str, tpot_ms: float | None, **more: object) -> dict[str, object]:
    status = "ok" if tpot_ms else "oom"
    return dict.fromkeys(NAMES) | {
        "system": "llama_cpp", "variant": variant, "model": "m", "memory": "high", "B": 1, "tpot_ms": tpot_ms,
        "status": status, "prompt_id": next(NUMBERS), "repeat": 0,
    } | more  # fmt: skip


def reported(tmp_path, rows):
    (tmp_path / "measured").mkdir(exist_ok=True)
    with (tmp_path / "measured" / "records.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, NAMES)
        writer.writeheader()
        writer.writerows(rows)
    counts = report_better(tmp_path)
    files = [list(csv.DictReader((tmp_path / f"{n}.csv").open())) for n in ("records", "placements")]
    assert counts == (len(files[0]), len(files[1]))
    return files


def test_the_faster_variant_of_a_cell_is_reported_and_all_are_kept(tmp_path):
    best, everything = reported(tmp_path, [
        row("experts", 12.0), row("experts", 14.0), row("layers", 12.5),
        row("experts", 30.0, memory="low"), row("layers", 20.0, memory="low"),
        row("resident", 3.0, system="llama_cpp_resident", memory="resident"),
    ])  # fmt: skip
    assert [(r["memory"], r["variant"], float(r["tpot_ms"])) for r in best] == [
        ("high", "offload", 12.5), ("low", "offload", 20.0), ("resident", "resident", 3.0),
    ]  # fmt: skip
    assert len(everything) == 6 and {r["variant"] for r in everything} == {"experts", "layers", "resident"}


def test_a_variant_that_failed_is_never_the_better_one(tmp_path):
    best, everything = reported(tmp_path, [row("experts", None), row("layers", 50.0)])
    assert [r["tpot_ms"] for r in best] == ["50.0"] and len(everything) == 2


def test_a_failure_that_was_measured_again_counts_once(tmp_path):
    best, everything = reported(tmp_path, [row("experts", None, prompt_id="p"), row("experts", 9.0, prompt_id="p")])
    assert [r["status"] for r in best] == [r["status"] for r in everything] == ["ok"]


def test_answers_are_compared_with_a_reference_that_comes_later(tmp_path):
    prompt, answer = BenchPrompt("gsm8k", "GK", "p", (1, 2, 3), False), (7, 8, 9)
    key = reference_key("cafe", prompt, 3)
    (tmp_path / "measured").mkdir()
    notes = [
        {"config_hash": name, "prompt_id": "p", **key._asdict(), "tokens_sha256": token_digest(tokens)}
        for name, tokens in (("same", answer), ("other", (7, 8, 8)), ("dummy", answer))
    ]
    lines = "".join(json.dumps(note) + "\n" for note in notes)
    (tmp_path / "measured" / "token_digests.jsonl").write_text(lines)
    rows = [row(n["config_hash"], 5.0, config_hash=n["config_hash"], prompt_id="p") for n in notes]
    rows[2]["weights"] = "dummy"
    _, everything = reported(tmp_path, rows)
    assert [r["exact_match"] for r in everything] == ["", "", ""]

    ReferenceTokens(tmp_path / "later.jsonl").put(key, prompt, answer)
    asked = ["--system", "llama_cpp", "--ids", "none", "--out", str(tmp_path), "--report", "--tokens"]
    assert script.main([*asked, str(tmp_path / "later.jsonl")]) == 0
    filled = list(csv.DictReader((tmp_path / "placements.csv").open()))
    assert [r["exact_match"] for r in filled] == ["true", "false", ""]
    assert script.main([*asked, str(tmp_path / "nothing.jsonl")]) == 2


@pytest.mark.skipif(missing_environment("llama_cpp", "baseline-llama") is not None, reason="make baseline-llama")
@pytest.mark.parametrize("how", [[], ["--together"]])
def test_a_run_that_ran_out_of_time_goes_on(tmp_path, how, capsys):
    ids = {"id": "p", "label": "GK", "private": False, "tokens": list(range(60, 76))}
    made = {"qwen2_moe_mini": {"warmup": ids["tokens"], "prompts": {"gsm8k": {"16": [ids]}}}}
    (tmp_path / "ids.json").write_text(json.dumps(made))
    out = tmp_path / "out"
    asked = [
        "--system", "llama_cpp", "--kinds", "resident", "--models", "qwen2_moe_mini", "--memories", "roomy",
        "--weights", "reference", "--device", "cpu", "--datasets", "gsm8k", "--new-tokens", "3",
        "--set", f"folder={json.dumps(str(tmp_path))}", "--ids", str(tmp_path / "ids.json"), "--out", str(out), *how,
    ]  # fmt: skip
    for limit, left in (("0", 1), ("60", 0)):
        assert script.main([*asked, "--limit-s", limit]) == 0
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["left"] == left
    assert [r["status"] for r in read_rows(out / "measured" / "records.csv")] == ["ok"]
    assert len((out / "measured" / "token_digests.jsonl").read_text().splitlines()) == 1
