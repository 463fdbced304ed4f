"""Routed experts of one target layer: route known, residency planned, ops executed, rows summed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from specter_core.memory.expert_cache import ExpertCache
from specter_core.memory.expert_loader import ExpertLoader
from specter_core.model.layer import Routing
from specter_core.prefetch.need_history import NeedHistory
from specter_core.trace import Trace
from specter_core.types import WindowStats
from specter_core.verify.combine import combine_rows
from specter_core.verify.executor_cpu import LayerTiming
from specter_core.verify.layer_hook import LayerHook
from specter_core.verify.residency import LayerPlan

if TYPE_CHECKING:
    from specter_core.policies import Prefetching, Residency

NOTHING: Mapping[int, int] = MappingProxyType({})
_FEW = 256
"""Choices that are counted sooner one by one than by numpy's calls."""

Execute = Callable[[LayerPlan, "list[int] | None"], LayerTiming]
"""Runs a plan, for the given rows only (None: all)."""


class LayerExecutor(Protocol):
    """`CpuLayerExecutor` and `CudaLayerExecutor`."""

    def run(
        self, plan: LayerPlan, normed: Tensor, ids: Tensor, out: Tensor, rows: Collection[int] | None = None
    ) -> LayerTiming: ...


class ExpertPass:
    """Computes a MoE layer's routed experts through the expert cache.

    order "expertwise" gathers the rows of each expert (paper, Figure 12); "tokenwise" takes row after row, each with
    its own residency plan; "microbatches" takes the first half of the batch's sequences, then the second. All give the
    same bits: results land in (row, choice) rows and are summed in one order.
    """

    def __init__(
        self,
        loader: ExpertLoader,
        prefetcher: Prefetching,
        residency: Residency,
        executor: LayerExecutor,
        *,
        order: str = "expertwise",
        trace: Trace,
        history: NeedHistory | None = None,
    ) -> None:
        self.cache: ExpertCache = loader.cache
        self.loader = loader
        self.prefetcher = prefetcher
        self.residency = residency
        self.executor = executor
        self.order = order
        self.trace = trace
        self.history = history
        self.hook: LayerHook | None = None
        self._batch = 1
        self.routes: list[tuple[int, Tensor]] = []  # (layer, ids [R, k]) of the last decode pass

    def run(self, layer: int, routings: Sequence[Routing], stats: WindowStats) -> list[Tensor]:
        """Routed sums, [R_i, H] float32 for each of `routings` (several in prefill: one per chunk)."""
        ids = torch.cat([r.ids for r in routings])  # [R, k]
        normed = torch.cat([r.normed for r in routings])  # [R, H]
        out = torch.zeros(*ids.shape, normed.shape[1], dtype=torch.float32, device=ids.device)  # [R, k, H]
        self.prefetcher.prepare_layer(layer)
        self.schedule(layer, ids.cpu(), stats, lambda plan, rows: self.executor.run(plan, normed, ids, out, rows))
        weights = torch.cat([r.weights for r in routings])
        return list(combine_rows(out, weights, ids).split([r.ids.shape[0] for r in routings]))

    def schedule(
        self, layer: int, ids: Tensor, stats: WindowStats, execute: Execute, computed: Mapping[int, int] = NOTHING
    ) -> None:
        """All that follows the router's choice ids [R, k] int64, on the CPU: counts, residency plans, execution.

        computed: resident experts (-> slot) that the device computes if they are needed; a plan has no ops for them.
        """
        self.routes.append((layer, ids))
        counts = _rows_per_expert(ids)
        late = self.prefetcher.before_layer(layer, counts)
        if self.history:
            self.history.observe(layer, counts)
        self._classify(layer, counts, late, stats, computed)
        if self.hook:
            self.hook.before_plan(layer, counts)
        done = [expert for expert in counts if expert in computed] if computed else []
        if done and len(done) == len(counts):
            with self.trace.span(f"experts {layer}", hits=len(counts), late=0, misses=0):
                self._count_uses(layer, counts, done, computed)
        elif self.order == "expertwise":
            self._count_uses(layer, counts, done, computed)
            self._execute(layer, counts, late, None, stats, execute, done)
        else:
            for rows in self._groups(ids.shape[0]):
                own = _rows_per_expert(ids[rows])
                self._execute(layer, own, [e for e in late if e in own], rows, stats, execute)

    def begin_pass(self, batch: int = 1) -> None:
        """Forget the routing of the pass before. batch: sequences whose rows each layer will be given."""
        self.routes.clear()
        self._batch = batch

    def routed_by(self, rows: Sequence[int]) -> set[tuple[int, int]]:
        """(layer, expert) of the experts that these flat rows of the last pass were routed to."""
        if not self.routes or not rows:
            return set()
        ids = np.stack([ids.numpy() for _, ids in self.routes])[:, list(rows)]  # [L, rows, k]
        chosen = ids.reshape(len(self.routes), -1).tolist()
        return {(j, e) for (j, _), own in zip(self.routes, chosen, strict=True) for e in set(own) if e >= 0}

    def reset(self) -> None:
        """Empties the cache and forgets past routing; what is under way arrives first."""
        self.loader.drain()
        self.cache.clear()
        if self.history:
            self.history.forget()

    def _execute(
        self,
        layer: int,
        counts: dict[int, int],
        late: Sequence[int],
        rows: list[int] | None,
        stats: WindowStats,
        execute: Execute,
        done: Collection[int] = (),
    ) -> None:
        if not counts:
            return
        plan = self.residency.plan_layer(layer, list(counts), counts, late, done)
        with self.trace.span(f"experts {layer}", hits=len(plan.hits), late=len(plan.late), misses=len(plan.misses)):
            timing = execute(plan, rows)
        for cause, stall_ns in timing.stall_ns.items():
            stats.stall_ms[cause] = stats.stall_ms.get(cause, 0.0) + stall_ns / 1e6

    def _groups(self, rows: int) -> list[list[int]]:
        """Flat rows b·T + t that are planned and computed together, in order."""
        if self.order == "tokenwise":
            return [[row] for row in range(rows)]
        half = -(-self._batch // 2) * (rows // self._batch)
        return [part for part in (list(range(half)), list(range(half, rows))) if part]

    def _count_uses(self, layer: int, counts: dict[int, int], done: Collection[int], slots: Mapping[int, int]) -> None:
        """Of experts that are computed already only the uses are noted, the least valuable first."""
        self.cache.touch_slots([slots[e] for e in sorted(done, key=counts.__getitem__)])
        self.loader.mark_all_used(layer, done)

    def _classify(
        self, layer: int, counts: dict[int, int], late: Sequence[int], stats: WindowStats, known: Collection[int]
    ) -> None:
        """Hit, late or miss at the moment the router has spoken. known: experts that are certainly resident."""
        held, moving = self.cache.held(layer), self.cache.loading_slots
        absent = [e for e in counts if e not in known and (e in late or e not in held or held[e] in moving)]
        slots = len(self.cache.layer_slots(layer)) + len(self.cache.staging_slots)
        accesses = sum(counts.values())
        stats.distinct.append(len(counts))
        stats.hits.append(len(counts) - len(absent))
        stats.late.append(len(late))
        stats.misses.append(len(absent) - len(late))
        stats.coverage_ceiling.append(min(1.0, slots / len(counts)) if counts else 1.0)
        stats.accesses += accesses
        stats.access_hits += accesses - sum(counts[e] for e in absent)


def _rows_per_expert(ids: Tensor) -> dict[int, int]:
    """Expert -> number of rows routed to it, ascending by expert; −1 is not an expert. ids [R, k] int64."""
    if ids.numel() <= _FEW:
        counts: dict[int, int] = {}
        for expert in sorted(chain.from_iterable(ids.tolist())):
            counts[expert] = counts.get(expert, 0) + 1
        counts.pop(-1, None)
        return counts
    flat = ids.numpy().reshape(-1)
    found = np.bincount(flat[flat >= 0])
    needed = found.nonzero()[0]
    return dict(zip(needed.tolist(), found[needed].tolist(), strict=True))
