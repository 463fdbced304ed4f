"""Table 3: TPOT and throughput of every system per dataset at B = 32.

python -m figures.table3_batch32 --records outputs/batch-run/records.csv --out outputs/batch-run/figures
"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from figures import grids, stats, style, sweeps

NAME = "table3_batch32"
FREE = ("B",)
BATCH = 32


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """Columns model, B, system, metric, GK … AVG: at B = 32, or at a model's largest B where 32 was not run."""
    rows = sweeps.batch(rows)
    lines = []
    for model in style.models(rows):
        own = rows[rows["model"] == model]
        size = BATCH if (own["B"] == BATCH).any() else int(own["B"].max())
        at = own[own["B"] == size]
        for metric, unit in (("tpot_ms", "TPOT (ms)"), ("throughput", "tokens/s")):
            found = stats.means(at, ["system"], metric).set_index(["system", "label"])["mean"].unstack("label")
            for system in style.systems(at):
                if system.system in found.index:
                    cells = {x: found.loc[system.system].get(x) for x in style.LABELS}
                    lines.append({"model": model, "B": size, "system": system.label, "metric": unit} | cells)
    return pd.DataFrame(lines)


def figure(rows: pd.DataFrame) -> Figure:
    """The table as a figure; the best value of each column and metric is bold."""
    with style.look():
        found = table(rows)
        shown = sweeps.batch(rows)
        body = [
            [style.model_label(r["model"]), str(r["B"]), r["system"], r["metric"]]
            + ["" if pd.isna(r[x]) else f"{r[x]:.4g}" for x in style.LABELS]
            for r in found.to_dict("records")
        ]
        fig = grids.drawn(["model", "B", "system", "metric", *style.LABELS], body, _best(found), left=4)
        style.finish(fig, shown[shown["B"].isin(found["B"])])
        return fig


def _best(found: pd.DataFrame) -> set[tuple[int, int]]:
    """(line, column) of the best values."""
    best = set()
    for (_, metric), block in found.groupby(["model", "metric"]):
        for number, label in enumerate(style.LABELS):
            values = block[label].astype(float)
            if values.notna().any():
                line = values.idxmin() if "TPOT" in str(metric) else values.idxmax()
                best.add((int(line), 4 + number))
    return best


if __name__ == "__main__":
    from figures.io import main

    raise SystemExit(main(figure, NAME, free=FREE))
