"""Means with their standard errors, the same way in every figure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy.stats import bootstrap

RESAMPLES = 2000
CONFIDENCE = 0.95


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


def whiskers(errors: ArrayLike) -> np.ndarray:
    """float [n]: what errorbar draws of standard errors; NaN, nothing, where there is none."""
    found = np.asarray(errors, dtype=float)
    return np.where(found > 0, found, np.nan)


def per_prompt(rows: pd.DataFrame) -> pd.Series:
    """Mean TPOT in ms of each prompt over its repeats."""
    return rows.groupby(["dataset", "prompt_id"])["tpot_ms"].mean().dropna()


def paired_ratio(system: pd.Series, base: pd.Series) -> tuple[float, float, float]:
    """Geometric mean of system / base over the prompts that both have, and its 95 % interval from a paired
    bootstrap of the log ratios (percentile method). NaN without common prompts; no interval below two."""
    logs = np.log((system / base).dropna().to_numpy(dtype=float))
    if len(logs) == 0:
        return (float("nan"),) * 3
    mean = float(np.exp(logs.mean()))
    if len(logs) < 2 or np.ptp(logs) == 0:
        return mean, float("nan") if len(logs) < 2 else mean, float("nan") if len(logs) < 2 else mean
    interval = bootstrap(
        (logs,),
        np.mean,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return mean, float(np.exp(interval.low)), float(np.exp(interval.high))
