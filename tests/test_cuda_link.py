"""The native copy worker and its link, on a stub driver: what the queue promises holds for what arrives."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator

import pytest
import torch

from specter_core.memory.host_store import HostExpertStore
from specter_core.memory.link import Priority, TransferState
from specter_core.memory.link_cuda import CudaLink
from specter_core.memory.payload import PayloadLayout
from specter_core.memory.slot_buffer import SlotBuffer
from specter_core.types import ExpertKey
from tests.host_runtime import HostRuntime

LAYOUT = PayloadLayout(64, 32, torch.float32)
LAYERS, EXPERTS, SLOTS = 2, 8, 12


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostExpertStore]:
    made = HostExpertStore.create(LAYERS, EXPERTS, LAYOUT, tmp_path_factory.mktemp("store"))
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            value = float(layer * EXPERTS + expert)
            wide, tall = torch.full((32, 64), value), torch.full((64, 32), -value)
            LAYOUT.write(made.entry(ExpertKey(layer, expert)), ExpertKey(layer, expert), wide, wide, tall)
    yield made
    made.close()
    made.unlink()


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> HostRuntime:
    return HostRuntime(tmp_path_factory.mktemp("stub"))


@pytest.fixture
def slots() -> SlotBuffer:
    return SlotBuffer(SLOTS, LAYOUT.entry_bytes)


SLOW = LAYOUT.entry_bytes * 50.0  # 20 ms each: the test's own calls are all made before the second one starts


def linked(store: HostExpertStore, slots: SlotBuffer, runtime: HostRuntime, rate: float | None = None) -> CudaLink:
    return CudaLink(store, slots, runtime, rate, piece_bytes=LAYOUT.entry_bytes // 3 + 1, record_intervals=True)


def order_of_arrival(link: CudaLink) -> list[int]:
    """Experts by their last piece."""
    return list(reversed(dict.fromkeys(i.key.expert for i in reversed(link.counters.intervals))))


def test_every_expert_arrives_whole_in_its_slot(
    store: HostExpertStore, slots: SlotBuffer, runtime: HostRuntime
) -> None:
    link, chosen = linked(store, slots, runtime), random.Random(4)
    for _ in range(40):
        keys = [ExpertKey(chosen.randrange(LAYERS), e) for e in chosen.sample(range(EXPERTS), 6)]
        places = chosen.sample(range(SLOTS), 6)
        transfers = [
            link.submit(k, s, chosen.choice((Priority.PREFETCH, Priority.DEMAND)))
            for k, s in zip(keys, places, strict=True)
        ]
        for transfer in chosen.sample(transfers, 3):
            link.promote(transfer)
        for key, place, transfer in zip(keys, places, transfers, strict=True):
            link.wait(transfer)  # orders the compute stream behind the arrival: with the stub, waits for it
            LAYOUT.check(slots.view(place), key)
            LAYOUT.verify_crc(slots.view(place))
        link.drain()
        assert all(link.done(t) for t in transfers) and link.idle()
    assert link.counters.transfers == 240 and link.counters.bytes == 240 * LAYOUT.entry_bytes
    link.close()


def test_cancelled_transfers_move_nothing_and_the_others_all_arrive(
    store: HostExpertStore, slots: SlotBuffer, runtime: HostRuntime
) -> None:
    link = linked(store, slots, runtime, SLOW)
    slots.data.zero_()  # the link has measured its rate with them
    transfers = [link.submit(ExpertKey(0, e), e, Priority.PREFETCH) for e in range(EXPERTS)]
    cancelled = [t for t in transfers[3:] if link.cancel(t)]
    assert len(cancelled) >= 4 and all(t.state is TransferState.CANCELLED for t in cancelled)
    link.drain()
    assert link.counters.transfers == EXPERTS - len(cancelled) and link.counters.cancelled == len(cancelled)
    for transfer in transfers:
        held = bool(slots.view(transfer.slot)[-32:].any())
        assert held == (transfer not in cancelled)
    assert not link.cancel(transfers[0]), "what has arrived cannot be taken back"
    link.close()


def test_a_demand_overtakes_queued_prefetches_and_order_can_be_changed(
    store: HostExpertStore, slots: SlotBuffer, runtime: HostRuntime
) -> None:
    link = linked(store, slots, runtime, SLOW)
    first = [link.submit(ExpertKey(0, e), e, Priority.PREFETCH) for e in range(6)]
    link.reorder([first[5], first[4]])
    link.reorder([first[3], first[2]])
    demand = link.submit(ExpertKey(1, 7), 7, Priority.DEMAND)
    link.drain()
    order = order_of_arrival(link)
    assert order[-4:] == [5, 4, 3, 2], "queued prefetches keep the order they were given last"
    assert order.index(7) < order.index(1) and demand.issued_as is Priority.DEMAND
    assert len(first) == 6 and link.counters.transfers == 7
    link.close()


def test_a_promoted_prefetch_is_issued_as_a_demand_once(
    store: HostExpertStore, slots: SlotBuffer, runtime: HostRuntime
) -> None:
    link = linked(store, slots, runtime, SLOW)
    transfers = [link.submit(ExpertKey(0, e), e, Priority.PREFETCH) for e in range(5)]
    link.promote(transfers[4])
    link.promote(transfers[4])
    link.drain()
    counters = link.counters
    assert counters.promoted == 1 and transfers[4].issued_as is Priority.DEMAND
    assert transfers[2].issued_as is Priority.PREFETCH
    link.close()


def test_pacing_is_never_faster_than_asked(store: HostExpertStore, slots: SlotBuffer, runtime: HostRuntime) -> None:
    rate = LAYOUT.entry_bytes * 1000.0
    link = linked(store, slots, runtime, rate)
    assert link.rate_bytes_per_s == rate
    start = time.perf_counter()
    for e in range(EXPERTS):
        link.submit(ExpertKey(0, e), e, Priority.PREFETCH)
    link.drain()
    assert time.perf_counter() - start >= 0.99 * EXPERTS * LAYOUT.entry_bytes / rate - 0.0051  # slack of the bucket
    link.close()
    assert link.counters.transfers == EXPERTS, "counters stay readable after close"


def test_recorded_pieces_take_the_time_that_the_driver_says(
    store: HostExpertStore, slots: SlotBuffer, runtime: HostRuntime
) -> None:
    """The stub moves 20 bytes/ns after 2 µs, one piece after the other."""
    link = linked(store, slots, runtime)
    begin_ns = time.perf_counter_ns()
    for expert in range(EXPERTS):
        link.submit(ExpertKey(1, expert), expert, Priority.PREFETCH)
    link.drain()
    end_ns = time.perf_counter_ns()
    pieces = link.counters.intervals
    assert len(pieces) == 3 * EXPERTS and sum(p.bytes for p in pieces) == EXPERTS * LAYOUT.entry_bytes
    slack_ns = 1_000_000 + (end_ns - begin_ns)  # a busy machine reads its two clocks far apart
    assert begin_ns - slack_ns < pieces[0].start_ns and pieces[-1].end_ns < end_ns + slack_ns
    for piece, following in itertools.pairwise(pieces):
        assert piece.end_ns <= following.start_ns + 1_000  # single precision
    for piece in pieces:
        assert piece.end_ns - piece.start_ns >= 2_000 + piece.bytes / 20 - 1_000
    link.close()


def test_loads_submitted_at_once_go_in_their_order_and_are_reported_once(
    store: HostExpertStore, slots: SlotBuffer, runtime: HostRuntime
) -> None:
    link = linked(store, slots, runtime, SLOW)
    assert link.submit_all([], Priority.PREFETCH) == []
    made = link.submit_all([(ExpertKey(1, e), 5 - e) for e in range(4)], Priority.PREFETCH)
    assert [t.key.expert for t in made] == [0, 1, 2, 3] and link.cancel(made[2])
    waiting = [t for t in made if t is not made[2]]
    demand = link.submit(ExpertKey(0, 7), 7, Priority.DEMAND)
    assert waiting[-1] in link.queued(made) and set(link.queued(made)) <= set(waiting)
    link.drain()
    assert link.queued(made) == []
    order = order_of_arrival(link)
    assert [e for e in order if e != 7] == [0, 1, 3] and order.index(7) < order.index(3)
    assert set(link.arrivals([*waiting, demand])) == {*waiting, demand}
    assert link.arrivals(waiting) == [] and all(link.done(t) for t in waiting)
    for transfer in waiting:
        LAYOUT.check(slots.view(transfer.slot), transfer.key)
    link.close()


def test_the_rate_of_an_unpaced_link_never_falls_below_what_was_seen(
    store: HostExpertStore, slots: SlotBuffer, runtime: HostRuntime
) -> None:
    link = linked(store, slots, runtime)
    rates = []
    for _ in range(3):
        link.submit_all([(ExpertKey(0, e), e) for e in range(EXPERTS)], Priority.PREFETCH)
        link.drain()
        rates.append(link.rate_bytes_per_s)
    assert rates == sorted(rates) and rates[0] > 0
    link.close()
    paced = linked(store, slots, runtime, SLOW)
    assert paced.rate_bytes_per_s == SLOW
    paced.close()
