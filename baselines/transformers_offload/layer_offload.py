"""Offloaded layers on a CPU, where accelerate has no second device to offload from: before an offloaded
layer's experts run, all of them cross the same paced link that the other systems use."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specter_core.memory.token_bucket import TokenBucket

PIECE_BYTES = 8_000_000


@dataclass(slots=True)
class OffloadCounters:
    """Of one `generate` call."""

    bytes: int = 0
    bytes_used: int = 0
    stall_ns: int = 0


class PacedLayers:
    """Experts of offloaded layers: stored (BF16) in host memory, copied as a whole into one device-side
    buffer when their layer is about to run. The module computes in float32 from that buffer's content and
    from nothing else.

    modules: the experts modules (gate_up_proj [E, 2I, H], down_proj [E, H, I]) that are offloaded, all of one
    shape; their float32 parameters are released. rate_bytes_per_s None: an unpaced copy.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        stored: torch.dtype,
        rate_bytes_per_s: float | None,
        *,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        sleep_s: Callable[[float], None] = time.sleep,
    ) -> None:
        self.counters = OffloadCounters()
        self._bucket = TokenBucket(rate_bytes_per_s) if rate_bytes_per_s else None
        self._clock_ns, self._sleep_s = clock_ns, sleep_s
        shapes = {name: p.shape for name, p in modules[0].named_parameters(recurse=False)} if modules else {}
        self._arrived = {name: torch.empty(shape, dtype=stored) for name, shape in shapes.items()}
        self._computed = {name: torch.empty(shape, dtype=torch.float32) for name, shape in shapes.items()}
        for module in modules:
            host = {name: p.detach().to(stored) for name, p in module.named_parameters(recurse=False)}
            assert {name: t.shape for name, t in host.items()} == shapes, "offloaded layers differ in shape"
            for name in host:
                getattr(module, name).data = self._computed[name]
            module.register_forward_pre_hook(self._hook(host))

    @property
    def buffer_bytes(self) -> int:
        """Device bytes of one layer's experts in the stored dtype."""
        return sum(t.nbytes for t in self._arrived.values())

    def _hook(self, host: dict[str, Tensor]) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def bring(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            start_ns = self._clock_ns()
            for name, tensor in host.items():
                self._copy(self._arrived[name], tensor)
            self.counters.stall_ns += self._clock_ns() - start_ns
            for name, tensor in self._arrived.items():
                self._computed[name].copy_(tensor)
            routed = arguments[1].unique().numel()  # top_k_index [tokens, k]
            self.counters.bytes_used += self.buffer_bytes * routed // self._experts
            self.counters.bytes += self.buffer_bytes

        return bring

    @property
    def _experts(self) -> int:
        return next(iter(self._arrived.values())).shape[0]

    def _copy(self, target: Tensor, source: Tensor) -> None:
        for offset in range(0, source.nbytes, PIECE_BYTES):
            size = min(PIECE_BYTES, source.nbytes - offset)
            now_ns = self._clock_ns()
            ctypes.memmove(target.data_ptr() + offset, source.data_ptr() + offset, size)
            if self._bucket is not None:
                deadline_ns = self._bucket.reserve(size, now_ns, now_ns)
                while (left_ns := deadline_ns - self._clock_ns()) > 0:
                    self._sleep_s(left_ns / 1e9)
