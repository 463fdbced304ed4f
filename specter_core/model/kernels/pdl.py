# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Programmatic dependent launch: a kernel starts while the one before it in the stream still runs.

Every kernel of such a chain lets its successor start at once and waits, before it touches anything that others write,
until its predecessor has ended; so at most the wait, never an order, is saved. What no kernel writes (weights) may be
fetched before the wait.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin(PDL: tl.constexpr):
    """First statement of a kernel that fetches nothing early."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def start_next():
    """Let the successor start."""
    gdc_launch_dependents()


@triton.jit
def wait_previous():
    """Until the predecessor has ended and its writes are visible."""
    gdc_wait()


@triton.jit
def fetch_rows(w, ns, N: tl.constexpr, K: tl.constexpr, BYTES: tl.constexpr):
    """Send rows ns of a weight [N, K] of BYTES bytes per value on their way into the L2."""
    SEGMENTS: tl.constexpr = 8
    if K * BYTES % (16 * SEGMENTS) == 0:
        part = tl.arange(0, SEGMENTS)
        at = w + tl.minimum(ns, N - 1).to(tl.int64)[:, None] * K + (part * (K // SEGMENTS))[None, :]
        size = tl.full(at.shape, K * BYTES // SEGMENTS, tl.int32)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [at, size],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


def launch_options(pdl: bool) -> dict[str, bool]:
    """Keywords of a launch."""
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}
