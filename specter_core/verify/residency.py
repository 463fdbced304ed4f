"""Verification Expert Cache Residency Manager: one layer's op list (paper, "rolling load-compute")."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from specter_core.memory.eviction import EvictionPolicy, count_then_recency
from specter_core.memory.expert_cache import CacheView
from specter_core.prefetch.need_history import NeedHistory
from specter_core.verify.layer_pass import LayerPass, Needs, Worth
from specter_core.verify.ops import Op, OpList

LOOKAHEAD_COPIES = 2


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Op list of one layer pass. hits, late, misses: the needed experts by what they were when the router
    spoke.

    protects: slots of needed experts that are resident or loading; the executor protects them before the
    first op. Each needed expert has exactly one Gemm, followed by its Release, unless it was done before.
    """

    layer: int
    ops: Sequence[Op]
    protects: tuple[int, ...]
    hits: tuple[int, ...]
    late: tuple[int, ...]
    misses: tuple[int, ...]


class ResidencyManager:
    """Plans layers; changes nothing (the executor does, op by op).

    hit_first: compute resident experts before those that are still to arrive; otherwise in ascending id.
    policy says what is worth keeping; where there is a history, it does. lookahead: without staging slots, copies that
    should be under way or waiting for compute before a valuable expert's slot is given up for the next one; 2 keeps the
    link busy while one arrival is computed.
    """

    def __init__(
        self,
        cache: CacheView,
        *,
        hit_first: bool = True,
        policy: EvictionPolicy = count_then_recency,
        history: NeedHistory | None = None,
        lookahead: int = LOOKAHEAD_COPIES,
    ) -> None:
        assert lookahead >= 1, lookahead
        self._cache = cache
        self._hit_first = hit_first
        self._policy = policy
        self._history = history
        self._lookahead = lookahead

    def plan_layer(
        self,
        layer: int,
        needed: Sequence[int],
        counts: Mapping[int, int] | None = None,
        late: Sequence[int] = (),
        done: Collection[int] = (),
    ) -> LayerPlan:
        """Plan the pass of `layer` over its `needed` experts (distinct, ascending).

        counts: rows routed to each (default 1). late: experts whose load was queued or issued when the
        router spoke, in order of arrival (`Prefetcher.before_layer`). done: hits that are computed and
        noted as used already, so that their slots are free for others. The result depends on these and the
        cache's state alone, never on a clock. For token-wise order call it once per token, each time after
        the last plan has run.
        """
        assert list(needed) == sorted(set(needed)), f"needed experts must be distinct and ascending: {needed}"
        rows = dict.fromkeys(needed, 1) if counts is None else {expert: counts[expert] for expert in needed}
        needs = self._classify(layer, rows, late, done)
        walk = LayerPass(self._cache, needs, self._worth(layer), self._hit_first, self._lookahead)
        ops = OpList(walk.walk())
        if not self._hit_first:
            ops.finish()  # planning may still take a needed expert's protection away
        lates = sorted([*needs.loading, *(e for e in needs.absent if e in needs.late)])
        return LayerPlan(
            layer=layer,
            ops=ops,
            protects=tuple(walk.protects),
            hits=tuple(sorted(needs.hits)),
            late=tuple(lates),
            misses=tuple(e for e in needs.absent if e not in needs.late),
        )

    def _worth(self, layer: int) -> Worth:
        if self._history is None:
            policy = self._policy
            return lambda expert, rows, recency: policy(rows, recency)
        rates = self._history.rates(layer)
        return lambda expert, rows, recency: (rates[expert], recency)

    def _classify(self, layer: int, rows: Mapping[int, int], late: Sequence[int], done: Collection[int]) -> Needs:
        held, moving = self._cache.held(layer), self._cache.loading_slots
        computed = frozenset(done)
        rest = [e for e in rows if e not in computed]
        slot_of = {e: held[e] for e in rest if e in held}
        loading = [e for e, slot in slot_of.items() if slot in moving]
        if len(loading) > 1:
            arrival = {expert: i for i, expert in enumerate(late)}
            loading.sort(key=lambda e: (arrival.get(e, len(arrival)), slot_of[e]))
        return Needs(
            layer=layer,
            rows=rows,
            hits=[e for e in rows if e in computed or (e in slot_of and e not in loading)],
            loading=loading,
            absent=[e for e in rest if e not in held],
            late=frozenset(late),
            slot_of=slot_of,
            done=tuple([e for e in rows if e in computed]),
        )
