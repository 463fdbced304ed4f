"""A written synthetic checkpoint is the model that is made in memory, wherever it is opened."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from harness.dataset_source import DatasetSource
from harness.entries import ModelEntry
from harness.shared_store import shared_store
from harness.synthetic import SyntheticSpec, open_synthetic, spec_for
from harness.synthetic.text import byte_tokenizer
from harness.system import MemorySpec, ModelShape, ModelSpec
from harness.systems import specter
from harness.weights import model_spec
from scripts import make_synthetic_checkpoint
from specter_core.assembly import build_engine
from specter_core.cli import main as specter_core
from specter_core.errors import UserError
from specter_core.options import EngineOptions
from specter_core.types import Request

DEPTH, SLOTS, NEW = 4, 3, 24
FULL = ("deepseek_v2_lite", "qwen15_moe", "phi35_moe")


@pytest.fixture(scope="module")
def spec() -> SyntheticSpec:
    return spec_for("small_deepseek_v2", layers=3, experts=8, vocab=2048, topic_dims=16)


@pytest.fixture(scope="module")
def folder(spec: SyntheticSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synthetic") / "checkpoint"
    make_synthetic_checkpoint.write(spec, folder, "cpu", shard_bytes=1_000_000)
    return folder


def written(folder: Path) -> ModelSpec:
    places = {"path": str(folder), "draft": str(folder / "draft")}
    return model_spec(ModelEntry("small", "Small", "deepseek_v2", DEPTH, "synthetic", {"synthetic": places}))


def prompt_of(model: ModelSpec) -> tuple[int, ...]:
    return DatasetSource(prompts=1, seed=0).select(model, "builtin", 16)[0].tokens


@pytest.mark.parametrize("encoding", ["plain", "nested"])
def test_a_run_on_the_folder_gives_the_tokens_of_the_model_in_memory(
    spec: SyntheticSpec, folder: Path, encoding: str
) -> None:
    request = Request("r", prompt_of(written(folder)), NEW, ignore_eos=True)
    options = EngineOptions(depth=DEPTH, context_tokens=64)
    with (
        open_synthetic(spec, "cpu", encoding=encoding) as made,
        build_engine(made, options, slots_per_layer=SLOTS) as engine,
    ):
        expected = engine.generate([request]).results[0]
    system = specter.create({"variant": "default", "depth": DEPTH, "encoding": encoding})
    with shared_store(written(folder), 1) as model:
        system.load(model, MemorySpec("tight", None, SLOTS, "native", None, max_sequence=64))
        (record,) = system.generate([request])
        system.close()
    assert list(record.tokens) == expected.tokens and len(set(record.tokens)) > NEW // 2
    assert record.acceptance == expected.acceptance < 1  # so it is the same draft
    assert (record.depth, record.encoding) == (DEPTH, encoding)


def test_prompts_are_the_same_ids_in_memory_and_from_the_folder(spec: SyntheticSpec, folder: Path) -> None:
    shape = ModelShape(256, 3, 2, 8, 2, 128, spec.model_config.vocab_size, 1, 1)
    in_memory = ModelSpec("small", "deepseek_v2", "", None, "synthetic", "bfloat16", spec.hash, shape)
    assert prompt_of(in_memory) == prompt_of(written(folder))


def test_two_models_in_memory_share_no_prompts(spec: SyntheticSpec) -> None:
    source = DatasetSource(prompts=1, seed=0)
    tokens = []
    for name, vocabulary in (("one", 2048), ("two", 4096)):
        shape = ModelShape(256, 3, 2, 8, 2, 128, vocabulary, 1, 1)
        model = ModelSpec(name, "deepseek_v2", "", None, "synthetic", "bfloat16", spec.hash, shape)
        tokens.append(source.select(model, "builtin", 16)[0].tokens)
    assert [2 * t for t in tokens[0]] == list(tokens[1])


@pytest.mark.parametrize("name", ["small_phimoe", *FULL])
def test_text_comes_back_and_no_byte_is_an_end_of_text(name: str) -> None:
    config = spec_for(name).model_config
    tokenizer, text = byte_tokenizer(config.vocab_size), "Aß 漢\n\t{}"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text and len(ids) == len(text.encode())
    assert tokenizer.get_vocab_size() == config.vocab_size
    assert not {i * (config.vocab_size // 256) for i in range(256)} & set(config.eos_ids)


def test_too_small_a_vocabulary_is_refused_with_both_numbers() -> None:
    with pytest.raises(UserError, match="200 tokens has no room for 256 bytes"):
        byte_tokenizer(200)


def test_the_engines_command_line_writes_from_the_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["generate", "--model", str(folder), "--prompt", "The river", "--max-new-tokens", "8", "--depth", "0"]
    assert specter_core(given) == 0
    assert capsys.readouterr().out.strip()


def test_the_models_own_tokenizer_can_be_given(spec: SyntheticSpec, tmp_path: Path) -> None:
    own, absent = tmp_path / "own.json", tmp_path / "absent.json"
    byte_tokenizer(300).save(str(own))
    make_synthetic_checkpoint.write(spec, tmp_path / "out", "cpu", tokenizer=own)
    assert Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).get_vocab_size() == 300
    with pytest.raises(UserError, match=r"absent\.json: No such file"):
        make_synthetic_checkpoint.write(spec, tmp_path / "other", "cpu", tokenizer=absent)
    assert not (tmp_path / "other").exists()
