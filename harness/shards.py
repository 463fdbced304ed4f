"""Parts of a run that are measured apart, each in a folder of its own, and how they become one again."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pandas as pd

from harness.records import RecordFile, key_of, read_rows
from harness.timings import COLUMNS, KEY
from specter_core.errors import UserError

T = TypeVar("T")
FOLDER = "shards"


def part(blocks: Sequence[T], shard: str | None) -> list[T]:
    """The blocks of shard "i/n" (i from 1): every n-th. None: all. UserError for anything else."""
    if shard is None:
        return list(blocks)
    found = re.fullmatch(r"(\d+)/(\d+)", str(shard))
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise UserError(f"shard={shard} is no part; give i/n with i from 1 to n, e.g. shard=2/4")
    return list(blocks[int(found[1]) - 1 :: int(found[2])])


def seed(out: Path, folder: Path) -> None:
    """A part begins with what the run has: its rows and reference tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("records.csv", "reference_tokens.jsonl"):
        if (out / name).exists() and not (folder / name).exists():
            shutil.copyfile(out / name, folder / name)


def merge(out: Path, notice: Callable[[str], None]) -> int:
    """Adds to out what its parts have and it has not: rows, reference tokens, times (the longest part's minutes), and
    the first part's environment. Files that were merged are removed, so that nothing counts twice. Returns the new ok
    rows."""
    folders = sorted(p for p in (out / FOLDER).glob("*") if p.is_dir())
    records = RecordFile(out / "records.csv", notice)
    before = len(records.done)
    for folder in folders:
        path = folder / "records.csv"
        if path.exists():
            RecordFile(path, notice)  # drops a torn last line
            seen = {key_of(row) for row in read_rows(records.path)} - records.done
            new = [r for r in read_rows(path) if key_of(r) not in records.done]
            records.append([r for r in new if r["status"] == "ok" or key_of(r) not in seen])
            path.unlink()
        _lines(out / "reference_tokens.jsonl", folder / "reference_tokens.jsonl")
    _timings(out / "timings.csv", [f / "timings.csv" for f in folders])
    for folder in folders:
        if (folder / "environment.json").exists():
            _environment(out / "environment.json", folder / "environment.json")
    return len(records.done) - before


def _lines(whole: Path, own: Path) -> None:
    if own.exists():
        known = set(whole.read_text().splitlines()) if whole.exists() else set()
        with whole.open("a") as file:
            file.writelines(f"{line}\n" for line in own.read_text().splitlines() if line not in known)
        own.unlink()


def _timings(whole: Path, parts: Sequence[Path]) -> None:
    found = [pd.read_csv(p) for p in parts if p.exists()]
    if not found:
        return
    new = pd.concat(found).groupby([*KEY, "git_commit"], as_index=False, sort=False)
    table = new.agg(minutes=("minutes", "max"), rows=("rows", "sum"))
    if whole.exists():
        both = pd.concat([pd.read_csv(whole), table]).groupby([*KEY], as_index=False, sort=False)
        table = both.agg(minutes=("minutes", "sum"), rows=("rows", "sum"), git_commit=("git_commit", "last"))
    temporary = whole.with_suffix(".tmp")
    table[COLUMNS].to_csv(temporary, index=False, float_format="%.6g")
    temporary.replace(whole)
    for path in parts:
        path.unlink(missing_ok=True)


def _environment(whole: Path, own: Path) -> None:
    merged = json.loads(own.read_text())
    if whole.exists():
        merged["weights"] = json.loads(whole.read_text()).get("weights", {}) | merged.get("weights", {})
    temporary = whole.with_suffix(".tmp")
    temporary.write_text(json.dumps(merged, indent=1) + "\n")
    temporary.replace(whole)
    own.unlink()
