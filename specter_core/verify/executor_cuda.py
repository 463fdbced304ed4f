"""Enqueues a layer's op list on a device: copies on the link, grouped products on the compute stream."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from specter_core.device_runtime import DeviceEvent, DeviceRuntime
from specter_core.errors import WrongExpertError
from specter_core.memory.expert_loader import ExpertLoader
from specter_core.memory.link import Priority
from specter_core.memory.link_cuda import CudaLink
from specter_core.memory.payload import PayloadLayout
from specter_core.memory.slot_buffer import SlotBuffer
from specter_core.nested.layout import NestedLayout
from specter_core.trace import Trace
from specter_core.verify.executor_cpu import LayerTiming
from specter_core.verify.kernels import nested_ffn as nested
from specter_core.verify.kernels.group_rows import group_rows
from specter_core.verify.kernels.grouped_ffn import DOWN_TILE, GATE_UP_TILE, PREFILL_TILES, grouped_ffn
from specter_core.verify.kernels.host_io import admit_list, admit_table
from specter_core.verify.kernels.nested_ffn import ResidentCodes, nested_ffn
from specter_core.verify.ops import Adopt, Copy, Gemm, Release, Source, WaitSlotFree
from specter_core.verify.residency import LayerPlan

_LISTS = 512
_EVENTS = 4096


@dataclass(frozen=True, slots=True)
class RoutedWork:
    """The routed experts' operands of one pass: x [R, H], members int32 [E, R], counts int32 [E], act [R, k, I] in
    x's dtype, out float32 [R, k, H]. products: captured launches for lists of up to so many experts. prefill: in tiles
    for the many rows of a prompt; most: rows that the busiest expert has at most (None: R).
    """

    x: Tensor
    members: Tensor
    counts: Tensor
    act: Tensor
    out: Tensor
    products: Mapping[int, Callable[[], None]] = field(default_factory=dict)
    prefill: bool = False
    most: int | None = None

    @staticmethod
    def allocate(x: Tensor, top_k: int, experts: int, width: int, out: Tensor | None = None) -> RoutedWork:
        rows, hidden = x.shape
        found = x.new_zeros(rows, top_k, hidden, dtype=torch.float32) if out is None else out
        return RoutedWork(
            x,
            x.new_zeros(experts, rows, dtype=torch.int32),
            x.new_zeros(experts, dtype=torch.int32),
            x.new_empty(rows, top_k, width),
            found,
        )


class CudaLayerExecutor:
    """Executes `LayerPlan`s without waiting for their computation; the cache's state follows op by op.

    An expert that is still on its way is waited for only until its copy is on the copy stream; the compute stream
    waits for the arrival. Arrived experts are computed together. Trailers are checked by the kernel that brings slot
    numbers to the device; `end_pass` reports what they found, before anything of the pass is used.
    """

    def __init__(
        self,
        layout: PayloadLayout,
        slots: SlotBuffer,
        loader: ExpertLoader,
        link: CudaLink,
        runtime: DeviceRuntime,
        experts: int,
        trace: Trace,
        codes: ResidentCodes | None = None,
    ) -> None:
        self.layout, self.runtime, self.experts, self._trace = layout, runtime, experts, trace
        self._codes = codes
        self._slots, self._loader, self._cache, self._link = slots, loader, loader.cache, link
        self._words = slots.data.view(torch.int32)
        columns = -(-experts // 4) * 4  # rows start on 16 bytes: others compile to another kernel
        self._host_lists = runtime.mapped(2, _LISTS, columns, dtype=torch.int32)  # experts, slots
        self._host_layers = runtime.mapped(_LISTS, dtype=torch.int32)
        self._rows, self._row_layers = self._host_lists.numpy(), self._host_layers.numpy()
        self._lists = torch.zeros(3, columns, dtype=torch.int32, device=slots.data.device)
        self._turn = torch.zeros(1, dtype=torch.int32, device=slots.data.device)
        self._launched = self._idle_at = 0  # lists so far; how many of them the stream is known to have passed
        self._error = runtime.mapped(1, dtype=torch.int32)
        self._events: list[DeviceEvent] = []
        self._marks = 0

    def end_pass(self) -> None:
        """Waits for the compute stream. Raises WrongExpertError when a slot held another expert than was computed."""
        self.runtime.synchronize()
        self._idle_at = self._launched
        self._link.forget_readers()
        slot = int(self._error[0]) - 1
        if slot < 0:
            return
        self._error.zero_()
        key = self._cache.key(slot)
        if key is not None:
            self.layout.check(self._slots.view(slot), key)
        raise WrongExpertError(f"slot {slot} held another expert than its layer was to compute")

    def admit_table(self, layer: int, host_table: Tensor, table: Tensor) -> None:
        """The layer's line of tables int32 [L, columns] of resident experts, mapped -> device, trailers checked."""
        line = slice(layer, layer + 1)
        admit_table(host_table[line], table[line], self._words, self._error, self.layout, layer)

    def mark(self) -> DeviceEvent:
        """An event behind what is on the compute stream now; recorded again only many passes later."""
        if len(self._events) < _EVENTS:
            self._events.append(self.runtime.event())
        event = self._events[self._marks % _EVENTS]
        self._marks += 1
        event.record()
        return event

    def captured(self, work: RoutedWork, graphs: bool) -> RoutedWork:
        """The same operands with the launches for arrived experts captured: for one, for four, for all."""
        sizes = sorted({1, min(4, self.experts), self.experts})
        self._launch([(0, -1)], 0, work)  # compiles
        if not graphs:
            return work
        self.runtime.synchronize()
        return replace(work, products={n: self.runtime.capture(partial(self._product, n, work)) for n in sizes})

    def run(
        self, plan: LayerPlan, normed: Tensor, ids: Tensor, out: Tensor, rows: Collection[int] | None = None
    ) -> LayerTiming:
        """As `CpuLayerExecutor.run`, enqueued. ids on the device."""
        if rows is not None:
            chosen = torch.zeros(ids.shape[0], 1, dtype=torch.bool, device=ids.device)
            chosen[list(rows)] = True
            ids = torch.where(chosen, ids, -1)
        work = RoutedWork.allocate(normed, ids.shape[1], self.experts, self.layout.width, out)
        group_rows(ids, work.members, work.counts)
        return self.enqueue(plan, work)

    def enqueue(
        self,
        plan: LayerPlan,
        work: RoutedWork,
        computed: Mapping[int, int] = MappingProxyType({}),
        after: DeviceEvent | None = None,
    ) -> LayerTiming:
        """The plan's ops for rows that are grouped already. computed: resident experts (-> slot) that the device
        computes before `after`.
        """
        if after is not None:
            self._link.free_all_after(computed.values(), after)
        timing = LayerTiming()
        group: list[tuple[int, int]] = []  # (expert, slot) to compute with the next launches
        for slot in plan.protects:
            self._cache.protect(slot)
        for op in plan.ops:
            match op:
                case WaitSlotFree(slot):
                    timing.stall_ns["slot"] += self._loader.wait_free(slot)
                case Copy(key, slot):
                    if any(slot == waiting for _, waiting in group):
                        group = self._compute(group, plan.layer, work)
                    self._loader.load(key, slot, Priority.DEMAND)
                    self._cache.protect(slot)
                case Gemm(key, slot, source):
                    if source is not Source.HIT and self._loader.is_open(key):
                        group = self._arrive(op, group, plan.layer, work, timing)
                    assert self._cache.lookup(key) == slot and self._cache.is_protected(slot), op
                    self._cache.touch(key)
                    self._loader.mark_used(key)
                    if key.expert not in computed:
                        group.append((key.expert, slot))
                case Adopt(slot, victim):
                    self._cache.adopt(slot, plan.layer, victim)
                case Release(slot):
                    self._cache.release(slot)
                    if self._cache.is_staging(slot) and not self._cache.is_protected(slot):
                        self._cache.evict(slot)
        self._compute(group, plan.layer, work)
        return timing

    def _arrive(
        self, op: Gemm, group: list[tuple[int, int]], layer: int, work: RoutedWork, timing: LayerTiming
    ) -> list[tuple[int, int]]:
        """Order the compute stream behind an expert's arrival; what is there already is computed first."""
        if op.key not in self._loader.reap():
            group = self._compute(group, layer, work)
            with self._trace.on_device(f"stall {layer}", cause=op.source.value, expert=op.key.expert):
                timing.stall_ns[op.source.value] += self._loader.wait(op.key)
        return group

    def _compute(self, group: list[tuple[int, int]], layer: int, work: RoutedWork) -> list[tuple[int, int]]:
        """Launch the group's products; its slots may be overwritten once these have run. Returns an empty group."""
        if group:
            with self._trace.on_device(f"experts {layer}", arrived=len(group)):
                self._launch(group, layer, work)
            event = self.mark()
            for _, slot in group:
                self._link.free_after(slot, event)
        return []

    def _launch(self, group: list[tuple[int, int]], layer: int, work: RoutedWork) -> None:
        if self._launched - self._idle_at == _LISTS:
            self.runtime.synchronize()
            self._idle_at = self._launched
        row, count = self._launched % _LISTS, len(group)
        self._launched += 1
        size = next((n for n in work.products if n >= count), count)
        self._rows[0, row, :count] = [expert for expert, _ in group]
        self._rows[1, row, :count] = [slot for _, slot in group]
        self._rows[1, row, count:size] = -1
        self._row_layers[row] = layer
        if work.products:
            work.products[size]()
        else:
            self._product(size, work)

    def _product(self, count: int, work: RoutedWork) -> None:
        """The next list of the ring: to the device, then its experts' rows."""
        admit_list(
            self._host_lists, self._host_layers, self._lists, self._turn, self._words, self._error, count, self.layout
        )
        self.products(work, self._lists[1, :count], layer=self._lists[2, :1], experts=self._lists[0, :count])

    def products(self, work: RoutedWork, slots: Tensor, *, layer: int | Tensor, experts: Tensor | None = None) -> None:
        """Launches what `grouped_ffn` describes on the slots' encoding. layer: a number, or int32 [1] on the device."""
        top_k = work.out.shape[1]
        if self._codes is None:
            gate_up, down = PREFILL_TILES if work.prefill else (GATE_UP_TILE, DOWN_TILE)
            buffer = self._slots.data.view(self.layout.dtype)  # [slots, entry / itemsize]
            grouped_ffn(work.x, buffer, slots, work.members, work.counts, work.act, work.out, top_k=top_k,
                        experts=experts, most=work.most, gate_up_tile=gate_up, down_tile=down)  # fmt: skip
            return
        gate_up, down = nested.PREFILL_TILES if work.prefill else (nested.GATE_UP_TILE, nested.DOWN_TILE)
        here = layer if isinstance(layer, Tensor) else self._codes.layers[layer : layer + 1]
        nested_ffn(work.x, self._slots.data, self._codes, here, slots, work.members, work.counts, work.act, work.out,
                   layout=NestedLayout(self.layout.hidden, self.layout.width), top_k=top_k, experts=experts,
                   most=work.most, gate_up_tile=gate_up, down_tile=down)  # fmt: skip
