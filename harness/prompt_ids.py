"""Prompts as token ids from one JSON file, for machines that have neither datasets nor tokenizers.

{"MODEL": {"warmup": {"16": [ids]}, "prompts": {"DATASET": {"16": [{"id", "label", "private", "tokens"}, …]}}}}

The file may hold ids of private datasets: it stays on machines of the one who made it and is never committed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import datasets
from harness.dataset_source import WARMUP
from harness.datasets.select import TooFewDocuments
from harness.prompts import BenchPrompt
from harness.system import ModelSpec
from specter_core.errors import UserError

DATASETS = ("gsm8k", "wikitext2", "humaneval", "gpqa", "c4")
"""In the order of the paper's figures."""


class IdSource:
    """A `PromptSource` over such a file. prompts: how many of each dataset; UserError where the file has fewer."""

    def __init__(self, path: Path, *, prompts: int) -> None:
        if not path.exists():
            raise UserError(f"{path} does not exist; make it with: scripts/prepare_prompt_ids.py --output {path}")
        self._path, self._prompts = path, prompts
        self._models: Mapping[str, Any] = json.loads(path.read_text())

    def absent(self, dataset: str) -> str | None:
        known = sorted({name for model in self._models.values() for name in model["prompts"]})
        return None if dataset in known else f"{self._path} has no dataset {dataset}; it has {', '.join(known)}"

    def select(self, model: ModelSpec, dataset: str, prefix_tokens: int) -> list[BenchPrompt]:
        lengths = self._model(model)["prompts"].get(dataset, {})
        found = lengths.get(str(prefix_tokens), [])[: self._prompts]
        if len(found) < self._prompts:
            raise TooFewDocuments(
                f"{self._path} has {len(found)} prompts of {dataset} with {prefix_tokens} tokens for {model.name}, "
                f"{self._prompts} are wanted; make it again with more"
            )
        return [BenchPrompt(dataset, p["label"], p["id"], tuple(p["tokens"]), p["private"]) for p in found]

    def warmup(self, model: ModelSpec, prefix_tokens: int) -> BenchPrompt:
        ids: list[int] = self._model(model)["warmup"]
        repeated = ids * -(-prefix_tokens // len(ids))
        return BenchPrompt("warmup", "warmup", "warmup", tuple(repeated[:prefix_tokens]))

    def _model(self, model: ModelSpec) -> Mapping[str, Any]:
        if model.name not in self._models:
            raise UserError(f"{self._path} has no prompts of model {model.name}; it has {', '.join(self._models)}")
        found: Mapping[str, Any] = self._models[model.name]
        return found


def prompt_ids(
    roots: Mapping[str, Path], encode: Callable[[str], Sequence[int]], lengths: Mapping[int, int], seed: int
) -> dict[str, Any]:
    """One model's part of the file. roots: dataset -> folder; lengths: prefix length -> prompts per dataset. A dataset
    with too few documents of a length has none of it."""
    chosen: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name, root in roots.items():
        texts = datasets.load_texts(name, root)
        chosen[name] = {}
        for length, count in lengths.items():
            try:
                found = datasets.select_prompts(texts, encode, count=count, prefix_len=length, seed=seed)
            except TooFewDocuments:
                continue
            chosen[name][str(length)] = [
                {"id": p.prompt_id, "label": p.label, "private": p.private, "tokens": list(p.token_ids)} for p in found
            ]
    return {"warmup": list(encode(WARMUP)), "prompts": chosen}
