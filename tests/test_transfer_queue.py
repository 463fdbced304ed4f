"""Transfer queue and pacing: order, bounds and rate, without any real time."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from specter_core.memory.link import Priority, Transfer, TransferState
from specter_core.memory.token_bucket import TokenBucket
from specter_core.memory.transfer_queue import PIECE_BYTES, PIECES_IN_FLIGHT, Piece, TransferQueue
from specter_core.types import ExpertKey

PIECE = 100


class QueueMachine(RuleBasedStateMachine):
    """Compares the queue with two plain lists: demands and prefetches, each first come first served."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = TransferQueue(PIECE)
        self.lanes: dict[Priority, list[Transfer]] = {Priority.DEMAND: [], Priority.PREFETCH: []}
        self.everything: list[Transfer] = []
        self.flying: list[Piece] = []
        self.landed: list[Piece] = []

    def waiting(self) -> list[Transfer]:
        return self.lanes[Priority.DEMAND] + self.lanes[Priority.PREFETCH]

    @rule(size=st.integers(1, 350), priority=st.sampled_from(Priority))
    def submit(self, size, priority):
        number = len(self.everything)
        transfer = Transfer(ExpertKey(0, number), number, size, priority)
        self.queue.submit(transfer)
        self.everything.append(transfer)
        self.lanes[priority].append(transfer)

    @rule(pick=st.randoms(use_true_random=False))
    def submit_twice_is_refused(self, pick):
        if self.waiting():
            other = pick.choice(self.waiting())
            with pytest.raises(AssertionError):
                self.queue.submit(Transfer(other.key, 10**6, 1, Priority.DEMAND))
            with pytest.raises(AssertionError):
                self.queue.submit(Transfer(ExpertKey(9, 9), other.slot, 1, Priority.DEMAND))

    @rule(pick=st.randoms(use_true_random=False))
    def promote(self, pick):
        if not self.everything:
            return
        transfer = pick.choice(self.everything)
        lane = self.lanes[Priority.PREFETCH]
        assert self.queue.promote(transfer) == (transfer in lane)
        if transfer in lane:
            lane.remove(transfer)
            self.lanes[Priority.DEMAND].append(transfer)
            assert transfer.priority is Priority.DEMAND

    @rule(pick=st.randoms(use_true_random=False))
    def cancel(self, pick):
        if not self.everything:
            return
        transfer = pick.choice(self.everything)
        untouched = transfer in self.waiting() and transfer.sent_bytes == 0
        assert self.queue.cancel(transfer) == untouched
        if untouched:
            self.lanes[transfer.priority].remove(transfer)
            assert transfer.state is TransferState.CANCELLED

    @rule(pick=st.randoms(use_true_random=False))
    def reorder(self, pick):
        lane = self.lanes[Priority.PREFETCH]
        chosen = [t for t in lane if pick.random() < 0.7]
        pick.shuffle(chosen)
        self.queue.reorder(chosen + self.lanes[Priority.DEMAND])
        moved = [t for t in chosen if t.state is TransferState.QUEUED]
        self.lanes[Priority.PREFETCH] = [t for t in lane if t not in moved] + moved

    @rule()
    def take(self):
        piece = self.queue.next_piece()
        if len(self.flying) == PIECES_IN_FLIGHT or not self.waiting():
            assert piece is None
            return
        assert piece is not None
        first = self.waiting()[0]
        assert piece.transfer is first
        assert piece.bytes <= PIECE
        assert piece.offset == sum(p.bytes for p in self.sent_pieces(first))
        self.flying.append(piece)
        if piece.last:
            self.lanes[first.priority].remove(first)

    def sent_pieces(self, transfer):
        return [p for p in self.flying + self.landed if p.transfer is transfer]

    @rule()
    def arrive(self):
        if self.flying:
            piece = self.flying.pop(0)
            assert self.queue.piece_arrived(piece) == piece.last
            self.landed.append(piece)
            assert (piece.transfer.state is TransferState.DONE) == piece.last

    @invariant()
    def bounds_hold(self):
        assert self.queue.in_flight == len(self.flying) <= PIECES_IN_FLIGHT
        assert self.queue.queued() == [t for t in self.waiting() if t.sent_bytes == 0]
        finished = (TransferState.DONE, TransferState.CANCELLED)
        assert self.queue.idle() == all(t.state in finished for t in self.everything)
        for transfer in self.everything:
            assert transfer.arrived_bytes <= transfer.sent_bytes <= transfer.bytes


QueueMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestQueueMachine = QueueMachine.TestCase


def test_an_expert_travels_in_pieces_of_at_most_eight_megabytes_two_at_a_time():
    queue = TransferQueue()
    queue.submit(Transfer(ExpertKey(0, 0), 0, 17_301_760, Priority.PREFETCH))
    first, second = queue.next_piece(), queue.next_piece()
    assert first is not None and second is not None
    assert queue.next_piece() is None
    assert (first.bytes, second.offset, second.bytes) == (PIECE_BYTES, PIECE_BYTES, PIECE_BYTES)
    assert not queue.piece_arrived(first)
    third = queue.next_piece()
    assert third is not None and third.last
    assert not queue.piece_arrived(second)
    assert queue.piece_arrived(third)


def test_a_demand_goes_ahead_of_the_rest_of_an_issued_prefetch():
    queue = TransferQueue(PIECE, in_flight=1)
    queue.submit(Transfer(ExpertKey(0, 0), 0, 3 * PIECE, Priority.PREFETCH))
    begun = queue.next_piece()
    assert begun is not None
    queue.submit(Transfer(ExpertKey(0, 1), 1, PIECE, Priority.DEMAND))
    queue.piece_arrived(begun)
    following = queue.next_piece()
    assert following is not None and following.transfer.key == ExpertKey(0, 1)


@settings(deadline=None)
@given(
    rate=st.floats(1e3, 1e11),
    sizes=st.lists(st.integers(1, 8_000_000), min_size=1, max_size=60),
    seed=st.integers(0, 1000),
)
def test_late_wake_ups_do_not_lower_the_rate_and_nothing_raises_it(rate, sizes, seed):
    rng = random.Random(seed)
    bucket = TokenBucket(rate, slack_ns=5_000_000)
    now = start = 10**12
    for size in sizes:  # all ready since `start`
        deadline = bucket.reserve(size, start, now)
        if now < deadline:
            now = deadline + rng.randrange(0, 4_000_000)  # the thread sleeps and wakes up late
    ideal_ns = sum(sizes) * 1e9 / rate
    assert abs((deadline - start) - ideal_ns) <= len(sizes)


def test_an_idle_link_saves_up_no_bandwidth():
    bucket = TokenBucket(1e9)
    assert bucket.reserve(1000, 0, 0) == 1000
    assert bucket.reserve(1000, 10**10, 10**10) == 10**10 + 1000


def test_a_copy_slower_than_the_pace_is_made_up_for_only_within_the_slack():
    bucket = TokenBucket(1e9, slack_ns=500)
    bucket.reserve(1000, 0, 0)
    assert bucket.reserve(1000, 0, 50_000) == 50_000 - 500 + 1000
