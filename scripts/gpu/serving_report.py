"""What the rows of serving baselines come to: the faster variant of every cell, and exact_match that came later."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from harness.columns import NAMES
from harness.records import read_rows
from harness.reference_tokens import ReferenceKey, ReferenceTokens
from scripts.gpu.together import DIGESTS
from specter_core.errors import UserError


def bring_tokens(source: Path, target: Path) -> None:
    """UserError where there is no such file."""
    if not source.exists():
        raise UserError(f"{source} does not exist; --tokens names the reference_tokens.jsonl of a comparison")
    target.parent.mkdir(parents=True, exist_ok=True)
    if not (target.exists() and target.samefile(source)):
        shutil.copyfile(source, target)


def report_better(out: Path) -> tuple[int, int]:
    """placements.csv: every row; records.csv: those of the variant with the least mean TPOT of every (system, model,
    memory, B), as the variant that conf/system names. Returns how many rows are in each."""
    path = out / "measured" / "records.csv"
    if not path.exists():
        return 0, 0
    rows = read_rows(path)
    _fill_exact(rows, out / "measured")
    cells: dict[tuple[str, ...], dict[str, list[dict[str, str]]]] = {}
    for row in rows:
        cell = tuple(row[c] for c in ("system", "model", "memory", "B"))
        cells.setdefault(cell, {}).setdefault(row["variant"], []).append(row)
    best: list[dict[str, str]] = []
    for variants in cells.values():
        means = {name: fmean(times) for name, own in variants.items() if (times := _times(own))}
        chosen = min(means, key=lambda name: means[name]) if means else min(variants)
        usual = "resident" if chosen == "resident" else "offload"
        best += [row | {"variant": usual} for row in variants[chosen]]
    for name, found in (("records.csv", best), ("placements.csv", rows)):
        with (out / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, NAMES, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(found)
    if (side := out / "measured" / "environment.json").exists():
        shutil.copyfile(side, out / "environment.json")
    return len(best), len(rows)


def _fill_exact(rows: list[dict[str, str]], measured: Path) -> None:
    """exact_match of rows without it, from the digests of their answers and the reference's tokens."""
    reference = ReferenceTokens(measured / "reference_tokens.jsonl")
    notes = [json.loads(line) for line in _lines(measured / DIGESTS)]
    answers = {(note["config_hash"], note["prompt_id"]): note for note in notes}
    for row in rows:
        note = answers.get((row["config_hash"], row["prompt_id"]))
        if note is None or row["status"] != "ok" or row["exact_match"] or row["weights"] == "dummy":
            continue
        key = ReferenceKey(note["weights_hash"], note["prompt_sha256"], note["new_tokens"])
        found = reference.matches_digest(key, note["tokens_sha256"])
        row["exact_match"] = "" if found is None else str(found).lower()


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _times(rows: Sequence[dict[str, str]]) -> list[float]:
    return [float(row["tpot_ms"]) for row in rows if row["status"] == "ok" and row["tpot_ms"]]
