"""What a claim's expression can call: means over the rows of one setting, in the observed data or in a bootstrap
draw of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import numpy as np
import pandas as pd

from harness.claim_cells import MEMORIES, Cell, Cells, Missing
from harness.claim_math import expected, gmean, largest, least, mean

SPECTER = "specter"
BASELINES = ("specmoeoff", "mo_sm", "mo_sc", "transformers", "vllm", "llama_cpp")
STAND_INS = {
    "deepseek_v2_lite": "deepseek_v2_mini",
    "qwen15_moe": "qwen2_moe_mini",
    "phi35_moe": "phimoe_mini",
}


class Evidence:
    """Functions over the rows of one setting. `resample(rng)` draws the prompts of each dataset anew, the same ones for
    every system (paired); `restore()` returns to the data. `notes` collect what is narrower than the statement,
    `models_used`, `weights_used` what was read."""

    def __init__(self, cells: Cells, *, stand_in: bool = True) -> None:
        self.cells_of = cells
        self.rows = cells.rows
        self.stand_in = stand_in
        self.notes: dict[str, None] = {}
        self.models_used: set[str] = set()
        self.weights_used: set[str] = set()
        self._counts: dict[str, np.ndarray] | None = None

    def namespace(self) -> dict[str, Any]:
        """Names of an expression."""
        own: list[Callable[..., Any]] = [
            self.tpot,
            self.speedup,
            self.throughput,
            self.acceptance,
            self.by_label,
            self.distinct,
            self.models,
            self.models_at,
            self.labels,
            self.cells,
            self.lowest,
            self.lead,
            self.best_depth,
            self.rises,
            self.gains,
            self.fused_gains,
            self.spread,
            self.divergence_ratio,
            self.minutes,
            self.exact_share,
            expected,
            gmean,
            mean,
        ]
        return {f.__name__: f for f in own} | {"max": largest, "min": least}

    def resample(self, rng: np.random.Generator) -> None:
        """Counts per prompt of each dataset, drawn with replacement."""
        self._counts = {label: rng.multinomial(n, np.full(n, 1 / n)) for label, n in self.cells_of.prompts.items()}

    @property
    def resamplable(self) -> bool:
        """Whether any dataset has two prompts or more."""
        return max(self.cells_of.prompts.values(), default=0) > 1

    def restore(self) -> None:
        self._counts = None

    def tpot(self, system: str, model: str, memory: str = "high", B: int | None = None) -> float:
        """Average TPOT in ms: the mean of the datasets' means."""
        return mean(self._means("tpot_ms", system=system, model=model, memory=memory, B=B).values())

    def speedup(
        self, system: str, model: str, memory: str = "high", B: int | None = None, label: str | None = None
    ) -> float:
        """Average TPOT of a system over Specter's, on the datasets (or the one named) that both were measured on."""
        other, own = (self._means("tpot_ms", system=s, model=model, memory=memory, B=B) for s in (system, SPECTER))
        if absent := [x for x in other if x not in own]:
            self.notes[f"specter not measured on {', '.join(absent)}"] = None
        common = [x for x in own if x in other and label in (None, x)]
        if not common:
            raise Missing(f"no dataset with both {system} and Specter on {model}, {memory} memory")
        return mean(other[x] for x in common) / mean(own[x] for x in common)

    def throughput(self, system: str, model: str, memory: str = "high", B: int | None = None) -> float:
        return mean(self._means("throughput", system=system, model=model, memory=memory, B=B).values())

    def acceptance(self, model: str) -> float:
        return mean(self.by_label("acceptance", model))

    def by_label(self, metric: str, model: str) -> list[float]:
        """Specter's mean of each dataset."""
        return list(self._means(metric, system=SPECTER, model=model).values())

    def distinct(self, model: str, B: int) -> float:
        """Mean distinct experts per layer and window."""
        return mean(self._means("distinct", system=SPECTER, model=model, memory="high", B=B).values())

    def models(self, *names: str) -> list[str]:
        """The paper's models (or `names`) that were measured."""
        wanted = names or tuple(STAND_INS)
        found = [m for m in wanted if self._model(m) in self.cells_of.models]
        self._note_missing("models", wanted, found)
        return found

    def models_at(self, *memories: str) -> list[str]:
        """Those measured with Specter and a baseline in all these memory settings."""
        found = [m for m in STAND_INS if all(self._compared(m, s) for s in memories)]
        if not found:
            raise Missing(f"no model with Specter and a baseline in {' and '.join(memories)} memory")
        self._note_missing("models", tuple(STAND_INS), found)
        return found

    def labels(self, model: str, memory: str) -> list[str]:
        return list(self._means("tpot_ms", system=SPECTER, model=model, memory=memory))

    def cells(self, *systems: str) -> list[tuple[str, str]]:
        """(model, memory) of the paper in which all these systems were measured; with Specter alone, any baseline
        too."""
        wanted = [(m, s) for m in STAND_INS for s in MEMORIES]
        if len(systems) == 1:
            found = [(m, s) for m, s in wanted if self._compared(m, s)]
        else:
            found = [(m, s) for m, s in wanted if all(self._has(x, m, s) for x in systems)]
        if not found:
            raise Missing(
                f"no model and memory setting with {' and '.join(systems)}{' and a baseline' * (len(systems) == 1)}"
            )
        self._note_missing("settings", [f"{m} {s}" for m, s in wanted], [f"{m} {s}" for m, s in found])
        return found

    def lowest(self, model: str, memory: str, label: str | None = None) -> bool:
        """Whether Specter's TPOT is below that of every baseline measured there."""
        return self._lead(model, memory, label) > 1

    def lead(self, model: str, memory: str) -> float:
        """TPOT of the best baseline over Specter's."""
        return self._lead(model, memory, None)

    def best_depth(self, model: str) -> int:
        """The K of least average TPOT; the smaller one of equals."""
        depths = self.cells_of.taken("K", SPECTER, self._model(model))
        if len(depths) < 3:
            raise Missing(f"no depth sweep of {model}")
        times = {k: mean(self._means("tpot_ms", system=SPECTER, model=model, K=k).values()) for k in depths}
        return min(times, key=lambda k: (times[k], k))

    def rises(self, model: str) -> list[float]:
        """TPOT of Specter at each B over that at the B before."""
        sizes = self.cells_of.taken("B", SPECTER, self._model(model))
        if len(sizes) < 3 or sizes[0] != 1:
            raise Missing(f"no three batch sizes from B = 1 of {model}")
        times = [self.tpot(SPECTER, model, B=b) for b in sizes]
        return [b / a for a, b in itertools.pairwise(times)]

    def gains(self, backend: str, over: str, kind: str, least: int = 1, most: int = 1 << 30) -> list[float]:
        """Speedups of a backend at each shape and number of tokens (kernels.csv)."""
        rows = self.rows[self.rows["us"].notna() & self.rows["shape"].str.startswith(kind + " ")]
        rows = rows[rows["tokens"].between(least, most)]
        self._use(rows)
        times = rows.groupby(["shape", "tokens", "backend"])["us"].mean().unstack("backend")
        if not {backend, over} <= set(times.columns):
            raise Missing(f"no {kind} shapes timed with both {backend} and {over}")
        return self._some((times[over] / times[backend]).dropna(), f"{kind} shapes of {backend} and {over}")

    def fused_gains(self) -> list[float]:
        """us(unfused) / us(fused) of each MoE layer, backend and number of tokens."""
        rows = self.rows[self.rows["us"].notna() & self.rows["shape"].str.startswith("moe ")]
        self._use(rows)
        times = rows.groupby(["shape", "tokens", "backend", "variant"])["us"].mean().unstack("variant")
        if not {"fused", "unfused"} <= set(times.columns):
            raise Missing("no moe shapes timed both fused and unfused")
        return self._some((times["unfused"] / times["fused"]).dropna(), "pairs of fused and unfused")

    def spread(self, model: str) -> float:
        """Standard deviation of the datasets' mean distinct experts over the mean standard error of these means; means
        over windows of all layers."""
        rows = self._of(self._of(self.rows, "kind", "distinct"), "model", self._model(model))
        groups = [g["value"].to_numpy(dtype=float) for _, g in rows.groupby("dataset")]
        if len(groups) < 2 or min(len(g) for g in groups) < 2:
            raise Missing(f"no two rows each of two datasets' distinct experts on {model}")
        self._use(rows)
        errors = [g.std(ddof=1) / np.sqrt(len(g)) for g in groups]
        return float(np.std([g.mean() for g in groups], ddof=1) / max(mean(errors), 1e-12))

    def divergence_ratio(self, model: str) -> float:
        """Mean divergence of two datasets over the mean of two halves of one (halves are half as long and so noisier,
        which counts against the datasets)."""
        rows = self._of(self._of(self.rows, "kind", "divergence"), "model", self._model(model))
        same = rows["dataset"] == rows["other"]
        if not same.any() or same.all():
            raise Missing(f"no divergences of pairs and of halves on {model}")
        self._use(rows)
        return float(rows[~same]["value"].mean() / rows[same]["value"].mean())

    def minutes(self, sweep: str) -> float:
        rows = self._of(self.rows, "sweep", sweep)
        rows = rows if self.stand_in else rows[rows["model"].isin(list(STAND_INS))]
        if rows.empty:
            raise Missing(f"no time of sweep {sweep}")
        self._use(rows)
        return float(rows["minutes"].mean())

    def exact_share(self) -> float:
        """Share of Specter's requests with a reference whose tokens are the target's."""
        rows = self.rows[self.rows["exact_match"].notna()]
        if rows.empty:
            raise Missing("no request of Specter has a reference to compare with")
        self._use(rows)
        return float(rows["exact_match"].astype(str).str.lower().eq("true").mean())

    def _lead(self, model: str, memory: str, label: str | None) -> float:
        leads = {}
        for system in BASELINES:
            if self._has(SPECTER, model, memory) and self._has(system, model, memory):
                with suppress(Missing):
                    leads[system] = self.speedup(system, model, memory, label=label)
        if not leads:
            raise Missing(f"no TPOT of Specter and a baseline on {model}, {memory} memory")
        self._note_missing("baselines", BASELINES, list(leads))
        return min(leads.values())

    def _compared(self, model: str, memory: str) -> bool:
        return self._has(SPECTER, model, memory) and any(self._has(x, model, memory) for x in BASELINES)

    def _has(self, system: str, model: str, memory: str) -> bool:
        try:
            self.cells_of.cell("tpot_ms", {"system": system, "model": self._model(model), "memory": memory})
        except Missing:
            return False
        return True

    def _means(self, metric: str, *, system: str, model: str, **where: Any) -> dict[str, float]:
        """label -> mean over prompts, in the present draw."""
        conditions = {"system": system, "model": self._model(model)} | {k: v for k, v in where.items() if v is not None}
        try:
            cell = self.cells_of.cell(metric, conditions)
        except Missing as missing:
            raise Missing(str(missing).replace(f"model {conditions['model']}", f"model {model}")) from missing
        self.models_used.add(conditions["model"])
        self.weights_used |= cell.weights
        if system != SPECTER:
            self._note_narrower(metric, conditions, cell)
        if self._counts is None:
            return {label: float(values.mean()) for label, values in cell.values.items()}
        found = {}
        for label, values in cell.values.items():
            counts = self._counts[label][cell.prompts[label]]
            found[label] = float(counts @ values / counts.sum()) if counts.sum() else float(values.mean())
        return found

    def _note_narrower(self, metric: str, conditions: dict[str, Any], cell: Cell) -> None:
        """Notes the datasets and tokens that Specter was measured with and this system was not."""
        try:
            own = self.cells_of.cell(metric, conditions | {"system": SPECTER})
        except Missing:
            return
        if absent := [label for label in own.values if label not in cell.values]:
            self.notes[f"{conditions['system']} not measured on {', '.join(absent)}"] = None
        if cell.new_tokens < own.new_tokens:
            self.notes[f"{conditions['system']} measured with {cell.new_tokens} of {own.new_tokens} new tokens"] = None

    def _model(self, model: str) -> str:
        """The model itself where it was measured, else its stand-in where that is allowed."""
        absent = model not in self.cells_of.models
        return STAND_INS.get(model, model) if absent and self.stand_in else model

    def _use(self, rows: pd.DataFrame) -> None:
        self.weights_used |= set(rows["weights"])
        if "model" in rows:
            self.models_used |= set(rows["model"])

    def _note_missing(self, what: str, wanted: Iterable[str], found: Iterable[str]) -> None:
        absent = [w for w in wanted if w not in set(found)]
        if absent:
            self.notes[f"{what} not measured: {', '.join(absent)}"] = None

    @staticmethod
    def _of(rows: pd.DataFrame, column: str, value: Any) -> pd.DataFrame:
        return rows[rows[column] == value]

    @staticmethod
    def _some(values: pd.Series, what: str) -> list[float]:
        if values.empty:
            raise Missing(f"no {what}")
        return [float(v) for v in values]
