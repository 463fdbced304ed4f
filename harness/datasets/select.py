"""From documents to the prompts of a run: a seeded permutation, the long enough ones first, cut to length."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from harness.datasets.prompt import Prompt, PromptText
from specter_core.errors import UserError

PRIVATE = ("gpqa",)


class TooFewDocuments(UserError):
    """A dataset, or a style of it, has not enough documents of the wanted length."""


def select_prompts(
    texts: Sequence[PromptText],
    encode: Callable[[str], Sequence[int]],
    *,
    count: int,
    prefix_len: int,
    seed: int,
) -> list[Prompt]:
    """`count` prompts of `prefix_len` tokens for each (dataset, label): `builtin` gives `count` per style.

    The order of the documents depends on seed, dataset and prompt id alone, not on the file format or on how
    many others there are. Raises TooFewDocuments (a UserError) when fewer than `count` have `prefix_len` tokens.
    """
    if count < 1 or prefix_len < 1:
        raise UserError(f"count={count}, prefix_len={prefix_len}: both have to be 1 or more")
    if not texts:
        raise UserError("the dataset has no documents; fetch it again")
    groups: dict[tuple[str, str], list[PromptText]] = {}
    for text in texts:
        groups.setdefault((text.dataset, text.label), []).append(text)
    return [p for group in groups.values() for p in _take(group, encode, count, prefix_len, seed)]


def _take(
    group: list[PromptText], encode: Callable[[str], Sequence[int]], count: int, prefix_len: int, seed: int
) -> list[Prompt]:
    chosen: list[Prompt] = []
    for text in sorted(group, key=lambda t: _rank(seed, t)):
        tokens = _tokens(text, encode)
        if len(tokens) >= prefix_len:
            ids = tuple(int(t) for t in tokens[:prefix_len])
            chosen.append(Prompt(text.prompt_id, text.dataset, text.label, ids, text.dataset in PRIVATE))
        if len(chosen) == count:
            return chosen
    first = group[0]
    name = first.dataset if first.dataset != "builtin" else f"builtin (style {first.label})"
    raise TooFewDocuments(
        f"dataset {name} has {len(chosen)} documents of >= {prefix_len} tokens, count asks for {count}; "
        "ask for fewer prompts or a shorter prefix"
    )


def _rank(seed: int, text: PromptText) -> bytes:
    return hashlib.sha256(f"{seed}/{text.dataset}/{text.prompt_id}".encode()).digest()


def _tokens(text: PromptText, encode: Callable[[str], Sequence[int]]) -> Sequence[int]:
    if text.dataset not in PRIVATE:
        return encode(text.text)
    try:
        return encode(text.text)
    except Exception as error:  # its message may quote the text
        raise UserError(f"{text.prompt_id} cannot be tokenised ({type(error).__name__})") from None
