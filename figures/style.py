"""One look for every figure: sizes, fonts, and a fixed colour, order and label per system and dataset."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

LABELS = ("GK", "WT", "HE", "GP", "C4", "AVG")
WATERMARK = "CPU run: checks behaviour, not GPU performance"
FALLBACK = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
COLUMN_WIDTH_IN, TEXT_WIDTH_IN = 3.4, 7.0

RC = {
    "figure.dpi": 200,
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 7.5,
    "legend.fontsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "pdf.fonttype": 42,
}


class SystemStyle(NamedTuple):
    """How a system is drawn. Colours are colour-blind safe (Okabe and Ito)."""

    system: str
    label: str
    colour: str


def look() -> AbstractContextManager[None]:
    """The settings that every figure is drawn and saved under."""
    return mpl.rc_context(RC)


def systems(rows: pd.DataFrame) -> list[SystemStyle]:
    """The systems of rows that belong in a figure, in their fixed order. Columns system_label, system_colour,
    system_order and system_figure (io.with_systems) say how; a system without them gets a fallback colour by
    name."""
    table = rows.drop_duplicates("system").set_index("system")
    names = sorted(table.index, key=lambda s: (_of(table, s, "system_order", 99), s))
    styles = []
    for number, name in enumerate(names):
        if _of(table, name, "system_figure", True):
            colour = _of(table, name, "system_colour", FALLBACK[number % len(FALLBACK)])
            styles.append(SystemStyle(name, _of(table, name, "system_label", name), colour))
    return styles


def caption(rows: pd.DataFrame) -> str:
    """n, weights kind, link and device of the rows shown."""
    n = rows.groupby(["model", "memory", "system"])["prompt_id"].nunique()
    prompts = str(n.min()) if n.min() == n.max() else f"{n.min()}-{n.max()}"
    rates = sorted({_rate(r.link, r.link_rate_bytes_per_s) for r in rows.itertuples()})
    shown = {
        "prompts per system": prompts,
        "prefix": f"{_span(rows['prefix_len'])} tokens",
        "new tokens": _span(rows["new_tokens"]),
        "batch": _span(rows["B"]),
        "weights": ", ".join(sorted(rows["weights"].unique())),
        "link": ", ".join(rates),
        "device": ", ".join(sorted(rows["device"].unique())),
    }
    return "; ".join(f"{name} {value}" for name, value in shown.items())


def finish(figure: Figure, rows: pd.DataFrame) -> None:
    """Caption below, and on a CPU the watermark across."""
    figure.text(0.5, 0.012, caption(rows), ha="center", va="bottom", fontsize=6.8, color="#444444")
    if (rows["device"] == "cpu").any():
        size = 5.2 * figure.get_figwidth() ** 0.62
        figure.text(
            0.5,
            0.5,
            WATERMARK,
            ha="center",
            va="center",
            fontsize=size,
            color="#aa0000",
            alpha=0.22,
            rotation=12,
        )


def _rate(link: str, rate: float) -> str:
    return link if pd.isna(rate) else f"{link} ({rate / 1e9:g} GB/s)"


def _span(values: pd.Series) -> str:
    low, high = int(values.min()), int(values.max())
    return str(low) if low == high else f"{low}-{high}"


def _of(table: pd.DataFrame, system: str, column: str, default: Any) -> Any:
    value = table[column].get(system) if column in table else None
    return default if value is None or pd.isna(value) else value
