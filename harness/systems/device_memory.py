"""Device memory of a worker's process: what it may take, and giving back what it no longer needs."""

from __future__ import annotations

import gc

import torch

LEAST_CONTEXT_BYTES = 500_000_000
"""What a CUDA context takes at the least, outside torch's allocator."""


def tidy() -> None:
    """Returns what nothing holds any more to the device."""
    gc.collect()
    torch.cuda.empty_cache()


def cap_allocator(budget_bytes: int | None) -> None:
    """No more than the budget less the CUDA context, so that going beyond it is an error here and no silent advantage;
    None: the whole device. What NVML sees decides whether a row is within its budget."""
    total = torch.cuda.get_device_properties(0).total_memory
    share = 1.0 if budget_bytes is None else (budget_bytes - LEAST_CONTEXT_BYTES) / total
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(share, 0.0)))


def beyond(planned_bytes: int) -> int:
    """Bytes that torch's allocator holds beyond what is planned for, e.g. in blocks that cannot be given back."""
    return max(0, int(torch.cuda.memory_reserved()) - planned_bytes)


def report() -> str:
    """What this process holds, in GB (1e9): torch's tensors, its reserve, and everything on the device."""
    free, total = torch.cuda.mem_get_info()
    held = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), total - free)
    return "allocated {:.3f}, reserved {:.3f}, device {:.3f} GB".format(*(size / 1e9 for size in held))
