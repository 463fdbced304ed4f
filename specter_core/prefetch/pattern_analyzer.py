"""Incremental Routing Pattern Analyzer: accumulates routing in the ELB and hands snapshots to the planner
(paper, Fig. 8).
"""

from __future__ import annotations

import torch
from torch import Tensor

from specter_core.prefetch.elb import ELB


class Snapshot:
    """ELB counters on their way to the host; `wait` is the one synchronisation point of a boundary."""

    def __init__(self, counters: Tensor, event: torch.cuda.Event | None = None) -> None:
        self._counters = counters
        self._event = event

    def wait(self) -> Tensor:
        """int32 [L, E] on the CPU."""
        if self._event is not None:
            self._event.synchronize()
        return self._counters


class PatternAnalyzer:
    """Owns the ELB of a window. One batched copy to the host per boundary, none per token."""

    def __init__(self, elb: ELB) -> None:
        self.elb = elb

    def record(self, layer: int, ids: Tensor) -> None:
        """Draft router's choice ids [R, k] int64 in `layer`; −1 is ignored."""
        self.elb.add(layer, ids)

    def snapshot(self) -> Snapshot:
        """Start copying the counters as they are now; later `record` calls do not change it."""
        counters = self.elb.counters
        if counters.device.type != "cuda":
            return Snapshot(counters.clone())
        host = torch.empty(counters.shape, dtype=counters.dtype, pin_memory=True)
        host.copy_(counters, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return Snapshot(host, event)

    def clear(self) -> None:
        """Forget the window: nothing of it reaches the next one."""
        self.elb.clear()
