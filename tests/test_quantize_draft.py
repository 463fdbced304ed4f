"""From a target checkpoint to a draft folder, for every family; GPTQ's codes are not round-to-nearest's."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from initialization.quantize_draft import main
from specter_core.draft import rtn
from specter_core.draft.draft_store import DraftExperts, load_draft, quantize_rtn
from specter_core.draft.experts import DraftExpertPath
from specter_core.draft.int4 import Int4Matrix, dequantize, unpack
from specter_core.draft.quantizing.calibration import Tokenizer as CalibrationTokenizer
from specter_core.draft.quantizing.calibration import load_calibration
from specter_core.draft.quantizing.draft_writer import DraftWriter
from specter_core.draft.quantizing.layer_loop import LayerLoop
from specter_core.errors import UserError, exit_code
from specter_core.model.checkpoint import Checkpoint
from specter_core.model.config import ModelConfig
from specter_core.model.decoder import Decoder
from specter_core.model.experts_loader import ExpertReader, expert_dtype
from specter_core.model.rows import Rows
from specter_core.state.kv_cache import KVCache
from tests.plain_model import plain_forward
from tests.tiny_models import FAMILIES, tiny_checkpoint

REFERENCE = Path(__file__).parents[1] / "reference"
WORDS = ("the", "quick", "expert", "drafts", "eight", "tokens", "while", "slow", "links", "carry", "bytes")
HAS_GPTQMODEL = importlib.util.find_spec("gptqmodel") is not None


def _text(words: int, seed: int = 0) -> str:
    picks = torch.randint(len(WORDS), (words,), generator=torch.Generator().manual_seed(seed)).tolist()
    return " ".join(WORDS[pick] for pick in picks)


def _add_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(
        {symbol for word in pre_tokenizers.ByteLevel().pre_tokenize_str(_text(500)) for symbol in word[0]}
    )
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<pad>", "<s>", "</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([_text(500)], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.save_pretrained(folder)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = tiny_checkpoint(family, tmp_path_factory.mktemp(family), experts=4)
            _add_tokenizer(made[family])
        return made[family]

    return get


def _reader(model: Path) -> ExpertReader:
    checkpoint, config = Checkpoint(model), ModelConfig.from_file(model)
    return ExpertReader(checkpoint, config, expert_dtype(checkpoint, config))


def _same(a: DraftExperts, b: DraftExperts) -> bool:
    pairs = zip((*a.gate_up, *a.down), (*b.gate_up, *b.down), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("family", FAMILIES)
def test_rtn_folder_holds_the_routed_experts_and_nothing_else(
    family: str, checkpoints: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, output = checkpoints(family), tmp_path / "draft"
    assert main(["--model", str(model), "--output", str(output), "--method", "rtn"]) == 0
    card = json.loads(capsys.readouterr().out.splitlines()[-1])
    config = ModelConfig.from_file(model)
    draft = load_draft(output, config)
    assert _same(draft, quantize_rtn(_reader(model).read, config))
    assert draft.kind == "rtn" and draft.card == card
    assert "gptq" not in json.dumps(card).lower()
    with safe_open(output / "model.safetensors", framework="pt") as file:
        names = list(file.keys())
    assert len(names) == len(config.moe_layers) * config.num_experts * 3 * 4
    assert all(".mlp.experts." in name for name in names)
    assert {path.name for path in output.parent.iterdir()} == {"draft"}


def _record_inputs(seen: list[Tensor]) -> Callable[[Tensor, Tensor], Int4Matrix]:
    def quantize(weight: Tensor, inputs: Tensor) -> Int4Matrix:
        seen.append(inputs.clone())
        return rtn.quantize(weight)

    return quantize


def _loop(model: Path, quantize: Callable[[Tensor, Tensor], Int4Matrix], min_tokens: int = 1) -> LayerLoop:
    config = ModelConfig.from_file(model)
    decoder = Decoder.load(model, compute_dtype=torch.float32)
    return LayerLoop(decoder, config, _reader(model).read, quantize, min_tokens)


def _tokens() -> Tensor:
    return torch.randint(3, 200, (3, 20), generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("family", FAMILIES)
def test_calibration_runs_through_the_layers_that_are_already_quantised(
    family: str, checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    model, tokens = checkpoints(family), _tokens()
    config = ModelConfig.from_file(model)
    writer = DraftWriter(tmp_path / "draft", config.moe_layers, {"method": "rtn"})
    loop = _loop(model, _record_inputs([]))
    loop.run(tokens, writer, lambda layer, note: None)
    saved = writer.load_hidden()
    writer.finish({"method": "rtn"})
    assert saved is not None and saved[0] == len(config.moe_layers) - 1
    path = DraftExpertPath(load_draft(tmp_path / "draft", config))
    kv = KVCache(config, 1, 20, "cpu", torch.float32)
    for sample in range(3):
        expected = plain_forward(
            loop.decoder,
            lambda layer, routing: path.forward(layer, routing.normed, routing.ids, routing.weights),
            tokens[sample : sample + 1],
            kv,
            Rows.prefill(0, 0, 20, 20),
        )
        found = saved[1][20 * sample : 20 * (sample + 1)]
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


class _Killed(Exception):
    pass


def test_a_stopped_job_goes_on_and_ends_with_the_same_draft(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    model, tokens = checkpoints("qwen2_moe"), _tokens()
    config = ModelConfig.from_file(model)
    job = {"method": "rtn", "samples": 3}
    whole = DraftWriter(tmp_path / "whole", config.moe_layers, job)
    inputs_whole: list[Tensor] = []
    _loop(model, _record_inputs(inputs_whole)).run(tokens, whole, lambda layer, note: None)
    whole.finish(job)

    inputs: list[Tensor] = []

    def stop(layer: int, note: str) -> None:
        if layer == 1:
            raise _Killed

    with pytest.raises(_Killed):
        _loop(model, _record_inputs(inputs)).run(tokens, DraftWriter(tmp_path / "cut", config.moe_layers, job), stop)
    layers: list[int] = []
    again = DraftWriter(tmp_path / "cut", config.moe_layers, job)
    inputs.clear()
    _loop(model, _record_inputs(inputs)).run(tokens, again, lambda layer, note: layers.append(layer))
    assert layers == [1, 2]
    again.finish(job)
    assert all(torch.equal(a, b) for a, b in zip(inputs, inputs_whole[len(inputs_whole) // 3 :], strict=True))
    assert _same(load_draft(tmp_path / "cut", config), load_draft(tmp_path / "whole", config))


def test_a_partial_folder_of_another_job_is_refused(tmp_path: Path) -> None:
    DraftWriter(tmp_path / "draft", (0, 1), {"samples": 3})
    with pytest.raises(UserError, match="samples 3, this job has 4"):
        DraftWriter(tmp_path / "draft", (0, 1), {"samples": 4})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(UserError, match="not empty"):
        DraftWriter(tmp_path / "full", (0, 1), {})


def test_experts_that_few_tokens_chose_borrow_others_and_are_named(
    checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    model = checkpoints("phimoe")
    config = ModelConfig.from_file(model)
    writer, seen = DraftWriter(tmp_path / "draft", config.moe_layers, {}), []
    _loop(model, _record_inputs(seen), min_tokens=60).run(_tokens(), writer, lambda layer, note: None)
    assert all(inputs.shape[0] == 60 for inputs in seen)
    assert all(note["borrowed"] for note in writer.notes())


def test_large_drafts_are_sharded_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specter_core.draft.quantizing.draft_writer._ONE_FILE_BYTES", 0)
    writer = DraftWriter(tmp_path / "draft", (1, 2), {})
    matrices = [rtn.quantize(torch.randn(128, 128, generator=torch.Generator().manual_seed(i))) for i in range(6)]
    for layer in range(2):
        writer.write_layer(layer, [matrices[3 * layer : 3 * layer + 3]], {"borrowed": ""})
    writer.finish({"method": "rtn"})
    assert (tmp_path / "draft" / "model-00002-of-00002.safetensors").is_file()
    checkpoint = Checkpoint(tmp_path / "draft")
    assert len(checkpoint.names) == 24
    assert torch.equal(checkpoint.tensor("model.layers.2.mlp.experts.0.up_proj.scales"), matrices[4].scales.t())


def _letters(text: str) -> Sequence[int]:
    return [ord(letter) for letter in text]


@pytest.mark.parametrize(("name", "lines"), [("a.txt", False), ("a.jsonl", True), ("a.json.gz", True)])
def test_calibration_blocks_are_spread_over_the_file(name: str, lines: bool, tmp_path: Path) -> None:
    import gzip

    text = "".join(json.dumps({"text": letter * 9}) + "\n" for letter in "abcdef") if lines else "abcdefgh" * 6
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    calibration = load_calibration(path, CalibrationTokenizer(_letters, (1,), (2,)), samples=3, sequence_length=10)
    assert calibration.tokens.shape == (3, 10) and calibration.tokens[:, 0].tolist() == [1, 1, 1]
    # blocks 0, 2, 4 of 6 or 0, 1, 3 of 5
    assert [chr(token) for token in calibration.tokens[:, 1]] == ["a", "b", "d"]
    assert len(calibration.sha256) == 64 and calibration.file == name


def test_bad_calibration_files_are_refused(tmp_path: Path) -> None:
    tokenizer = CalibrationTokenizer(_letters, (), ())
    for name, content, match in (
        ("short.txt", "abc", "0 blocks of 10 tokens, 2 samples"),
        ("bad.jsonl", "{", "line 1 is no JSON"),
        ("other.jsonl", '{"body": "x"}\n', "none of the fields"),
        ("bad.gz", "not gzip", "cannot be read"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(UserError, match=match):
            load_calibration(tmp_path / name, tokenizer, samples=2, sequence_length=10)
    with pytest.raises(UserError, match="does not exist"):
        load_calibration(tmp_path / "absent.txt", tokenizer, samples=2, sequence_length=10)


def test_bad_input_ends_in_one_line_and_code_2(
    checkpoints: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, output = str(checkpoints("qwen2_moe")), str(tmp_path / "draft")
    text = tmp_path / "text.txt"
    text.write_text(_text(50))
    bad = [
        ["--model", model, "--output", output],
        ["--model", str(tmp_path / "absent"), "--output", output, "--method", "rtn"],
        ["--model", model, "--output", model, "--method", "rtn"],
        ["--model", model, "--output", output, "--calibration", str(text), "--samples", "1000"],
    ]
    for arguments in bad:
        assert exit_code(partial(main, arguments)) == 2
        captured = capsys.readouterr()
        assert captured.err.strip() and "Traceback" not in captured.err and not captured.out


def test_truncated_draft_is_refused(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    model, output = checkpoints("qwen2_moe"), tmp_path / "draft"
    main(["--model", str(model), "--output", str(output), "--method", "rtn"])
    weights = output / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match="truncated"):
        load_draft(output, ModelConfig.from_file(model))


def _changed(gptq: DraftExperts, nearest: DraftExperts) -> float:
    return float((unpack(gptq.gate_up.codes) != unpack(nearest.gate_up.codes)).float().mean())


@pytest.mark.skipif(not HAS_GPTQMODEL, reason="gptqmodel is not installed")
@pytest.mark.parametrize("family", FAMILIES)
def test_gptq_draft_differs_from_rtn_and_fits_the_calibration_better(
    family: str, checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    model, output, text = checkpoints(family), tmp_path / "draft", tmp_path / "text.txt"
    text.write_text(_text(6000, seed=3))
    arguments = ["--model", str(model), "--output", str(output), "--calibration", str(text)]
    assert main([*arguments, "--samples", "16", "--sequence-length", "64"]) == 0
    config = ModelConfig.from_file(model)
    gptq = load_draft(output, config)
    assert gptq.kind == "gptq"
    assert gptq.card["gptqmodel_version"] and len(gptq.card["calibration_sha256"]) == 64
    assert _changed(gptq, quantize_rtn(_reader(model).read, config)) > 0.05


@pytest.mark.skipif(not HAS_GPTQMODEL, reason="gptqmodel is not installed")
def test_gptq_of_one_matrix_has_less_output_error_than_rtn() -> None:
    from specter_core.draft.quantizing.gptq import GptqModelQuantizer

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(128, 256, generator=generator)
    inputs = torch.randn(2000, 256, generator=generator) @ torch.randn(256, 256, generator=generator)

    def error(matrix: Int4Matrix) -> float:
        return float((inputs @ (dequantize(matrix) - weight).t()).square().mean())

    assert error(GptqModelQuantizer().quantize(weight, inputs)) < 0.8 * error(rtn.quantize(weight))


@pytest.mark.skipif(HAS_GPTQMODEL, reason="gptqmodel is installed")
def test_without_gptqmodel_the_remedy_is_named(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    from specter_core.draft.quantizing.gptq import GptqModelQuantizer

    with pytest.raises(UserError, match="--method rtn"):
        GptqModelQuantizer()


@pytest.mark.parametrize("card", sorted(REFERENCE.glob("*/**/draft_card.json")), ids=lambda path: path.parts[-3])
def test_shipped_gptq_drafts_are_not_rtn(card: Path) -> None:
    if json.loads(card.read_text())["method"] != "gptq":
        pytest.skip("not a GPTQ draft")
    model = card.parent.parent
    config = ModelConfig.from_file(model)
    gptq = load_draft(card.parent, config)
    assert gptq.card["gptqmodel_version"] and len(gptq.card["calibration_sha256"]) == 64
    assert _changed(gptq, quantize_rtn(_reader(model).read, config)) > 0.05
