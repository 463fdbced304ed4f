"""Rows as a main run writes them, with made-up but plausible numbers, for tests of records, summary and
figures."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from harness.columns import NAMES

LABELS = ("GK", "WT", "HE", "GP", "C4")
TPOT_MS = {"specter": 20.0, "mo_sm": 42.0, "mo_sc": 55.0, "transformers": 310.0, "autoregressive": 60.0}


def row(**changes: Any) -> dict[str, Any]:
    """One row with status ok; `changes` replace columns."""
    base = dict.fromkeys(NAMES) | {
        "system": "specter",
        "variant": "default",
        "model": "deepseek_v2_mini",
        "weights": "reference",
        "dtype": "bfloat16",
        "encoding": "plain",
        "dataset": "builtin",
        "label": "C4",
        "prompt_id": "web-1",
        "repeat": 0,
        "seed": 0,
        "temperature": 0.0,
        "B": 1,
        "K": 8,
        "M": 3.0,
        "budget_bytes": 20_000_000,
        "memory": "tight",
        "prefix_len": 16,
        "new_tokens": 32,
        "ttft_ms": 80.0,
        "tpot_ms": 20.0,
        "throughput": 45.0,
        "h2d_bytes": 64_000_000,
        "exact_match": True,
        "status": "ok",
        "link": "scaled",
        "link_rate_bytes_per_s": 1e8,
        "device": "cpu",
        "config_hash": "0123456789ab",
        "git_commit": "unknown",
    }
    assert set(changes) <= set(NAMES), set(changes) - set(NAMES)
    return base | changes


def main_run(models: tuple[str, ...] = ("deepseek_v2_mini",), prompts: int = 3) -> Iterator[dict[str, Any]]:
    """Five systems x models x five labels x prompts; a system's K and config hash are its own."""
    noise = random.Random(0)
    for model in models:
        for system, tpot in TPOT_MS.items():
            for label in LABELS:
                for number in range(prompts):
                    depth = 8 if system == "specter" else 0
                    yield row(
                        system=system,
                        model=model,
                        label=label,
                        prompt_id=f"{label}-{number}",
                        K=depth,
                        tpot_ms=tpot * noise.uniform(0.8, 1.25),
                        acceptance=noise.uniform(0.8, 0.95) if depth else None,
                        config_hash=f"{system}-{model}",
                    )
