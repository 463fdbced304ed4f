"""Prompts of a run as token ids of the model at hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from harness.system import ModelSpec


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One prompt. tokens: the prefix. label: GK, WT, HE, GP or C4, under which figures show it (for the
    built-in set the label of its style). private: its text and tokens are never written anywhere."""

    dataset: str
    label: str
    prompt_id: str
    tokens: tuple[int, ...] = field(repr=False)
    private: bool = False


class PromptSource(Protocol):
    """Where a run's prompts come from; `harness.dataset_source` for real ones, something fixed in tests."""

    def absent(self, dataset: str) -> str | None:
        """None when the dataset is here; otherwise one line that says what fetches it."""
        ...

    def select(self, model: ModelSpec, dataset: str, prefix_tokens: int) -> list[BenchPrompt]:
        """The prompts of a dataset for a model, the same at every call."""
        ...

    def warmup(self, model: ModelSpec, prefix_tokens: int) -> BenchPrompt:
        """A prompt that is never measured."""
        ...
