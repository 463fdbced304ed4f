"""Times of turns on CUDA: a turn is one product, or one layer's experts, called without arguments; in one graph or each
kernel launched by itself, its kernels counted, and bytes per second of a finished row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Call = Callable[[], object]


def eager_us(turns: Sequence[Call]) -> float:
    """Microseconds of one turn when every kernel is launched by itself."""
    for turn in turns:
        turn()
    torch.cuda.synchronize()
    begin = time.perf_counter_ns()
    for turn in turns:
        turn()
    torch.cuda.synchronize()
    return (time.perf_counter_ns() - begin) / 1e3 / len(turns)


def launches(turn: Call) -> int | None:
    """Kernels and memory operations of one turn, as captured."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    try:
        with torch.cuda.graph(graph):
            turn()
        return _nodes(graph.raw_cuda_graph())
    except (AttributeError, TypeError, OSError, RuntimeError):
        return None


def _nodes(graph: int) -> int:
    import ctypes

    count = ctypes.c_size_t()
    status = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(ctypes.c_void_p(graph), None, ctypes.byref(count))
    if status:
        raise RuntimeError(f"cuGraphGetNodes: {status}")
    return count.value


def finished(row: dict[str, Any], ceiling: float) -> dict[str, Any]:
    rate = row.pop("bytes") / row["us"] / 1e6
    row |= {"tb_per_s": round(rate, 3), "share_of_ceiling": round(rate / ceiling, 3)}
    for name in ("us", "eager_us"):
        if name in row:
            row[name] = round(row[name], 2)
    return row
