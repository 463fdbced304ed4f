"""How long a cell will take: from what was recorded before, else from rough figures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from harness.catalogue import ROOT
from harness.grid import PlannedGroup
from harness.records import read_rows
from specter_core.errors import UserError

WORKER_S = 4.0
ROUGH_MS = {"reference": {"transformers": 100.0}, "other": {"transformers": 400.0}}
ROUGH_USUAL_MS = {"reference": 35.0, "other": 120.0}
"""ms per token of a request: reference models on two CPU cores, full-size ones on a GPU over PCIe."""


class Estimate(NamedTuple):
    """seconds of one request, batch shared. basis: recorded (the same cell), similar (the same system and model in
    another cell) or rough (no record)."""

    seconds: float
    basis: str


class Speeds:
    """What files of records say. The first file counts most: cells that it holds are not looked up in the others. A
    file of another version, or a damaged one, says nothing."""

    def __init__(self, paths: Iterable[Path], device: str) -> None:
        self._cells: dict[tuple[str, ...], float] = {}
        self._tokens: dict[tuple[str, str], list[float]] = defaultdict(list)
        for path in paths:
            cells: dict[tuple[str, ...], list[float]] = defaultdict(list)
            with suppress(UserError, KeyError, ValueError):
                for row in recorded(path):
                    if row["status"] == "ok" and row["device"] == device:
                        seconds = request_s(row)
                        cells[row_key(row)].append(seconds)
                        self._tokens[row["system"], row["model"]].append(seconds / max(1, int(row["new_tokens"])))
            means = {key: sum(values) / len(values) for key, values in cells.items()}
            self._cells = means | self._cells

    def request(self, planned: PlannedGroup) -> Estimate:
        tokens = planned.group.setting.new_tokens
        if (seconds := self._cells.get(planned_key(planned))) is not None:
            return Estimate(seconds, "recorded")
        name = planned.group.system.name
        if known := self._tokens.get((name, planned.model.name)):
            return Estimate(sum(known) / len(known) * tokens, "similar")
        kind = "reference" if planned.model.weights == "reference" else "other"
        each = ROUGH_MS[kind].get(name, ROUGH_USUAL_MS[kind])
        return Estimate(each * tokens / 1e3 / planned.memory.batch**0.5, "rough")

    def cell_s(self, planned: PlannedGroup, requests: int) -> Estimate:
        """Seconds of `requests` requests, the worker's start included; 0 for none."""
        each = self.request(planned)
        return Estimate(WORKER_S + requests * each.seconds if requests else 0.0, each.basis)


def known_files(own: Path) -> list[Path]:
    """Records that an estimate may come from: the run's own, those of other runs here, those that are committed."""
    return [own, *sorted(ROOT.glob("outputs/*/records.csv")), *sorted(ROOT.glob("results/**/records.csv"))]


def recorded(path: Path) -> list[dict[str, str]]:
    return read_rows(path) if path.exists() else []


def request_s(row: Mapping[str, str]) -> float:
    """Wall time of a request, a batch's divided evenly."""
    wall_ms = float(row["ttft_ms"]) + float(row["tpot_ms"] or 0) * (int(row["new_tokens"]) - 1)
    return wall_ms / 1e3 / int(row["B"])


def row_key(row: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(row[c] for c in ("system", "model", "memory", "K", "B", "prefix_len", "new_tokens"))


def planned_key(planned: PlannedGroup) -> tuple[str, ...]:
    s, m = planned.group.setting, planned.memory
    numbers = (planned.group.depth, m.batch, s.prefix_tokens, s.new_tokens)
    return (planned.group.system.name, planned.model.name, m.label, *map(str, numbers))
