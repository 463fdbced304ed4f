"""DecoderOps on CUDA: the same layers as on the CPU, on row-invariant Triton kernels.

Each operation allocates its result, so this is the plain path (checks, prefill, first use of a model);
decoding passes that are captured in graphs use the fused kernels on buffers of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specter_core.model.kernels import elementwise, head_linear, linear, norm
from specter_core.model.kernels.attention import combine_splits, gqa_splits
from specter_core.model.kernels.mla_attention import mla_splits
from specter_core.model.kernels.partials import Partials
from specter_core.model.kernels.rope import RowTensors
from specter_core.model.kernels.tiles import Preset, linear_tile
from specter_core.model.rope import Rotation
from specter_core.model.rows import Rows

_FEWEST_STEPS, _MOST_STEPS = 64, 256
_STEP_POSITIONS = _FEWEST_STEPS * 4096


def attention_steps(positions: int) -> int:
    """Rows of a sequence per attention launch over so many KV positions: bounds the partial results (rows x positions),
    changes no bit."""
    return max(_FEWEST_STEPS, min(_MOST_STEPS, _STEP_POSITIONS // positions))


class CudaOps:
    """See DecoderOps. Weights, activations and results in bfloat16, float16 or float32; sums in float32."""

    def __init__(self, preset: Preset = Preset.TARGET) -> None:
        self._preset = preset
        self._row_tile = 16 if preset is Preset.DRAFT else 32

    def pad(self, x: Tensor) -> Tensor:
        """The kernels take any number of rows."""
        return x

    def linear(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        rows, k = x.shape
        n = w.shape[0]
        tile = linear_tile(n, k, pair=False, preset=self._preset)
        partial = x.new_empty(tile.split * rows * n, dtype=torch.float32) if tile.split > 1 else None
        return linear.linear(_aligned(x), w, x.new_empty(rows, n), tile, bias=b, partial=partial)

    def head_linear(self, x: Tensor, w: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0], x.shape[1], w.shape[2])
        return head_linear.head_linear(_aligned(x), w, out, row_tile=self._row_tile)

    def rms_norm(self, x: Tensor, w: Tensor, eps: float) -> Tensor:
        return norm.norm_rows(_aligned(x), w, None, eps, x.new_empty(x.shape))

    def layer_norm(self, x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
        return norm.norm_rows(_aligned(x), w, b, eps, x.new_empty(x.shape))

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return elementwise.silu_mul(_aligned(gate), _aligned(up), gate.new_empty(gate.shape))

    def sigmoid(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)

    def softmax(self, scores: Tensor) -> Tensor:
        return norm.softmax_rows(_aligned(scores), scores.new_empty(scores.shape, dtype=torch.float32))

    def rope(self, x: Tensor, rotation: Rotation) -> Tensor:
        cos, sin = rotation.cos.contiguous(), rotation.sin.contiguous()
        return elementwise.rope_rows(_aligned(x), cos, sin, rotation.interleaved, x.new_empty(x.shape))

    def attention(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows, scale: float) -> Tensor:
        """Launches for 64 to 256 steps of all sequences; results do not depend on where the steps are cut."""
        count, kv_heads, group, width = q.shape
        query = q.reshape(rows.batch, rows.steps, kv_heads * group, width)
        out = q.new_empty(rows.batch, rows.steps, kv_heads * group, v.shape[-1])
        bucket = rows.last + 1
        steps = attention_steps(bucket)
        shared = k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        for start in range(0, rows.steps, steps):
            part_rows = rows.once(("cuda rows", start), lambda s=start: _row_tensors(rows, s, steps))  # type: ignore[misc]
            piece = query[:, start : start + part_rows.steps].flatten(0, 1).contiguous()
            heads = kv_heads * group
            part = Partials.allocate(part_rows.total, heads, v.shape[-1], bucket, q.device)
            if shared:
                assert kv_heads == 1 and k.shape[-1] == width
                mla_splits(piece, k.squeeze(2), v.shape[-1], part_rows, scale, bucket, part)
            else:
                gqa_splits(piece, k, v, part_rows, scale, bucket, part)
            result = q.new_empty(part_rows.total, heads, v.shape[-1])
            combine_splits(part, part_rows, bucket, result)
            out[:, start : start + part_rows.steps] = result.unflatten(0, (rows.batch, part_rows.steps))
        return out.view(count, kv_heads, group, v.shape[-1])


def _row_tensors(rows: Rows, start: int, count: int) -> RowTensors:
    steps = slice(start, start + count)
    positions = rows.positions[:, steps]
    return RowTensors(
        positions.flatten().contiguous(),
        rows.valid[:, steps].flatten().contiguous(),
        rows.context[:, steps].flatten().contiguous(),
        positions.shape[1],
        rows.kv_start,
    )


def _aligned(x: Tensor) -> Tensor:
    """x with unit stride in its last dimension and 16-byte alignment of rows, copied only if need be: the
    kernels are specialised by both, and a row's bits must not depend on where it happened to lie.
    """
    row_bytes = [stride * x.element_size() for stride in x.stride()[:-1]]
    if x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(b % 16 == 0 for b in row_bytes):
        return x
    return x.clone(memory_format=torch.contiguous_format)
