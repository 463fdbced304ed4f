"""Figure 7: TPOT against the speculation depth K, from which K is chosen.

python -m figures.fig07_depth --records outputs/depth-run/records.csv --out outputs/depth-run/figures
"""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures import paper, stats, style, sweeps

NAME = "fig07_depth"
FREE = ("K",)


def figure(rows: pd.DataFrame, system: str = sweeps.MAIN) -> Figure:
    """rows: records of Specter (system: or of sweeps.NESTED) at several K. One panel per (model, memory): a thin line
    per dataset, a thick one with standard errors for their average, the K of least average TPOT circled, the paper's K
    dotted. The panel's note gives the mean acceptance a, E[A] = a/(1 - a) and the chosen K."""
    with style.look():
        return _draw(sweeps.depth(rows, 2, system))


def best(rows: pd.DataFrame) -> pd.DataFrame:
    """rows: of `sweeps.depth`. Columns model, memory, K, mean, error: the depth of least mean TPOT (ties: the smaller
    K)."""
    table = stats.average(rows, ["model", "memory", "K"])
    table = table.sort_values(["mean", "K"])
    return table.groupby(["model", "memory"], sort=False).head(1).reset_index(drop=True)


def _draw(rows: pd.DataFrame) -> Figure:
    panels = [
        (model, memory, rows[(rows["model"] == model) & (rows["memory"] == memory)])
        for memory in style.memories(rows)
        for model in style.models(rows)
    ]
    panels = [panel for panel in panels if len(panel[2])]
    columns = 2 if len(panels) == 4 else min(3, len(panels))
    lines = -(-len(panels) // columns)
    width = style.TEXT_WIDTH_IN * (0.58 if columns == 1 else 0.8 if columns == 2 else 1)
    fig = Figure(figsize=(width, 0.85 + 2.05 * lines), layout="constrained")
    axes = fig.subplots(lines, columns, squeeze=False).ravel()
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    chosen = best(rows).set_index(["model", "memory"])["K"]
    for axis, (model, memory, panel) in zip(axes, panels, strict=False):
        _panel(axis, panel, int(chosen[(model, memory)]))
        axis.set_title(f"{style.model_label(model)}, {memory} memory", loc="left")
    handles: dict[str, object] = {}
    for axis in axes[: len(panels)]:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    fig.legend(
        handles.values(), handles.keys(), loc="outside upper center", ncols=4 if columns < 3 else 8, frameon=False
    )
    experts = "; experts nested" if (rows["system"] == sweeps.NESTED).all() else ""
    style.stamp(fig, style.caption(rows) + experts, bool((rows["device"] == "cpu").any()))
    return fig


def _panel(axis: Axes, panel: pd.DataFrame, chosen: int) -> None:
    table = stats.means(panel, ["K"])
    depths = sorted(table["K"].unique())
    place = {k: i for i, k in enumerate(depths)}
    for label in style.LABELS:
        own = table[table["label"] == label].sort_values("K")
        if own.empty:
            continue
        at = [place[k] for k in own["K"]]
        colour = style.DATASET_COLOURS[label]
        if label == "AVG":
            axis.errorbar(
                at,
                own["mean"],
                stats.whiskers(own["error"]),
                color=colour,
                lw=1.6,
                marker="o",
                ms=3.5,
                capsize=2,
                label=label,
            )
            mark = own[own["K"] == chosen]
            axis.plot(
                [place[chosen]],
                mark["mean"],
                "o",
                ms=9,
                mfc="none",
                mec="#D55E00",
                mew=1.4,
                ls="none",
                label="chosen K",
            )
        else:
            axis.plot(at, own["mean"], color=colour, lw=0.8, alpha=0.85, label=label)
    stated = paper.value("depth", model=panel["model"].iloc[0])
    if stated in place:
        axis.axvline(place[int(stated)], color="black", ls=":", lw=1, label="K in the paper")
    rate = stats.average(panel, ["model"], "acceptance")["mean"]
    note = f"K = {chosen}"
    if len(rate) and 0 < rate.iloc[0] < 1:
        note = f"a = {rate.iloc[0]:.3f}, E[A] = {rate.iloc[0] / (1 - rate.iloc[0]):.1f}, " + note
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.2}
    axis.text(0.5, 0.975, note, transform=axis.transAxes, ha="center", va="top", fontsize=6.8, bbox=box, zorder=6)
    low, high = axis.get_ylim()
    axis.set_ylim(low, high + 0.14 * (high - low))
    axis.set_xticks(range(len(depths)), [str(k) for k in depths])
    axis.set_xlabel("speculation depth K (tokens)")
    axis.set_ylabel("TPOT (ms)")


if __name__ == "__main__":
    from figures.io import main

    raise SystemExit(main(figure, NAME, free=FREE))
