"""A checkpoint that GPTQModel itself has quantised and saved: our draft computes the logits its torch kernel does."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from specter_core.draft.draft_store import load_draft
from specter_core.draft.experts import DraftExpertPath
from specter_core.model.config import ModelConfig
from specter_core.model.decoder import Decoder
from specter_core.model.rows import Rows
from specter_core.state.kv_cache import KVCache
from tests.plain_model import plain_forward
from tests.test_quantize_draft import _add_tokenizer, _text
from tests.tiny_models import FAMILIES, tiny_checkpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("gptqmodel") is None, reason="gptqmodel is not installed"),
]
STEPS = 24
KEPT = ("self_attn.*", "shared_expert.*", r"\.gate$", "router.*", r"\.mlp\.(gate|up|down)_proj$")


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_gptqmodels_torch_kernel(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPTQMODEL_CPU_WORKERS", "2")
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    source, saved = tiny_checkpoint(family, tmp_path, experts=4), tmp_path / "gptq"
    _add_tokenizer(source)
    config = QuantizeConfig(
        bits=4,
        group_size=128,
        sym=True,
        desc_act=False,
        dynamic={f"-:.*{name}": {} for name in KEPT},
    )
    model = GPTQModel.load(str(source), config, device="cpu")
    model.quantize([_text(60, seed=seed) for seed in range(24)], batch_size=1)
    model.save(str(saved))
    theirs = GPTQModel.load(str(saved), device="cpu", backend=BACKEND.TORCH, dtype=torch.float16).model.float()

    shape = ModelConfig.from_file(source)
    tokens = torch.randint(3, 200, (1, STEPS), generator=torch.Generator().manual_seed(0))
    decoder = Decoder.load(source, compute_dtype=torch.float32)
    path = DraftExpertPath(load_draft(saved, shape))
    with torch.inference_mode():
        hidden = plain_forward(
            decoder,
            lambda layer, routing: path.forward(layer, routing.normed, routing.ids, routing.weights),
            tokens,
            KVCache(shape, 1, STEPS, "cpu", torch.float32),
            Rows.prefill(0, 0, STEPS, STEPS),
        )
        ours = decoder.logits(hidden)
        expected = theirs(input_ids=tokens).logits[0]
    assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max()
