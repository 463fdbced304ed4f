"""A dataset's documents before and after tokenisation. Text and tokens never show in a repr."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PromptText:
    """One document before tokenisation. label: C4, WT, HE, GK or GP (for `builtin` that of its style)."""

    prompt_id: str
    text: str = field(repr=False)
    dataset: str
    label: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """The first tokens of a document. private: neither its text nor its tokens may be written or printed."""

    prompt_id: str
    dataset: str
    label: str
    token_ids: tuple[int, ...] = field(repr=False)
    private: bool
