"""HumanEval (Chen et al. 2021): HumanEval.jsonl.gz or the hub's parquet. A document is a function's head."""

from __future__ import annotations

from pathlib import Path

from harness.datasets.files import find, read_table
from harness.datasets.prompt import PromptText

PATTERNS = ("HumanEval.jsonl.gz", "HumanEval.jsonl", "test-*.parquet")


def files(root: Path) -> list[Path]:
    return find("humaneval", root, PATTERNS, folders=("openai_humaneval",))[:1]


def load(root: Path) -> list[PromptText]:
    """One document per task; the id is the task's own ("HumanEval/12")."""
    return [
        PromptText(str(task), str(prompt), "humaneval", "HE") for path in files(root) for task, prompt in _columns(path)
    ]


def _columns(path: Path) -> list[tuple[object, object]]:
    table = read_table(path, ["task_id", "prompt"])
    return list(zip(table["task_id"], table["prompt"], strict=True))
