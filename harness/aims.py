"""Aims that records answer, and every aim of a results folder in one table: python -m harness.aims results/h200

Writes DIR/comparison/aims.csv (nested experts against their targets and against the best peer, peaks against budgets;
from the rows that figure 14 shows) and gathers every aims.csv and *_aims.csv below DIR into DIR/aims.csv. One line per
aim on stderr; the last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from harness import aim
from harness.aim import Aim
from specter_core.errors import exit_code

looks: Any = importlib.import_module("figures.looks")
redraw: Any = importlib.import_module("figures.redraw")
results: Any = importlib.import_module("figures.results")
stats: Any = importlib.import_module("figures.stats")
sweeps: Any = importlib.import_module("figures.sweeps")

NESTED, ADAPTED = sweeps.MAIN + looks.SUFFIX, "specmoeoff"
TPOT_MS = {("qwen15_moe", "high", "native"): 7.3, ("qwen15_moe", "low", "native"): 10.0}
TIMES_PEER, TIMES_ADAPTED = 2, 3
COMPUTED = Path("comparison", "aims.csv")


class Cell(NamedTuple):
    model: str
    memory: str
    link: str


class Peer(NamedTuple):
    """Another system's TPOT over nested Specter's: geometric mean over common prompts, with its interval."""

    label: str
    ratio: float
    low: float
    high: float
    tpot_ms: float

    def __str__(self) -> str:
        interval = "" if pd.isna(self.low) else f" [{self.low:.3g}, {self.high:.3g}]"
        return f"{self.label}, {self.tpot_ms:.3g} ms: {self.ratio:.3g}{interval}"


def computed(found: Any) -> list[Aim]:
    """found: figures.results.Results."""
    rows, every = redraw.gather(found, "main"), _tried(found)
    aims: list[Aim] = []
    for cell in cells(every):
        tried = _at(every, cell)
        aims += nested_aims(_at(rows, cell) if len(rows) else tried.iloc[:0], tried, cell)
        aims += budget_aims(tried[tried["status"] == "ok"], cell)
    return aims


def cells(every: pd.DataFrame) -> list[Cell]:
    """Where nested experts were measured or tried: named memory settings on a GPU, by model, budget and link."""
    own = every[every["system"] == NESTED] if len(every) else every
    keys = own[["model", "memory", "link"]].itertuples(index=False, name=None) if len(own) else ()
    return sorted({Cell(*key) for key in keys})


def nested_aims(rows: pd.DataFrame, tried: pd.DataFrame, cell: Cell) -> Iterator[Aim]:
    """rows: measured, of one cell; tried: all of the cell, whatever became of them."""
    place = _place(tried, cell)
    own = rows[rows["system"] == NESTED]
    commit = ", ".join(sorted(set(own["git_commit"].dropna().astype(str))))
    mean = _mean(own) if len(own) else None
    flaw = "; ".join(_flaws(own))
    why = "" if len(own) else _reason(tried[tried["system"] == NESTED])
    goal = TPOT_MS.get(cell)
    note = why or flaw or f"{own['prompt_id'].nunique()} prompts"
    yield Aim(f"TPOT nested, {place}", mean, "ms/token", f"<= {goal}" if goal else "", commit, note, bool(flaw))
    peers = {s: peer(block, own) for s, block in rows.groupby("system") if s not in sweeps.SPECULATIVE and len(own)}
    over = {s for s, block in rows.groupby("system") if block["within_budget"].eq(False).any()}
    best = min((p for s, p in peers.items() if s not in over), key=lambda p: p.ratio, default=None)
    adapted = peers.get(ADAPTED) if ADAPTED not in over else None
    beyond = ", ".join(p.label for s, p in peers.items() if s in over)
    absent = ", ".join(_absent(tried, {*map(str, peers), *sweeps.SPECULATIVE}))
    left = [f"beyond the budget, not counted: {beyond}" if beyond else "", f"not measured: {absent}" if absent else ""]
    for name, found, times in (
        ("TPOT of the best peer over nested", best, TIMES_PEER),
        ("TPOT of SpecMoEOff (adapted) over nested", adapted, TIMES_ADAPTED),
    ):
        said = [why or flaw, str(found) if found else "" if why else "no such row within the budget"]
        said += [] if why else left[: 1 + (times == TIMES_PEER)]
        note = "; ".join(filter(None, said))
        ratio = found.ratio if found else None
        yield Aim(f"{name}, {place}", ratio, "ratio", f">= {times}", commit, note, bool(flaw))


def peer(rows: pd.DataFrame, own: pd.DataFrame) -> Peer:
    """rows: of one system, own: nested Specter's. Without common prompts the means over datasets are compared."""
    ratio, low, high = stats.paired_ratio(stats.per_prompt(rows), stats.per_prompt(own))
    mean, label = _mean(rows), rows["system_label"].fillna(rows["system"]).iloc[0]
    if pd.isna(ratio):
        return Peer(f"{label} (other prompts)", mean / _mean(own), low, high, mean)
    return Peer(str(label), ratio, low, high, mean)


def budget_aims(rows: pd.DataFrame, cell: Cell) -> Iterator[Aim]:
    """Specter's own peaks. rows: measured, of one cell."""
    for system in sweeps.SPECULATIVE:
        own = rows[(rows["system"] == system) & rows["peak_device_bytes"].notna() & rows["budget_bytes"].notna()]
        if len(own):
            share = float((own["peak_device_bytes"] / own["budget_bytes"]).max())
            label = own["system_label"].fillna(system).iloc[0]
            commit = ", ".join(sorted(set(own["git_commit"].dropna().astype(str))))
            name = f"peak device bytes over budget by NVML, {label}, {_place(own, cell)}"
            yield Aim(name, share, "ratio", "<= 1", commit, f"{len(own)} requests, weights {own['weights'].iloc[0]}")


def gather(folder: Path) -> pd.DataFrame:
    """Writes DIR/comparison/aims.csv and DIR/aims.csv; returns the latter's rows."""
    aim.write(folder / COMPUTED, computed(results.read(folder)))
    table: pd.DataFrame = results.read(folder).tables["aims"]
    temporary = folder / "aims.tmp"
    table.to_csv(temporary, index=False, lineterminator="\n")
    temporary.replace(folder / "aims.csv")
    return table


def _tried(found: Any) -> pd.DataFrame:
    """Rows, measured or not, of folders of no sweep, on a GPU, one request at a time."""
    own = [rows for folder, rows in found.records.items() if not sweeps.of_a_sweep(folder)]
    every = pd.concat(own, ignore_index=True) if own else pd.DataFrame()
    return every[(every["device"] == "cuda") & (every["B"] == 1)] if len(every) else every


def _at(rows: pd.DataFrame, cell: Cell) -> pd.DataFrame:
    return rows[(rows["model"] == cell.model) & (rows["memory"] == cell.memory) & (rows["link"] == cell.link)]


def _place(rows: pd.DataFrame, cell: Cell) -> str:
    return f"{cell.model}, {rows['budget_bytes'].max() / 1e9:g} GB, {cell.link} link"


def _mean(rows: pd.DataFrame) -> float:
    """Mean of the datasets' means, as the README's table has it."""
    return float(stats.average(rows, ["system"])["mean"].iloc[0])


def _flaws(own: pd.DataFrame) -> Iterator[str]:
    if own["within_budget"].eq(False).any():
        yield f"beyond its budget: {own['peak_device_bytes'].max() / 1e9:.2f} GB"
    if own["exact_match"].eq(False).any():
        yield "not exact"


def _absent(tried: pd.DataFrame, there: set[str]) -> list[str]:
    """Labels of systems that belong in figures and gave no time here."""
    bad = tried[(tried["status"] != "ok") & ~tried["system"].isin(there)]
    bad = bad[bad["system_figure"].fillna(True).astype(bool)].drop_duplicates("system")
    return [str(label) for label in bad["system_label"].fillna(bad["system"])]


def _reason(tried: pd.DataFrame) -> str:
    reasons = tried["reason"].dropna().astype(str).drop_duplicates().head(2)
    return "; ".join(reasons) or "not measured"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.aims", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DIR")
    folder: Path = parser.parse_args(arguments).folder
    table = gather(folder)
    met = table["met"].astype(str).str.lower().map({"true": "met", "false": "missed"})
    met = met.fillna(table["target"].isna().map({True: "-", False: "open"}))
    for word, row in zip(met, table.to_dict("records"), strict=True):
        value = "" if pd.isna(row["value"]) else f"{row['value']:.4g}"
        unit, target = ("" if pd.isna(row[name]) else str(row[name]) for name in ("unit", "target"))
        print(f"{word:7s}{value:>9s} {unit:13s} {target:8s} {row['aim']}", file=sys.stderr)
    counts = {word: int((met == word).sum()) for word in ("met", "missed", "open")}
    print(json.dumps({"out": str(folder / "aims.csv"), "aims": len(table)} | counts))
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
