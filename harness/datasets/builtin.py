"""The prompts that ship with the repository: one JSON-lines file per style in builtin/.

All of them were written for it; places and events in them are made up or described in our own words.
"""

from __future__ import annotations

import json
from pathlib import Path

from harness.datasets.prompt import PromptText

FOLDER = Path(__file__).with_name("builtin")
STYLE_LABELS = {"web": "C4", "encyclopedic": "WT", "code": "HE", "maths": "GK", "choice": "GP"}


def load() -> list[PromptText]:
    """Every prompt, style by style; a style has the label of the dataset that it resembles."""
    return [
        PromptText(record["id"], record["text"], "builtin", label)
        for style, label in STYLE_LABELS.items()
        for record in map(json.loads, (FOLDER / f"{style}.jsonl").read_text(encoding="utf-8").splitlines())
    ]
