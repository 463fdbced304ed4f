"""CpuLink: the right bytes in the right order at the right rate, and no error lost."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from control_plane import filled_store

from specter_core.errors import WrongExpertError
from specter_core.memory.host_store import HostExpertStore
from specter_core.memory.link import Priority, Transfer, TransferState
from specter_core.memory.link_cpu import CpuLink
from specter_core.memory.payload import PayloadLayout
from specter_core.memory.slot_buffer import SlotBuffer
from specter_core.types import ExpertKey

LAYOUT = PayloadLayout(16, 8, torch.bfloat16)
LAYERS, EXPERTS = 2, 4


@pytest.fixture
def store(tmp_path):
    made = filled_store(LAYERS, EXPERTS, LAYOUT, str(tmp_path))
    yield made
    made.unlink()


class Gate:
    """A `delay` that holds the first transfer on the link until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self, transfer: Transfer) -> float:
        if not self.reached.is_set():
            self.reached.set()
            assert self.open.wait(60)
        return 0.0


class FakeClock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 10**12

    def read(self) -> int:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += round(seconds * 1e9) + (seconds > 0)


def buffer() -> SlotBuffer:
    return SlotBuffer(LAYERS * EXPERTS, LAYOUT.entry_bytes)


def test_every_expert_arrives_in_its_slot(store: HostExpertStore):
    slots = buffer()
    link = CpuLink(store, slots, piece_bytes=100, verify_crc=True)
    transfers = [
        link.submit(ExpertKey(layer, expert), layer * EXPERTS + expert, Priority.PREFETCH)
        for layer in range(LAYERS)
        for expert in range(EXPERTS)
    ]
    link.drain()
    assert link.idle()
    for transfer in transfers:
        assert link.done(transfer) and link.wait(transfer) >= 0
        assert torch.equal(slots.view(transfer.slot), store.entry(transfer.key))
    assert link.counters.transfers == len(transfers)
    assert link.counters.bytes == len(transfers) * LAYOUT.entry_bytes
    link.close()


def test_a_demand_overtakes_queued_prefetches_and_a_promoted_one_follows_it(store):
    gate = Gate()
    link = CpuLink(store, buffer(), delay=gate, record_intervals=True)
    first = link.submit(ExpertKey(0, 0), 0, Priority.PREFETCH)
    assert gate.reached.wait(60)
    prefetches = [link.submit(ExpertKey(0, e), e, Priority.PREFETCH) for e in (1, 2, 3)]
    demand = link.submit(ExpertKey(1, 0), 4, Priority.DEMAND)
    link.promote(prefetches[2])
    assert link.cancel(prefetches[1])
    assert not link.cancel(first), "already issued"
    gate.open.set()
    link.drain()
    order = [interval.key for interval in link.counters.intervals]
    assert order == [first.key, demand.key, prefetches[2].key, prefetches[0].key]
    assert prefetches[1].state is TransferState.CANCELLED
    assert prefetches[2].issued_as is Priority.DEMAND
    assert (link.counters.promoted, link.counters.cancelled) == (1, 1)
    link.close()


def test_reordered_prefetches_travel_in_the_new_order(store):
    gate = Gate()
    link = CpuLink(store, buffer(), delay=gate, record_intervals=True)
    first = link.submit(ExpertKey(0, 0), 0, Priority.PREFETCH)
    assert gate.reached.wait(60)
    rest = [link.submit(ExpertKey(0, e), e, Priority.PREFETCH) for e in (1, 2, 3)]
    link.reorder([first, rest[2], rest[0], rest[1]])
    gate.open.set()
    link.drain()
    assert [i.key.expert for i in link.counters.intervals] == [0, 3, 1, 2]
    link.close()


@pytest.mark.parametrize("piece_bytes", [100, 8_000_000])
def test_transfers_take_exactly_what_the_rate_says(store, piece_bytes):
    clock = FakeClock()
    gate = Gate()
    link = CpuLink(
        store, buffer(), 1e6, piece_bytes=piece_bytes, delay=gate, record_intervals=True,
        clock_ns=clock.read, sleep_s=clock.sleep,
    )  # fmt: skip
    start = clock.now
    transfers = []
    for n in range(LAYERS * EXPERTS):
        transfers.append(link.submit(ExpertKey(n // EXPERTS, n % EXPERTS), n, Priority.PREFETCH))
    gate.open.set()
    link.drain()
    ideal = [(n + 1) * LAYOUT.entry_bytes * 1000 for n in range(len(transfers))]
    done_ns = {interval.key: interval.end_ns for interval in link.counters.intervals}  # of its last piece
    assert [abs(done_ns[t.key] - start - i) <= 100 for t, i in zip(transfers, ideal, strict=True)] == [True] * 8
    assert abs(link.counters.busy_ns - ideal[-1]) <= 100
    assert link.rate_bytes_per_s == 1e6
    link.close()


def test_a_wrong_expert_is_an_error_in_the_waiting_thread_and_stays_one(store):
    wrong = store.entry(ExpertKey(1, 1))
    wrong.copy_(store.entry(ExpertKey(0, 3)))
    link = CpuLink(store, buffer())
    transfer = link.submit(ExpertKey(1, 1), 0, Priority.DEMAND)
    with pytest.raises(WrongExpertError, match=r"layer 1 expert 1.*layer 0 expert 3"):
        link.wait(transfer)
    for call in (
        lambda: link.submit(ExpertKey(0, 0), 1, Priority.DEMAND),
        lambda: link.done(transfer),
        link.drain,
    ):
        with pytest.raises(WrongExpertError):
            call()
    link.close()


def test_a_damaged_payload_is_an_error_when_checksums_are_on(store):
    store.entry(ExpertKey(1, 1))[5] ^= 8
    link = CpuLink(store, buffer(), verify_crc=True)
    with pytest.raises(WrongExpertError, match="crc32"):
        link.wait(link.submit(ExpertKey(1, 1), 0, Priority.DEMAND))
    link.close()


def test_what_fails_in_the_thread_is_raised_by_the_caller(store):
    def fail(transfer: Transfer) -> float:
        raise RuntimeError(f"no way to {transfer.key.expert}")

    link = CpuLink(store, buffer(), delay=fail)
    with pytest.raises(RuntimeError, match="no way to 2"):
        link.wait(link.submit(ExpertKey(0, 2), 0, Priority.DEMAND))
    with pytest.raises(RuntimeError, match="no way to 2"):
        link.submit(ExpertKey(0, 1), 1, Priority.DEMAND)
    link.close()


def test_close_joins_the_thread_and_can_be_repeated(store):
    before = set(threading.enumerate())
    link = CpuLink(store, buffer())
    (thread,) = set(threading.enumerate()) - before
    link.submit(ExpertKey(0, 0), 0, Priority.DEMAND)
    link.close()
    assert not thread.is_alive()
    link.close()
    del link
    gc.collect()


def test_an_idle_link_sleeps(store):
    link = CpuLink(store, buffer())
    asked = 0
    take = link._queue.next_piece

    def counted():
        nonlocal asked
        asked += 1
        return take()

    link._queue.next_piece = counted
    link.wait(link.submit(ExpertKey(0, 0), 0, Priority.DEMAND))
    with link._queue.ready:
        settled = asked
    threading.Event().wait(0.05)
    assert asked <= settled + 1, "one look after the last arrival, then it waits to be notified"
    link.close()


def test_an_unpaced_link_knows_its_own_rate(store):
    link = CpuLink(store, buffer())
    assert link.rate_bytes_per_s > 0
    link.close()
