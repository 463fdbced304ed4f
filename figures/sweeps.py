"""Which sweep rows belong to: told by the columns that vary. Every function takes and returns records."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from figures.style import shown

MAIN = "specter"
BUDGETS = 3  # memory settings that make a sweep over budgets; the main run has two
VARIANTS = 3  # variants of Specter that make an ablation; a main run may hold two


def measured(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with a time, of systems that belong in figures."""
    if rows.empty:
        return rows
    return shown(rows[(rows["status"] == "ok") & rows["tpot_ms"].notna()])


def depth(rows: pd.DataFrame) -> pd.DataFrame:
    """Specter at three or more depths K > 0, everything else equal."""
    rows = measured(rows)
    if rows.empty:
        return rows
    rows = main_variant(rows[(rows["system"] == MAIN) & (rows["K"] > 0)])
    return _varying(rows, "K", 3, ["model", "memory", "weights", "link", "device", "B", "prefix_len"])


def batch(rows: pd.DataFrame) -> pd.DataFrame:
    """Systems at two or more batch sizes."""
    rows = main_variant(measured(rows))
    return _varying(rows, "B", 2, ["system", "model", "memory", "weights", "link", "device"])


def prefix(rows: pd.DataFrame) -> pd.DataFrame:
    """Systems at three or more prefix lengths."""
    rows = main_variant(measured(rows))
    return _varying(rows, "prefix_len", 3, ["system", "model", "memory", "weights", "link", "device", "B"])


def memory(rows: pd.DataFrame) -> pd.DataFrame:
    """Systems at three or more budgets, everything else equal: where a setting is given in slots, its bytes grow with
    the KV, so with B and with the prefix."""
    rows = main_variant(measured(rows))
    fixed = ["system", "model", "weights", "link", "device", "B", "K", "prefix_len", "new_tokens"]
    return _varying(rows, "budget_bytes", BUDGETS, fixed)


def ablation(rows: pd.DataFrame) -> pd.DataFrame:
    """Specter in three or more variants."""
    rows = measured(rows)
    rows = rows[(rows["system"] == MAIN) & (rows["K"] > 0)] if len(rows) else rows
    return _varying(rows, "variant", VARIANTS, ["model", "memory", "weights", "link", "device", "B"])


def main(rows: pd.DataFrame) -> pd.DataFrame:
    """Two or more systems side by side at one workload: rows that belong to no sweep above."""
    rows = measured(rows)
    for sweep in (depth, batch, prefix, memory, ablation):
        rows = rows.drop(sweep(rows).index, errors="ignore") if len(rows) else rows
    if rows.empty:
        return rows
    rows = main_variant(rows)
    return _varying(rows, "system", 2, ["model", "memory", "link", "device", "B", "prefix_len", "new_tokens"])


def one_workload(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows that other sweeps hold of a main run: B = 1, the shortest prefix, and Specter at its best depth."""
    rows = main_variant(measured(rows))
    if rows.empty:
        return rows
    rows = rows[(rows["B"] == 1) & (rows["prefix_len"] == rows["prefix_len"].min())]
    own = rows[rows["system"] == MAIN]
    keys = ["model", "memory", "weights", "link", "device"]
    mean = own.groupby([*keys, "K"], dropna=False)["tpot_ms"].transform("mean")
    best = own.assign(mean=mean).groupby(keys, dropna=False)["mean"].transform("min")
    rows = rows.drop(own.index[mean > best])
    return _varying(rows, "system", 2, ["model", "memory", "link", "device", "new_tokens"])


SWEEPS = {"main": main, "depth": depth, "batch": batch, "prefix": prefix, "memory": memory, "ablation": ablation}


def main_variant(rows: pd.DataFrame) -> pd.DataFrame:
    """One variant per system: `default` where it is there, else the one with most rows."""
    if rows.empty:
        return rows
    counts = rows.groupby(["system", "variant"]).size()
    best = {s: _preferred(counts.xs(s, level="system")) for s in rows["system"].unique()}
    return rows[rows["variant"] == rows["system"].map(best)]


def _preferred(counts: pd.Series) -> str:
    return "default" if "default" in counts.index else str(counts.idxmax())


def _varying(rows: pd.DataFrame, column: str, least: int, fixed: list[str]) -> pd.DataFrame:
    """The rows of those groups in which column takes `least` values or more."""
    if rows.empty:
        return rows
    values = rows.groupby(fixed, dropna=False)[column].transform("nunique")
    return rows[values >= least]


SETTING = ["weights", "link", "device", "temperature", "new_tokens", "prefix_len", "B"]


def settings(rows: pd.DataFrame, free: str | None = None) -> Iterator[tuple[str, pd.DataFrame]]:
    """(suffix for a file name, rows) for each setting: rows of different settings never share a figure. free: the
    sweep's own axis. Rows of systems with dummy weights stand beside those of every other kind, under their name."""
    columns = [c for c in SETTING if c != free]
    dummy = rows[rows["weights"] == "dummy"]
    rest = rows[rows["weights"] != "dummy"]
    if rest.empty:
        rest, dummy = dummy, rest
    varying = [c for c in columns if rest[c].nunique() > 1]
    for key, block in rest.groupby(columns, sort=True):
        same = dummy
        for column, value in zip(columns, key, strict=True):
            if column != "weights":
                same = same[same[column] == value]
        same = same[same["model"].isin(block["model"])]
        suffix = "".join(f"-{_word(c, v)}" for c, v in zip(columns, key, strict=True) if c in varying)
        yield suffix, pd.concat([block, same]) if len(same) else block


def _word(column: str, value: object) -> str:
    return str(value) if column in ("weights", "link", "device") else f"{column}{value}"
