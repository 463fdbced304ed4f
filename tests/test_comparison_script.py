"""scripts/gpu/run_fig14.py on the CPU with a reference model: rows of the usual schema, resume, closing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness import closing
from harness.records import read_rows
from harness.validate import validate
from scripts.gpu import run_fig14
from specter_core.errors import UserError, exit_code

MODEL = "deepseek_v2_mini"


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ids") / "prompts.json"
    prompts = {
        name: {"16": [{"id": f"{name}-1", "label": "GK", "private": False, "tokens": list(range(start, start + 16))}]}
        for name, start in (("gsm8k", 100), ("c4", 200))
    }
    path.write_text(json.dumps({MODEL: {"warmup": [5, 6, 7], "prompts": prompts}}))
    return path


def arguments(ids: Path, out: Path, *more: str) -> list[str]:
    own = ["--models", MODEL, "--weights", "reference", "--device", "cpu", "--memories", "wide", "--new-tokens", "8"]
    own += ["--datasets", "gsm8k,c4", "--systems", "specter,transformers", "--ids", str(ids), "--out", str(out)]
    return own + list(more)


@pytest.mark.slow
def test_rows_have_the_usual_schema_and_a_second_call_goes_on(ids, tmp_path, capsys):
    out = tmp_path / "run"
    assert run_fig14.main(arguments(ids, out, "--paced-prompts", "1", "--limit-s", "0", "--write-off", "no time")) == 0
    assert {r["status"] for r in read_rows(out / "records.csv")} == {"not_run"}
    assert (
        run_fig14.main(arguments(ids, out, "--paced-prompts", "1", "--slow-tokens", "3", "--warmup-tokens", "2")) == 0
    )
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["left"] == 0 and last["rows"] == 4
    rows = [r for r in read_rows(out / "records.csv") if r["status"] == "ok"]
    assert sorted((r["system"], r["link"], r["dataset"], r["new_tokens"]) for r in rows) == [
        ("specter", "native", "c4", "8"), ("specter", "native", "gsm8k", "8"), ("specter", "pcie4", "gsm8k", "8"),
        ("transformers", "native", "gsm8k", "3"),
    ]  # fmt: skip
    assert {r["exact_match"] for r in rows} == {"true"}
    assert closing.close(out)["ok"] == 4 and not validate(out).problems
    assert (out / "summary.csv").exists() and (out / "systems.csv").exists()


def test_other_encodings_and_variants_are_systems_of_their_own_under_the_same_name(ids, tmp_path):
    options = run_fig14._parser().parse_args(
        arguments(ids, tmp_path, "--encoding", "plain,nested", "--also", 'specter={"named": "b1", "staging_slots": 1}')
    )
    fast, slow = run_fig14.configurations(options)
    assert [(s.name, s.variant) for s in fast.systems] == [("specter", v) for v in ("default", "nested", "b1")]
    assert [s.name for s in slow.systems] == ["transformers"] and list(slow.new_tokens) == [6]
    assert [link.name for link in slow.links] == ["native"]


def test_a_sweep_brings_its_own_axes(ids, tmp_path):
    options = run_fig14._parser().parse_args(arguments(ids, tmp_path, "--sweep", "depth"))
    (config,) = run_fig14.configurations(options)
    assert list(config.depth) == [2, 4, 6, 8, 12, 16, 20, 24, 32] and [s.name for s in config.systems] == ["specter"]
    assert config.sweep == "depth" and list(config.new_tokens) == [8]


def test_missing_ids_are_a_users_error(tmp_path, capsys):
    assert exit_code(lambda: run_fig14.main(arguments(tmp_path / "none.json", tmp_path / "out"))) == 2
    assert "prepare_prompt_ids" in capsys.readouterr().err
    with pytest.raises(UserError):
        run_fig14.IdSource(tmp_path / "none.json", prompts=1)
