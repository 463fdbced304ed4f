"""Prompts of the real datasets and the built-in one, cut to token prefixes by the tokenizer of the model at
hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from harness import assets, datasets
from harness.datasets import PromptText
from harness.prompts import BenchPrompt
from harness.system import ModelSpec
from harness.weights_in_memory import is_in_memory
from specter_core.errors import UserError

WARMUP = "The ferry left the harbour at dawn with two lorries, a dozen cyclists and a crate of oranges. "


class DatasetSource:
    """`prompts` per dataset label, chosen by `seed`. Tokenizers and texts are read once."""

    def __init__(self, *, prompts: int, seed: int) -> None:
        self._prompts, self._seed = prompts, seed
        self._texts: dict[str, list[PromptText]] = {}
        self._encoders: dict[str, Callable[[str], Sequence[int]]] = {}
        self._selected: dict[tuple[str, str, int], list[BenchPrompt]] = {}

    def absent(self, dataset: str) -> str | None:
        return datasets.absent(dataset, assets.dataset_root(dataset))

    def select(self, model: ModelSpec, dataset: str, prefix_tokens: int) -> list[BenchPrompt]:
        key = (_place(model), dataset, prefix_tokens)
        if key not in self._selected:
            if dataset not in self._texts:
                self._texts[dataset] = datasets.load_texts(dataset, assets.dataset_root(dataset))
            found = datasets.select_prompts(
                self._texts[dataset],
                self._encoder(model),
                count=self._prompts,
                prefix_len=prefix_tokens,
                seed=self._seed,
            )
            self._selected[key] = [BenchPrompt(p.dataset, p.label, p.prompt_id, p.token_ids, p.private) for p in found]
        return self._selected[key]

    def warmup(self, model: ModelSpec, prefix_tokens: int) -> BenchPrompt:
        ids = self._encoder(model)(WARMUP * (1 + prefix_tokens // 8))
        return BenchPrompt("warmup", "warmup", "warmup", tuple(ids[:prefix_tokens]))

    def _encoder(self, model: ModelSpec) -> Callable[[str], Sequence[int]]:
        place = _place(model)
        if place not in self._encoders:
            self._encoders[place] = _in_memory(model) if is_in_memory(model) else load_encoder(Path(model.path))
        return self._encoders[place]


def _place(model: ModelSpec) -> str:
    """Models of one folder have one tokenizer."""
    return model.path or model.name


def _in_memory(model: ModelSpec) -> Callable[[str], Sequence[int]]:
    from harness.synthetic.text import byte_tokenizer

    assert model.shape is not None, model.name
    tokenizer = byte_tokenizer(model.shape.vocab_size)
    return lambda text: tokenizer.encode(text).ids


def load_encoder(folder: Path) -> Callable[[str], Sequence[int]]:
    """The checkpoint's own tokenizer.json, special tokens as it adds them. UserError where there is none."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.exists():
        raise UserError(f"{folder} has no tokenizer.json; fetch the checkpoint again, tokenizer included")
    tokenizer = Tokenizer.from_file(str(path))
    return lambda text: tokenizer.encode(text).ids
