"""efficiency.jsonl: what systems did with their time and their link, a line per measured batch; and tables from it.

A batch's line names its row of records.csv and adds the numbers of harness/systems/probe.py: times of the whole batch
in ms, loads in experts.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = "efficiency.jsonl"
KEYS = ("model", "weights", "memory", "link", "device", "B", "prefix_len", "system", "variant", "encoding")
NAMES = ("config_hash", "dataset", "prompt_id", "repeat", "K", "new_tokens", "tpot_ms", "energy_j")


def append(path: Path, row: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """One line, whole or not at all. row: of records.csv; found: RequestRecord.efficiency."""
    line = {name: row[name] for name in (*KEYS, *NAMES)} | dict(found)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(line) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """Every whole line, the last one of each (config_hash, prompt_id, repeat)."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        found[line["config_hash"], line["prompt_id"], line["repeat"]] = line
    return list(found.values())
