"""Runs a layer's op list on the CPU: compute on the calling thread, copies on the link's."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specter_core.memory.expert_loader import ExpertLoader
from specter_core.memory.link import Priority
from specter_core.memory.payload import ExpertViews, PayloadLayout
from specter_core.memory.slot_buffer import SlotBuffer
from specter_core.types import ExpertKey
from specter_core.verify.ops import Adopt, Copy, Gemm, Op, Release, Source, WaitSlotFree
from specter_core.verify.residency import LayerPlan

ExpertFfn = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(x [R, H], gate [I, H], up [I, H], down [H, I]) -> [R, H] float32"""
Views = Callable[[Tensor, ExpertKey], ExpertViews]
"""An entry and whose it is -> its matrices; where the layout alone does not say."""


@dataclass(slots=True)
class LayerTiming:
    """What a layer pass waited for, by cause: late, miss (an expert's arrival), slot (a slot to become free)."""

    stall_ns: dict[str, int] = field(default_factory=lambda: {"late": 0, "miss": 0, "slot": 0})


class CpuLayerExecutor:
    """Executes `LayerPlan`s; the cache's state follows op by op. `on_op` sees each op before it runs
    (tests, trace).
    """

    def __init__(
        self,
        layout: PayloadLayout,
        slots: SlotBuffer,
        loader: ExpertLoader,
        expert_ffn: ExpertFfn,
        on_op: Callable[[Op], None] | None = None,
        views: Views | None = None,
    ) -> None:
        self._layout = layout
        self._slots = slots
        self._loader = loader
        self._cache = loader.cache
        self._expert_ffn = expert_ffn
        self._on_op = on_op
        self._views = views or (lambda entry, key: layout.views(entry))

    def run(
        self, plan: LayerPlan, normed: Tensor, ids: Tensor, out: Tensor, rows: Collection[int] | None = None
    ) -> LayerTiming:
        """Compute out[r, c] = FFN of expert ids[r, c] for every routed (row, choice).

        normed [R, H]; ids [R, k] int64 on the CPU, −1 = nothing; out [R, k, H] float32, written only where
        routed. rows limits the pass to these rows (token-wise order); the plan's experts must be exactly
        theirs. Raises WrongExpertError when a slot does not hold what the plan says.
        """
        timing = LayerTiming()
        routed = _places_by_expert(ids, rows)
        flat_out = out.view(-1, out.shape[-1])  # [R * k, H]
        for slot in plan.protects:
            self._cache.protect(slot)
        for op in plan.ops:
            if self._on_op is not None:
                self._on_op(op)
            match op:
                case WaitSlotFree(slot):
                    timing.stall_ns["slot"] += self._loader.wait_free(slot)
                case Copy(key, slot):
                    self._loader.load(key, slot, Priority.DEMAND)
                    self._cache.protect(slot)
                case Gemm():
                    self._compute(op, routed.pop(op.key.expert), normed, flat_out, ids.shape[1], timing)
                case Adopt(slot, victim):
                    self._cache.adopt(slot, plan.layer, victim)
                case Release(slot):
                    self._release(slot)
        assert not routed, f"layer {plan.layer}: experts {sorted(routed)} were routed to but not planned"
        return timing

    def _compute(
        self, op: Gemm, places: list[int], normed: Tensor, flat_out: Tensor, top_k: int, timing: LayerTiming
    ) -> None:
        if op.source is not Source.HIT and self._loader.is_open(op.key):
            timing.stall_ns[op.source.value] += self._loader.wait(op.key)
        assert self._cache.lookup(op.key) == op.slot and self._cache.is_protected(op.slot), op
        entry = self._slots.view(op.slot)
        self._layout.check(entry, op.key)
        index = torch.tensor(places, device=normed.device)  # flat (row, choice)
        x = normed[index // top_k]  # [rows of this expert, H]
        flat_out[index] = self._expert_ffn(x, *self._views(entry, op.key))
        self._cache.touch(op.key)
        self._loader.mark_used(op.key)

    def _release(self, slot: int) -> None:
        self._cache.release(slot)
        if self._cache.is_staging(slot) and not self._cache.is_protected(slot):
            self._cache.evict(slot)


def _places_by_expert(ids: Tensor, rows: Collection[int] | None) -> dict[int, list[int]]:
    """expert -> flat indices row * k + choice, ascending."""
    wanted = None if rows is None else frozenset(rows)
    places: dict[int, list[int]] = {}
    for row, choices in enumerate(ids.tolist()):
        if wanted is not None and row not in wanted:
            continue
        for choice, expert in enumerate(choices):
            if expert >= 0:
                places.setdefault(expert, []).append(row * len(choices) + choice)
    return places
