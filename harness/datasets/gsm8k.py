"""GSM8K test split (Cobbe et al. 2021): test.jsonl or the hub's parquet. A document is a question."""

from __future__ import annotations

from pathlib import Path

from harness.datasets.files import find, read_table
from harness.datasets.prompt import PromptText

PATTERNS = ("test.jsonl", "test-*.parquet")


def files(root: Path) -> list[Path]:
    return find("gsm8k", root, PATTERNS)[:1]


def load(root: Path) -> list[PromptText]:
    """One document per question; the id is its row in the split."""
    return [
        PromptText(f"gsm8k-test-{row:05d}", str(question), "gsm8k", "GK")
        for path in files(root)
        for row, question in enumerate(read_table(path, ["question"])["question"])
    ]
