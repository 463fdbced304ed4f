"""The main run from end to end: real engine, real baselines, a random checkpoint with its draft."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import tiny_checkpoint
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from harness import frame
from harness.catalogue import ROOT
from harness.datasets import load_texts


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tiny_checkpoint("qwen2_moe", tmp_path_factory.mktemp("model"), experts=16, vocab=512)
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator((t.text for t in load_texts("builtin", ROOT)), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    command = ["initialization/quantize_draft.py", "--method", "rtn"]
    execute(*command, "--model", str(folder), "--output", str(folder / "draft"))
    return folder


def execute(*arguments: str) -> tuple[str, int]:
    """stdout and process id of a command that succeeds."""
    env = dict(os.environ, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, *arguments], env=env, cwd=ROOT, **pipes) as process:
        out, error = process.communicate()
    assert process.returncode == 0, error
    return out, process.pid


def test_every_system_gives_the_targets_tokens_within_its_budget_over_the_paced_link(checkpoint, tmp_path):
    out, pid = execute(
        "run.py",
        "model=qwen2_moe_mini",
        f"models.qwen2_moe_mini.weights.reference.path={checkpoint}",
        f"models.qwen2_moe_mini.weights.reference.draft={checkpoint / 'draft'}",
        "system=[specter,mo_sm,mo_sc,transformers]",
        "links.scaled.rate_bytes_per_s=1e9",
        "new_tokens=12",
        "prompts=1",
        f"output={tmp_path}",
    )
    outcome = json.loads(out.splitlines()[-1])
    assert (outcome["rows"], outcome["failed_rows"], outcome["specter_exact_match"]) == (20, 0, True)
    rows = frame.load(tmp_path / "records.csv")
    assert rows["exact_match"].all() and rows["within_budget"].all()
    assert (rows["h2d_bytes"] > 0).all() and (rows["h2d_bytes_used"] <= rows["h2d_bytes"]).all()
    specter = rows[rows["system"] == "specter"]
    assert set(specter["K"]) == {8} and specter["acceptance"].between(0, 1).all()
    assert (specter["coverage"] <= specter["coverage_ceiling"]).all() and specter["tokens_per_window"].gt(1).any()
    slots = rows.groupby("system")["M"].mean()
    assert slots["mo_sm"] > slots["mo_sc"] >= slots["specter"]
    assert (tmp_path / "figures/fig14_tpot.png").exists()
    assert not list(Path("/dev/shm").glob(f"specter-experts-{pid}-*")), "the shared store goes with the run"
