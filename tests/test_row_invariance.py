"""A row's bits depend on that row alone: not on how many rows there are, where it stands, who the others
are.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specter_core.model.argmax import argmax_lowest
from specter_core.model.checkpoint import Checkpoint
from specter_core.model.config import RouterConfig
from specter_core.model.decoder import Decoder
from specter_core.model.linear import row_invariant_bmm, row_invariant_linear, silu
from specter_core.model.router import softmax_top_k, sparsemixer
from specter_core.model.rows import Rows
from specter_core.model.torch_attention import attention
from specter_core.model.torch_ops import TorchOps
from specter_core.state.kv_cache import KVCache
from specter_core.verify.expert_ffn import expert_ffn
from tests.plain_model import PlainRoutedExperts, plain_forward, read_experts
from tests.tiny_models import FAMILIES, tiny_checkpoint

OPS = TorchOps()
WIDTHS = [(128, 128), (128, 272), (64, 2), (48, 16), (37, 53), (512, 128), (2048, 64), (128, 4096)]


def companies(row: Tensor, seed: int = 0) -> list[tuple[Tensor, int]]:
    """The row among others: (rows [R, …], index of the row), over sizes, positions and contents."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for size in (1, 2, 15, 16, 17, 31, 33, 51, 64):
        for index in {0, size // 2, size - 1, min(size - 1, 13)}:
            rows = torch.randn(size, *row.shape, generator=generator) * 30
            rows[index] = row
            found.append((rows, index))
        lone = torch.zeros(size, *row.shape)
        lone[-1] = row
        found.append((lone, size - 1))
    return found


def assert_row_invariant(row: Tensor, function: object) -> None:
    assert callable(function)
    expected = function(row.unsqueeze(0))[0]
    for rows, index in companies(row):
        assert torch.equal(function(rows)[index], expected), (rows.shape, index)


@pytest.mark.parametrize(("inner", "outer"), WIDTHS)
def test_linear_rows_are_invariant(inner: int, outer: int) -> None:
    torch.manual_seed(inner + outer)
    w, b = torch.randn(outer, inner), torch.randn(outer)
    assert_row_invariant(torch.randn(inner), lambda x: row_invariant_linear(x, w))
    assert_row_invariant(torch.randn(inner), lambda x: row_invariant_linear(x, w, b))


@pytest.mark.parametrize(("heads", "inner", "outer"), [(4, 32, 64), (16, 128, 512), (2, 64, 32), (3, 20, 12)])
def test_per_head_products_are_invariant(heads: int, inner: int, outer: int) -> None:
    torch.manual_seed(heads)
    w = torch.randn(heads, inner, outer)
    assert_row_invariant(torch.randn(heads, inner), lambda x: row_invariant_bmm(x, w))


@pytest.mark.parametrize("width", [64, 96, 128, 512, 576, 100, 2048])
def test_norms_and_activations_are_invariant(width: int) -> None:
    torch.manual_seed(width)
    w, b = torch.randn(width), torch.randn(width)
    row = torch.randn(width)
    assert_row_invariant(row, lambda x: OPS.rms_norm(x, w, 1e-6))
    assert_row_invariant(row, lambda x: OPS.layer_norm(x, w, b, 1e-5))
    assert_row_invariant(row, lambda x: OPS.silu_mul(x, x * 0.5))
    assert_row_invariant(row[:3], OPS.sigmoid)
    assert_row_invariant(row, silu)


@pytest.mark.parametrize("experts", [5, 8, 16, 60, 64])
def test_routing_is_invariant(experts: int) -> None:
    torch.manual_seed(experts)
    row = torch.randn(experts)
    groups = RouterConfig(groups=4, top_groups=2) if experts % 4 == 0 else RouterConfig(normalise=True)
    for select in (
        lambda x: softmax_top_k(OPS.softmax(x), 3, RouterConfig()),
        lambda x: softmax_top_k(OPS.softmax(x), 3, groups),
        lambda x: sparsemixer(x, 0.01),
    ):
        assert_row_invariant(row, lambda x, select=select: select(x).ids)
        assert_row_invariant(row, lambda x, select=select: select(x).weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_expert_rows_are_invariant_and_close_to_float64(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate, up = torch.randn(2, 96, 128).mul(0.1).to(dtype)
    down = torch.randn(128, 96).mul(0.1).to(dtype)
    row = torch.randn(128)
    assert_row_invariant(row, lambda x: expert_ffn(x, gate, up, down))
    wide = torch.nn.functional.silu(gate.double() @ row.double()) * (up.double() @ row.double())
    assert torch.allclose(expert_ffn(row[None], gate, up, down)[0].double(), down.double() @ wide, atol=1e-5)


def test_expert_bits_do_not_depend_on_where_the_weights_lie() -> None:
    """A slot, a host entry and a plain tensor have other addresses and alignments."""
    torch.manual_seed(0)
    gate, up, down = torch.randn(96, 128), torch.randn(96, 128), torch.randn(128, 96)
    x = torch.randn(5, 128)
    expected = expert_ffn(x, gate, up, down)
    for shift in (1, 3, 8, 17):
        buffer = torch.zeros(3 * 96 * 128 + shift)
        flat = buffer[shift:]
        flat.copy_(torch.cat([gate.flatten(), up.flatten(), down.flatten()]))
        size = 96 * 128
        parts = flat[:size].view(96, 128), flat[size : 2 * size].view(96, 128), flat[2 * size :].view(128, 96)
        assert torch.equal(expert_ffn(x, *parts), expected)


SHAPES = [(1, 4, 80, 64), (1, 16, 576, 512), (1, 2, 40, 32), (2, 2, 32, 32), (4, 1, 48, 48), (8, 4, 16, 16)]


def attention_case(shape: tuple[int, int, int, int], batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, 256, Hkv, G, D] by position, k and v [B, 257, Hkv, D]."""
    kv_heads, group, dim, value_dim = shape
    torch.manual_seed(sum(shape))
    q = torch.randn(batch, 256, kv_heads, group, dim)
    return q, torch.randn(batch, 257, kv_heads, dim), torch.randn(batch, 257, kv_heads, value_dim)


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_invariant_and_close_to_float64(shape: tuple[int, int, int, int]) -> None:
    q, k, v = attention_case(shape, 3)
    scale = shape[2] ** -0.5
    for at in (0, 15, 62, 63, 64, 130, 200):
        alone = attention(q[1, at : at + 1], k[1:2], v[1:2], Rows.decode([at], 1), scale)[0]
        scores = torch.einsum("hgd,shd->hgs", q[1, at].double(), k[1, : at + 1].double()) * scale
        expected = torch.einsum("hgs,shd->hgd", scores.softmax(-1), v[1, : at + 1].double())
        assert torch.allclose(alone.double(), expected, atol=1e-5)
        for steps in (2, 5, 16, 17, 33):
            for step in {0, steps // 2, steps - 1}:
                start = at - step
                if start < 0:
                    continue
                counts = [0, steps, 3]
                rows = Rows.decode([7, start, 100], steps, counts)
                query = torch.stack([q[0, 7 : 7 + steps], q[1, start : start + steps], q[2, 100 : 100 + steps]])
                together = attention(query.flatten(0, 1), k, v, rows, scale).unflatten(0, (3, steps))
                assert torch.equal(together[1, step], alone), (at, steps, step)
                assert not together[0].any()


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_never_reads_behind_a_rows_own_position(shape: tuple[int, int, int, int]) -> None:
    q, k, v = attention_case(shape, 1)
    for at in (0, 5, 63, 64, 100):
        expected = attention(q[0, at : at + 1], k, v, Rows.decode([at], 1), 0.2)
        poisoned_k, poisoned_v = k.clone(), v.clone()
        poisoned_k[:, at + 1 :], poisoned_v[:, at + 1 :] = torch.nan, torch.inf
        assert torch.equal(attention(q[0, at : at + 1], poisoned_k, poisoned_v, Rows.decode([at], 1), 0.2), expected)
        changed_k, changed_v = k.clone(), v.clone()
        changed_k[:, at + 1 :] += 3.0
        changed_v[:, at + 1 :] -= 5.0
        rows = Rows.decode([at], 9)
        several = attention(q[0, at : at + 9], changed_k, changed_v, rows, 0.2)
        assert torch.equal(several[0], expected[0])


def test_argmax_and_routers_give_ties_to_the_lowest_id() -> None:
    scores = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 3.0, 3.0, 3.0], [-1.0, -2.0, -1.0, -1.0]])
    assert argmax_lowest(scores).tolist() == [1, 0, 0]
    assert softmax_top_k(OPS.softmax(scores), 2, RouterConfig()).ids.tolist() == [[1, 2], [0, 1], [0, 2]]
    assert sparsemixer(scores, 0.01).ids.tolist() == [[1, 2], [0, 1], [0, 2]]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(request.param, tmp_path_factory.mktemp(request.param), layers=2, original_positions=64)


def test_whole_passes_are_bit_identical_for_every_batch_and_step_count(folder: Path) -> None:
    """Three texts token by token and alone, against ragged batches and verifications of up to 17 rows."""
    decoder = Decoder.load(folder, compute_dtype=torch.float32)
    with Checkpoint(folder) as checkpoint:
        experts = PlainRoutedExperts(read_experts(checkpoint, decoder.config).__getitem__)
    texts = torch.randint(0, 256, (3, 120), generator=torch.Generator().manual_seed(0))
    lengths = (40, 55, 3)

    @torch.no_grad()
    def run(kv: KVCache, tokens: Tensor, rows: Rows) -> Tensor:
        x = plain_forward(decoder, experts, tokens, kv, rows)
        return decoder.logits(x).view(rows.batch, rows.steps, -1)

    alone: list[Tensor] = []
    for text, length in zip(texts, lengths, strict=True):
        kv = KVCache(decoder.config, 1, 120, "cpu", torch.float32)
        run(kv, text[None, :length], Rows.prefill(0, 0, length, length))
        steps = [run(kv, text[None, n : n + 1], Rows.decode([n], 1))[0, 0] for n in range(length, length + 40)]
        alone.append(torch.stack(steps))

    for pattern in ([1], [17], [5, 2, 16], [4, 1, 1, 9]):
        kv = KVCache(decoder.config, 3, 120, "cpu", torch.float32)
        for row in range(3):
            run(kv, texts[row : row + 1, : lengths[row]], Rows.prefill(row, 0, lengths[row], lengths[row]))
            kv.advance(row, lengths[row])
        turn = 0
        while any(kv.boundaries[row] < lengths[row] + 40 for row in range(3)):
            steps = pattern[turn % len(pattern)]
            left = [lengths[row] + 40 - kv.boundaries[row] for row in range(3)]
            counts = [min(steps, n) if row != turn % 3 else min(n, steps // 2 + 1) for row, n in enumerate(left)]
            tokens = torch.zeros(3, steps, dtype=torch.int64)
            for row, count in enumerate(counts):
                tokens[row, :count] = texts[row, kv.boundaries[row] : kv.boundaries[row] + count]
            logits = run(kv, tokens, Rows.decode(kv.boundaries, steps, counts))
            for row, count in enumerate(counts):
                first = kv.boundaries[row] - lengths[row]
                assert torch.equal(logits[row, :count], alone[row][first : first + count]), (pattern, row)
                kv.advance(row, count)
            turn += 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment",
    [
        {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"},
        {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
        {
            "ATEN_CPU_CAPABILITY": "default",
            "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
            "ONEDNN_MAX_CPU_ISA": "SSE41",
        },
    ],
)
def test_rows_are_invariant_under_other_thread_counts_and_instruction_sets(
    environment: dict[str, str],
) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", __file__]
    result = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:]
