"""The target's decode pass cut where the host must speak: one captured segment from one router to the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from specter_core.model.fused_pass import FusedPass
from specter_core.model.fused_weights import FusedWeights
from specter_core.model.rows import Rows
from specter_core.trace import Trace
from specter_core.verify.executor_cuda import CudaLayerExecutor, RoutedWork
from specter_core.verify.kernels.combine_rows import combine_rows
from specter_core.verify.kernels.group_rows import group_rows
from specter_core.verify.kernels.host_io import load_rows, report_ids
from specter_core.verify.router_report import wait_for_router


class DecodeSegments:
    """Segment j < L: what follows MoE layer j−1, attention and router of layer j, its ids to the host, its resident
    experts from the slot table. Segment L: what follows the last MoE layer, and the logits if the step has any.

    The host calls `fill` before segment 0, `show(j)` before segment j, and reads `ids(j)` after it. Inputs and slot
    tables are read from mapped memory. `steps` rows per sequence: what a pass has less is invalid rows. hits: compute
    resident experts inside the segments. graphs: replay captured segments, else launch one kernel after another. With a
    trace, a segment is two replays, so that attention and resident experts can be told apart.
    """

    def __init__(
        self, step: FusedPass, weights: FusedWeights, executor: CudaLayerExecutor, steps: int, batch: int, *,
        graphs: bool, hits: bool, trace: Trace,
    ) -> None:  # fmt: skip
        self.step, self.steps, self.batch = step, steps, batch
        self._weights, self._executor, self._hits = weights, executor, hits
        self._moe = [i for i, layer in enumerate(weights.layers) if layer.moe_index is not None]
        runtime, device = executor.runtime, step.tokens.device
        rows, top_k = step.ids.shape
        layers, columns = len(self._moe), -(-executor.experts // 4) * 4
        self.work = RoutedWork.allocate(step.normed, top_k, executor.experts, executor.layout.width)
        self._inputs = runtime.mapped(3, rows, dtype=torch.int64)
        self._ids = runtime.mapped(layers, -(-rows * top_k // 4) * 4, dtype=torch.int32)
        self._flags = runtime.mapped(layers, 4, dtype=torch.int32)
        self._host_table = runtime.mapped(layers, columns, dtype=torch.int32).fill_(-1)
        self._table_rows = self._host_table.numpy()
        self._shown: list[dict[int, int] | None] = [None] * layers  # what the host table holds
        self._table = torch.full((layers, columns), -1, dtype=torch.int32, device=device)
        self._valid = step.valid.view(torch.uint8)
        plain = [self._segment(j) for j in range(layers + 1)]
        for run in chain(*plain):  # all rows invalid, no slot: compiles
            run()
        self.work = executor.captured(self.work, graphs)
        if not hits:  # some rows at a time: grouped anew for each plan, results in the same place
            own = RoutedWork.allocate(step.normed, top_k, executor.experts, executor.layout.width, self.work.out)
            self.rows_work = executor.captured(own, graphs)
        runtime.synchronize()
        whole = [parts if trace.enabled else [partial(_in_turn, parts)] for parts in plain]
        ready = [[runtime.capture(run) for run in parts] for parts in whole] if graphs else whole
        self.segments = [self._traced(j, parts, trace) if trace.enabled else parts[0] for j, parts in enumerate(ready)]

    def fill(self, tokens: Tensor, rows: Rows) -> None:
        """tokens int64 [B, T] and rows (host) with T ≤ steps."""
        steps = rows.steps
        assert steps <= self.steps and rows.batch == self.batch, (steps, self.steps, rows.batch, self.batch)
        inputs = self._inputs.view(3, self.batch, self.steps)
        inputs.zero_()
        inputs[0, :, :steps] = tokens
        inputs[1, :, :steps] = rows.positions
        inputs[2, :, :steps] = rows.valid
        self._flags.zero_()

    def show(self, j: int, slots: dict[int, int]) -> None:
        """Resident expert -> slot of layer j, now; a dict that was shown before has not changed."""
        if slots is not self._shown[j]:
            self._shown[j] = slots
            row = self._table_rows[j]
            row.fill(-1)
            row[list(slots)] = list(slots.values())

    def ids(self, j: int, steps: int) -> Tensor:
        """Waits for layer j's router. Its ids of the first `steps` rows of each sequence, int64 [B·steps, k]."""
        wait_for_router(self._flags[j], j, self._executor.runtime)
        top_k = self.step.ids.shape[1]
        found = self._ids[j, : self.batch * self.steps * top_k].view(self.batch, self.steps, top_k)
        return found[:, :steps].to(torch.int64).reshape(-1, top_k)

    def logits(self, steps: int) -> Tensor:
        """float32 [B, steps, V] of the last pass, valid until the next."""
        return self.step.logits.view(self.batch, self.steps, -1)[:, :steps]

    def open(self, j: int) -> None:
        """From the end of the MoE layer before to layer j's router and groups."""
        step, index = self.step, self._moe[j]
        if j == 0:
            load_rows(self._inputs, step.tokens, step.positions, step.context, self._valid)
            step.embed()
        self._executor.admit_table(j, self._host_table, self._table)
        self._dense(self._moe[j - 1] + 1 if j else 0, index)
        step.attend(index)
        step.route(index)
        report_ids(step.ids, self._ids[j, : step.ids.numel()], self._flags[j])
        group_rows(step.ids, self.work.members, self.work.counts)

    def compute_hits(self, j: int) -> None:
        """Experts of the slot table that rows were routed to."""
        self._executor.products(self.work, self._table[j, : self._executor.experts], layer=j)

    def close(self, j: int) -> None:
        """Layer j's routed experts are on the stream: sum, shared experts, residual."""
        combine_rows(self.work.out, self.step.weights, self.step.ids, self.step.routed)
        self.step.combine(self._moe[j])

    def finish(self) -> None:
        self._dense(self._moe[-1] + 1, len(self._weights.layers))
        if self.step.logits.shape[0]:
            self.step.head()

    def _segment(self, j: int) -> list[Callable[[], None]]:
        """Up to the router, and resident experts."""

        def run() -> None:
            if j:
                self.close(j - 1)
            if j == len(self._moe):
                self.finish()
            else:
                self.open(j)

        return [run, partial(self.compute_hits, j)] if self._hits and j < len(self._moe) else [run]

    def _traced(self, j: int, parts: Sequence[Callable[[], None]], trace: Trace) -> Callable[[], None]:
        names = [f"attention {self._moe[j]}" if j < len(self._moe) else "head", f"experts {j}"]

        def run() -> None:
            for name, part in zip(names, parts, strict=False):
                with trace.on_device(name):
                    part()

        return run

    def _dense(self, start: int, stop: int) -> None:
        for index in range(start, stop):
            self.step.attend(index)
            self.step.dense(index)


def _in_turn(parts: Sequence[Callable[[], None]]) -> None:
    for part in parts:
        part()
