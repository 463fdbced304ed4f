"""The model card that ships in a reference folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .settings import Settings

FAMILIES = {
    "DeepseekV2ForCausalLM": "DeepSeek-V2",
    "Qwen2MoeForCausalLM": "Qwen2-MoE",
    "PhimoeForCausalLM": "PhiMoE",
}


def write_card(folder: Path, settings: Settings, manifest: dict[str, Any], report: dict[str, Any]) -> None:
    """README.md and the list of training sources with their checksums in training_data.json."""
    held = report["held_out"]
    total = sum(s["weight"] for s in manifest["sources"])
    rows = [
        "| source | style | rows | train tokens | held-out perplexity | bits per byte | licence | origin |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for s in manifest["sources"]:
        h = held["sources"][s["name"]]
        rows.append(
            f"| {s['name']} | {s['style']} | {100 * s['weight'] / total:.1f}% "
            f"| {s['train'][1] - s['train'][0]:,} | "
            f"{h['perplexity']:.2f} | {h['bits_per_byte']:.3f} | {s['licence']} | {', '.join(s['origin'])} |"
        )
    training = settings.training
    run = (
        f"{report['steps']:,} steps of {training.batch_rows} x {training.sequence_tokens} tokens "
        f"({report['tokens'] / 1e6:.0f} M tokens drawn from {manifest['train_tokens'] / 1e6:.1f} M), "
        f"{report['train_seconds']:.0f} s on {report['device']}, torch {report['torch']}"
    )
    quality = f"perplexity {held['perplexity']:.2f} per token, {held['bits_per_byte']:.3f} bits per byte"
    balance = f"{held['load_max']:.2f} and {held['load_min']:.2f} times the even share"
    text = f"""---
language: en
library_name: transformers
tags: [mixture-of-experts, toy]
---
# {settings.name}

A toy language model of the {FAMILIES[settings.model_class]} family, trained from scratch so that Specter runs
real text, real routing and real rejections on any laptop without a download. It writes recognisable English
and Python and knows next to nothing: use it for nothing but running and testing the engine.

- Trained by `scripts/train_reference_moe.py`, config `{settings.name}`, seed {report["seed"]}:
  {run}.
  The learning-rate schedule follows wall time, so another run gives other weights.
- Loss: next token plus load balancing (weight {training.aux_loss}); Muon and AdamW; float32 master weights,
  rounded once to BF16 at the end.
- Tokenizer: byte-level BPE, {manifest["vocab_size"]:,} ids, trained on the same text; id 0 ends a text.
  The three reference models share it.
- Held-out documents, rounded weights, windows of 512 tokens: {quality}.
  Busiest and idlest expert of a layer on them: {balance}.
- transformers reads the folder back with float32 logits within {report["reload_error"]:.1e} (relative) of the
  trained model.

## Training data

Debian packages are named with their version; other names are files of the data sets or of the Python
installation that ran `prepare`. HumanEval, GPQA, GSM8K's test split, WikiText's test split and the second half of
the C4 file were not trained on; documents that share a run of 13 words with HumanEval or those splits were
dropped. Checksums of the text of each source, before the largest were cut to fit the token file, are in
`training_data.json`. "rows" is the source's share of the training rows.

{chr(10).join(rows)}
"""
    (folder / "README.md").write_text(text)
    data = [
        {k: s[k] for k in ("name", "licence", "origin", "documents", "dropped_for_overlap", "sha256")}
        for s in manifest["sources"]
    ]
    (folder / "training_data.json").write_text(json.dumps(data, indent=1) + "\n")
