"""What benches do with an engine beside generating: fill slots, watch bits, copy KV, time segments, profile hosts."""

from __future__ import annotations

import cProfile
import io
import pstats
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specter_core.engine import SpecterEngine
from specter_core.memory.link import Priority
from specter_core.types import ExpertKey, Request, WindowStats

ROOT = Path(__file__).resolve().parents[2]


class Bits:
    """Hashes of the logits of every committed position: positions verified again replace what was rejected."""

    def __init__(self, engine: SpecterEngine) -> None:
        self.by_position: dict[int, int] = {}
        self._decode = engine.target.decode
        vocab = engine.decoder.config.vocab_size
        self._weights = torch.arange(vocab, device="cuda") * 2_654_435_761 + 1
        engine.target.decode = self._watched  # type: ignore[method-assign]

    def _watched(self, tokens: Tensor, rows: Any, kv: Any, stats: WindowStats) -> Tensor:
        logits = self._decode(tokens, rows, kv, stats)
        hashes = (logits[0].contiguous().view(torch.int32).long() * self._weights).sum(dim=1).tolist()
        for position, value in zip(rows.positions[0].tolist(), hashes, strict=True):
            self.by_position[position] = value
        return logits


def committed_kv(engine: SpecterEngine, end: int) -> list[Tensor]:
    """Copies of the first sequence's KV entries before position `end`, layer by layer."""
    kv = engine.kv
    return [t[0, :end].clone() for t in (*kv.keys, *kv.values, *kv.latents)]


def fill(engine: SpecterEngine, experts: int) -> None:
    """Every expert into its slot."""
    cache, loader = engine.experts.cache, engine.experts.loader
    for layer in range(len(engine.slots.slots_per_layer)):
        absent = [e for e in range(experts) if cache.lookup(ExpertKey(layer, e)) is None]
        for expert, slot in zip(absent, cache.free_slots(layer), strict=False):
            loader.load(ExpertKey(layer, expert), slot, Priority.PREFETCH)
    loader.drain()


def segments_ms(engine: SpecterEngine) -> float:
    """Median time of a verification's captured segments, replayed back to back, ms."""
    made = next(iter(engine.target._segments.values()))  # type: ignore[attr-defined]
    times = []
    for _ in range(8):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for run in made.segments:
            run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def host_profile(engine: SpecterEngine, request: Request) -> None:
    """Prints where the host's time goes while an engine generates, the longest functions first."""
    profiler = cProfile.Profile()
    profiler.enable()
    engine.generate([request])
    profiler.disable()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(22)
    for line in text.getvalue().splitlines():
        if line.strip() and line.strip()[0].isdigit():
            print("    " + line.strip().replace(str(ROOT), "")[:110])


def lru_loads(passes: Iterable[Sequence[tuple[int, Tensor]]], slots: Sequence[int]) -> list[int]:
    """Loads per pass of a demand-only LRU with these slots per layer, ids taken in ascending order."""
    held: list[dict[int, None]] = [{} for _ in slots]
    found = []
    for routes in passes:
        loads = 0
        for layer, ids in routes:
            for expert in sorted({e for e in ids.flatten().tolist() if e >= 0}):
                cache = held[layer]
                loads += expert not in cache
                cache.pop(expert, None)
                cache[expert] = None
                if len(cache) > slots[layer]:
                    del cache[next(iter(cache))]
        found.append(loads)
    return found
