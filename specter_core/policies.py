"""The engine's decisions as protocols, so that another system can run on the same parts with decisions of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from specter_core.memory.budget import SlotPlan
from specter_core.memory.expert_cache import ExpertCache
from specter_core.memory.expert_loader import ExpertLoader
from specter_core.memory.link import Link
from specter_core.memory.slot_buffer import SlotBuffer
from specter_core.prefetch.planner import PrefetchPlan, Timings
from specter_core.prefetch.prefetcher import PrefetchCounters
from specter_core.types import WindowStats
from specter_core.verify.residency import LayerPlan


class DepthPolicy(Protocol):
    """How many tokens a window drafts."""

    def depth(self) -> int:
        """K of the next window, at most `EngineOptions.depth`; called once per window."""
        ...

    def observe(self, stats: WindowStats) -> None:
        """A window has been committed."""
        ...


class FixedDepth:
    """The same K in every window."""

    def __init__(self, depth: int) -> None:
        self._depth = depth

    def depth(self) -> int:
        return self._depth

    def observe(self, stats: WindowStats) -> None:
        del stats


class Prefetching(Protocol):
    """What is loaded before the target's router asks for it; see `Prefetcher`."""

    @property
    def wants_snapshot(self) -> bool: ...
    def begin_window(self, depth: int) -> int: ...
    def on_boundary(self, counters: Tensor, drafted: int, timings: Timings) -> PrefetchPlan: ...
    def shorten_window(self, depth: int) -> None: ...
    def end_of_draft(self) -> None: ...
    def before_layer(self, layer: int, needed: Collection[int]) -> tuple[int, ...]: ...
    def prepare_layer(self, layer: int) -> None: ...
    def end_window(self, useful: Collection[tuple[int, int]]) -> PrefetchCounters: ...


class Residency(Protocol):
    """Which slot each missing expert of a layer gets, and when; see `ResidencyManager`."""

    def plan_layer(
        self, layer: int, needed: Sequence[int], counts: Mapping[int, int] | None = None, late: Sequence[int] = (),
        done: Collection[int] = (),
    ) -> LayerPlan: ...  # fmt: skip


@dataclass(frozen=True, slots=True)
class Replacements:
    """What another system builds in the place of Specter's part; None: Specter's.

    link wraps the device's own. Each gets what the part that it replaces is built from.
    """

    cache: Callable[[SlotPlan], ExpertCache] | None = None
    link: Callable[[Link, SlotBuffer, ExpertCache], Link] | None = None
    prefetcher: Callable[[ExpertLoader], Prefetching] | None = None
    residency: Callable[[ExpertCache], Residency] | None = None
    depth: DepthPolicy | None = None
