"""One look for every figure: sizes, fonts, and a fixed colour, order and label per system and dataset."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from figures import looks

LABELS = ("GK", "WT", "HE", "GP", "C4", "AVG")
WATERMARK = "CPU run: checks behaviour, not GPU performance"
DUMMY = "dummy weights"
FALLBACK = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
DATASET_COLOURS = dict(zip(LABELS, ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#000000"), strict=True))
MODELS = {
    "deepseek_v2_lite": "DeepSeek-V2-Lite",
    "qwen15_moe": "Qwen1.5-MoE",
    "phi35_moe": "Phi-3.5-MoE",
    "deepseek_v2_mini": "DeepSeek-V2 mini",
    "qwen2_moe_mini": "Qwen2-MoE mini",
    "phimoe_mini": "PhiMoE mini",
}
MEMORIES = ("high", "wide", "roomy", "low", "tight")
PAPER = {"marker": "D", "s": 15, "facecolors": "white", "edgecolors": "black", "linewidths": 0.8, "zorder": 5}
PAPER_LABEL = "paper (A100 40 GB, PCIe 4.0)"
HIT, MISS, WAIT, QUIET = "#009E73", "#D55E00", "#E69F00", "#999999"
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
    hatch: str = ""


def look() -> AbstractContextManager[None]:
    """The settings that every figure is drawn and saved under."""
    return mpl.rc_context(RC)


def systems(rows: pd.DataFrame) -> list[SystemStyle]:
    """The systems of rows that belong in a figure, in their fixed order. Columns system_label, system_colour,
    system_order and system_figure (figures/looks.py) say how; a system without them gets a fallback colour by
    name."""
    table = rows.drop_duplicates("system").set_index("system")
    called = looks.labels(rows)
    names = sorted(table.index, key=lambda s: (_of(table, s, "system_order", 99), s))
    styles = []
    for number, name in enumerate(names):
        if _of(table, name, "system_figure", True):
            colour = _of(table, name, "system_colour", FALLBACK[number % len(FALLBACK)])
            label, remarks = called.get(name, name), _remarks(rows, name)
            label = f"{label} ({', '.join(remarks)})" if remarks else label
            styles.append(SystemStyle(name, label, colour, "////" if DUMMY in remarks else ""))
    return styles


def _remarks(rows: pd.DataFrame, system: str) -> list[str]:
    """What tells a system's rows from those of the others: dummy weights, more or fewer tokens, fewer datasets."""
    own = rows[rows["system"] == system]
    remarks = [DUMMY] if "weights" in own and (own["weights"] == "dummy").all() else []
    usual = "asked_tokens" if "asked_tokens" in rows else "new_tokens"
    if "new_tokens" in own and not (own["new_tokens"] == rows[usual].mode().max()).any():
        remarks.append(f"{own['new_tokens'].max()} tokens")
    if "label" in own and (there := set(own["label"])) < (every := set(rows["label"])):
        few = ", ".join(x for x in LABELS if x in there)
        remarks.append(f"{few} only" if len(there) < 3 else f"{len(there)} of {len(every)} datasets")
    return remarks


def shown(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of the systems that belong in a figure."""
    return rows[rows["system_figure"].fillna(True).astype(bool)] if "system_figure" in rows else rows


def legend_columns(names: Sequence[str], width_in: float, most: int = 4) -> int:
    """How many columns of a legend in its usual size fit: the widest column counts for all (0.06 in per letter, half an
    inch for its mark)."""
    widest = max((len(name) for name in names), default=1) * 0.06 + 0.5
    return max(1, min(most, len(names), int(width_in / widest)))


def model_label(model: str) -> str:
    return MODELS.get(model, model)


def models(rows: pd.DataFrame) -> list[str]:
    """The models of rows in their fixed order, unknown ones last."""
    return [m for m in MODELS if m in set(rows["model"])] + sorted(set(rows["model"]) - set(MODELS))


def memories(rows: pd.DataFrame) -> list[str]:
    """The memory settings of rows in their fixed order, unknown ones last."""
    return [m for m in MEMORIES if m in set(rows["memory"])] + sorted(set(rows["memory"]) - set(MEMORIES))


def caption(rows: pd.DataFrame) -> str:
    """n, weights kind, link and device of the rows shown."""
    n = rows.groupby(["model", "memory", "system"])["prompt_id"].nunique()
    rates = sorted({_rate(r.link, r.link_rate_bytes_per_s) for r in rows.itertuples()})
    shown = {
        "prompts per system": _span(n),
        "repeats": _span(rows["repeat"].groupby(rows["config_hash"]).nunique()) if "repeat" in rows else "1",
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
    stamp(figure, caption(rows), bool((rows["device"] == "cpu").any()))


def stamp(figure: Figure, text: str, cpu: bool) -> None:
    """`text` below the axes, wrapped to the figure's width; cpu: the watermark across."""
    whole = "; ".join(part.replace(" ", "\N{NO-BREAK SPACE}") if len(part) < 30 else part for part in text.split("; "))
    lines = textwrap.wrap(whole, round(19.5 * figure.get_figwidth()), break_on_hyphens=False)
    figure.set_figheight(figure.get_figheight() + 0.1 * (len(lines) - 1))
    figure.supxlabel(
        "\n".join(lines).replace("\N{NO-BREAK SPACE}", " "), fontsize=6.3, color="#444444", linespacing=1.25
    )
    if cpu:
        figure.text(
            0.5,
            0.5,
            WATERMARK,
            ha="center",
            va="center",
            fontsize=5.2 * figure.get_figwidth() ** 0.62,
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
