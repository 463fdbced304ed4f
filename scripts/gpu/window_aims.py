"""Aims of the window bench: rows of its summary beside their targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness import aim

GROWTH_WINDOWS = 200
LINK_USE = "link use from b_1 to the end"
BOUND = "bound: cold start + max(needed, compute)"
DIFFERENCES = ("token mismatches", "positions with other logit bits", "KV entries with other bits")
TARGETS = {
    "window over bound": ("window over (cold start + bound)", "<= 1.15"),
    "bytes used over moved": ("bytes used over moved", ">= 0.8"),
    "moved over demand-only LRU": ("bytes moved over demand-only LRU", "<= 1.0"),
    LINK_USE: ("link use from b_1 to the end of verification", ">= 0.9"),
    "device memory grown": (f"device memory grown over {GROWTH_WINDOWS} windows", "<= 0.0"),
    "peak over budget": ("peak device bytes over budget", "<= 1.0"),
    "TPOT": ("TPOT, random weights, native link", ""),
}
"""Row of the summary -> aim and its target."""


def aims(summary: Sequence[dict[str, Any]], model: str, commit: str) -> list[aim.Aim]:
    """summary: rows of Bench.summary. The link's aim holds where a window's needed loads take longer than its
    computation; the others everywhere. One more per budget: tokens, logits and KV entries with other bits."""
    found = []
    by_budget: dict[str, list[dict[str, Any]]] = {}
    for row in summary:
        if row["where"].endswith("GB"):
            by_budget.setdefault(row["where"], []).append(row)
    for where, rows in by_budget.items():
        bound = next((row["note"] for row in rows if row["what"] == BOUND), "")
        for row in rows:
            if row["what"] not in TARGETS:
                continue
            name, target = TARGETS[row["what"]]
            note = row["note"]
            if row["what"] == LINK_USE and not link_bound(bound):
                target, note = "", "not link-bound: the aim does not apply"
            found.append(aim.Aim(f"{name}, {model}, {where}", row["value"], row["unit"], target, commit, note))
        wrong = [row["value"] for row in rows if row["what"] in DIFFERENCES]
        if wrong:
            name = f"tokens, logits and KV entries with other bits than the plain target's, {model}, {where}"
            found.append(aim.Aim(name, sum(wrong), "", "<= 0", commit))
    return found


def link_bound(note: str) -> bool:
    """note: of the bound's row, "needed 45.8, compute 32.1"."""
    needed, compute = (float(part.split()[1]) for part in note.split(", ")) if note else (0.0, 0.0)
    return needed > compute
