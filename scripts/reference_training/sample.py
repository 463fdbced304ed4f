"""`sample`: continue a prompt with transformers."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers


def sample(folder: Path, prompt: str, tokens: int, temperature: float) -> str:
    """Prompt and continuation; greedy when the temperature is 0."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = tokenizer(prompt, return_tensors="pt")
    how = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    out = model.generate(inputs.input_ids, attention_mask=inputs.attention_mask, max_new_tokens=tokens, **how)
    return tokenizer.decode(out[0], skip_special_tokens=True)
