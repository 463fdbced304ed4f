"""What other replacement policies would have loaded on the same routing trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Needs = list[list[int]]
"""Of one target pass: distinct experts by layer, ascending."""


def needs(routes: Sequence[tuple[int, Any]], layers: int) -> Needs:
    """routes: (layer, ids [R, k]) of a pass, ids below zero are no experts."""
    found: Needs = [[] for _ in range(layers)]
    for layer, ids in routes:
        found[layer] = sorted({e for e in ids.flatten().tolist() if e >= 0})
    return found


def lru_loads(passes: Sequence[Needs], slots: Sequence[int]) -> int:
    """Loads of a demand-only LRU per layer, empty at first, ids taken in ascending order."""
    loads = 0
    for layer, size in enumerate(slots):
        held: dict[int, None] = {}
        for needed in (p[layer] for p in passes):
            for expert in needed:
                loads += expert not in held
                held.pop(expert, None)
                held[expert] = None
                if len(held) > size:
                    del held[next(iter(held))]
    return loads


def belady_loads(passes: Sequence[Needs], slots: Sequence[int]) -> int:
    """The fewest loads that demand loading with so many slots per layer needs (Belady 1966: the victim is what is
    needed again last), empty at first, ids taken in ascending order."""
    loads = 0
    for layer, size in enumerate(slots):
        trace = [expert for p in passes for expert in p[layer]]
        following = _next_uses(trace)
        held: dict[int, int] = {}  # expert -> index of its next use
        for at, expert in enumerate(trace):
            if expert not in held:
                loads += 1
                if len(held) == size:
                    del held[max(held, key=held.__getitem__)]
            held[expert] = following[at]
    return loads


def _next_uses(trace: Sequence[int]) -> list[int]:
    """For each place, where the same expert is needed next; behind the end where it is not."""
    last: dict[int, int] = {}
    found = [0] * len(trace)
    for at in range(len(trace) - 1, -1, -1):
        found[at] = last.get(trace[at], len(trace) + trace[at])
        last[trace[at]] = at
    return found
