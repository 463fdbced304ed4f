"""Means with their standard errors, the same way in every figure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd


def means(rows: pd.DataFrame, by: Sequence[str], metric: str = "tpot_ms") -> pd.DataFrame:
    """Columns `by`, label, mean, error, n. error: standard error over prompts (each the mean of its repeats). Label
    AVG is the mean of the labels' means, its error propagated from theirs."""
    keys = list(by)
    prompts = rows.dropna(subset=[metric]).groupby([*keys, "label", "prompt_id"])[metric].mean()
    table = prompts.groupby([*keys, "label"]).agg(["mean", "sem", "size"])
    table = table.rename(columns={"sem": "error", "size": "n"}).reset_index()
    return pd.concat([table, _average(table, keys)], ignore_index=True)


def average(rows: pd.DataFrame, by: Sequence[str], metric: str = "tpot_ms") -> pd.DataFrame:
    """The AVG lines of `means` alone."""
    table = means(rows, by, metric)
    return table[table["label"] == "AVG"].drop(columns="label").reset_index(drop=True)


def _average(table: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    table = table.assign(square=table["error"] ** 2)
    found = table.groupby(keys).agg(
        mean=("mean", "mean"), square=("square", "sum"), labels=("mean", "size"), n=("n", "sum")
    )
    found["error"] = np.sqrt(found["square"]) / found["labels"]
    return found.drop(columns=["square", "labels"]).assign(label="AVG").reset_index()
