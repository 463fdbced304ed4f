"""Ablation: Specter with one mechanism off at a time.

python -m figures.ablation --records outputs/ablation-run/records.csv --out outputs/ablation-run/figures
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures import stats, style, sweeps

NAME = "ablation"
FREE = ("variant",)
BASE = "default"
VARIANT_LABELS = {
    "default": "Specter",
    "paper": "paper's switches",
    "plain": "plain experts",
    "tokenwise": "token-wise order",
    "no_expertwise": "token-wise order",
    "private_kv": "private KV",
    "no_shared_kv": "private KV",
    "no_graphs": "no CUDA graphs",
    "top_m_planning": "top-M planning",
    "count_eviction": "eviction by count",
    "no_stage_ahead": "no staging ahead",
    "draft_stop": "unlikely drafts stopped",
}


def relative(panel: pd.DataFrame) -> pd.DataFrame:
    """Columns variant, ratio, error: geometric mean over prompts of TPOT(variant) / TPOT(default), one standard error
    of the mean log ratio; without a default variant, over the fastest one."""
    prompts = panel.groupby(["variant", "label", "prompt_id"])["tpot_ms"].mean().unstack("variant")
    base = BASE if BASE in prompts else str(prompts.mean().idxmin())
    logs = np.log(prompts.div(prompts[base], axis=0))
    table = pd.DataFrame({"ratio": np.exp(logs.mean()), "error": logs.sem().fillna(0)})
    table["error"] *= table["ratio"]
    order = table.drop(index=base).sort_values("ratio")
    return pd.concat([table.loc[[base]], order]).rename_axis("variant").reset_index()


def figure(rows: pd.DataFrame) -> Figure:
    """rows: records of Specter in three or more variants. One panel per (model, memory): the slowdown of each variant;
    the bar's text gives its average TPOT."""
    with style.look():
        return _draw(sweeps.ablation(rows))


def _draw(rows: pd.DataFrame) -> Figure:
    panels = [
        (model, memory, rows[(rows["model"] == model) & (rows["memory"] == memory)])
        for model in style.models(rows)
        for memory in style.memories(rows)
    ]
    panels = [p for p in panels if len(p[2])]
    most = max(panel["variant"].nunique() for _, _, panel in panels)
    height = 0.7 + len(panels) * (0.5 + 0.2 * most)
    fig = Figure(figsize=(style.TEXT_WIDTH_IN * 0.75, height), layout="constrained")
    axes = fig.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
    right = 0.0
    for axis, (model, memory, panel) in zip(axes, panels, strict=True):
        right = max(right, _panel(axis, panel))
        axis.set_title(f"{style.model_label(model)}, {memory} memory", loc="left")
    axes[-1].set_xlim(0, right)
    axes[-1].set_xlabel("TPOT over Specter's (1 = all mechanisms on)")
    style.finish(fig, rows)
    return fig


def _panel(axis: Axes, panel: pd.DataFrame) -> float:
    """Returns how far to the right its bars and their texts reach."""
    table = relative(panel)
    tpot = stats.average(panel, ["variant"]).set_index("variant")["mean"]
    at = np.arange(len(table))
    specter = style.systems(panel[panel["variant"] == table["variant"].iloc[0]])[0].colour
    colours = [specter] + [style.QUIET] * (len(table) - 1)
    axis.barh(at, table["ratio"], color=colours, height=0.7)
    xerr = stats.whiskers(table["error"])
    axis.errorbar(table["ratio"], at, xerr=xerr, fmt="none", ecolor="#222222", elinewidth=0.8, capsize=2)
    for place, row in enumerate(table.itertuples()):
        axis.annotate(
            f"{row.ratio:.2f}x, {tpot[row.variant]:.3g} ms",
            (row.ratio + row.error, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=6.5,
        )
    axis.set_yticks(at, [variant_label(v) for v in table["variant"]])
    axis.invert_yaxis()
    axis.grid(axis="x")
    axis.grid(axis="y", visible=False)
    axis.axvline(1, color="#555555", lw=0.8, ls=":")
    return float(1.3 * (table["ratio"] + table["error"]).max())


def variant_label(variant: str) -> str:
    return VARIANT_LABELS.get(variant, variant.replace("_", " "))


if __name__ == "__main__":
    from figures.io import main

    raise SystemExit(main(figure, NAME, free=FREE))
