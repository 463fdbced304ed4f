"""Which rows of a results folder a kind of claim reads, and the settings that they fall into."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

import pandas as pd

from harness.claim_cells import Cells, Setting
from harness.claim_data import SPECTER
from harness.claim_verdict import Claim

redraw: Any = importlib.import_module("figures.redraw")
working_set: Any = importlib.import_module("figures.fig16_working_set").working_set
SPECULATIVE: tuple[str, ...] = importlib.import_module("figures.sweeps").SPECULATIVE
PREFERENCE = (
    ("official", "synthetic", "reference", "dummy"),
    ("native", "", "pcie4", "pcie3", "scaled"),
    ("cuda", "cpu"),
)


class Data:
    """Rows per kind of data, split by setting."""

    def __init__(self, found: Any) -> None:
        self.found = found
        self._rows: dict[str, pd.DataFrame] = {}
        self._settings: dict[str, list[tuple[Setting, Cells]]] = {}

    def rows(self, kind: str) -> pd.DataFrame:
        if kind not in self._rows:
            self._rows[kind] = self._gather(kind)
        return self._rows[kind]

    def settings(self, kind: str) -> list[tuple[Setting, Cells]]:
        """Strongest first. Systems with dummy weights stand in every setting of their link and device."""
        if kind not in self._settings:
            self._settings[kind] = list(self._split(self.rows(kind)))
        return self._settings[kind]

    def untold(self, claim: Claim) -> str:
        """Why what a claim speaks of was tried and not measured: the reasons of its sweep's rows, or of the systems and
        models that its expression names; empty where nothing was tried."""
        sweep = {"working_set": "batch", "acceptance": "depth"}.get(claim.data, claim.data)
        if claim.data != "main" and (why := str(self.found.untold(sweep))):
            return why
        rows = self.found.all_records()
        if rows.empty or claim.data != "main":
            return ""
        reasons: dict[str, None] = {}
        for system, model in re.findall(r'(?:tpot|speedup)\("(\w+)", "(\w+)"', claim.value):
            own = rows[(rows["system"] == system) & (rows["model"] == model) & (rows["B"] == 1)]
            if not (own["status"] == "ok").any():
                reasons |= dict.fromkeys(f"{system}: {reason}" for reason in own["reason"].dropna().unique()[:1])
        return "; ".join(reasons)

    @staticmethod
    def _split(rows: pd.DataFrame) -> Iterator[tuple[Setting, Cells]]:
        if rows.empty:
            return
        rows = rows.assign(link=rows.get("link", ""))
        keys = {Setting(*key) for key in rows[["weights", "link", "device"]].drop_duplicates().itertuples(index=False)}
        for setting in sorted(keys, key=_rank):
            own = rows["weights"].isin([setting.weights, "dummy"])
            yield setting, Cells(rows[own & (rows["link"] == setting.link) & (rows["device"] == setting.device)])

    def _gather(self, kind: str) -> pd.DataFrame:
        if kind in ("main", "depth", "batch"):
            return _one_workload(redraw.gather(self.found, kind), kind)
        if kind == "working_set":
            return working_set(self.rows("batch"))
        if kind == "acceptance":
            counted = self.found.tables["acceptance"].rename(columns={"dataset": "label"})
            blocks = [self.rows("depth"), self.rows("main"), counted.assign(system=SPECTER, prompt_id="all", link="")]
            return next((b for b in blocks if len(b)), pd.DataFrame())
        if kind == "exact":
            return _exact(self.found.all_records(), self.found.tables["exactness"])
        if kind == "routing":
            return redraw.routing(self.found)
        return self.found.tables[kind]


def _exact(rows: pd.DataFrame, checks: pd.DataFrame) -> pd.DataFrame:
    """Specter's rows that have a reference; of weights and devices that have none, one row per check."""
    if len(rows):
        rows = rows[rows["system"].isin(SPECULATIVE) & (rows["status"] == "ok") & rows["exact_match"].notna()]
    there = set(rows[["weights", "device"]].itertuples(index=False, name=None)) if len(rows) else set()
    new = [key not in there for key in checks[["weights", "device"]].itertuples(index=False, name=None)]
    checks = checks[new].assign(system=SPECTER, link="", exact_match=checks["mismatches"] == 0)
    blocks = [block for block in (rows, checks) if len(block)]
    return pd.concat(blocks, ignore_index=True) if blocks else pd.DataFrame()


def _one_workload(rows: pd.DataFrame, kind: str) -> pd.DataFrame:
    """The workload of most rows (new tokens, temperature, prefix; B but for the batch sweep)."""
    if rows.empty:
        return rows
    tokens = "asked_tokens" if "asked_tokens" in rows else "new_tokens"
    columns = [tokens, "temperature", "prefix_len"] + ([] if kind == "batch" else ["B"])
    keys = ["weights", "link", "device"]
    counts = rows.groupby([*keys, *columns])["system"].transform("size")
    return rows[counts == rows.assign(n=counts).groupby(keys)["n"].transform("max")]


def _rank(setting: Setting) -> tuple[int, ...]:
    return tuple(o.index(v) if v in o else len(o) for o, v in zip(PREFERENCE, setting, strict=True))
