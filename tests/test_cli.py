"""The engine's command line and check_exactness: what the README says, and one line for each bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "reference" / "deepseek_v2_mini"


def command(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], cwd=ROOT, capture_output=True, text=True, timeout=120)


def generate(*args: str) -> subprocess.CompletedProcess[str]:
    return command("-m", "specter_core", "generate", *args)


@pytest.mark.ci
def test_generate_streams_text_and_ends_with_a_table(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    prompt = "The history of the town begins with"
    options = ("--max-new-tokens", "12", "--depth", "4", "--slots", "3", "--link-gb-s", "0.5", "--trace", str(trace))
    found = generate("--model", str(MODEL), "--prompt", prompt, *options)
    assert found.returncode == 0, found.stderr
    assert len(found.stdout.strip()) >= 6
    for row in ("acceptance", "coverage", "prefetch precision", "MB per token", "not GPU performance"):
        assert row in found.stderr
    events = json.loads(trace.read_text())["traceEvents"]
    names = {e["name"] for e in events}
    assert {"prefill", "verify", "plan", "draft step"} <= names
    link = next(e["tid"] for e in events if e["ph"] == "M" and e["args"]["name"] == "link")
    assert any(e["tid"] == link for e in events if e["ph"] == "X"), "the link's track is empty"


def test_depth_zero_and_paper_variant_write_the_same_text() -> None:
    common = ("--model", str(MODEL), "--prompt", "To install the program,", "--max-new-tokens", "12", "--slots", "2")
    texts = {generate(*common, *more).stdout for more in (("--depth", "0"), (), ("--variant", "paper"))}
    assert len(texts) == 1 and texts != {""}


def test_budget_gives_slots() -> None:
    found = generate("--model", str(MODEL), "--prompt", "a", "--max-new-tokens", "2", "--budget-gb", "0.0075")
    assert found.returncode == 0, found.stderr
    assert "slots per layer" in found.stderr


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (("--model", str(MODEL), "--prompt", ""), ("0 tokens", "at least 1")),
        (("--model", str(MODEL), "--prompt", "a", "--depth", "-1"), ("depth is -1", "the least is 0")),
        (("--model", str(MODEL), "--prompt", "a", "--slots", "0"), ("got 0", "1 … 16")),
        (("--model", str(MODEL), "--prompt", "a", "--slots", "99"), ("--slots 99", "16 experts", "1 … 16")),
        (("--model", str(MODEL), "--prompt", "a", "--seed", "-1"), ("--seed -1", "0 or more")),
        (
            ("--model", str(MODEL), "--prompt", "a", "--budget-gb", "0.003"),
            ("cannot hold one slot per layer", "at least"),
        ),
        (("--model", str(MODEL), "--prompt", "a", "--max-new-tokens", "0"), ("max_new_tokens is 0",)),
        (("--model", str(MODEL), "--prompt", "a", "--max-new-tokens", "9000"), ("9001", "2048")),
        (
            ("--model", str(MODEL), "--prompt", "a", "--draft", "nowhere"),
            ("nowhere does not exist", "quantize_draft.py"),
        ),
        (("--model", "nowhere", "--prompt", "a"), ("nowhere does not exist", "tokenizer.json")),
        (
            ("--model", str(MODEL), "--prompt", "a", "--draft", str(MODEL.parent / "phimoe_mini" / "draft")),
            ("made of a phimoe model", "deepseek_v2"),
        ),
        (("--model", str(MODEL), "--prompt", "a", "--budget-gb", "nan"), ("--budget-gb nan", "above 0")),
        (("--model", str(MODEL), "--prompt", "a", "--link-gb-s", "0"), ("--link-gb-s 0.0", "above 0")),
        (("--model", str(MODEL), "--prompt", "a", "--temperature", "nan"), ("temperature nan", "use 0")),
        (("--model", str(MODEL), "--prompt", "a", "--trace", "no/t.json"), ("no/t.json", "folder no does not exist")),
        (("--model", str(MODEL), "--prompt", "a", "--device", "tpu"), ("'tpu'", "cpu, cuda")),
        (("--model", str(MODEL), "--prompt", "a", "--temperature", "-1"), ("temperature -1.0", "use 0")),
        (("--model", str(MODEL), "--prompt", "a", "--numa-node", "99"), ("numa_node is 99", "online are")),
    ],
)
def test_bad_input_ends_with_one_line_and_exit_code_2(args: tuple[str, ...], parts: tuple[str, ...]) -> None:
    found = generate(*args)
    assert found.returncode == 2, found.stderr
    lines = found.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), found.stderr
    assert all(part in lines[0] for part in parts), lines[0]


@pytest.mark.ci
def test_check_exactness_finds_no_mismatch_and_forces_rejections() -> None:
    found = command(
        *("scripts/check_exactness.py", "--model", str(MODEL), "--depths", "4", "--slots", "1", "--batches", "2"),
        *("--tokens", "12", "--prompts", "2", "--noise", "2.0"),
    )
    assert found.returncode == 0, found.stderr
    report = json.loads(found.stdout.splitlines()[-1])
    assert report["tokens"] == 24 and report["mismatches"] == 0
    assert report["rejected"] > 0
    assert report["transformers_tokens"] == 24 and report["transformers_mismatches"] == 0
