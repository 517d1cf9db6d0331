"""Requests of one connection that wait for their answers.  Pure."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

from storage.ledger.bookkeeper.bookie_client import AddDone, BatchDone, ReadDone, ReplyCode
from storage.ledger.bookkeeper.wire import Key


class Waiter(ABC):
    """One request: its frame, of `frame_bytes`, and its callback."""

    __slots__ = ("expired", "frame_bytes", "key", "pieces", "tick")

    def __init__(self, key: Key, frame_bytes: int, pieces: Sequence[bytes]) -> None:
        self.key = key
        self.frame_bytes = frame_bytes
        self.pieces = pieces
        """The frame; empty once it was sent."""
        self.tick = 0
        """Time of the request, in ticks."""
        self.expired = False
        """Whether it was answered TIMED_OUT: then it is a tombstone."""

    @abstractmethod
    def answer(self, code: ReplyCode, payload: Sequence[bytes]) -> None:
        """Run the callback; its exceptions pass through."""


class AddWaiter(Waiter):
    """A request to store an entry."""

    __slots__ = ("_done",)

    def __init__(self, key: Key, frame_bytes: int, pieces: Sequence[bytes], done: AddDone) -> None:
        super().__init__(key, frame_bytes, pieces)
        self._done = done

    def answer(self, code: ReplyCode, payload: Sequence[bytes]) -> None:
        """See `Waiter`."""
        self._done(code)


class ReadWaiter(Waiter):
    """A request to read an entry."""

    __slots__ = ("_done",)

    def __init__(self, key: Key, frame_bytes: int, pieces: Sequence[bytes], done: ReadDone) -> None:
        super().__init__(key, frame_bytes, pieces)
        self._done = done

    def answer(self, code: ReplyCode, payload: Sequence[bytes]) -> None:
        """See `Waiter`."""
        self._done(code, payload[0] if code is ReplyCode.OK else b"")


class BatchWaiter(Waiter):
    """A request to read a batch of entries."""

    __slots__ = ("_done",)

    def __init__(
        self, key: Key, frame_bytes: int, pieces: Sequence[bytes], done: BatchDone
    ) -> None:
        super().__init__(key, frame_bytes, pieces)
        self._done = done

    def answer(self, code: ReplyCode, payload: Sequence[bytes]) -> None:
        """See `Waiter`."""
        self._done(code, payload if code is ReplyCode.OK else ())


class Waiters:
    """The requests in flight on one connection, tombstones of expired ones included.

    The answer to an expired request may still come, and must not go to a newer request with the
    same key.  Requests with one key get its answers in order.
    """

    __slots__ = ("_first", "_later", "frame_bytes", "requests")

    def __init__(self) -> None:
        self._first: dict[Key, Waiter] = {}
        self._later: dict[Key, deque[Waiter]] = {}
        """Requests behind the first one of a key; nearly always there are none."""
        self.requests = 0
        self.frame_bytes = 0
        """Sum over all requests."""

    def put(self, waiter: Waiter) -> None:
        """Add a request that was sent."""
        key = waiter.key
        if self._first.setdefault(key, waiter) is not waiter:
            self._later.setdefault(key, deque()).append(waiter)
        self.requests += 1
        self.frame_bytes += waiter.frame_bytes

    def take(self, key: Key) -> Waiter | None:
        """Remove and return the request for an answer with this key; None if there is none."""
        waiter = self._first.pop(key, None)
        if waiter is None:
            return None
        self.requests -= 1
        self.frame_bytes -= waiter.frame_bytes
        if self._later and key in self._later:
            later = self._later[key]
            self._first[key] = later.popleft()
            if not later:
                del self._later[key]
        return waiter

    def all(self) -> list[Waiter]:
        """All requests, tombstones included."""
        found = list(self._first.values())
        for later in self._later.values():
            found.extend(later)
        return found

    def clear(self) -> None:
        """Remove all requests."""
        self._first.clear()
        self._later.clear()
        self.requests = 0
        self.frame_bytes = 0
