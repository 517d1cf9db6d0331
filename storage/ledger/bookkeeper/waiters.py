"""Who waits for which answer on one connection.  Pure.

Rules:

- Waiters of one key get its answers in the order of their requests.
- A waiter that timed out is told so and stays, as a tombstone: its answer may still come, and must
  not go to a newer request with the same key.
- Tombstones count as in flight like the others: the bookie still has their requests.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

from storage.ledger.bookkeeper.bookie_client import AddDone, BatchDone, ReadDone, ReplyCode
from storage.ledger.bookkeeper.wire import Key


class Waiter(ABC):
    """One request: what to send, and whom to tell.  `frame_bytes` is the size of its frame."""

    __slots__ = ("expired", "frame_bytes", "key", "pieces", "tick")

    def __init__(self, key: Key, frame_bytes: int, pieces: Sequence[bytes]) -> None:
        self.key = key
        self.frame_bytes = frame_bytes
        self.pieces = pieces
        """The frame; empty once it was sent."""
        self.tick = 0
        """When it was taken."""
        self.expired = False
        """It was told TIMED_OUT; nobody waits any more."""

    @abstractmethod
    def answer(self, code: ReplyCode, payload: Sequence[bytes]) -> None:
        """Tell the caller; what the caller raises comes through."""


class AddWaiter(Waiter):
    """Waits for an entry to be stored."""

    __slots__ = ("_done",)

    def __init__(self, key: Key, frame_bytes: int, pieces: Sequence[bytes], done: AddDone) -> None:
        super().__init__(key, frame_bytes, pieces)
        self._done = done

    def answer(self, code: ReplyCode, payload: Sequence[bytes]) -> None:
        """See `Waiter`."""
        self._done(code)


class ReadWaiter(Waiter):
    """Waits for an entry."""

    __slots__ = ("_done",)

    def __init__(self, key: Key, frame_bytes: int, pieces: Sequence[bytes], done: ReadDone) -> None:
        super().__init__(key, frame_bytes, pieces)
        self._done = done

    def answer(self, code: ReplyCode, payload: Sequence[bytes]) -> None:
        """See `Waiter`."""
        self._done(code, payload[0] if code is ReplyCode.OK else b"")


class BatchWaiter(Waiter):
    """Waits for entries."""

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
    """Everything that is in flight on one connection."""

    __slots__ = ("_first", "_later", "frame_bytes", "requests")

    def __init__(self) -> None:
        self._first: dict[Key, Waiter] = {}
        self._later: dict[Key, deque[Waiter]] = {}
        """Behind the first waiter of a key, which nearly never has others."""
        self.requests = 0
        self.frame_bytes = 0
        """Of all requests together."""

    def put(self, waiter: Waiter) -> None:
        """Its request was sent."""
        key = waiter.key
        if self._first.setdefault(key, waiter) is not waiter:
            self._later.setdefault(key, deque()).append(waiter)
        self.requests += 1
        self.frame_bytes += waiter.frame_bytes

    def take(self, key: Key) -> Waiter | None:
        """The one that an answer with this key is for, None if nobody asked."""
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
        """Everyone, tombstones included."""
        found = list(self._first.values())
        for later in self._later.values():
            found.extend(later)
        return found

    def clear(self) -> None:
        """Nobody waits any more."""
        self._first.clear()
        self._later.clear()
        self.requests = 0
        self.frame_bytes = 0
