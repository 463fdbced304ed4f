"""Figure 13: distinct experts per window and dataset, and how far the datasets' routing distributions differ.

python -m figures.fig13_routing --routing results/h200/routing.csv --out outputs/figures
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures import stats, style
from figures.scale import shown
from figures.sweeps import MAIN

NAME = "fig13_routing"
DATASETS = style.LABELS[:-1]


def figure(rows: pd.DataFrame) -> Figure:
    """rows: routing.csv (figures/results.py). One line of two panels per model. Left: mean distinct experts per layer
    and window by dataset, standard error over rows. Right, where any model has one: mean Jensen-Shannon divergence of
    each pair of datasets; the diagonal, where given, compares two halves of one dataset."""
    with style.look():
        names = style.models(rows)
        fig = Figure(figsize=(style.TEXT_WIDTH_IN * 0.9, 0.5 + 2.25 * len(names)), layout="constrained")
        compared = bool((rows["kind"] == "divergence").any())
        axes = fig.subplots(len(names), 1 + compared, squeeze=False)
        for line, model in zip(axes, names, strict=True):
            own = rows[rows["model"] == model]
            _distinct(line[0], own[own["kind"] == "distinct"])
            line[0].set_title(style.model_label(model), loc="left")
            if compared:
                _divergence(fig, line[1], own[own["kind"] == "divergence"])
        style.stamp(fig, caption(rows), bool((rows["device"] == "cpu").any()))
        return fig


def counted(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of kind `distinct` from records of Specter: one per prompt, mean over layers, windows and repeats; each
    window has up to K + 1 tokens."""
    if rows.empty:
        return rows
    own = rows[(rows["system"] == MAIN) & rows["distinct_experts"].notna()]
    keys = ["model", "weights", "device", "label", "prompt_id"]
    table = own.groupby(keys).agg(value=("distinct_experts", "mean"), window=("K", "max")).reset_index()
    table["window"] += 1
    table = table.drop(columns="prompt_id").rename(columns={"label": "dataset"})
    return table.assign(kind="distinct", other="", layer=None)


def caption(rows: pd.DataFrame) -> str:
    distinct = rows[rows["kind"] == "distinct"]
    n = distinct.groupby(["model", "dataset"]).size()
    window = ", ".join(f"{w:g}" for w in sorted(distinct["window"].dropna().unique()))
    count = f"{n.min()}" if len(n) and n.min() == n.max() else f"{n.min()}-{n.max()}" if len(n) else "0"
    what = "MoE layers" if distinct["layer"].notna().all() else "prompt" if count == "1" else "prompts"
    return (
        f"window of {window or 'unknown'} tokens; n = {count} {what} per bar; weights "
        f"{', '.join(sorted(rows['weights'].unique()))}; device {', '.join(sorted(rows['device'].unique()))}"
    )


def _distinct(axis: Axes, rows: pd.DataFrame) -> None:
    table = rows.groupby("dataset")["value"].agg(["mean", "sem"])
    labels = [x for x in DATASETS if x in table.index]
    values = table.loc[labels]
    axis.bar(range(len(labels)), values["mean"], color=[style.DATASET_COLOURS[x] for x in labels], width=0.7)
    axis.errorbar(
        range(len(labels)),
        values["mean"],
        stats.whiskers(values["sem"]),
        fmt="none",
        ecolor="#222222",
        lw=0.8,
        capsize=2,
    )
    tops = values["mean"] + values["sem"].fillna(0)
    for place, (value, top) in enumerate(zip(values["mean"], tops, strict=True)):
        axis.annotate(shown(value), (place, top), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=6.5)
    axis.margins(y=0.15)
    axis.set_xticks(range(len(labels)), labels)
    axis.set_ylabel("distinct experts\nper layer and window")


def _divergence(fig: Figure, axis: Axes, rows: pd.DataFrame) -> None:
    grid = np.full((len(DATASETS), len(DATASETS)), np.nan)
    for (one, other), value in rows.groupby(["dataset", "other"])["value"].mean().items():
        if one in DATASETS and other in DATASETS:
            i, j = DATASETS.index(one), DATASETS.index(other)
            grid[i, j] = grid[j, i] = value
    axis.grid(visible=False)
    axis.set_xticks(range(len(DATASETS)), DATASETS)
    axis.set_yticks(range(len(DATASETS)), DATASETS)
    if np.isnan(grid).all():
        axis.text(2, 2, "no divergence rows", ha="center", va="center", fontsize=7)
        return
    image = axis.imshow(grid, cmap="viridis", vmin=0)
    top = np.nanmax(grid)
    for i, j in np.ndindex(*grid.shape):
        if np.isfinite(grid[i, j]):
            colour = "black" if grid[i, j] > 0.6 * top else "white"
            axis.text(j, i, f"{grid[i, j]:.2g}", ha="center", va="center", fontsize=6, color=colour)
    bar = fig.colorbar(image, ax=axis, shrink=0.85)
    bar.set_label("routing divergence (JS, bits)", fontsize=7)
    bar.ax.tick_params(labelsize=6.5)


def main() -> int:
    import argparse
    from pathlib import Path

    from figures.io import exit_code, show

    parser = argparse.ArgumentParser(prog=f"python -m figures.{NAME}")
    parser.add_argument("--routing", type=Path, required=True, help="routing.csv")
    parser.add_argument("--out", type=Path, required=True, help="folder for PNG and PDF")
    options = parser.parse_args()

    def body() -> int:
        if not options.routing.exists():
            raise SystemExit(f"error: {options.routing} does not exist; python run.py sweep=routing writes it")
        return show(figure(pd.read_csv(options.routing)), options.out, NAME)

    return exit_code(body)


if __name__ == "__main__":
    raise SystemExit(main())
