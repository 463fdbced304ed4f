"""Device memory of a worker's process: what it may take, and giving back what it no longer needs."""

from __future__ import annotations

import gc

import torch

from specter_core.assembly import CONTEXT_BYTES

CAPPED = False


def tidy() -> None:
    """Returns what nothing holds any more to the device."""
    gc.collect()
    torch.cuda.empty_cache()


def cap_allocator(budget_bytes: int | None) -> None:
    """No more than the budget less the CUDA context, so that going beyond it is an error here and no silent advantage;
    None: the whole device."""
    budget_bytes = budget_bytes if CAPPED else None
    total = torch.cuda.get_device_properties(0).total_memory
    share = 1.0 if budget_bytes is None else (budget_bytes - CONTEXT_BYTES) / total
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(share, 0.0)))
