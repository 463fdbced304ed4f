"""Efficiency: experts moved per token beside LRU and Belady, and how well plans foretell, by draft tokens and by layer.

python -m figures --results results/h200 --only efficiency
"""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from figures import looks, style, sweeps

NAME = "efficiency"
KEYS = ["weights", "link", "device", "encoding"]
LOADS = {"needed_loads": "needed", "moved_loads": "moved", "lru_loads": "LRU", "belady_loads": "Belady"}
CELL = [*KEYS, "model", "memory", "B", "system", "variant"]
PLACE = ["folder", "prefix_len", "K"]
SHARES = {"precision": (style.HIT, "o"), "recall": (style.FALLBACK[0], "s")}


def settings(found: dict[str, pd.DataFrame]) -> list[tuple[str, dict[str, pd.DataFrame]]]:
    """(suffix, tables) per weights, link, device and encoding: Specter's rows of efficiency.csv,
    prefetch_by_horizon.csv and prefetch_by_layer.csv at B = 1, of one K per model and memory setting."""
    own = _one_depth({name: _own(table) for name, table in found.items()})
    keys = own["efficiency"][KEYS].drop_duplicates().itertuples(index=False, name=None)
    chosen = sorted((tuple(map(str, key)) for key in keys), key=lambda key: (key[-1] == looks.NESTED, key))
    blocks = []
    for key in chosen:
        tables = {n: t[(t[KEYS].astype(str) == list(key)).all(axis=1)] for n, t in own.items()}
        told = [word for place, word in enumerate(key) if len({other[place] for other in chosen}) > 1]
        told = [word for word in told if word != "plain"]
        blocks.append(("".join(f"-{word}" for word in told), tables))
    return blocks


def _own(table: pd.DataFrame) -> pd.DataFrame:
    table = table[(table["system"] == sweeps.MAIN) & (table["B"] == 1)]
    return pd.concat([sweeps.main_variant(rows) for _, rows in table.groupby("encoding")] or [table])


def _one_depth(tables: dict[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Of each cell that of a comparison where it stands in one, before those of sweeps; of several the fastest."""
    rows = tables["efficiency"]
    if rows.empty:
        return tables
    swept = rows["folder"].map(sweeps.of_a_sweep)
    ranked = rows.assign(swept=swept).sort_values(["swept", "tpot_ms"], kind="stable").drop_duplicates(CELL)
    chosen = ranked[[*CELL, *PLACE]]
    return {name: table.merge(chosen, on=[*CELL, *PLACE]) for name, table in tables.items()}


def figure(tables: dict[str, pd.DataFrame]) -> Figure:
    """tables: of one setting (`settings`). One line of three panels per model and memory setting: experts loaded per
    committed token over all layers; precision and recall of the M most wanted experts after so many draft tokens; those
    of the plans by MoE layer."""
    with style.look():
        rows = tables["efficiency"]
        cells = [(m, s) for m in style.models(rows) for s in style.memories(rows[rows["model"] == m])]
        fig = Figure(figsize=(style.TEXT_WIDTH_IN, 0.9 + 1.65 * len(cells)), layout="constrained")
        axes = fig.subplots(len(cells), 3, squeeze=False, width_ratios=[1, 1.15, 1.15])
        for line, (model, memory) in zip(axes, cells, strict=True):
            own = {n: t[(t["model"] == model) & (t["memory"] == memory)] for n, t in tables.items()}
            _loads(line[0], own["efficiency"])
            _shares(line[1], own["prefetch_by_horizon"], "drafted")
            _shares(line[2], own["prefetch_by_layer"], "layer")
            depth = ", ".join(f"{k:g}" for k in own["efficiency"]["K"])
            line[0].set_title(f"{style.model_label(model)}, {memory} memory, K {depth}", loc="left")
        axes[-1][1].set_xlabel("draft tokens seen")
        axes[-1][2].set_xlabel("MoE layer")
        handles, names = axes[0][2].get_legend_handles_labels()
        fig.legend(handles, names, loc="outside upper right", ncols=2, frameon=False)
        style.stamp(fig, caption(rows), bool((rows["device"] == "cpu").any()))
        return fig


def caption(rows: pd.DataFrame) -> str:
    requests = rows["requests"]
    span = f"{requests.min():g}" if requests.nunique() == 1 else f"{requests.min():g}-{requests.max():g}"
    said = {"Specter at the K above each line": "", "requests per cell": span}
    said |= {name: ", ".join(sorted(rows[name].astype(str).unique())) for name in KEYS}
    text = "; ".join(f"{name} {value}".strip() for name, value in said.items())
    return text + "; LRU and Belady: demand loading with the same slots on the same passes, from an empty cache"


def _loads(axis: Axes, rows: pd.DataFrame) -> None:
    assert len(rows) == 1, rows
    values = [float(rows[name].iloc[0]) for name in LOADS]
    colours = [style.QUIET, "#D55E00", style.FALLBACK[0], style.HIT]
    axis.bar(range(len(values)), values, color=colours, width=0.7)
    for place, value in enumerate(values):
        axis.annotate(
            f"{value:.3g}", (place, value), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=6.5
        )
    axis.margins(y=0.16)
    axis.set_xticks(range(len(values)), list(LOADS.values()))
    axis.tick_params(axis="x", length=0, labelsize=7)
    axis.set_ylabel("experts per token")


def _shares(axis: Axes, rows: pd.DataFrame, column: str) -> None:
    """Places that a twentieth of the windows or fewer came to (rare chunk boundaries) are left out."""
    sums = rows.groupby(column)[["planned", "right", "needed"]].sum()
    sums = sums[sums["needed"] > 0.05 * sums["needed"].max()]
    for name, (colour, marker) in SHARES.items():
        whole = sums["planned" if name == "precision" else "needed"]
        values = (sums["right"] / whole.where(whole > 0)).dropna()
        axis.plot(values.index, values, color=colour, marker=marker, ms=3, lw=1.2, label=name)
    axis.set_ylim(0, 1.05)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    if sums.empty:
        axis.text(0.5, 0.5, "no plans", ha="center", va="center", fontsize=7, transform=axis.transAxes)
