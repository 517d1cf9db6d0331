"""Bounds and timeouts of the requests of one connection.  Pure."""

import enum
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from config.bounds import (
    BOOKIE_INFLIGHT_BYTES,
    BOOKIE_INFLIGHT_REQUESTS,
    BOOKIE_LATE_TIMEOUTS,
    BOOKIE_WAITING_BYTES,
    BOOKIE_WAITING_REQUESTS,
)
from storage.ledger.bookkeeper.waiters import Waiter, Waiters
from storage.ledger.bookkeeper.wire import Key

TICKS: Final = 8
"""Ticks in one timeout."""


class Admission(enum.Enum):
    """The decision about a new request."""

    SEND = "send it now"
    WAIT = "too many requests are in flight: it waits"
    REFUSE = "too many requests wait already"


class Overdue(NamedTuple):
    """Requests that are overdue, and whether the connection is to be given up."""

    waiters: Sequence[Waiter]
    given_up: bool


class Window:
    """Bounds the requests that one connection has in flight, and times them out.

    At most BOOKIE_INFLIGHT_REQUESTS and BOOKIE_INFLIGHT_BYTES are in flight, but always one.  At
    most BOOKIE_WAITING_REQUESTS and BOOKIE_WAITING_BYTES wait behind them, in order.  A request is
    overdue after TICKS ticks.  The window opens when the connection is ready.
    """

    __slots__ = (
        "_inflight_bytes",
        "_inflight_requests",
        "_open",
        "_tick",
        "_waiters",
        "_waiting",
        "_waiting_bytes",
        "_waiting_bytes_max",
        "_waiting_requests_max",
    )

    def __init__(
        self,
        *,
        inflight_requests: int = BOOKIE_INFLIGHT_REQUESTS,
        inflight_bytes: int = BOOKIE_INFLIGHT_BYTES,
        waiting_requests: int = BOOKIE_WAITING_REQUESTS,
        waiting_bytes: int = BOOKIE_WAITING_BYTES,
    ) -> None:
        self._inflight_requests = inflight_requests
        self._inflight_bytes = inflight_bytes
        self._waiting_requests_max = waiting_requests
        self._waiting_bytes_max = waiting_bytes
        self._open = False
        self._tick = 0
        self._waiters = Waiters()
        self._waiting: deque[Waiter] = deque()
        self._waiting_bytes = 0

    def open(self) -> None:
        """Allow requests to be sent."""
        self._open = True

    def admit(self, waiter: Waiter) -> Admission:
        """Decide about a new request; with SEND it counts as sent."""
        waiter.tick = self._tick
        size = waiter.frame_bytes
        if self._open and not self._waiting and self._has_room(size):
            self._waiters.put(waiter)
            return Admission.SEND
        if (
            len(self._waiting) >= self._waiting_requests_max
            or self._waiting_bytes + size > self._waiting_bytes_max
        ):
            return Admission.REFUSE
        self._waiting.append(waiter)
        self._waiting_bytes += size
        return Admission.WAIT

    def sendable(self) -> Sequence[Waiter]:
        """The waiting requests that may be sent now; they count as sent."""
        found: list[Waiter] = []
        waiting = self._waiting
        while self._open and waiting and self._has_room(waiting[0].frame_bytes):
            waiter = self._first_waiting()
            self._waiters.put(waiter)
            found.append(waiter)
        return found

    def answered(self, key: Key) -> Waiter | None:
        """The request for an answer with this key, None if there is none.

        An `expired` one is a tombstone: drop the answer.
        """
        return self._waiters.take(key)

    def tick(self) -> Overdue:
        """Count an eighth of a timeout, and find the overdue requests."""
        # Ticks instead of a clock: a process that was stopped counts none, so it reads the answers
        # that came meanwhile before any request is overdue.
        self._tick += 1
        too_old = self._tick - TICKS
        overdue: list[Waiter] = []
        while self._waiting and self._waiting[0].tick < too_old:
            overdue.append(self._first_waiting())
        given_up = False
        # A sent request stays in flight as a tombstone: the bookie may still have it.
        for waiter in self._waiters.all():
            if waiter.tick < too_old:
                given_up |= waiter.tick < self._tick - BOOKIE_LATE_TIMEOUTS * TICKS
                if not waiter.expired:
                    overdue.append(waiter)
        for waiter in overdue:
            waiter.expired = True
        return Overdue(overdue, given_up)

    def drain(self) -> Sequence[Waiter]:
        """Remove all requests, and return those that were not answered."""
        self._open = False
        found = [*self._waiters.all(), *self._waiting]
        self._waiters.clear()
        self._waiting.clear()
        self._waiting_bytes = 0
        return [waiter for waiter in found if not waiter.expired]

    def _has_room(self, size: int) -> bool:
        waiters = self._waiters
        return waiters.requests == 0 or (
            waiters.requests < self._inflight_requests
            and waiters.frame_bytes + size <= self._inflight_bytes
        )

    def _first_waiting(self) -> Waiter:
        waiter = self._waiting.popleft()
        self._waiting_bytes -= waiter.frame_bytes
        return waiter
