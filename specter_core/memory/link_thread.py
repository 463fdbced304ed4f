"""The I/O thread of a link: takes pieces off the queue, starts and finishes them, keeps what goes wrong for
the callers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from specter_core.memory.link import Transfer, TransferState
from specter_core.memory.transfer_queue import Piece, TransferQueue


class LinkThread:
    """Runs `start(piece)` and, for up to `in_flight` pieces later but in order, `finish(piece)`; then
    reports the arrival.

    The thread sleeps on the queue's condition while there is nothing to do. The first exception ends it;
    every later call of `raise_error`, `wait` or `drain` raises that exception in the caller's thread.
    """

    def __init__(
        self, queue: TransferQueue, start: Callable[[Piece], None], finish: Callable[[Piece], None], in_flight: int
    ) -> None:
        self._queue = queue
        self._start = start
        self._finish = finish
        self._in_flight = in_flight
        self._error: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="specter-link", daemon=True)
        self._thread.start()

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def wait(self, transfer: Transfer) -> None:
        """Sleep until `transfer` is DONE."""
        assert transfer.state is not TransferState.CANCELLED, transfer
        self._wait_for(lambda: transfer.state is TransferState.DONE)

    def drain(self) -> None:
        """Sleep until everything submitted is done."""
        self._wait_for(self._queue.idle)

    def close(self) -> None:
        """Stop after the pieces under way and join the thread. Idempotent."""
        with self._queue.ready:
            self._closing = True
            self._queue.ready.notify_all()
        self._thread.join()

    @property
    def closed(self) -> bool:
        return self._closing

    def _wait_for(self, reached: Callable[[], bool]) -> None:
        with self._queue.ready:
            self._queue.ready.wait_for(lambda: reached() or self._error is not None)
        self.raise_error()

    def _run(self) -> None:
        flying: deque[Piece] = deque()
        try:
            while True:
                piece = self._take(sleep=not flying)
                if piece is not None:
                    self._start(piece)
                    flying.append(piece)
                elif not flying:
                    return
                if piece is None or len(flying) == self._in_flight:
                    oldest = flying.popleft()
                    self._finish(oldest)
                    self._queue.piece_arrived(oldest)
        except BaseException as error:  # handed to the caller's next call
            with self._queue.ready:
                self._error = error
                self._queue.ready.notify_all()

    def _take(self, sleep: bool) -> Piece | None:
        """The next piece; None when the link closes or, without `sleep`, when nothing waits."""
        with self._queue.ready:
            while not self._closing:
                piece = self._queue.next_piece()
                if piece is not None or not sleep:
                    return piece
                self._queue.ready.wait()
        return None
