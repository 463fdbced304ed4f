"""The prompt datasets: documents from their official file formats, and the prompts of a run out of them."""

from __future__ import annotations

from pathlib import Path

from harness.datasets import builtin, c4, gpqa, gsm8k, humaneval, wikitext2
from harness.datasets.files import fetch_command
from harness.datasets.prompt import Prompt, PromptText
from harness.datasets.select import select_prompts
from specter_core.errors import UserError

__all__ = ["NAMES", "Prompt", "PromptText", "absent", "dataset_files", "load_texts", "select_prompts"]

MODULES = {"c4": c4, "wikitext2": wikitext2, "humaneval": humaneval, "gsm8k": gsm8k, "gpqa": gpqa}
NAMES = ("builtin", *MODULES)


def dataset_files(name: str, root: Path) -> list[Path]:
    """The files that `load_texts` would read; empty for `builtin` and for a dataset that is absent."""
    _check(name)
    return [] if name == "builtin" else MODULES[name].files(root)


def absent(name: str, root: Path) -> str | None:
    """None when the dataset is here; otherwise one line: what is missing and which command fetches it."""
    if name == "builtin" or dataset_files(name, root):
        return None
    return f"dataset={name} is not in {root}; fetch it with: {fetch_command(name, root)}"


def load_texts(name: str, root: Path) -> list[PromptText]:
    """All documents of a dataset below `root` (downloads/, or the folder of extracted release archives).

    Raises UserError when the dataset is unknown, absent, unreadable or empty. GPQA is read in memory only.
    """
    if (line := absent(name, root)) is not None:
        raise UserError(line)
    texts = builtin.load() if name == "builtin" else MODULES[name].load(root)
    texts = [t for t in texts if t.text.strip()]
    if not texts:
        where = ", ".join(str(p) for p in dataset_files(name, root))
        raise UserError(
            f"dataset={name}: no usable document in {where}; fetch it again with: {fetch_command(name, root)}"
        )
    return texts


def _check(name: str) -> None:
    if name not in NAMES:
        raise UserError(f"dataset={name} is unknown; known: {', '.join(NAMES)}")
