"""Checkpoints on disk: both ways of naming, shards, the host store, and everything that can be wrong with
them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specter_core.errors import UserError
from specter_core.memory.host_store import HostExpertStore
from specter_core.memory.payload import PayloadLayout
from specter_core.model.checkpoint import Checkpoint
from specter_core.model.config import ModelConfig
from specter_core.model.decoder import Decoder
from specter_core.model.experts_loader import expert_dtype, expert_keys, fill_store
from specter_core.model.families import family_named
from specter_core.model.rows import Rows
from specter_core.state.kv_cache import KVCache
from tests.plain_model import PlainRoutedExperts, plain_forward, read_experts
from tests.tiny_models import FAMILIES, tiny_checkpoint, tiny_config, tiny_model


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("deepseek_v2", tmp_path_factory.mktemp("sharded"), shard_size="300KB")


@pytest.fixture
def copy(sharded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded, tmp_path / "model"))


def logits(folder: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    decoder = Decoder.load(folder, compute_dtype=dtype)
    with Checkpoint(folder) as checkpoint, torch.no_grad():
        experts = PlainRoutedExperts(read_experts(checkpoint, decoder.config).__getitem__)
        kv = KVCache(decoder.config, 1, 64, "cpu", dtype)
        tokens = torch.arange(3, 23)[None]
        return decoder.logits(plain_forward(decoder, experts, tokens, kv, Rows.prefill(0, 0, 20, 20)))


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_names_are_the_official_ones_and_tensors_read_back_bit_by_bit(family: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(family, tmp_path, shard_size="300KB", dtype=torch.float16)
    config = ModelConfig.from_file(folder)
    stored: dict[str, torch.Tensor] = {}
    for shard in folder.glob("*.safetensors"):
        stored |= load_file(shard)
    with Checkpoint(folder) as checkpoint:
        expected = family_named(config.family).expected_tensors(config)
        assert checkpoint.names == set(expected) == set(stored)
        checkpoint.require(expected)
        for name, tensor in stored.items():
            assert torch.equal(checkpoint.tensor(name), tensor)
            assert checkpoint.dtype(name) == torch.float16 == config.dtype


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_and_official_names_give_the_same_logits(family: str, tmp_path: Path) -> None:
    model = tiny_model(tiny_config(family, layers=2))
    model.save_pretrained(tmp_path / "official")
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    with Checkpoint(tmp_path / "fused") as fused, Checkpoint(tmp_path / "official") as official:
        assert any(name.endswith("gate_up_proj") for name in fused.names)
        assert len(fused.names) < len(official.names)
    assert torch.equal(logits(tmp_path / "fused"), logits(tmp_path / "official"))


def test_phimoe_under_module_names_gives_the_same_logits(tmp_path: Path) -> None:
    folder = tiny_checkpoint("phimoe", tmp_path, layers=2)
    expected = logits(folder)
    family = family_named("phimoe")
    tensors = load_file(folder / "model.safetensors")
    renamed = {(family.aliases(name) or (name,))[0]: tensor for name, tensor in tensors.items()}
    assert "model.layers.1.mlp.experts.7.down_proj.weight" in renamed and "model.layers.0.mlp.router.weight" in renamed
    save_file(renamed, folder / "model.safetensors")
    assert torch.equal(logits(folder), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_computing_in_the_stored_dtype_stays_close_to_float32(sharded: Path, dtype: torch.dtype) -> None:
    exact, rounded = logits(sharded), logits(sharded, dtype)
    assert rounded.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(exact, rounded, dim=1).min() > 0.99


@pytest.mark.parametrize("family", FAMILIES)
def test_the_store_holds_every_expert_under_its_key(family: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(family, tmp_path, shard_size="300KB")
    config = ModelConfig.from_file(folder)
    with Checkpoint(folder) as checkpoint:
        layout = PayloadLayout(config.hidden, config.expert_width, expert_dtype(checkpoint, config))
        store = HostExpertStore.create(len(config.moe_layers), config.num_experts, layout, tmp_path)
        seen: list[tuple[int, int]] = []
        fill_store(checkpoint, config, store, threads=3, progress=lambda done, total: seen.append((done, total)))
        keys = expert_keys(config)
        assert seen == [(n + 1, len(keys)) for n in range(len(keys))]
        names = family_named(config.family)
        for key in keys:
            layout.check(store.entry(key), key)
            layout.verify_crc(store.entry(key))
            official = names.expert_names(config.moe_layers[key.layer], key.expert)
            for found, name in zip(layout.views(store.entry(key)), official, strict=True):
                assert torch.equal(found, checkpoint.tensor(name))
        store.close()
        store.unlink()


def test_a_store_of_another_dtype_is_refused_before_anything_is_written(sharded: Path, tmp_path: Path) -> None:
    config = ModelConfig.from_file(sharded)
    layout = PayloadLayout(config.hidden, config.expert_width, torch.float32)
    store = HostExpertStore.create(len(config.moe_layers), config.num_experts, layout, tmp_path)
    with (
        Checkpoint(sharded) as checkpoint,
        pytest.raises(UserError, match=r"has dtype torch.bfloat16, not torch.float"),
    ):
        fill_store(checkpoint, config, store)
    assert not any(store.entry(key).any() for key in expert_keys(config))
    store.close()
    store.unlink()


def shard_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]


def fails(folder: Path, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        Decoder.load(folder)
    assert "\n" not in str(caught.value)


def test_a_missing_shard_is_named(copy: Path) -> None:
    shard = sorted(copy.glob("*.safetensors"))[1]
    shard.unlink()
    fails(copy, rf"{shard.name} is missing in .* \(1 of \d+ shards are\)")


@pytest.mark.parametrize("keep", [4, 20, 0.5, 0.99])
def test_a_truncated_shard_is_named_with_both_sizes(copy: Path, keep: float) -> None:
    shard = sorted(copy.glob("*.safetensors"))[1]
    data = shard.read_bytes()
    shard.write_bytes(data[: int(keep if keep > 1 else keep * len(data))])
    fails(copy, rf"{shard.name} is truncated.*bytes.*download it again")


def test_a_missing_or_misshapen_or_quantized_tensor_is_named(copy: Path) -> None:
    name = "model.layers.1.mlp.gate.weight"
    shard = shard_of(copy, name)
    original = load_file(shard)
    index_file = copy / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())

    save_file({k: v for k, v in original.items() if k != name} | {"other": torch.zeros(1)}, shard)
    fails(copy, f"{shard.name} does not hold {name}")
    del index["weight_map"][name]
    index_file.write_text(json.dumps(index))
    fails(copy, f"has no tensor {name}")
    save_file(original | {name: torch.zeros(8, 64)}, shard)
    fails(copy, rf"{name} has shape \[8, 64\], config.json implies \[8, 128\]")
    save_file(original | {name: torch.zeros(8, 128, dtype=torch.int32)}, shard)
    fails(copy, rf"{name} has dtype I32, a target needs BF16")
    save_file(original | {name: torch.zeros(8, 128).to(torch.float8_e4m3fn)}, shard)
    fails(copy, rf"{name} has dtype F8_E4M3, known: ")


def test_quantized_experts_are_refused_as_a_target(copy: Path) -> None:
    config = ModelConfig.from_file(copy)
    name = "model.layers.1.mlp.experts.0.gate_proj.weight"
    shard = shard_of(copy, name)
    tensors = load_file(shard)
    tensors[name.replace(".weight", ".qweight")] = tensors.pop(name).to(torch.int32)
    save_file(tensors, shard)
    (copy / "model.safetensors.index.json").unlink()
    with Checkpoint(copy) as checkpoint, pytest.raises(UserError, match=r"holds quantized tensors \(.qweight\)"):
        read_experts(checkpoint, config)


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    fails(tmp_path / "absent", "does not exist")
    fails(tmp_path, "config.json does not exist")
    (tmp_path / "config.json").write_text("{")
    fails(tmp_path, "cannot be read as JSON")
    (tmp_path / "config.json").write_text("[]")
    fails(tmp_path, "holds a list, not an object")
    tiny_config("qwen2_moe", architectures=["Qwen2MoeForCausalLM"]).save_pretrained(tmp_path)
    fails(tmp_path, "holds no .*safetensors files")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    fails(tmp_path, "is not a safetensors index")


def test_the_shared_instance_counts_a_tied_embedding_once(tmp_path: Path) -> None:
    plain = Decoder.load(tiny_checkpoint("qwen2_moe", tmp_path), compute_dtype=torch.float32)
    tied = Decoder.load(tiny_checkpoint("qwen2_moe", tmp_path, tie_word_embeddings=True), compute_dtype=torch.float32)
    assert plain.shared_bytes - tied.shared_bytes == 256 * 128 * 4
    config = plain.config
    names = family_named("qwen2_moe")
    shapes = {n: s for n, s in names.expected_tensors(config).items() if ".experts." not in n}
    stored = 4 * sum(torch.Size(shape).numel() for shape in shapes.values())
    assert stored <= plain.shared_bytes <= stored + 4 * len(config.moe_layers) * 15 * config.hidden
