"""What a results folder holds: records of any number of runs, kernel and routing benches, aims, timings, traces.

DIR/**/records.csv   one row per request (harness/columns.py); systems.csv and environment.json may lie beside it
DIR/**/kernels.csv   one row per timed kernel            KERNELS
DIR/**/routing.csv   one row per routing statistic       ROUTING
DIR/**/acceptance.csv one row per dataset and depth    ACCEPTANCE
DIR/**/aims.csv, *_aims.csv   one row per aim of the project   AIMS (gathered ones, with a column `source`, are skipped)
DIR/**/exactness.csv one row per check of tokens against the plain target   EXACTNESS
DIR/**/timings.csv   one row per timed command           TIMINGS
DIR/**/efficiency.csv, prefetch_by_horizon.csv, prefetch_by_layer.csv   one row per cell   harness/efficiency.py
DIR/**/traces/*.json Chrome traces (scripts/record_traces.py)

Columns beyond those named are kept and ignored; tables have a column `folder`, where their rows are from; one without
`device` has that of the environment.json beside it.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from figures.looks import with_systems

KERNELS = {
    "shape": "what is multiplied: 'dense INxOUT', 'expert INxOUT' (one expert's matrix) or 'moe MODEL' (the routed "
    "experts of one layer)",
    "tokens": "rows of the input; a dense shape with 64 or more stands for prefill, below for decoding",
    "backend": "fp16 | marlin | specter (other names are drawn too)",
    "variant": "fused | unfused for 'moe' shapes, else free",
    "launches": "kernel launches per call",
    "us": "device time of one call, microseconds; empty when it failed",
    "tb_per_s": "bytes of weights and activations over that time, 1e12 bytes/s",
    "share_of_ceiling": "tb_per_s over the measured copy or read ceiling",
    "device": "cuda | cpu",
    "weights": "weights kind (random weights: synthetic)",
    "reason": "why it failed, else empty",
}
ROUTING = {
    "model": "name in conf/model",
    "weights": "weights kind",
    "device": "cuda | cpu",
    "kind": "distinct: distinct experts of a window; divergence: Jensen-Shannon divergence (base 2) of two routing "
    "distributions",
    "dataset": "label GK, WT, HE, GP, C4",
    "other": "divergence: the second dataset's label; the same label means two halves of one dataset",
    "layer": "MoE layer, or empty for the mean over layers",
    "window": "distinct: tokens per window; divergence: empty",
    "value": "the statistic",
}
ACCEPTANCE = {
    "model": "name in conf/model",
    "weights": "weights kind",
    "device": "cuda | cpu",
    "dataset": "label GK, WT, HE, GP, C4",
    "depth": "K",
    "acceptance": "accepted over tested draft tokens",
}
AIMS = {
    "aim": "what is aimed at",
    "value": "measured",
    "unit": "of value and target",
    "target": "aimed at, e.g. >= 0.7; empty: a figure without one",
    "met": "true | false",
    "git_commit": "of the measurement",
}
TIMINGS = {
    "sweep": "main | depth | prefix | ...",
    "minutes": "wall time, model loading included",
    "model": "name in conf/model",
    "weights": "weights kind",
    "link": "name in conf/link",
    "device": "cuda | cpu",
    "git_commit": "of the measurement",
}
NEEDED = ("system", "variant", "model", "weights", "label", "prompt_id", "repeat", "temperature", "B", "K")
NEEDED += ("budget_bytes", "memory", "prefix_len", "new_tokens", "tpot_ms", "status", "link", "device", "config_hash")
"""Columns of records without which rows say nothing; any other that is absent is read as empty."""
NEVER_EMPTY = ["config_hash", "prompt_id", "repeat", "system", "model", "weights", "device", "status"]
EMPTY = ("M", "encoding", "ttft_ms", "throughput", "acceptance", "tokens_per_window", "access_hit_rate", "coverage")
EMPTY += ("coverage_ceiling", "distinct_experts", "prefetch_precision", "prefetch_recall", "h2d_bytes")
EMPTY += ("h2d_bytes_used", "d2h_bytes", "link_utilisation", "stall_ms", "peak_device_bytes", "within_budget")
EMPTY += ("energy_j", "exact_match", "reason", "link_rate_bytes_per_s", "git_commit")
EXACTNESS = {
    "model": "name in conf/model",
    "weights": "weights kind",
    "device": "cuda | cpu",
    "tokens": "compared with the plain target's",
    "mismatches": "those that differ",
}
CELL = ("model", "weights", "memory", "link", "device", "B", "prefix_len", "system", "variant", "encoding", "K")
LOADS = ("requests", "committed", "tpot_ms", "needed_loads", "moved_loads", "lru_loads", "belady_loads")
FORESIGHT = ("planned", "right", "needed")
EFFICIENCY = {
    "efficiency": (*CELL, *LOADS),
    "prefetch_by_horizon": (*CELL, "drafted", *FORESIGHT),
    "prefetch_by_layer": (*CELL, "layer", *FORESIGHT),
}
TABLES: dict[str, Collection[str]] = {
    "kernels": KERNELS,
    "routing": ROUTING,
    "acceptance": ACCEPTANCE,
    "aims": AIMS,
    "timings": TIMINGS,
    "exactness": EXACTNESS,
} | EFFICIENCY


@dataclass(slots=True)
class Results:
    """records: folder (relative) -> its rows. Tables are empty frames with their columns where no file is.
    others: folder -> its CSV and trace files besides records. problems: one line per file that cannot be used."""

    folder: Path
    records: dict[str, pd.DataFrame] = field(default_factory=dict)
    tables: dict[str, pd.DataFrame] = field(default_factory=dict)
    traces: list[Path] = field(default_factory=list)
    environments: dict[str, dict] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    others: dict[str, list[str]] = field(default_factory=dict)

    def all_records(self) -> pd.DataFrame:
        return pd.concat(list(self.records.values()), ignore_index=True) if self.records else pd.DataFrame()

    def untold(self, sweep: str) -> str:
        """Why the folders named after a sweep have no measured row: their reasons; empty where one has, or none is."""
        own = [rows for folder, rows in self.records.items() if folder.split("/")[-1].startswith(sweep)]
        if not own or any((rows["status"] == "ok").any() for rows in own):
            return ""
        reasons = pd.concat(own)["reason"].dropna().astype(str)
        return "; ".join(reasons.drop_duplicates().head(3))


def read(folder: Path) -> Results:
    """Everything below folder. SystemExit with one line when the folder does not exist."""
    if not folder.is_dir():
        raise SystemExit(f"error: {folder} does not exist; a run writes one (python run.py), or name another folder")
    results = Results(folder, traces=sorted(folder.glob("**/traces/*.json")))
    for path in sorted(folder.glob("**/records.csv")):
        rows = _whole(path, _table(path, NEEDED, results.problems), results.problems)
        if len(rows):
            rows = rows.assign(**{name: float("nan") for name in EMPTY if name not in rows})
            rows = rows.drop_duplicates(["config_hash", "prompt_id", "repeat"], keep="last").reset_index(drop=True)
            results.records[_name(path, folder)] = with_systems(rows, path.with_name("systems.csv"))
    for name, columns in TABLES.items():
        found = {p: _table(p, tuple(columns), results.problems) for p in sorted(folder.glob(f"**/{name}.csv"))}
        filled = [table.assign(folder=_name(path, folder)) for path, table in found.items() if len(table)]
        results.tables[name] = (
            pd.concat(filled, ignore_index=True) if filled else pd.DataFrame(columns=[*columns, "folder"])
        )
    results.tables["aims"] = _aims(folder, results.problems)
    for path in sorted(folder.glob("**/environment.json")):
        try:
            results.environments[_name(path, folder)] = dict(json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            results.problems.append(f"{path} is no environment: {' '.join(str(error).split())}")
    results.others = _others(folder)
    return results


def _whole(path: Path, rows: pd.DataFrame, problems: list[str]) -> pd.DataFrame:
    """The rows of records that are no torn lines."""
    if rows.empty:
        return rows
    whole = rows.dropna(subset=NEVER_EMPTY)
    if len(whole) < len(rows):
        problems.append(f"{path}: {len(rows) - len(whole)} of {len(rows)} rows are torn lines and left out")
    return whole


def _others(folder: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in sorted([*folder.glob("**/*.csv"), *folder.glob("**/traces/*.json")]):
        if path.name not in ("records.csv", "systems.csv", "summary.csv") and not path.name.endswith(".tmp"):
            found.setdefault(_name(path, folder), []).append(path.name)
    return found


def _aims(folder: Path, problems: list[str]) -> pd.DataFrame:
    """AIMS with note and source (the folder); of an aim that a folder holds twice, the last."""
    columns = [*AIMS, "note", "source"]
    found = []
    for path in sorted({*folder.glob("**/aims.csv"), *folder.glob("**/*_aims.csv")}):
        table = _table(path, tuple(AIMS), problems)
        if len(table) and "source" not in table:
            found.append(table.assign(source=_name(path, folder)).reindex(columns=columns).astype(object))
    if not found:
        return pd.DataFrame(columns=columns)
    return pd.concat(found, ignore_index=True).drop_duplicates(["source", "aim"], keep="last").reset_index(drop=True)


def _device(folder: Path) -> str | None:
    """Of the environment.json in folder; None without one."""
    try:
        environment = json.loads((folder / "environment.json").read_text())
    except (OSError, ValueError):
        return None
    return str(environment.get("device") or ("cuda" if environment.get("gpu") or environment.get("gpus") else "cpu"))


def _name(path: Path, folder: Path) -> str:
    return str(path.parent.relative_to(folder))


def _table(path: Path, needed: tuple[str, ...], problems: list[str]) -> pd.DataFrame:
    try:
        table = pd.read_csv(path)
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        problems.append(f"{path} cannot be read: {' '.join(str(error).split())}")
        return pd.DataFrame()
    if sum(column in table for column in needed) < 2:  # another kind of table that happens to have the name
        return pd.DataFrame()
    if "device" in needed and "device" not in table and (device := _device(path.parent)):
        table = table.assign(device=device)
    missing = [column for column in needed if column not in table]
    if missing:
        problems.append(f"{path} has no column {', '.join(missing)}; figures/results.py says what it must hold")
        return pd.DataFrame()
    return table
