"""The nested kernels' inline assembly, emulated, against the code's definition; what it rounds, against exact sums."""

from __future__ import annotations

import numpy as np
import ptx_lanes
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from specter_core.draft import rtn
from specter_core.draft.int4 import GROUP, Int4Matrix, pack, unpack
from specter_core.draft.kernels.blocks import repack_to_blocks
from specter_core.memory.payload import TRAILER_BYTES
from specter_core.nested.code import (
    BELOW,
    NOTHING,
    TAIL_ORDER,
    CodedMatrix,
    _bases,
    code_matrix,
    flag_span,
    sanitised,
    tail_bytes,
)
from specter_core.nested.kernels.assembly import COUNT, SCALES, assembly
from specter_core.nested.layout import OVERREAD_BYTES

FILL = 0xA5


def words_of(t: Tensor) -> np.ndarray:
    return t.contiguous().view(torch.int32).numpy().view(np.uint32)


def code_words(codes: Tensor, scales: Tensor) -> Tensor:
    """int32 [rows, K/8], as the draft's blocks have them."""
    whole = pad(pack(codes), (0, 0, 0, -codes.shape[0] % 16)), pad(scales, (0, 0, 0, -codes.shape[0] % 16))
    words = repack_to_blocks(Int4Matrix(*whole)).words
    return words.unflatten(2, (16, 16)).transpose(1, 2).flatten(0, 1).flatten(1)[: codes.shape[0]]


def rebuilt(coded: CodedMatrix, codes: Tensor, scales: Tensor, words: int) -> np.ndarray:
    """The weights' bits, uint32 [rows, K], by the assembly for so many words at once."""
    rows, groups, calls = codes.shape[0], codes.shape[1] // GROUP, 16 // words  # calls per group
    size = coded.tails.numel()
    memory = np.full((size + OVERREAD_BYTES) // 4 * 4, 0xA5, np.uint8)
    memory[:size] = coded.tails.numpy()
    bit = np.arange(groups) // flag_span(groups)
    flagged = coded.flags.numpy()[:, None] >> bit & 1  # [rows, groups]
    zero = (codes.view(rows, groups, GROUP)[..., list(TAIL_ORDER)] == 0).numpy()
    sizes = zero.sum(2) * (1 + flagged)
    begin = np.repeat(2 * coded.starts.numpy()[:, None] + sizes.cumsum(1) - sizes, calls)
    counts = zero.reshape(rows * groups, calls, -1).sum(2)
    before = (counts.cumsum(1) - counts).ravel()
    numbers = words_of(code_words(codes, scales)).reshape(-1, words)
    found = ptx_lanes.run(COUNT, {"$1": numbers.ravel()})["$0"]
    np.testing.assert_array_equal(found, zero.reshape(len(found), 8).sum(1))
    symbols = words_of(coded.symbols).reshape(-1, 2, calls, words).swapaxes(1, 2).reshape(-1, 2, words)
    t_and_c = ptx_lanes.run(SCALES, {"$2": scales.float().numpy().ravel(), "$3": flagged.astype(np.uint32).ravel()})
    t, c = (np.repeat(t_and_c[name], calls) for name in ("$0", "$1"))
    places = [place.astype(np.uint32) for place in (begin, begin + before, 0 * begin)]
    operands = [*numbers.T, *symbols[:, 0].T, *symbols[:, 1].T, t, c, *places]
    named = {f"${4 * words + i}": value for i, value in enumerate(operands)}
    outputs = ptx_lanes.run(assembly(words), named, ptx_lanes.words_within(memory))
    bits = np.zeros((rows * groups, calls, words, 4, 2), np.uint32)
    for word in range(words):
        for pair, place in enumerate((0, 2, 1, 3)):  # nibbles pair and 4 + pair are two neighbouring inputs
            value = outputs[f"${4 * word + pair}"].reshape(-1, calls)
            bits[:, :, word, place, 0], bits[:, :, word, place, 1] = value & 0xFFFF, value >> 16
    return bits.reshape(codes.shape)


def cases() -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """weight, codes, scales."""
    generator = torch.Generator().manual_seed(7)
    gauss = (torch.randn(24, 3 * GROUP, generator=generator) * 0.02).bfloat16()
    matrix = rtn.quantize(gauss)
    few = unpack(matrix.codes), matrix.scales
    flagged = gauss.clone()
    flagged[3, 5] = flagged[7] = flagged[20, 300] = 0
    flagged[11, 7] = float("inf")
    long = (torch.randn(2, 33 * GROUP, generator=generator) * 0.02).bfloat16()
    matrix = rtn.quantize(long)
    long[0, 130] = long[1, 32 * GROUP] = 0  # the first group that shares a flag, the last, which has one of its own
    patterns = torch.randint(-32768, 32768, (40, 2 * GROUP), generator=generator).to(torch.int16).view(torch.bfloat16)
    sizes = torch.tensor([0.0, 1e-6, 1.0, 1e4]).repeat(20).view(40, 2)
    scales = (torch.randn(40, 2, generator=generator).abs() * sizes).half()
    codes = torch.randint(-8, 8, patterns.shape, generator=generator, dtype=torch.int8)
    half = torch.where(torch.rand(codes.shape, generator=generator) < 0.5, 0, codes)
    whole = scales.float().repeat_interleave(GROUP, dim=1)
    small = (whole * (torch.rand(whole.shape, generator=generator) - 0.5)).bfloat16()
    near = torch.where(half == 0, small, (whole * half * 1.01).bfloat16())
    nothing = torch.zeros_like(codes)
    return {
        "gauss": (gauss, *few),
        "gauss, flagged": (flagged, *few),
        "shared flags": (long, unpack(matrix.codes), matrix.scales),
        "any pattern, any code": (patterns, codes, scales),
        "half of the codes 0": (near, half, scales),
        "no code but 0": (small, nothing, scales),
        "no code but 0, flagged": (patterns, nothing, scales),
    }


FLAGS = {"gauss, flagged": 6, "shared flags": 2, "any pattern, any code": 80, "no code but 0, flagged": 80}


@pytest.mark.parametrize("words", (2, 4))
@pytest.mark.parametrize("name", cases())
def test_the_assembly_rebuilds_every_weight_and_reads_nothing_beyond_its_entry(name: str, words: int) -> None:
    weight, codes, scales = cases()[name]
    codes, flags = sanitised(weight, codes, scales)
    coded = code_matrix(weight, codes, scales)
    assert sum((word & 0xFFFFFFFF).bit_count() for word in coded.flags.tolist()) == FLAGS.get(name, 0)
    assert coded.tails.numel() == int(tail_bytes(codes, flags).sum())
    wanted = weight.view(torch.int16).numpy().astype(np.uint32) & 0xFFFF
    np.testing.assert_array_equal(rebuilt(coded, codes, scales, words), wanted)


def test_what_is_read_behind_the_last_tail_ends_within_a_trailer() -> None:
    assert OVERREAD_BYTES <= TRAILER_BYTES


@pytest.mark.parametrize("flagged", (False, True))
def test_bases_are_the_exact_sums_rounded_once_for_every_scale_and_code(flagged: bool) -> None:
    scales = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16)[:, None]  # all not negative
    codes = torch.arange(-8, 8, dtype=torch.int8).repeat(GROUP // 16).expand(len(scales), 1, GROUP)
    found = _bases(codes, scales, torch.full(scales.shape, flagged))[:, 0, :16].numpy().astype(np.uint32)
    t = ptx_lanes.to_bf16(scales.double().numpy() * 7 / 16)
    c = np.full_like(t, NOTHING) if flagged else np.maximum(t.astype(np.int64) - BELOW, 0).astype(np.uint32)
    exact = np.arange(-8.0, 8.0) * ptx_lanes.from_bf16(t) + ptx_lanes.from_bf16(
        c
    )  # 4 · 8 bits, 2^16 times c's 8: no float64 rounds them
    np.testing.assert_array_equal(found, ptx_lanes.to_bf16(exact))
