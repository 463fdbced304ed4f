"""What is typed behind run.py, looked at before Hydra reads it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import fields

from harness import catalogue
from harness.config import CONSUMED
from harness.entries import RunConfig
from specter_core.errors import UserError

COMMANDS = "list, plan [KEY=VALUE …], validate DIR, or none for a run"
KEYS = sorted({*(f.name for f in fields(RunConfig)), *CONSUMED, *catalogue.GROUPS, "hydra"})


def check(arguments: Sequence[str]) -> None:
    """UserError for a word that is no command and no KEY=VALUE, an unknown key, an unknown name in one of the groups of
    conf/. Keys that begin with + or ~, and flags, are Hydra's own business."""
    for before, argument in zip(["", *arguments], arguments, strict=False):
        key, equals, _ = argument.partition("=")
        if argument.startswith(("-", "+", "~")):
            continue
        if not equals and before.startswith("-"):  # the flag's value
            continue
        if not equals:
            raise UserError(f"{argument!r} is no command and no KEY=VALUE; commands: {COMMANDS}")
        first = key.partition(".")[0].partition("@")[0]
        if first not in KEYS:
            raise UserError(f"{first} is no key; {_nearest(first, KEYS)}")
    catalogue.check_overrides(arguments)


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
