"""kernels.csv (figures/results.py says what it holds) for figures 10 and 11."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from figures import style

COLOURS = {"fp16": "#0072B2", "marlin": "#E69F00", "specter": "#D55E00"}
LABELS = {"fp16": "FP16", "marlin": "Marlin INT4", "specter": "Specter INT4"}
MARKERS = {"fp16": "o", "marlin": "s", "specter": "^"}


def timed(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with a time, with columns kind (dense, expert, moe) and size (the rest of shape)."""
    rows = rows[rows["us"].notna()]
    parts = [str(shape).partition(" ") for shape in rows["shape"]]
    return rows.assign(kind=[p[0] for p in parts], size=[p[2] for p in parts])


def colour(backend: str) -> str:
    return COLOURS.get(backend, style.QUIET)


def label(backend: str) -> str:
    return LABELS.get(backend, backend)


def caption(rows: pd.DataFrame, text: str) -> str:
    counts = rows.groupby(["shape", "tokens", "backend", "variant"], dropna=False).size()
    n = f"{counts.min()}" if counts.min() == counts.max() else f"{counts.min()}-{counts.max()}"
    weights = ", ".join(sorted(rows["weights"].astype(str).unique()))
    devices = ", ".join(sorted(rows["device"].astype(str).unique()))
    return f"{text}; n = {n} per point; weights {weights}; device {devices}"


def stamp(fig: Figure, rows: pd.DataFrame, text: str) -> None:
    style.stamp(fig, caption(rows, text), bool((rows["device"] == "cpu").any()))


def spread(rows: pd.DataFrame) -> pd.DataFrame:
    """Columns shape, kind, size, tokens, backend, variant, us, error: mean and standard error over repeated rows."""
    keys = ["shape", "kind", "size", "tokens", "backend", "variant"]
    table = rows.assign(variant=rows["variant"].fillna("")).groupby(keys)["us"].agg(["mean", "sem"])
    return table.rename(columns={"mean": "us", "sem": "error"}).fillna({"error": 0.0}).reset_index()


def main(
    draw: Callable[[pd.DataFrame], Figure], name: str, needed: Callable[[pd.DataFrame], pd.DataFrame] | None = None
) -> int:
    """The command line of a figure of kernels; its exit code."""
    import argparse

    from figures.io import exit_code, show

    parser = argparse.ArgumentParser(prog=f"python -m figures.{name}")
    parser.add_argument("--kernels", type=Path, required=True, help="kernels.csv")
    parser.add_argument("--out", type=Path, required=True, help="folder for PNG and PDF")
    options = parser.parse_args()

    def body() -> int:
        if not options.kernels.exists():
            raise SystemExit(f"error: {options.kernels} does not exist; a kernel bench writes it")
        rows = pd.read_csv(options.kernels)
        if needed is not None and needed(rows).empty:
            raise SystemExit(f"error: {options.kernels} has no timed row for {name}; its column reason says why")
        return show(draw(rows), options.out, name)

    return exit_code(body)
