"""C4 (Raffel et al. 2020): the hub's validation shards, or JSON lines with `text` or `prefix`."""

from __future__ import annotations

from pathlib import Path

from harness.datasets.files import find, read_table
from harness.datasets.prompt import PromptText
from specter_core.errors import UserError

PATTERNS = ("c4-validation.*.json.gz", "c4*.jsonl", "c4*.json.gz")


def files(root: Path) -> list[Path]:
    return find("c4", root, PATTERNS)


def load(root: Path) -> list[PromptText]:
    """Every document; of a file of `prefix` records the second half only, since the reference models are
    trained on the first."""
    texts: list[PromptText] = []
    for path in files(root):
        table = read_table(path, ())
        column = next((c for c in ("text", "prefix") if c in table.columns), None)
        if column is None:
            raise UserError(f"{path} has neither a text nor a prefix column; fetch it again")
        first = len(table) // 2 if column == "prefix" else 0
        stem = path.name.removesuffix(".gz").rsplit(".", 1)[0]
        texts += [
            PromptText(f"{stem}-{row:06d}", str(text), "c4", "C4")
            for row, text in enumerate(table[column])
            if row >= first
        ]
    return texts
