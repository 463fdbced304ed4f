"""Compile Triton kernels for sm_90 on a machine without a GPU: launches compile and run nothing."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction


class _OfflineDriver:
    """As much of Triton's driver as compilation asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compile_only() -> Iterator[list[tuple[str, Any]]]:
    """Inside, `kernel[grid](…)` compiles for sm_90 with the arguments' types; yields (kernel name, compiled)s.

    Tensors may be on the meta device. Not for TRITON_INTERPRET=1.
    """
    compiled: dict[int, tuple[str, Any]] = {}
    launch = JITFunction.__getitem__
    active = triton.runtime.driver._active

    def instead(self: JITFunction[Any], grid: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> None:
            kernel = self.run(*args, grid=grid, warmup=True, **kwargs)
            compiled[id(kernel)] = (self.fn.__name__, kernel)

        return functools.wraps(self.fn)(run)

    found: list[tuple[str, Any]] = []
    JITFunction.__getitem__ = instead  # type: ignore[method-assign]
    triton.runtime.driver.set_active(_OfflineDriver())
    try:
        yield found
        found.extend(compiled.values())
    finally:
        JITFunction.__getitem__ = launch  # type: ignore[method-assign]
        triton.runtime.driver._active = active
