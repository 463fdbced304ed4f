"""Page-locking the host store for a CUDA device: touch in parallel, then register."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from specter_core.errors import UserError

_PAGE_BYTES = 4096
_CHUNK_BYTES = 256 << 20


class HostRegistration:
    """Keeps `segment` (uint8, page-aligned, on the CPU) registered with the current CUDA device until
    `close`.

    One registration for the whole segment, so no expert straddles two. UserError when the driver refuses.
    """

    def __init__(self, segment: Tensor, threads: int = 8) -> None:
        assert segment.device.type == "cpu" and segment.data_ptr() % _PAGE_BYTES == 0, segment.device
        touch_pages(segment, threads)
        self._pointer: int | None = segment.data_ptr()
        status = torch.cuda.cudart().cudaHostRegister(self._pointer, segment.numel(), 0)
        if int(status) != 0:
            self._pointer = None
            raise UserError(refusal(segment.numel(), int(status)))

    def close(self) -> None:
        """Unregister. Idempotent; no copy from the segment may be under way."""
        if self._pointer is not None:
            torch.cuda.cudart().cudaHostUnregister(self._pointer)
            self._pointer = None


def refusal(wanted_bytes: int, status: int) -> str:
    """What to say when the driver does not page-lock so much (CUDA error `status`)."""
    return (
        f"the driver refused to page-lock {wanted_bytes / 1e9:.3g} GB of host memory (CUDA error {status}); free host "
        "memory, raise the locked-memory limit (ulimit -l) or the container's, or choose a smaller model; "
        "--pin-limit-gb G makes such a run stop before it loads anything: there is no pageable fallback"
    )


def touch_pages(segment: Tensor, threads: int) -> None:
    """Read one byte of every page, so that registering finds them mapped; torch releases the GIL while it
    reads.
    """
    pages = segment[::_PAGE_BYTES]
    step = _CHUNK_BYTES // _PAGE_BYTES
    parts = [pages[start : start + step] for start in range(0, pages.numel(), step)]
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(torch.Tensor.amax, parts):
            pass
