"""Deadlines of open transactions: one timer, on the earliest."""

import asyncio
import heapq
from collections.abc import Callable, Sequence

from config.bounds import TXN_DEADLINE_LOOK_S, TXN_PAGE
from magnetar.protocol.txn_id import TxnId
from storage.clock import Clock

_STALE_ALLOWED = 1024


class Deadlines:
    """The deadlines of open transactions, in wall-clock milliseconds, behind one timer.

    `due` is called from the loop with pages of transactions whose deadlines have passed, once for
    each deadline.  It has to add a deadline again to retry.
    """

    def __init__(self, clock: Clock, due: Callable[[Sequence[TxnId]], None]) -> None:
        self._clock = clock
        self._due = due
        self._heap: list[tuple[int, TxnId]] = []
        self._deadlines: dict[TxnId, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_for_ms = 0
        self._closed = False

    def __len__(self) -> int:
        return len(self._deadlines)

    def add(self, txn: TxnId, deadline_ms: int) -> None:
        """Set the transaction's deadline, in place of an earlier one."""
        self._deadlines[txn] = deadline_ms
        heapq.heappush(self._heap, (deadline_ms, txn))
        if self._timer is None or deadline_ms < self._timer_for_ms:
            self._arm()

    def discard(self, txn: TxnId) -> None:
        """Remove the transaction's deadline."""
        if self._deadlines.pop(txn, None) is None:
            return
        # Stale entries stay in the heap until most of it is stale.
        if len(self._heap) > 2 * len(self._deadlines) + _STALE_ALLOWED:
            self._heap = [(deadline_ms, txn) for txn, deadline_ms in self._deadlines.items()]
            heapq.heapify(self._heap)

    def close(self) -> None:
        """Remove all deadlines and set no timer any more."""
        self._closed = True
        self._deadlines.clear()
        self._heap.clear()
        self._disarm()

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        self._disarm()
        # A stale entry at the top would wake the loop for nothing.
        self._drop_stale()
        if self._closed or not self._heap:
            return
        self._timer_for_ms = self._heap[0][0]
        delay_s = max(0.0, (self._timer_for_ms - self._clock.now_ms()) / 1000)
        # Bounded, so that a wall clock that is set forward is noticed.
        self._timer = asyncio.get_running_loop().call_later(
            min(delay_s, TXN_DEADLINE_LOOK_S), self._check
        )

    def _check(self) -> None:
        self._timer = None
        now_ms = self._clock.now_ms()
        page: list[TxnId] = []
        while self._heap and self._heap[0][0] <= now_ms and len(page) < TXN_PAGE:
            deadline_ms, txn = heapq.heappop(self._heap)
            if self._deadlines.get(txn) == deadline_ms:
                del self._deadlines[txn]
                page.append(txn)
        if page:
            self._due(page)
        self._arm()

    def _drop_stale(self) -> None:
        heap = self._heap
        while heap and self._deadlines.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
