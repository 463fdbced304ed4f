"""Write a model folder in Hugging Face format and prove that transformers reads the same model back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
import transformers

from .model import TrainableMoe
from .rope import rope_tables
from .settings import Settings


def round_to_bf16(model: TrainableMoe) -> None:
    """Round every parameter to BF16 in place; the dtype stays float32."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16().float())


def save_model(model: TrainableMoe, settings: Settings, work: Path, folder: Path) -> None:
    """config.json, generation_config.json, model.safetensors (BF16, per-expert names), tokenizer files."""
    folder.mkdir(parents=True, exist_ok=True)
    hf = getattr(transformers, settings.model_class)(model.config)
    hf.load_state_dict({k: v.cpu() for k, v in model.state_dict().items()}, strict=True)
    hf = hf.to(torch.bfloat16)
    hf.generation_config.do_sample = False
    hf.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["architectures"] = settings.architectures
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(work / name, folder / name)
    for path in folder.iterdir():
        path.chmod(0o644)


@torch.no_grad()
def reload_error(model: TrainableMoe, folder: Path, tokens: torch.Tensor) -> float:
    """Largest float32 logit difference of `model` (on the CPU) and the folder, over the largest logit."""
    hf = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    cos, sin = rope_tables(model.config, tokens.shape[1])[0]
    ours = model(tokens, cos[None], sin[None]).logits
    theirs = hf(tokens).logits
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()
