"""Which expert is in which slot, and in what state. A pure state machine: no tensors, no clock, no thread."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

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


class CacheView(Protocol):
    """What planning may see of the cache; nothing here changes it."""

    @property
    def slots_per_layer(self) -> tuple[int, ...]: ...
    def layer_slots(self, layer: int) -> Sequence[int]: ...
    @property
    def staging_slots(self) -> Sequence[int]: ...
    def lookup(self, key: ExpertKey) -> int | None: ...
    def state(self, slot: int) -> SlotState: ...
    def key(self, slot: int) -> ExpertKey | None: ...
    def previous(self, slot: int) -> Occupant | None: ...
    def recency(self, slot: int) -> int: ...
    def resident_slots(self, layer: int) -> dict[int, int]: ...
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
        self._keys: list[ExpertKey | None] = [None] * self._total
        self._loading = [False] * self._total
        self._protections = [0] * self._total
        self._recency = [0] * self._total
        self._previous: list[Occupant | None] = [None] * self._total
        self._slot_of: dict[ExpertKey, int] = {}
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
        if self._keys[victim_slot] is not None:
            self.evict(victim_slot)

    def lookup(self, key: ExpertKey) -> int | None:
        """Slot that holds `key` or is loading it."""
        return self._slot_of.get(key)

    def state(self, slot: int) -> SlotState:
        if self._keys[slot] is None:
            return SlotState.EMPTY
        if self._loading[slot]:
            return SlotState.LOADING
        return SlotState.PROTECTED if self._protections[slot] else SlotState.RESIDENT

    def key(self, slot: int) -> ExpertKey | None:
        return self._keys[slot]

    def previous(self, slot: int) -> Occupant | None:
        """The expert that `abort_load(slot)` would bring back."""
        return self._previous[slot]

    def recency(self, slot: int) -> int:
        return self._recency[slot]

    def is_protected(self, slot: int) -> bool:
        """True also while a protected expert is still loading."""
        return self._protections[slot] > 0

    def residents(self, layer: int) -> list[ExpertKey]:
        """Experts of `layer` in its own slots that are resident or protected, in slot order."""
        return [k for s in self.layer_slots(layer) if (k := self._keys[s]) is not None and not self._loading[s]]

    def resident_slots(self, layer: int) -> dict[int, int]:
        """expert -> slot of the experts in `layer`'s own slots that are complete."""
        keys, loading = self._keys, self._loading
        return {k.expert: s for s in self._members[layer] if (k := keys[s]) is not None and not loading[s]}

    def present(self) -> frozenset[ExpertKey]:
        """Every expert that is in a slot or on its way into one."""
        return frozenset(self._slot_of)

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
        fits = slot in self.layer_slots(key.layer) or slot in self.staging_slots
        return fits and key not in self._slot_of and not self._loading[slot] and not self._protections[slot]

    def begin_load(self, key: ExpertKey, slot: int) -> None:
        """EMPTY or RESIDENT -> LOADING; a resident expert is evicted, but remembered for `abort_load`."""
        assert self.can_load(key, slot), (
            key,
            slot,
            self._keys[slot],
            self.state(slot),
            self._slot_of.get(key),
        )
        self._versions[key.layer] += 1
        former = self._keys[slot]
        self._previous[slot] = None
        if former is not None:
            self._previous[slot] = Occupant(former, self._recency[slot])
            del self._slot_of[former]
        self._keys[slot] = key
        self._loading[slot] = True
        self._slot_of[key] = slot
        self._recency[slot] = self._tick()

    def finish_load(self, slot: int) -> None:
        """LOADING -> RESIDENT (PROTECTED when it was protected while loading)."""
        key = self._keys[slot]
        assert self._loading[slot] and key is not None, (slot, self.state(slot))
        self._versions[key.layer] += 1
        self._loading[slot] = False
        self._previous[slot] = None

    def abort_load(self, slot: int, *, restore: bool = True) -> None:
        """LOADING -> RESIDENT with the former expert, or EMPTY. `restore` only if no byte of the load has
        moved.
        """
        assert self._loading[slot] and not self._protections[slot], (slot, self.state(slot))
        key, former = self._keys[slot], self._previous[slot]
        assert key is not None
        self._versions[key.layer] += 1
        del self._slot_of[key]
        self._loading[slot] = False
        self._keys[slot] = None
        self._previous[slot] = None
        self._recency[slot] = 0
        if restore and former is not None and former.key not in self._slot_of:
            self._keys[slot] = former.key
            self._slot_of[former.key] = slot
            self._recency[slot] = former.recency

    def protect(self, slot: int) -> None:
        """Count one more user of the slot; it cannot be evicted until each has released it."""
        assert self._keys[slot] is not None, slot
        self._protections[slot] += 1

    def release(self, slot: int) -> None:
        assert self._protections[slot] > 0, (slot, self.state(slot))
        self._protections[slot] -= 1

    def evict(self, slot: int) -> ExpertKey:
        """RESIDENT -> EMPTY; returns the expert that was there."""
        assert self.state(slot) is SlotState.RESIDENT, (slot, self.state(slot))
        key = self._keys[slot]
        assert key is not None
        self._versions[key.layer] += 1
        del self._slot_of[key]
        self._keys[slot] = None
        self._recency[slot] = 0
        return key

    def touch(self, key: ExpertKey) -> None:
        """Record a use of `key` now."""
        self._recency[self._slot_of[key]] = self._tick()

    def touch_slots(self, slots: Sequence[int]) -> None:
        """Record a use of what each slot holds, in this order."""
        for slot in slots:
            self._clock += 1
            self._recency[slot] = self._clock

    def clear(self) -> None:
        """Forget everything; nothing may be protected or loading."""
        assert not any(self._protections) and not any(self._loading)
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
        assert dict(held) == self._slot_of, "lookup table does not match the slots"
        for key, slot in held:
            assert slot in self.layer_slots(key.layer) or slot in self.staging_slots, (key, slot)
        for slot, content in enumerate(self._keys):
            assert content is not None or not (self._loading[slot] or self._protections[slot]), (
                slot,
                "empty but in use",
            )
            assert self._previous[slot] is None or self._loading[slot], (
                slot,
                "former expert kept without a load",
            )
            assert self._protections[slot] >= 0 and self._recency[slot] <= self._clock, slot

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
