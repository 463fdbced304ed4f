"""TPOT of every system against the memory budget (beyond the paper).

python -m figures.memory --records outputs/memory-run/records.csv --out outputs/memory-run/figures
"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from figures import lines, looks, style, sweeps

NAME = "memory"
FREE = ("memory", "budget_bytes")
CELL = ["system", "model", "budget_bytes"]
WORDS = {"not_run": "not measured"}


def figure(rows: pd.DataFrame) -> Figure:
    """rows: records of systems at two or more budgets; budgets in GB (1e9), below 0.1 GB in MB. Rows that are not ok
    are named below, never drawn."""
    with style.look():
        drawn = sweeps.budgets(rows)
        unit, size = ("GB", 1e9) if drawn["budget_bytes"].max() >= 1e8 else ("MB", 1e6)
        scaled = drawn.assign(budget_bytes=drawn["budget_bytes"] / size)
        label = f"device memory budget ({unit})"
        fig = lines.grid(scaled, "budget_bytes", {"tpot_ms": "TPOT (ms)"}, label, "linear", cut=True)
        text = [style.caption(drawn), *_datasets(drawn), *absent(rows, drawn, unit, size)]
        style.stamp(fig, "; ".join(text), bool((drawn["device"] == "cpu").any()))
        return fig


def beside(every: pd.DataFrame, drawn: pd.DataFrame) -> pd.DataFrame:
    """Rows of `every` that gave no time in the setting of `drawn`, at byte budgets where `drawn` has nothing."""
    bad = style.shown(every[(every["status"] != "ok") & every["budget_bytes"].notna()])
    places, there = (set(drawn[keys].itertuples(index=False, name=None)) for keys in (sweeps.BESIDE_BUDGETS, CELL))
    kinds = {*drawn["weights"], "dummy"}
    kept = [
        place in places and cell not in there and weights in kinds
        for place, cell, weights in zip(
            bad[sweeps.BESIDE_BUDGETS].itertuples(index=False, name=None),
            bad[CELL].itertuples(index=False, name=None),
            bad["weights"],
            strict=True,
        )
    ]
    return bad[pd.Series(kept, index=bad.index, dtype=bool)]


def absent(every: pd.DataFrame, drawn: pd.DataFrame, unit: str, size: float) -> list[str]:
    """One text per model and status: which systems at which budgets."""
    bad = beside(every, drawn)
    labels = looks.labels(bad, drawn["system"])
    texts = []
    for model in style.models(drawn):
        own = bad[bad["model"] == model]
        for status, block in own.groupby("status"):
            budgets = {s: sorted(b["budget_bytes"].unique()) for s, b in block.groupby("system", sort=False)}
            said: dict[str, list[str]] = {}
            for system, sizes in budgets.items():
                where = " ".join(f"{b / size:g}" for b in sizes)
                said.setdefault(where, []).append(str(labels.get(system, system)))
            cells = ", ".join(f"{' / '.join(names)} at {where} {unit}" for where, names in said.items())
            texts.append(f"{WORDS.get(str(status), status)}, {style.model_label(model)}: {cells}")
    return texts


def _datasets(drawn: pd.DataFrame) -> list[str]:
    """Points of a curve may be means over different numbers of datasets."""
    counts = drawn.groupby(CELL)["label"].nunique()
    low, high = counts.min(), counts.max()
    return [] if low == high else [f"datasets per point {low}-{high}"]


if __name__ == "__main__":
    from figures.io import main

    raise SystemExit(main(figure, NAME, free=FREE))
