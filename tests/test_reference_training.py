"""The training model of the reference checkpoints equals transformers; its small parts keep their word."""

from __future__ import annotations

import doctest
import json
import sys
import types
from pathlib import Path

import pytest
import torch
import transformers
from transformers.models.phimoe.modeling_phimoe import sparsemixer

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from reference_training.cli import main
from reference_training.corpus import Source, held_back_runs, word_runs
from reference_training.data import Corpus
from reference_training.generated_code import code_documents
from reference_training.generated_maths import maths_documents
from reference_training.model import TrainableMoe, make_config
from reference_training.moe import sparsemixer_weights, top_k_mask
from reference_training.optim import orthogonalise, schedule
from reference_training.prepare import common_cap, write_work
from reference_training.rope import rope_tables
from reference_training.settings import load_settings, model_names
from reference_training.sizes import LIMIT_BYTES, draft_bytes, tensor_shapes

NAMES = model_names()


def shaken(name: str, layers: int = 3) -> tuple[TrainableMoe, transformers.PreTrainedModel]:
    """A training model with no parameter at zero or one, and the transformers model of the same weights."""
    settings = load_settings(name)
    config = make_config(settings, num_hidden_layers=layers)
    torch.manual_seed(1)
    model = TrainableMoe(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    config._attn_implementation = "eager"
    reference = getattr(transformers, settings.model_class)(config).eval()
    reference.load_state_dict(model.state_dict(), strict=True)
    return model, reference


@pytest.mark.parametrize("name", NAMES)
def test_training_forward_equals_transformers(name: str) -> None:
    model, reference = shaken(name)
    tokens = torch.randint(0, 4096, (2, 40), generator=torch.Generator().manual_seed(2))
    cos, sin = rope_tables(model.config, 40)[0]
    with torch.no_grad():
        ours = model(tokens, cos[None], sin[None]).logits
        theirs = reference(tokens).logits
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


@pytest.mark.parametrize("name", NAMES)
def test_shipped_architecture_fits_the_size_limit(name: str) -> None:
    settings = load_settings(name)
    config = make_config(settings)
    with torch.device("meta"):
        model = TrainableMoe(config)
    shapes: dict[str, list[int]] = {}
    for key, p in model.named_parameters():
        if key.endswith("gate_up_proj"):
            shapes |= {
                f"{key.removesuffix('gate_up_proj')}{e}.{part}.weight": [p.shape[1] // 2, p.shape[2]]
                for e in range(p.shape[0])
                for part in ("gate_proj", "up_proj")
            }
        elif key.endswith("experts.down_proj"):
            shapes |= {
                f"{key.removesuffix('down_proj')}{e}.down_proj.weight": list(p.shape[1:]) for e in range(p.shape[0])
            }
        else:
            shapes[key] = list(p.shape)
    model_bytes = 2 * sum(p.numel() for p in model.parameters()) + 120 * len(shapes)
    other_files_bytes = 150_000
    assert model_bytes + draft_bytes(shapes) + other_files_bytes <= LIMIT_BYTES
    routed = [s for n, s in shapes.items() if ".experts." in n]
    assert all(side % 128 == 0 for shape in routed for side in shape)
    assert len(routed) >= 3 * 16 * 5 and config.num_hidden_layers >= 6


def test_top_k_mask_takes_the_lowest_id_among_equals() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    expected = torch.tensor([[False, True, True, False, False], [True, True, False, False, False]])
    assert torch.equal(top_k_mask(scores, 2), expected)


def test_sparsemixer_weights_equal_transformers_at_inference_with_and_without_near_ties() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4000, 16, generator=generator)
    logits[::2] = 1 + logits[::2] * 0.02  # many near ties
    value, chosen = sparsemixer(logits, 0.01, training=False)
    expected = torch.zeros_like(logits).scatter_(1, chosen, value)
    weights, mask = sparsemixer_weights(logits, 0.01)
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(mask, torch.zeros_like(mask).scatter_(1, chosen, True))
    assert ((value > 0.01) & (value < 0.99)).any()


def test_sparsemixer_router_gets_a_gradient_where_the_inference_weight_is_constant() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.2, -1.0]], requires_grad=True)
    weights, _ = sparsemixer_weights(logits, 0.01)
    assert weights[0].tolist() == [1.0, 1.0, 0.0, 0.0]
    weights[0, 0].backward()
    assert logits.grad is not None and logits.grad[0, 0] > 0 > logits.grad[0, 1]


def test_longrope_has_short_long_and_crossing_tables() -> None:
    config = make_config(load_settings("phimoe_mini"))
    original = config.rope_parameters["original_max_position_embeddings"]
    (short, _), (long, _), (crossing, _) = rope_tables(config, original + 8)
    assert not torch.allclose(short, long)
    assert torch.equal(crossing[:original], short[:original])
    assert torch.equal(crossing[original:], long[original:])


def test_orthogonalised_update_has_singular_values_near_one() -> None:
    batch = torch.randn(3, 64, 128, generator=torch.Generator().manual_seed(4))
    singular = torch.linalg.svdvals(orthogonalise(batch))
    assert singular.min() > 0.5 and singular.max() < 1.3


def test_schedule_rises_holds_and_ends_at_zero() -> None:
    training = load_settings(NAMES[0]).training
    values = [schedule(i / 1000, training) for i in range(1001)]
    top = values.index(1.0)
    assert values[: top + 1] == sorted(values[: top + 1])
    assert values[top:] == sorted(values[top:], reverse=True)
    assert values[-1] == 0.0


def tiny_work(folder: Path) -> Path:
    """A work folder with a few generated documents and a tokenizer of their own."""
    sources = []
    for name, stream in (("maths", maths_documents(1)), ("code", code_documents(2))):
        sources.append(Source(name, name, "Apache-2.0", 1.0, [next(stream) for _ in range(400)], ["generated"]))
    write_work(folder, sources, {"seed": 1, "vocab_size": 600, "tokenizer_mb": 0.2, "valid_share": 0.05,
                                 "valid_min_tokens": 500, "train_max_bytes": 10**9})  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_work(tmp_path_factory.mktemp("reference_work"))


def test_common_cap_cuts_only_the_largest_sources() -> None:
    assert common_cap([5, 100, 40, 80], 165) == 60
    assert common_cap([5, 100, 40], 1000) == 100


def test_prepared_rows_decode_to_the_documents(work: Path) -> None:
    corpus = Corpus(work, torch.device("cpu"), 0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(work)
    low, _ = corpus.sources[0]["train"]
    ids = corpus.train[low : low + 400].tolist()
    text = tokenizer.decode(ids[: ids.index(0)])
    assert text.startswith("Question: ") and "####" in text
    assert tokenizer(text).input_ids == ids[: ids.index(0)]
    assert int(corpus.token_bytes[torch.tensor(ids[: ids.index(0)])].sum()) == len(text.encode())
    inputs, targets = corpus.batch(6, 64)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


@pytest.mark.parametrize("name", NAMES)
def test_a_few_steps_lower_the_loss_and_the_folder_reloads(name: str, work: Path, tmp_path: Path) -> None:
    folder = tmp_path / name
    command = ["train", "--config", name, "--work", str(work), "--output", str(folder), "--steps", "8"]
    assert main([*command, "--batch-rows", "4", "--sequence-tokens", "64", "--device", "cpu"]) == 0
    report = json.loads((tmp_path / f"{name}.json").read_text())
    assert report["last_nll"] < report["first_nll"] - 0.5
    assert report["reload_error"] <= 1e-4
    assert report["sizes"]["total_bytes"] <= LIMIT_BYTES
    names = set(tensor_shapes(folder / "model.safetensors"))
    expert = "block_sparse_moe.experts.3.w1" if name == "phimoe_mini" else "mlp.experts.3.gate_proj"
    assert f"model.layers.2.{expert}.weight" in names
    architectures = json.loads((folder / "config.json").read_text())["architectures"]
    assert architectures == load_settings(name).architectures
    assert "held-out" in (folder / "README.md").read_text().lower()


def test_written_functions_pass_their_own_doctests() -> None:
    stream = code_documents(5)
    finder, examples = doctest.DocTestFinder(), 0
    for _ in range(60):
        scope: dict[str, object] = {}
        exec(next(stream), scope)
        for name, function in list(scope.items()):
            if isinstance(function, types.FunctionType):
                for test in finder.find(function, name, module=False, globs=scope):
                    result = doctest.DocTestRunner(verbose=False).run(test)
                    assert result.failed == 0
                    examples += result.attempted
    assert examples >= 60


def test_documents_that_share_a_run_with_held_back_text_are_found(tmp_path: Path) -> None:
    (tmp_path / "gsm8k").mkdir()
    words = [f"word{i}" for i in range(40)]
    (tmp_path / "gsm8k" / "test.jsonl").write_text(json.dumps({"question": " ".join(words), "answer": "#### 1"}))
    held_back = held_back_runs(tmp_path)
    assert not held_back.isdisjoint(word_runs("intro " + ", ".join(words[5:18])))
    assert held_back.isdisjoint(word_runs("intro " + ", ".join(words[5:17])))
