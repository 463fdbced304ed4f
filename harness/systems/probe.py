"""What the efficiency report needs of a request beyond its record: routing trace, plans, times by part."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from harness import replacement
from specter_core.engine import SpecterEngine
from specter_core.policies import Prefetching
from specter_core.prefetch.planner import PrefetchPlan, Timings
from specter_core.prefetch.prefetcher import PrefetchCounters
from specter_core.types import ExpertKey, GenerationRun, WindowStats


@dataclass(slots=True)
class Tally:
    """predicted: experts that a plan stood for; right: those of them that a committed token needed; needed: what
    committed tokens needed."""

    predicted: int = 0
    right: int = 0
    needed: int = 0

    def add(self, predicted: Collection[ExpertKey], useful: Collection[tuple[int, int]]) -> None:
        self.predicted += len(predicted)
        self.right += sum(key in useful for key in predicted)
        self.needed += len(useful)

    def as_list(self) -> list[int]:
        return [self.predicted, self.right, self.needed]


class PlanProbe:
    """`Prefetching` around another one; it only looks on. by_layer: what the plans of a window loaded, by MoE layer;
    by_horizon: the M most wanted experts per layer after so many draft tokens, against what the window's committed
    tokens needed."""

    def __init__(self, inner: Prefetching, slots: Collection[int]) -> None:
        self._inner, self._slots = inner, list(slots)
        self.by_layer = [Tally() for _ in self._slots]
        self.by_horizon: dict[int, Tally] = {}
        self._seen: list[tuple[int, Tensor]] = []
        self._loads: set[ExpertKey] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def begin_window(self, depth: int) -> int:
        self._seen, self._loads = [], set()
        return self._inner.begin_window(depth)

    def on_boundary(self, counters: Tensor, drafted: int, timings: Timings) -> PrefetchPlan:
        plan = self._inner.on_boundary(counters, drafted, timings)
        self._seen.append((drafted, counters.clone()))
        self._loads |= {load.key for load in plan.loads}
        self._loads -= set(plan.cancelled)
        return plan

    def end_window(self, useful: Collection[tuple[int, int]]) -> PrefetchCounters:
        found = self._inner.end_window(useful)
        if not self._seen:
            return found
        wanted: list[set[tuple[int, int]]] = [set() for _ in self._slots]
        for key in useful:
            wanted[key[0]].add(key)
        for layer, tally in enumerate(self.by_layer):
            tally.add([key for key in self._loads if key[0] == layer], wanted[layer])
        for drafted, counters in self._seen:
            tally = self.by_horizon.setdefault(drafted, Tally())
            for layer, slots in enumerate(self._slots):
                tally.add(_most_wanted(counters[layer], layer, slots), wanted[layer])
        return found


class RequestProbe:
    """Watches one engine. `watch` before a batch, `take` after it: the numbers of harness/efficiency.py."""

    def __init__(self, engine: SpecterEngine) -> None:
        self._engine = engine
        self._routes: list[list[tuple[int, Tensor]]] = []
        self._plans: PlanProbe | None = None
        self._former = engine.prefetcher

    def watch(self) -> None:
        self._routes = []
        if self._engine.options.depth and self._engine.options.prefetch:
            self._plans = PlanProbe(self._former, self._engine.slots.slots_per_layer)
            self._put(cast(Prefetching, self._plans))

    def _put(self, prefetcher: Prefetching) -> None:
        self._engine.prefetcher = self._engine.experts.prefetcher = prefetcher

    def on_commit(self, row: int, tokens: list[int]) -> None:
        """For `generate`: keeps the routing of the pass that has just ended."""
        if row == 0:
            self._routes.append(list(self._engine.experts.routes))

    def take(self, run: GenerationRun) -> dict[str, Any]:
        engine = self._engine
        loader, slots = engine.experts.loader, engine.slots.slots_per_layer
        entry, rate = loader.link.entry_bytes, loader.link.rate_bytes_per_s
        passes = [replacement.needs(routes, len(slots)) for routes in self._routes]
        found: dict[str, Any] = {
            "windows": len(run.windows), "committed": sum(w.committed for w in run.windows),
            "slots": sum(slots) / len(slots), "entry_bytes": entry, "rate_bytes_per_s": rate,
            "draft_ms": sum(w.draft_ms for w in run.windows), "verify_ms": sum(w.verify_ms for w in run.windows),
            "decode_ms": sum(r.tpot_ms * (len(r.tokens) - 1) for r in run.results) / len(run.results),
            "router_wait_ms": sum(w.router_wait_ms for w in run.windows),
            "link_busy_ms": sum(w.link_busy_ms for w in run.windows),
            "stall_ms": _stalls(run.windows),
            "bound_ms": sum(bound_ms(w, entry, rate, engine.options.initial_chunk_tokens) for w in run.windows),
            "moved": sum(w.h2d_bytes for w in run.windows) / entry,
            "needed": sum(sum(w.distinct) for w in run.windows), "absent": sum(w.absent for w in run.windows),
            "misses": sum(sum(w.misses) for w in run.windows), "late": sum(sum(w.late) for w in run.windows),
            "lru": replacement.lru_loads(passes, slots), "belady": replacement.belady_loads(passes, slots),
        }  # fmt: skip
        if self._plans is not None:
            found["by_layer"] = [t.as_list() for t in self._plans.by_layer]
            found["by_horizon"] = {str(t): v.as_list() for t, v in sorted(self._plans.by_horizon.items())}
            self._put(self._former)
            self._plans = None
        return found


def bound_ms(window: WindowStats, entry_bytes: int, rate_bytes_per_s: float, cold_tokens: int) -> float:
    """The least time of this window's work: drafting up to b_1, then the longer of computing all the rest and moving
    what was absent at b_1 (K = 0: what was missing) at the link's standalone rate, as if each hid the other."""
    cold_ms = window.draft_ms * min(1.0, cold_tokens / window.depth) if window.depth > 0 else 0.0
    compute_ms = window.draft_ms - cold_ms + window.verify_ms - sum(window.stall_ms.values())
    absent = window.absent if window.depth > 0 else sum(window.misses) + sum(window.late)
    return cold_ms + max(compute_ms, absent * entry_bytes / rate_bytes_per_s * 1e3)


def _most_wanted(counts: Tensor, layer: int, slots: int) -> list[ExpertKey]:
    """counts int32 [E]: the `slots` highest above zero, the lower id first among equals."""
    ranked = sorted(((-count, expert) for expert, count in enumerate(counts.tolist()) if count > 0))
    return [ExpertKey(layer, expert) for _, expert in ranked[:slots]]


def _stalls(windows: Collection[WindowStats]) -> dict[str, float]:
    found: dict[str, float] = {}
    for window in windows:
        for cause, ms in window.stall_ms.items():
            found[cause] = found.get(cause, 0.0) + ms
    return found
