"""Which expert is in which slot, and in what state. A pure state machine: no tensors, no clock, no thread."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from specter_core.types import ExpertKey


class SlotState(Enum):
    """EMPTY -> LOADING -> RESIDENT <-> PROTECTED; RESIDENT -> EMPTY (evict) or LOADING (overwrite)."""

    EMPTY = "empty"
    LOADING = "loading"
    RESIDENT = "resident"
    PROTECTED = "protected"


class Occupant(NamedTuple):
    """What a slot held before the load that is now under way, and that expert's recency."""

    key: ExpertKey
    recency: int


class SlotContents(NamedTuple):
    """int32 [slots] each. owner: the layer that the slot is one of, −1: staging. layer, expert: what is in the slot or
    on its way into it, −1: nothing.
    """

    owner: NDArray[np.int32]
    layer: NDArray[np.int32]
    expert: NDArray[np.int32]


_NOTHING = (-1, -1)
_STAGING = -1
"""Owner of a slot that serves any layer."""


class CacheView(Protocol):
    """What planning may see of the cache; nothing here changes it."""

    @property
    def slots_per_layer(self) -> tuple[int, ...]: ...
    def layer_slots(self, layer: int) -> Sequence[int]: ...
    @property
    def staging_slots(self) -> Sequence[int]: ...
    def lookup(self, key: ExpertKey) -> int | None: ...
    def held(self, layer: int) -> Mapping[int, int]: ...
    @property
    def contents(self) -> SlotContents: ...
    @property
    def loading_slots(self) -> AbstractSet[int]: ...
    @property
    def protected_slots(self) -> AbstractSet[int]: ...
    def state(self, slot: int) -> SlotState: ...
    def key(self, slot: int) -> ExpertKey | None: ...
    def previous(self, slot: int) -> Occupant | None: ...
    def recency(self, slot: int) -> int: ...
    def resident_slots(self, layer: int) -> dict[int, int]: ...
    def free_slots(self, layer: int) -> Sequence[int]: ...
    def version(self, layer: int) -> int: ...
    @property
    def clock(self) -> int: ...


class ExpertCache:
    """Slots and their states.

    Slots of layer l are at first the range [sum(M_0 … M_{l−1}), + M_l); the `staging` slots after the
    last layer's serve any layer; `adopt` exchanges the two kinds. `lookup` finds an expert from the moment
    its load begins. Illegal transitions are our bugs: assert.

    A load may begin in a RESIDENT slot: that evicts its expert. As long as no byte of the load has moved,
    `abort_load` brings the former expert back, for its bytes are still there.
    """

    def __init__(self, slots_per_layer: Sequence[int], staging: int = 0) -> None:
        assert slots_per_layer and all(m >= 1 for m in slots_per_layer) and staging >= 0, (
            slots_per_layer,
            staging,
        )
        self._slots_per_layer = tuple(slots_per_layer)
        starts = [0, *accumulate(slots_per_layer)]  # [L + 1]
        self._total = starts[-1] + staging
        self._members = [list(range(a, b)) for a, b in pairwise(starts)]
        self._staging = list(range(starts[-1], self._total))
        self._owner = array("i", [layer for layer, m in enumerate(slots_per_layer) for _ in range(m)])
        self._owner.extend([_STAGING] * staging)
        self._keys: list[ExpertKey | None] = [None] * self._total
        self._layer_in, self._expert_in = (array("i", [-1] * self._total) for _ in _NOTHING)
        mirrors = (self._owner, self._layer_in, self._expert_in)
        self._contents = SlotContents(*(np.frombuffer(mirror, np.int32) for mirror in mirrors))
        self._loading: set[int] = set()
        self._protections: dict[int, int] = {}  # slot -> its users
        self._recency = [0] * self._total
        self._previous: list[Occupant | None] = [None] * self._total
        self._held: list[dict[int, int]] = [{} for _ in slots_per_layer]  # expert -> slot, from the begin of its load
        self._clock = 0
        self._versions = [0] * len(slots_per_layer)

    @property
    def slots_per_layer(self) -> tuple[int, ...]:
        return self._slots_per_layer

    @property
    def slots(self) -> int:
        """All slots, staging included."""
        return self._total

    @property
    def clock(self) -> int:
        """Number of uses and loads so far: the unit of recency."""
        return self._clock

    def layer_slots(self, layer: int) -> Sequence[int]:
        return self._members[layer]

    @property
    def staging_slots(self) -> Sequence[int]:
        return self._staging

    def adopt(self, staging_slot: int, layer: int, victim_slot: int) -> None:
        """A staging slot joins `layer` with its content, and the layer's `victim_slot` becomes an empty
        staging slot.

        No byte moves. The victim must not be protected or loading; the staging slot holds an expert of
        `layer`.
        """
        key = self._keys[staging_slot]
        assert key is not None and key.layer == layer, (staging_slot, key, layer)
        self._versions[layer] += 1
        assert self.state(victim_slot) in (SlotState.EMPTY, SlotState.RESIDENT), (victim_slot, self.state(victim_slot))
        own = self._members[layer]
        own[own.index(victim_slot)] = staging_slot
        self._staging[self._staging.index(staging_slot)] = victim_slot
        self._owner[staging_slot], self._owner[victim_slot] = layer, _STAGING
        if self._keys[victim_slot] is not None:
            self.evict(victim_slot)

    def lookup(self, key: ExpertKey) -> int | None:
        """Slot that holds `key` or is loading it."""
        layer, expert = key
        return self._held[layer].get(expert)

    def held(self, layer: int) -> Mapping[int, int]:
        """expert -> slot of all of `layer` that `lookup` finds. It follows the cache: copy what is to stay."""
        return self._held[layer]

    @property
    def contents(self) -> SlotContents:
        """What is in the slots, for computations on all of them at once; follows the cache, to be read only."""
        return self._contents

    @property
    def loading_slots(self) -> AbstractSet[int]:
        """Slots that an expert is moving into; follows the cache."""
        return self._loading

    @property
    def protected_slots(self) -> AbstractSet[int]:
        """Slots that have users, loading ones included; follows the cache."""
        return self._protections.keys()

    def serves(self, layer: int, slot: int) -> bool:
        """Whether an expert of `layer` may be in the slot: one of its own, or a staging slot."""
        return self._owner[slot] in (layer, _STAGING)

    def is_staging(self, slot: int) -> bool:
        return self._owner[slot] == _STAGING

    def state(self, slot: int) -> SlotState:
        if self._keys[slot] is None:
            return SlotState.EMPTY
        if slot in self._loading:
            return SlotState.LOADING
        return SlotState.PROTECTED if slot in self._protections else SlotState.RESIDENT

    def key(self, slot: int) -> ExpertKey | None:
        return self._keys[slot]

    def previous(self, slot: int) -> Occupant | None:
        """The expert that `abort_load(slot)` would bring back."""
        return self._previous[slot]

    def recency(self, slot: int) -> int:
        return self._recency[slot]

    def is_protected(self, slot: int) -> bool:
        """True also while a protected expert is still loading."""
        return slot in self._protections

    def resident_slots(self, layer: int) -> dict[int, int]:
        """expert -> slot of the experts in `layer`'s own slots that are complete."""
        keys, loading = self._keys, self._loading
        return {k.expert: s for s in self._members[layer] if (k := keys[s]) is not None and s not in loading}

    def present(self) -> frozenset[ExpertKey]:
        """Every expert that is in a slot or on its way into one."""
        return frozenset(filter(None, self._keys))

    def version(self, layer: int) -> int:
        """Changes whenever `resident_slots(layer)` may have."""
        return self._versions[layer]

    def free_slots(self, layer: int) -> list[int]:
        """EMPTY slots of `layer`, staging not included."""
        return [s for s in self.layer_slots(layer) if self._keys[s] is None]

    def can_load(self, key: ExpertKey, slot: int) -> bool:
        """Whether `begin_load` is legal: nothing computes from the slot or moves into it, and `key` is
        nowhere yet.
        """
        layer, expert = key
        fits = self.serves(layer, slot) and expert not in self._held[layer]
        return fits and slot not in self._loading and slot not in self._protections

    def begin_load(self, key: ExpertKey, slot: int) -> None:
        """EMPTY or RESIDENT -> LOADING; a resident expert is evicted, but remembered for `abort_load`."""
        assert self.can_load(key, slot), (
            key,
            slot,
            self._keys[slot],
            self.state(slot),
            self.lookup(key),
        )
        self._versions[key.layer] += 1
        former = self._keys[slot]
        self._previous[slot] = None
        if former is not None:
            self._previous[slot] = Occupant(former, self._recency[slot])
            del self._held[former.layer][former.expert]
        self._put(key, slot)
        self._loading.add(slot)
        self._held[key.layer][key.expert] = slot
        self._recency[slot] = self._tick()

    def finish_load(self, slot: int) -> None:
        """LOADING -> RESIDENT (PROTECTED when it was protected while loading)."""
        key = self._keys[slot]
        assert slot in self._loading and key is not None, (slot, self.state(slot))
        self._versions[key.layer] += 1
        self._loading.remove(slot)
        self._previous[slot] = None

    def abort_load(self, slot: int, *, restore: bool = True) -> None:
        """LOADING -> RESIDENT with the former expert, or EMPTY. `restore` only if no byte of the load has
        moved.
        """
        assert slot in self._loading and slot not in self._protections, (slot, self.state(slot))
        key, former = self._keys[slot], self._previous[slot]
        assert key is not None
        self._versions[key.layer] += 1
        del self._held[key.layer][key.expert]
        self._loading.remove(slot)
        self._put(None, slot)
        self._previous[slot] = None
        self._recency[slot] = 0
        if restore and former is not None and self.lookup(former.key) is None:
            self._put(former.key, slot)
            self._held[former.key.layer][former.key.expert] = slot
            self._recency[slot] = former.recency

    def protect(self, slot: int) -> None:
        """Count one more user of the slot; it cannot be evicted until each has released it."""
        assert self._keys[slot] is not None, slot
        self._protections[slot] = self._protections.get(slot, 0) + 1

    def release(self, slot: int) -> None:
        assert slot in self._protections, (slot, self.state(slot))
        self._protections[slot] -= 1
        if not self._protections[slot]:
            del self._protections[slot]

    def evict(self, slot: int) -> ExpertKey:
        """RESIDENT -> EMPTY; returns the expert that was there."""
        assert self.state(slot) is SlotState.RESIDENT, (slot, self.state(slot))
        key = self._keys[slot]
        assert key is not None
        self._versions[key.layer] += 1
        del self._held[key.layer][key.expert]
        self._put(None, slot)
        self._recency[slot] = 0
        return key

    def touch(self, key: ExpertKey) -> None:
        """Record a use of `key` now."""
        self._recency[self._held[key.layer][key.expert]] = self._tick()

    def touch_slots(self, slots: Sequence[int]) -> None:
        """Record a use of what each slot holds, in this order."""
        recency = self._recency
        for now, slot in enumerate(slots, self._clock + 1):
            recency[slot] = now
        self._clock += len(slots)

    def clear(self) -> None:
        """Forget everything; nothing may be protected or loading."""
        assert not self._protections and not self._loading, (self._protections, self._loading)
        for slot, key in enumerate(self._keys):
            if key is not None:
                self.evict(slot)
        self._clock = 0

    def check_integrity(self) -> None:
        """Assert the invariants: no expert in two slots, slots hold their layer's experts, flags fit the
        states.
        """
        held = [(k, s) for s, k in enumerate(self._keys) if k is not None]
        assert len({k for k, _ in held}) == len(held), "an expert is in two slots"
        found = {ExpertKey(layer, e): slot for layer, own in enumerate(self._held) for e, slot in own.items()}
        assert dict(held) == found, "lookup table does not match the slots"
        for key, slot in held:
            assert slot in self.layer_slots(key.layer) or slot in self.staging_slots, (key, slot)
            assert self.serves(key.layer, slot) and self.is_staging(slot) == (slot in self.staging_slots), (key, slot)
        for slot, content in enumerate(self._keys):
            assert (self._contents.layer[slot], self._contents.expert[slot]) == (content or _NOTHING), (slot, content)
            used = slot in self._loading or slot in self._protections
            assert content is not None or not used, (slot, "empty but in use")
            assert self._previous[slot] is None or slot in self._loading, (slot, "former expert kept without a load")
            assert self._protections.get(slot, 1) > 0 and self._recency[slot] <= self._clock, slot

    def _put(self, key: ExpertKey | None, slot: int) -> None:
        self._keys[slot] = key
        self._layer_in[slot], self._expert_in[slot] = key or _NOTHING

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
