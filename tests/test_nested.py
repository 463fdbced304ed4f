"""Nested experts: every BF16 pattern comes back whatever code and scale it meets; payloads and stores are sound."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specter_core.draft import rtn
from specter_core.draft.int4 import GROUP, Int4Matrix, pack, unpack
from specter_core.draft.kernels.blocks import repack_to_blocks
from specter_core.errors import UserError, WrongExpertError
from specter_core.memory.host_store import HostExpertStore
from specter_core.memory.payload import ExpertViews, PayloadLayout
from specter_core.model.experts_loader import expert_keys
from specter_core.nested.code import STORED_ORDER, TAIL_ORDER, code_matrix, decode_matrix, sanitised
from specter_core.nested.expert import ExpertCodes, batch_of, decode_expert, encode_experts, sanitised_codes
from specter_core.nested.layout import NestedLayout
from specter_core.nested.nesting import nested_store, nested_views, new_report
from specter_core.opening import open_model
from specter_core.types import ExpertKey

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("deepseek_v2_mini", "qwen2_moe_mini", "phimoe_mini")
SCALES = (0.0, -0.0, 6e-8, 1e-7, 0.003, 1.0, -0.5, 65504.0)
ALL_PATTERNS = torch.arange(-32768, 32768).to(torch.int16).view(torch.bfloat16).view(-1, GROUP)


def bits(weight: Tensor) -> Tensor:
    return weight.contiguous().view(torch.int16)


def round_trip(weight: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    reached, _ = sanitised(weight, codes, scales)
    return decode_matrix(code_matrix(weight, reached, scales), reached, scales)


@pytest.mark.parametrize("code", range(-8, 8))
def test_every_pattern_comes_back_with_every_code_and_extreme_scales(code: int) -> None:
    codes = torch.full(ALL_PATTERNS.shape, code, dtype=torch.int8)
    for scale in SCALES:
        scales = torch.full((ALL_PATTERNS.shape[0], 1), scale, dtype=torch.float16)
        assert torch.equal(bits(round_trip(ALL_PATTERNS, codes, scales)), bits(ALL_PATTERNS)), scale


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from(("gauss", "student", "patterns", "zeros")), st.booleans())
def test_random_groups_come_back_bit_for_bit(seed: int, kind: str, adversarial: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(8, 2 * GROUP, generator=generator) * 0.02
    if kind == "student":
        weight /= torch.rand(weight.shape, generator=generator)
    weight = weight.to(torch.bfloat16)
    if kind == "patterns":
        weight = torch.randint(-32768, 32768, weight.shape, generator=generator).to(torch.int16).view(torch.bfloat16)
    if kind == "zeros":
        weight[::2] = 0
    if adversarial or kind == "patterns":
        codes = torch.randint(-8, 8, weight.shape, generator=generator).to(torch.int8)
        scales = torch.randn(8, 2, generator=generator).to(torch.float16)
    else:
        matrix = rtn.quantize(weight)
        codes, scales = unpack(matrix.codes), matrix.scales
    assert torch.equal(bits(round_trip(weight, codes, scales)), bits(weight))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.floats(1e-4, 1e3))
def test_rounding_to_nearest_needs_no_other_codes(seed: int, size: float) -> None:
    weight = (torch.randn(16, GROUP, generator=torch.Generator().manual_seed(seed)) * size).to(torch.bfloat16)
    matrix = rtn.quantize(weight)
    codes = unpack(matrix.codes)
    assert torch.equal(sanitised(weight, codes, matrix.scales)[0], codes)
    coded, zeros = code_matrix(weight, codes, matrix.scales), (codes == 0).sum(1)
    assert coded.tails.numel() == int(torch.where(coded.flags != 0, zeros, (zeros + 1) // 2).sum())


def test_the_orders_name_every_input_of_a_group_once_and_follow_the_draft_kernels_words() -> None:
    assert sorted(STORED_ORDER) == sorted(TAIL_ORDER) == list(range(GROUP))
    matrix = Int4Matrix(pack(torch.randint(-8, 8, (16, GROUP)).to(torch.int8)), torch.ones(16, 1, dtype=torch.float16))
    words = repack_to_blocks(matrix).words.view(16, GROUP // 8)
    nibbles = torch.stack([(words >> (4 * j)) & 15 for j in range(8)], dim=-1).flatten(1)
    assert torch.equal(nibbles - 8, unpack(matrix.codes)[:, list(TAIL_ORDER)].to(torch.int32))


@pytest.mark.parametrize("name", MODELS)
def test_reference_models_decode_to_their_own_experts(name: str, tmp_path: Path) -> None:
    with open_model(ROOT / "reference" / name) as model:
        assert model.draft is not None
        before = model.draft.gate_up.codes.clone()
        nested, report = nested_store(model.store, model.draft, directory=tmp_path)
        try:
            views = nested_views(nested.layout, model.draft)
            for key in expert_keys(model.decoder.config)[::5]:
                entry = nested.entry(key)
                nested.layout.check(entry, key)
                nested.layout.verify_crc(entry)
                originals = model.store.layout.views(model.store.entry(key))
                for found, wanted in zip(views(entry, key), originals, strict=True):
                    assert torch.equal(bits(found), bits(wanted))
            assert 8.0 < report.bits_per_weight < 9.8
            changed = (before != model.draft.gate_up.codes).float().mean()
            assert 0 < changed < 0.05, "GPTQ's error feedback moves some codes, and few"
        finally:
            nested.close()
            nested.unlink()


def expert(seed: int, hidden: int, width: int) -> tuple[ExpertViews, ExpertCodes]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    weights = ExpertViews(*((torch.randn(*s, generator=generator) * 0.1).to(torch.bfloat16) for s in shapes))
    matrices = (rtn.quantize(w[0]) for w in batch_of(weights))
    return weights, ExpertCodes(*(Int4Matrix(m.codes[None], m.scales[None]) for m in matrices))


def test_gaussian_weights_take_no_more_than_8_7_bits() -> None:
    layout = NestedLayout(2048, 256)
    weights, codes = expert(3, 2048, 256)
    found = sanitised_codes(*batch_of(weights), codes)
    assert found.moved == 0 and 0 < found.flagged < 1e-3 * layout.weights / GROUP
    assert 8 * layout.payload_bytes(found.tails[0]) / layout.weights <= 8.7


def test_a_payload_has_room_for_more_tails_than_it_needs() -> None:
    layout = NestedLayout(256, 128)
    weights, codes = expert(1, 256, 128)
    needed = layout.payload_bytes(sanitised_codes(*batch_of(weights), codes).tails[0])
    for spare in (0, 4096):
        payload = encode_experts(*batch_of(weights), codes, layout, needed + spare)[0]
        for found, wanted in zip(decode_expert(payload, codes, layout), weights, strict=True):
            assert torch.equal(bits(found), bits(wanted))
    with pytest.raises(AssertionError):
        encode_experts(*batch_of(weights), codes, layout, layout.payload_bytes(0))


def test_damage_and_another_encoding_are_noticed() -> None:
    layout = NestedLayout(128, 128)
    weights, codes = expert(2, 128, 128)
    size = layout.payload_bytes(sanitised_codes(*batch_of(weights), codes).tails[0])
    stored = PayloadLayout(128, 128, torch.bfloat16, "nested", size)
    entry = torch.zeros(stored.entry_bytes, dtype=torch.uint8)
    entry[:size] = encode_experts(*batch_of(weights), codes, layout, size)[0]
    key = ExpertKey(1, 2)
    stored.seal(entry, key)
    stored.check(entry, key)
    stored.verify_crc(entry)
    with pytest.raises(WrongExpertError):
        PayloadLayout(128, 128, torch.bfloat16, "nested", size + 256).check_trailer(entry[-32:], key)
    entry[size // 2] ^= 1
    with pytest.raises(WrongExpertError):
        stored.verify_crc(entry)


def test_other_dtypes_than_bf16_are_refused_with_one_line(tmp_path: Path) -> None:
    plain = HostExpertStore.create(1, 1, PayloadLayout(128, 128, torch.float16), tmp_path)
    try:
        with pytest.raises(UserError, match=r"torch\.float16.*torch\.bfloat16.*experts_encoding=plain"):
            new_report(plain)
    finally:
        plain.close()
        plain.unlink()


def test_nested_experts_change_no_token(tmp_path: Path) -> None:
    command = [
        sys.executable, "scripts/check_exactness.py", "--model", "reference/phimoe_mini", "--encoding", "nested",
        "--depths", "3", "--slots", "2", "--batches", "2", "--tokens", "8", "--prompts", "2",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


def test_a_synthetic_model_writes_the_same_text_nested_and_counts_its_codes_at_depth_0() -> None:
    from harness.synthetic import open_synthetic, spec_for
    from specter_core.assembly import build_engine, fixed_parts
    from specter_core.options import EngineOptions
    from specter_core.types import Request

    spec = spec_for("small_qwen2_moe", topic_dims=16, layers=3, experts=8, vocab=2048)
    request = Request("r", tuple(range(5, 15)), 6, ignore_eos=True)
    texts, entry_bytes = [], []
    for encoding in ("plain", "nested"):
        with open_synthetic(spec, "cpu", encoding=encoding) as model:
            entry_bytes.append(model.store.layout.entry_bytes)
            for depth in (0, 3):
                options = EngineOptions(depth=depth, context_tokens=32)
                with build_engine(model, options, slots_per_layer=2) as engine:
                    assert engine.options.experts_encoding == encoding
                    texts.append(engine.generate([request]).results[0].tokens)
                counted = fixed_parts(model, options)["draft"] > 0
                assert counted == (encoding == "nested" or depth > 0)
    assert all(text == texts[0] for text in texts)
    assert entry_bytes[1] < 0.65 * entry_bytes[0]


def test_the_harness_passes_the_encoding_on_and_the_paper_variant_is_plain_unless_told_otherwise() -> None:
    from harness.systems.specter import create

    assert create({"encoding": "nested"})._options.experts_encoding == "nested"
    assert create({"variant": "paper"})._options.experts_encoding == "plain"
    assert create({"encoding": "nested", "variant": "paper"})._options.experts_encoding == "nested"
    with pytest.raises(UserError, match="experts_encoding is 'squeezed', known are plain, nested"):
        create({"encoding": "squeezed"})
