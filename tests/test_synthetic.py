"""Synthetic weights: what they are made of, and that they come out the same wherever they are made."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from harness.synthetic import (
    check_host_memory,
    create_store,
    draft_from_store,
    draft_layers,
    expert,
    expert_layer,
    fill_store,
    open_synthetic,
    spec_for,
    tensor_names,
    tensors,
)
from harness.synthetic.vocabulary import basis, embedding, ring, walk
from specter_core.assembly import build_engine
from specter_core.draft.int4 import dequantize
from specter_core.errors import UserError, WrongExpertError, exit_code
from specter_core.model.families import family_named
from specter_core.opening import open_model
from specter_core.options import EngineOptions
from specter_core.types import ExpertKey, Request

SMALL = ("small_deepseek_v2", "small_qwen2_moe", "small_phimoe")
FULL = {
    "deepseek_v2_lite": (15_706_484_224, 5291, 28_790_128_640),
    "qwen15_moe": (14_315_784_192, 4659, 24_914_534_400),
    "phi35_moe": (41_873_153_344, 1957, 80_530_767_872),
}


def small(name: str = "small_qwen2_moe", **overrides):
    return spec_for(name, topic_dims=16, **{"layers": 3, "experts": 8, "vocab": 2048} | overrides)


@pytest.mark.parametrize("name", FULL)
def test_full_size_specs_have_the_published_numbers_of_parameters_and_tensors(name):
    spec = spec_for(name)
    shapes = family_named(spec.model_config.family).expected_tensors(spec.model_config)
    parameters, count, store_bytes = FULL[name]
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == parameters
    assert len(shapes) == count and spec.store_bytes == store_bytes
    assert sorted(tensor_names(spec)) == sorted(shapes)


@pytest.mark.parametrize("name", SMALL)
def test_tensors_have_the_names_and_shapes_of_the_family_and_the_stored_dtype(name):
    spec = small(name)
    shapes = family_named(spec.model_config.family).expected_tensors(spec.model_config)
    found = dict(tensors(spec, "cpu"))
    assert {n: tuple(t.shape) for n, t in found.items()} == shapes
    assert {t.dtype for t in found.values()} == {torch.bfloat16}
    assert list(found) == tensor_names(spec)


def test_an_expert_is_the_same_alone_in_its_layer_and_in_the_stream():
    spec = small()
    layer, stream = expert_layer(spec, 1, "cpu"), dict(tensors(spec, "cpu"))
    names = family_named("qwen2_moe").expert_names(spec.model_config.moe_layers[1], 5)
    for name, alone, among in zip(names, expert(spec, ExpertKey(1, 5), "cpu"), layer, strict=True):
        assert torch.equal(alone, among[5]) and torch.equal(alone, stream[name])


def test_the_seed_and_every_knob_change_hash_and_weights():
    first = small()
    for other in (small(seed=1), small(expert_gain=0.2), small(vote=2.0)):
        assert other.hash != first.hash
        assert not torch.equal(expert(first, ExpertKey(0, 0), "cpu").down, expert(other, ExpertKey(0, 0), "cpu").down)
    assert small().hash == first.hash


def test_rows_of_an_expert_are_gaussian_like():
    for matrix in expert(small(hidden=512, width=512), ExpertKey(0, 0), "cpu"):
        rows = matrix.float()
        rows = rows / rows.pow(2).mean(1, keepdim=True).sqrt()
        assert abs(float(rows.pow(4).mean()) - 3) < 0.15 and float(rows.mean().abs()) < 0.02


def test_candidates_of_a_token_are_of_different_classes_and_text_does_not_come_back():
    spec = small()
    places, steps = ring(spec), spec.knobs.steps
    assert sorted(places.token.tolist()) == sorted(set(places.token.tolist()))
    assert len({step % len(steps) for step in steps}) == len(steps)
    assert not set(spec.model_config.eos_ids) & set(places.token.tolist())
    tokens = walk(spec, 1, len(places.token) // max(steps))[0].tolist()
    assert len(set(tokens)) == len(tokens)


def test_embeddings_of_a_topic_share_it_and_differ_in_the_token():
    spec = small(topic_lengths=(50, 400))
    table, parts, places = embedding(spec, "cpu").float(), basis(spec, "cpu"), ring(spec)
    near, other = table[places.token[60]], table[places.token[61]]
    assert torch.allclose(near @ parts.topics[0], other @ parts.topics[0], atol=0.1)
    assert torch.cosine_similarity(parts.without(near), parts.without(other), dim=0).abs() < 0.3
    assert table.pow(2).mean().sqrt() == pytest.approx(1, abs=0.05)


def test_a_filled_store_holds_the_experts_with_valid_trailers():
    spec = small()
    done = []
    with_store = create_store(spec)
    try:
        fill_store(spec, with_store, "cpu", progress=lambda *at: done.append(at))
        assert with_store.ready and done == [(1, 3), (2, 3), (3, 3)]
        key = ExpertKey(2, 3)
        entry = with_store.entry(key)
        with_store.layout.check(entry, key)
        with pytest.raises(WrongExpertError):
            with_store.layout.check(entry, ExpertKey(2, 4))
        for stored, made in zip(with_store.layout.views(entry), expert(spec, key, "cpu"), strict=True):
            assert torch.equal(stored, made)
    finally:
        with_store.close()
        with_store.unlink()


def test_the_draft_is_rounded_to_nearest_and_says_so():
    spec = small()
    with open_synthetic(spec, "cpu") as model:
        assert model.draft_kind == "rtn" and model.draft.card["method"] == "rtn"
        gate = model.store.layout.views(model.store.entry(ExpertKey(1, 2))).gate.float()
        codes, scales = model.draft.gate_up.codes[1, 2, : gate.shape[0]], model.draft.gate_up.scales[1, 2]
        rounded = dequantize(type(model.draft.gate_up)(codes, scales[: gate.shape[0]]))
        step = scales[: gate.shape[0]].float().repeat_interleave(128, dim=1)
        assert bool(((rounded - gate).abs() <= 0.51 * step).all())
        error = float((rounded - gate).norm() / gate.norm())
        assert 0.09 < error < 0.14  # a Gaussian group of 128 at absmax / 7
        noisy = draft_from_store(model.store, "cpu", noise=1.0)
        assert noisy.card["noise"] == 1.0 and not torch.equal(noisy.down.codes, model.draft.down.codes)


def test_the_fused_path_made_layer_by_layer_equals_the_one_from_the_whole_draft():
    pytest.importorskip("triton")
    from specter_core.draft.kernels.block_path import BlockExpertPath

    spec = small()
    config = spec.model_config
    with open_synthetic(spec, "cpu") as model:
        whole = BlockExpertPath(model.draft, config.top_k, "cpu")
        layers = draft_layers(model.store, "cpu")
        made = BlockExpertPath.from_layers(layers, config.hidden, config.expert_width, config.top_k, "cpu")
        for left, right in zip([*whole.gate_up, *whole.down], [*made.gate_up, *made.down], strict=True):
            assert torch.equal(left.words, right.words) and torch.equal(left.scales, right.scales)


def test_a_second_process_attaches_to_the_store_and_generates_the_same_text_at_any_depth():
    spec = small()
    request = Request("r", (5, 77, 300), 24, ignore_eos=True)
    with open_synthetic(spec, "cpu") as owner, open_synthetic(spec, "cpu", owner.store.handle) as model:
        texts = []
        for chosen, depth, slots in ((owner, 0, None), (model, 0, 2), (model, 6, 2)):
            with build_engine(chosen, EngineOptions(depth=depth, context_tokens=64), slots_per_layer=slots) as engine:
                texts.append(engine.generate([request]).results[0].tokens)
        assert texts[0] == texts[1] == texts[2] and len(set(texts[0])) == 24


def test_too_little_host_memory_is_refused_with_both_numbers():
    with pytest.raises(UserError, match=r"phi35_moe: the experts need 80\.5 GB .* 64\.0 GB are available"):
        check_host_memory(spec_for("phi35_moe"), available=64_000_000_000)
    check_host_memory(spec_for("phi35_moe"), available=120_000_000_000)


def test_unknown_models_and_knobs_are_refused():
    with pytest.raises(UserError, match="known are deepseek_v2_lite"):
        spec_for("gpt5")
    with pytest.raises(UserError, match="'colour' is no knob"):
        spec_for("qwen15_moe", colour=1)


def script(name: str):
    path = Path(__file__).resolve().parents[1] / "scripts" / f"{name}.py"
    found = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def writer():
    return script("make_synthetic_checkpoint")


def test_a_written_checkpoint_loads_as_the_same_model(writer, tmp_path):
    spec = small("small_deepseek_v2")
    writer.write(spec, tmp_path / "checkpoint", "cpu", shard_bytes=1_000_000)
    assert len(list((tmp_path / "checkpoint").glob("*.safetensors"))) > 2
    with open_model(tmp_path / "checkpoint", need_draft=False) as read, open_synthetic(spec, "cpu") as made:
        for left, right in zip(read.decoder.tensors(), made.decoder.tensors(), strict=True):
            assert torch.equal(left, right)
        for key in (ExpertKey(0, 0), ExpertKey(1, 7)):
            for left, right in zip(*(m.store.layout.views(m.store.entry(key)) for m in (read, made)), strict=True):
                assert torch.equal(left, right)


def test_a_disk_without_room_is_refused_with_both_numbers(writer, tmp_path, monkeypatch):
    usage = type(writer.shutil.disk_usage("/"))
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda _: usage(64 << 30, 0, 64 << 30))
    with pytest.raises(UserError, match=r"phi35_moe needs 83\.8 GB on the disk, .* has 68\.7 GB free"):
        writer.write(spec_for("phi35_moe"), tmp_path / "phi", "cpu")
    assert not list(tmp_path.iterdir())


def test_the_search_for_router_shares_ends_near_the_published_coverage(tmp_path):
    fit = script("calibrate_synthetic")
    target = fit.TARGETS["phi35_moe"]
    knobs = spec_for("phi35_moe").knobs
    fit.LENGTHS, fit.COMMON = (knobs.topic_lengths,), (0.0, knobs.router_common)
    fit.SHORT, fit.LONG = (0.05, knobs.router_topics[0]), (knobs.router_topics[1],)
    points = list(fit.router_points(spec_for("phi35_moe"), tuple(target.coverage), 6, 160))
    best = min(points, key=lambda point: fit.miss(point, target))
    assert best["router_common"] == knobs.router_common and best["router_topics"] == knobs.router_topics
    assert fit.miss(best, target) < 0.06


def test_the_commands_refuse_what_they_cannot_do_in_one_line(writer, tmp_path, capsys):
    assert exit_code(lambda: writer.main(["model=gpt5", "--output", str(tmp_path / "x")])) == 2
    assert capsys.readouterr().err.startswith("error: model 'gpt5' has no synthetic shape")
    if not torch.cuda.is_available():
        assert exit_code(lambda: script("calibrate_synthetic").main(["--stage", "gains"])) == 2
        assert "use --small" in capsys.readouterr().err
