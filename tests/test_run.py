"""run.py as a user types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.catalogue import ROOT
from run import main

TESTS = Path(__file__).parent


def run(*arguments: str, command: list[str] | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(TESTS), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "COLUMNS": "200", **env}
    environment.pop("PROFILE", None) if "PROFILE" not in env else None
    command = [*(command or [sys.executable, str(ROOT / "run.py")]), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)


def one_line(code: int, out: str, error: str) -> str:
    """Asserts exit code 2, nothing on stdout and one line on stderr; returns it."""
    assert code == 2, error
    assert out == "" and len(error.splitlines()) == 1, error
    return error


@pytest.fixture
def typed(monkeypatch, capfd):
    """`python run.py …` in this process: bad input ends before any worker starts."""
    monkeypatch.delenv("PROFILE", raising=False)
    monkeypatch.setattr(sys, "argv", [str(ROOT / "run.py")])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")

    def error(*arguments: str) -> str:
        try:
            code = main(list(arguments))
        except SystemExit as end:
            code = int(end.code or 0)
        return one_line(code, *capfd.readouterr())

    return error


def tiny_run(out: Path, *more: str) -> list[str]:
    """Overrides for a run of a fake system on a checkpoint that is only a tokenizer and a config."""
    folder = out / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    if not (folder / "tokenizer.json").exists():
        from tokenizers import Tokenizer, models, pre_tokenizers

        tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1, "a": 2, "of": 3}, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.save(str(folder / "tokenizer.json"))
    shape = "{hidden: 128, decoder_layers: 4, moe_layers: 4, experts: 16, top_k: 3, expert_width: 128,"
    shape += " vocab_size: 64, shared_params: 1000, kv_bytes_per_token: 64}"
    return [
        "model=[]",
        "system=[]",
        f"+models.tiny={{label: Tiny, family: qwen2_moe, depth: 4, default_weights: reference, shape: {shape},"
        f" weights: {{reference: {{path: {folder}}}}}}}",
        "+systems.specter={module: fake_systems, label: Specter, colour: '#D55E00', order: 0, depth: model}",
        "+systems.mo_sm={module: fake_systems, label: MO-SM, colour: '#0072B2', order: 1, options: {tpot_ms: 4}}",
        f"output={out}",
        "prompts=1",
        "temperature=0.5",  # nothing to compare with, so no reference run
        *more,
    ]


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("model=gpt5", "model=gpt5 is unknown; known: deepseek_v2_lite, deepseek_v2_mini"),
        ("system=[specter,mo_xl]", "system=mo_xl is unknown; known: autoregressive,"),
        ("dataset=pile", "dataset=pile is unknown; known: builtin, c4"),
        ("memory=vast", "memory=vast is unknown; known: high, low,"),
        ("sweep=everything", "sweep=everything is unknown; known:"),
        ("link=pcie9", "link=pcie9 is unknown; known: native, pcie3, pcie4, scaled"),
        ("launcher=k8s", "launcher=k8s is unknown; known: local"),
        ("profile=phone", "profile=phone is unknown; known: paper, reference"),
        ("weights=stolen", "weights=stolen is unknown; known: official, synthetic, reference"),
        ("depth=-1", "depth=-1 is below 0; give 0 or more"),
        ("batch=[1,0]", "batch=0 is below 1"),
        ("prompts=many", "prompts=many is no whole number"),
        ("temperature=-1", "temperature=-1 is no temperature"),
        ("memories.tight.slots_per_layer=0", "slots_per_layer 0 is below 1"),
        ("colour=blue", "colour"),
        ("models.deepseek_v2_mini.depht=3", "depht"),
        ("system=reference", "no system to measure"),
        ("model=[deepseek_v2_mini", "no viable alternative"),
        ("promts=3", "promts is no key; did you mean prompts?"),
        ("lsit", "'lsit' is no command and no KEY=VALUE; commands: list, plan"),
        ("validate", "validate DIR"),
        ("launcher.paralel=2", "it has no such key"),
        ("launcher.load_timeout_s=abc", "launcher.load_timeout_s=abc is no length or size"),
        ("launcher.workers=many", "launcher.workers=many is unknown; known: cell, system"),
        ("budgets_gb=nan", "budgets_gb=nan is no size in GB"),
        ("temperature=nan", "temperature=nan is no temperature"),
        ("stop_early=maybe", "stop_early=maybe is neither true nor false"),
        ("new_tokens=100000", "exceed the model's context of 2048"),
        (
            "models.phimoe_mini.weights.reference.draft=nowhere",
            "no draft in nowhere, but reference/phimoe_mini",
        ),
        ("slots=99", "99 slots per layer exceed the model's 16 experts"),
        ("systems.specter.options.evictoin=lru", "unknown option 'evictoin'"),
        ("systems.specter.options.eviction=fifo", "eviction is 'fifo', known are need, count_then_recency, lru"),
        ("systems.specter.options.prefetch=maybe", "option prefetch=maybe is no bool"),
        ("systems.specter.options.variant=papr", "variant 'papr' is unknown, known are default, paper"),
    ],
)
def test_a_bad_value_is_one_line_that_names_it_and_what_would_do(typed, argument, said):
    chosen = ("model=phimoe_mini", "memory=[]") if argument.startswith(("slots", "new_tokens")) else ()
    chosen += ("model=phimoe_mini",) if argument.startswith("models.phimoe_mini") else ()
    chosen += ("slots=3",) if argument.startswith("new_tokens") else ()
    assert said in typed(*chosen, argument)


def test_a_folder_that_cannot_be_made_is_one_line(typed, tmp_path):
    (tmp_path / "file").touch()
    assert "file: File exists" in typed("model=phimoe_mini", "system=specter", f"output={tmp_path / 'file'}")


def test_cuda_without_a_cuda_torch_ends_before_anything_is_measured(typed, tmp_path, monkeypatch):
    monkeypatch.setattr("harness.environment.metadata.version", lambda name: "2.13.0+cpu")
    line = typed("model=phimoe_mini", "system=specter", "device=cuda", f"output={tmp_path / 'out'}")
    assert "device=cuda, but torch 2.13.0+cpu is built without CUDA" in line and not (tmp_path / "out").exists()


def test_every_switch_of_the_engine_can_be_typed(tmp_path):
    more = ("systems.specter.options.eviction=lru", "systems.specter.options.planning=top_m")
    done = run(*tiny_run(tmp_path, *more))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("how", [("profile=paper",), ("model=deepseek_v2_lite", "weights=official")])
def test_absent_official_weights_name_the_command_that_fetches_them_and_their_size(typed, how):
    line = typed(*how)
    assert "fetch 31.4 GB (29.3 GiB) with: python3 initialization/download_models.py --only deepseek_v2_lite" in line


def test_the_environment_can_choose_the_profile_and_the_shell_sees_exit_code_2():
    done = run(PROFILE="paper")
    assert "deepseek_v2_lite weights=official" in one_line(done.returncode, done.stdout, done.stderr)


def test_list_names_everything_with_one_line_each():
    done = run("list")
    assert done.returncode == 0 and done.stderr == ""
    lines = done.stdout.splitlines()
    for name in ("deepseek_v2_mini", "phi35_moe", "builtin", "gpqa", "specter", "vllm", "main", "tight", "scaled"):
        assert any(line.split()[:1] == [name] for line in lines), name
    installed = (ROOT / ".venvs" / "vllm" / "bin" / "python").is_file()
    assert any(line.startswith("  vllm ") and ("make baseline-vllm" in line) is not installed for line in lines)


def test_a_reader_of_the_plan_may_leave_early():
    command = f"{sys.executable} {ROOT / 'run.py'} plan | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("", "")


def test_a_run_ends_with_one_json_line_and_a_table_and_resumes(tmp_path):
    command = tiny_run(tmp_path)
    done = run(*command)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert outcome["rows"] == 10 and len(done.stdout.splitlines()) == 1
    assert "CPU run: checks behaviour, not GPU performance" in done.stderr and "specter" in done.stderr
    for name in ("records.csv", "summary.csv", "environment.json", "figures/fig14_tpot.png", "figures/fig14_tpot.pdf"):
        assert (tmp_path / name).stat().st_size > 0
    again = json.loads(run(*command).stdout)
    assert (again["rows"], again["new_rows"]) == (10, 0)
    validated = run("validate", str(tmp_path))
    assert validated.returncode == 0 and json.loads(validated.stdout) == {"rows": 10, "problems": 0}


def test_a_full_disk_is_one_line_and_exit_code_2(tmp_path):
    command = ["bash", "-c", 'ulimit -f 4; exec "$@"', "bash", sys.executable, str(ROOT / "run.py")]
    done = run(*tiny_run(tmp_path), command=command)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines()[-1].endswith("free some space, what is recorded stays")
    assert "Traceback" not in done.stderr
    assert (tmp_path / "records.csv").exists()


def test_plan_lists_groups_slots_bytes_and_skips_and_runs_nothing(tmp_path):
    later = "+systems.vllm={module: x, label: v, colour: c, order: 2, available: false, reason: later}"
    done = run("plan", *tiny_run(tmp_path, later, "+systems.specter.needs_store=true"))
    assert done.returncode == 0, done.stderr
    assert "2 cell groups in 1 blocks, 10 requests" in done.stdout
    assert "tiny, tight, specter, K = 4: 5 of 5 requests x 48 tokens to do" in done.stdout
    assert "slots 1.2 (3.0 of 16 per layer)" in done.stdout
    assert "skipped: tiny, tight, vllm: later" in done.stdout
    assert not (tmp_path / "records.csv").exists()


def test_plan_of_an_absent_model_shows_its_budgets_and_what_fetches_it():
    done = run("plan", "profile=paper")
    assert done.returncode == 2 and "python3 initialization/download_models.py" in done.stderr
    specter = [x for x in done.stdout.splitlines() if "deepseek_v2_lite, high, specter" in x]
    assert len(specter) == 1 and "budget 24,000.0 MB; shared 2,623.3, draft 7,422.3" in specter[0]
    assert "30.9 of 64 per layer" in specter[0]


def test_validate_of_a_folder_without_records_is_one_line(typed, tmp_path):
    assert "holds no records.csv" in typed("validate", str(tmp_path))


def test_when_nothing_is_measured_the_exit_code_says_so(tmp_path):
    done = run(*tiny_run(tmp_path, "systems.specter.module=json", "systems.mo_sm.module=json"))
    assert done.returncode == 1
    outcome = json.loads(done.stdout)
    assert outcome["rows"] == 0 and outcome["failed_rows"] == 10
