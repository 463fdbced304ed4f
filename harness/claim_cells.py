"""Cells of records for the claims: the prompts' means of one metric under some conditions, read once per setting."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

MEMORIES = {"high": ("high", "wide"), "low": ("low", "tight")}


class Missing(Exception):
    """A row that an expression needs was not measured; the text says which."""


class Setting(NamedTuple):
    """Where rows come from; link "" where the data has none (kernels, routing)."""

    weights: str
    link: str
    device: str


class Cell(NamedTuple):
    """label -> prompts (indices among the label's prompts) and their mean values over repeats; the rows' kinds of
    weights and most new tokens."""

    prompts: dict[str, np.ndarray]
    values: dict[str, np.ndarray]
    weights: frozenset[str]
    new_tokens: int = 0


class Cells:
    """All cells of the rows of one setting. prompts: label -> number of its prompts; a prompt has the same index for
    every system."""

    def __init__(self, rows: pd.DataFrame) -> None:
        self.rows = rows
        self.prompts: dict[str, int] = {}
        self._blocks: dict[tuple[str, str], pd.DataFrame] = {}
        self._taken: dict[tuple[str, ...], list[int]] = {}
        self._known: dict[tuple[Any, ...], Cell | Missing] = {}
        if "prompt_id" in rows:
            indices = rows.groupby("label")["prompt_id"].transform(lambda p: pd.factorize(p)[0]).astype(int)
            self.prompts = {str(k): int(n) + 1 for k, n in indices.groupby(rows["label"]).max().items()}
            indexed = rows.assign(prompt=indices)
            for system, own in indexed.groupby("system"):
                self._blocks |= {(str(system), str(model)): block for model, block in own.groupby("model")}

    @cached_property
    def models(self) -> set[str]:
        return set(self.rows["model"]) if "model" in self.rows else set()

    def taken(self, column: str, system: str, model: str) -> list[int]:
        """The values of a column (K, B) in the rows of a system on a model, ascending."""
        key = ("taken", column, system, model)
        if key not in self._taken:
            block = self._blocks.get((system, model))
            self._taken[key] = [] if block is None else sorted(int(v) for v in block[column].unique())
        return self._taken[key]

    def cell(self, metric: str, where: Mapping[str, Any]) -> Cell:
        """where: system, model, and any of memory (high and low stand for the reference models' wide and tight where
        those were measured), B, K. Missing when no row is left."""
        key = (metric, *where.items())
        if key not in self._known:
            try:
                self._known[key] = self._read(metric, where)
            except Missing as missing:
                self._known[key] = missing
        found = self._known[key]
        if isinstance(found, Missing):
            raise found
        return found

    def _read(self, metric: str, where: Mapping[str, Any]) -> Cell:
        rows = self._blocks.get((where["system"], where["model"]), self.rows.iloc[:0])
        for column, value in where.items():
            if column == "memory":
                names = MEMORIES.get(value, (value,))
                present = set(rows["memory"]) if len(rows) else set()
                value = next((m for m in names if m in present), value)
            if column not in ("system", "model"):
                rows = rows[rows[column] == value]
        rows = rows[rows[metric].notna()] if metric in rows else rows.iloc[:0]
        if rows.empty:
            raise Missing(f"no {metric} of " + ", ".join(f"{k} {v}" for k, v in where.items()))
        cell = Cell({}, {}, frozenset(rows["weights"]), int(rows["new_tokens"].max()) if "new_tokens" in rows else 0)
        for label, own in rows.groupby(["label", "prompt"])[metric].mean().groupby(level="label"):
            cell.prompts[str(label)] = own.index.get_level_values("prompt").to_numpy()
            cell.values[str(label)] = own.to_numpy(dtype=float)
        return cell
