"""routing.csv and acceptance.csv of models on prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from harness.routing import statistics
from harness.routing.statistics import Row
from harness.routing.trace import continuations
from specter_core.opening import LoadedModel

SAME = ["model", "weights", "device"]


def measure(
    model: LoadedModel,
    prompts: Mapping[str, Sequence[tuple[int, ...]]],
    common: Mapping[str, str],
    *,
    depth: int,
    new_tokens: int,
    budget_bytes: int | None = None,
) -> tuple[list[Row], list[Row]]:
    """prompts: label -> token ids. common: columns of every row (model, weights, device). Returns the rows of
    routing.csv (windows of depth + 1 tokens) and of acceptance.csv."""
    found = {
        label: continuations(model, chosen, depth=depth, new_tokens=new_tokens, budget_bytes=budget_bytes)
        for label, chosen in prompts.items()
    }
    traces = {label: c.ids for label, c in found.items()}
    routing = [{**common, **row} for row in statistics.rows(traces, model.decoder.config.num_experts, depth + 1)]
    accepted: list[Row] = [
        {
            **common,
            "dataset": label,
            "depth": depth,
            "tested": c.tested,
            "acceptance": c.accepted / c.tested,
            "tokens_per_window": c.committed / c.windows,
        }
        for label, c in found.items()
    ]
    return routing, accepted


def write(folder: Path, routing: Sequence[Row], accepted: Sequence[Row]) -> None:
    """Rows that the folder has of other models stay; those of the same (model, weights, device) are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("routing", routing), ("acceptance", accepted)):
        path, new = folder / f"{name}.csv", pd.DataFrame(rows)
        if path.exists():
            old = pd.read_csv(path)
            again = old[SAME].apply(tuple, axis=1).isin(set(new[SAME].apply(tuple, axis=1)))
            new = pd.concat([old[~again], new]) if (~again).any() else new
        temporary = path.with_suffix(".tmp")
        new.to_csv(temporary, index=False)
        temporary.replace(path)


def tables(folder: Path) -> str:
    """Both files as text: means over layers by model and dataset, then acceptance."""
    routing, accepted = pd.read_csv(folder / "routing.csv"), pd.read_csv(folder / "acceptance.csv")
    means = routing[routing["kind"] != "divergence"].copy()
    means["kind"] = [f"{k} {w:g}" for k, w in zip(means["kind"], means["window"], strict=True)]
    wide = means.pivot_table(index=["model", "dataset"], columns="kind", values="value", sort=False)
    return f"{wide.round(3).to_string()}\n{accepted.round(3).to_string(index=False)}"
