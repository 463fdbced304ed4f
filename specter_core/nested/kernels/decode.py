# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""A coded matrix back to BF16, on its own: the encoder's check, and whoever wants whole experts."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specter_core.draft.int4 import GROUP
from specter_core.draft.kernels.blocks import BlockMatrix
from specter_core.nested.code import flag_span
from specter_core.nested.kernels.rebuild import rebuild_group, uses_assembly

ROWS = 8


@triton.jit
def _decode_kernel(
    words, scales, symbols, tails, starts, flags, out,
    K: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, 16)
    cursor, marks = 2 * tl.load(starts + row), tl.load(flags + row)
    row = row.to(tl.int64)
    words += row // 16 * (2 * K) + row % 16 * 16
    scales += row // 16 * (K // 8) + row % 8 * 2 + row % 16 // 8
    for group in range(K // 128):
        code_words = tl.load(words[:, None] + group * 256 + n[None, :])
        at = symbols + row[:, None] * (K // 4) + group * 32 + n[None, :]
        first, second = tl.load(at), tl.load(at + 16)
        scale = tl.load(scales + group * 16).to(tl.float32)
        flagged = (marks >> (group // SPAN)) & 1
        tile, cursor = rebuild_group(code_words, first, second, scale, cursor, flagged, tails, ROWS, True, ASM)
        k = group * 128 + tl.arange(0, 128)
        tl.store(out + row[:, None] * K + k[None, :], tile)


def decode_rows(
    matrix: BlockMatrix, symbols: Tensor, tails: Tensor, starts: Tensor, flags: Tensor, out: Tensor
) -> None:
    """matrix: codes and scales of `rows` in natural order; symbols int32 [rows, K/4] (four stored bytes each), tails
    uint8 from a multiple of 8 bytes on, with OVERREAD_BYTES to spare, starts and flags int32 [rows] (`CodedMatrix`)
    -> out int16 [rows, K], the weights' bits."""
    rows, inputs = out.shape
    assert rows % ROWS == 0 and inputs % GROUP == 0, (rows, inputs)
    words, scales = matrix
    assert words.numel() * 8 == out.numel() and words.is_contiguous() and scales.is_contiguous()
    assert symbols.is_contiguous() and out.is_contiguous()
    _decode_kernel[(rows // ROWS,)](
        words, scales, symbols, tails, starts, flags, out,
        K=inputs, SPAN=flag_span(inputs // GROUP), ROWS=ROWS, ASM=uses_assembly(out), num_warps=1,
    )  # fmt: skip
