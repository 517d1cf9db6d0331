"""Pure: when the broker is asked for messages again; time is given."""

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import Final

from magnetar.consume.ack_tracker import bit_of
from magnetar.consume.message import EntryKey

__all__ = ["ProcessingTimeouts", "Redelivery", "delay_ms"]


TICKS: Final = 10
"""Ticks into which the first delay, or a timeout, is divided at least."""
MAX_TICK_MS: Final = 1000


def delay_ms(min_ms: int, max_ms: int, multiplier: float, redelivery_count: int) -> int:
    """How long a message waits that was delivered so many times before this one."""
    delay: float = min_ms
    for _ in range(redelivery_count):
        if delay >= max_ms or multiplier == 1:
            break
        delay *= multiplier
    return min(int(delay), max_ms)


class Redelivery:
    """The negative acknowledgements of one segment consumer.

    - The delay grows with the number of times that the broker delivered the message before: the
      first one, times the multiplier for each, up to a limit.
    - Of a batch only the messages are asked for that were negatively acknowledged, at once; brokers
      that know entries only send all of it that nobody has acknowledged.
    - An entry is forgotten when every message of it that was asked for again is acknowledged after
      all; messages of a batch that were not asked for do not count.
    - What falls due within a tick is asked for together. An entry is asked for once, at the
      earliest time that was asked of it.
    """

    __slots__ = (
        "_due",
        "_indexes",
        "_max_ms",
        "_min_ms",
        "_multiplier",
        "_tick_ms",
        "_ticks",
        "waiting",
    )

    def __init__(self, min_ms: int, max_ms: int, multiplier: float) -> None:
        self._min_ms = min_ms
        self._max_ms = max_ms
        self._multiplier = multiplier
        self._tick_ms = max(1, min_ms // TICKS)
        self.waiting: Final[dict[EntryKey, int]] = {}
        """The entries that are to be asked for, and when."""
        self._indexes: dict[EntryKey, set[int]] = {}
        """The messages for which an entry waits, by their index in the batch."""
        self._due: dict[int, list[EntryKey]] = {}
        self._ticks: list[int] = []

    def __len__(self) -> int:
        return len(self.waiting)

    def add(
        self, keys: Sequence[EntryKey], redelivery_count: int, now_ms: int, index: int = -1
    ) -> None:
        """Ask for these entries again when the delay is over, for the message of this index."""
        delay = delay_ms(self._min_ms, self._max_ms, self._multiplier, redelivery_count)
        due_ms = -(-(now_ms + delay) // self._tick_ms) * self._tick_ms
        for key in keys:
            self._indexes.setdefault(key, set()).add(index)
            if self.waiting.get(key, due_ms + 1) <= due_ms:
                continue
            self.waiting[key] = due_ms
            if due_ms not in self._due:
                self._due[due_ms] = []
                heappush(self._ticks, due_ms)
            self._due[due_ms].append(key)

    @property
    def messages(self) -> dict[EntryKey, int]:
        """The entries that wait, and the bits of their messages (`bit_of`)."""
        return {key: _bits_of(indexes) for key, indexes in self._indexes.items()}

    @property
    def next_ms(self) -> int | None:
        """When something falls due."""
        return self._ticks[0] if self._ticks else None

    def due(self, now_ms: int) -> dict[EntryKey, int]:
        """Take out what is to be asked for now, in the form of `messages`."""
        found: dict[EntryKey, int] = {}
        while self._ticks and self._ticks[0] <= now_ms:
            tick = heappop(self._ticks)
            for key in self._due.pop(tick):
                if self.waiting.get(key) == tick:
                    del self.waiting[key]
                    found[key] = _bits_of(self._indexes.pop(key))
        return found

    def forget(self, key: EntryKey, index: int = -1) -> None:
        """A message was acknowledged after all; -1 is all of the entry."""
        indexes = self._indexes.get(key)
        if indexes is None:
            return
        indexes.discard(index)
        if index < 0 or not indexes:
            del self.waiting[key], self._indexes[key]

    def clear(self) -> None:
        """Forget everything: the broker delivers it again."""
        self.waiting.clear()
        self._indexes.clear()
        self._due.clear()
        self._ticks.clear()


def _bits_of(indexes: Iterable[int]) -> int:
    bits = 0
    for index in indexes:
        bits |= bit_of(index)
    return bits


class ProcessingTimeouts:
    """The messages of one segment consumer that the application has, and their time limits.

    - The time of a message begins when it is handed out and ends when it is acknowledged (in a
      transaction too) or negatively acknowledged. It is over after the timeout and never sooner, at
      most a tick later: what falls due within a tick is asked for together.
    - Entries are asked for, not messages: of a batch all comes again that nobody has acknowledged.
      So the time of all its messages ends with it, and begins anew when they are handed out again.
    - Known is what is handed out and neither acknowledged nor asked for again, nothing else.
    """

    __slots__ = ("_batches", "_dues", "_tick_ms", "_timeout_ms")

    def __init__(self, timeout_ms: int) -> None:
        assert timeout_ms > 0
        self._timeout_ms: Final = timeout_ms
        self._tick_ms: Final = max(1, min(timeout_ms // TICKS, MAX_TICK_MS))
        self._dues: dict[tuple[int, int, int], int] = {}
        """Times by ledger, entry and index; the earliest first, as all wait equally long."""
        self._batches: dict[EntryKey, int] = {}
        """The bits of those that are of a batch."""

    def __len__(self) -> int:
        return len(self._dues)

    def handed_out(self, key: EntryKey, index: int, now_ms: int) -> int:
        """The time of a message begins; returns when it is over.  -1: it is of no batch."""
        place = (*key, index)
        self._dues.pop(place, None)
        # Time is given in whole milliseconds: the next tick is never too early.
        due_ms = ((now_ms + self._timeout_ms) // self._tick_ms + 1) * self._tick_ms
        self._dues[place] = due_ms
        if index >= 0:
            self._batches[key] = self._batches.get(key, 0) | 1 << index
        return due_ms

    def end(self, key: EntryKey, index: int) -> bool:
        """The time of a message ends; False: it had ended before."""
        if self._dues.pop((*key, index), None) is None:
            return False
        if index >= 0:
            left = self._batches[key] & ~(1 << index)
            if left:
                self._batches[key] = left
            else:
                del self._batches[key]
        return True

    def end_all(self, keys: Iterable[EntryKey]) -> None:
        """End the times of all messages of these entries, as they are asked for again."""
        for key in keys:
            self._dues.pop((*key, -1), None)
            left = self._batches.pop(key, 0)
            while left:
                index = left.bit_length() - 1
                del self._dues[(*key, index)]
                left ^= 1 << index

    @property
    def next_ms(self) -> int | None:
        """When something falls due."""
        return next(iter(self._dues.values()), None)

    def due(self, now_ms: int) -> list[EntryKey]:
        """The entries to be asked for now."""
        found: dict[EntryKey, None] = {}
        for (ledger_id, entry_id, _), due_ms in self._dues.items():
            if due_ms > now_ms:
                break
            found[ledger_id, entry_id] = None
        self.end_all(found)
        return list(found)

    def clear(self) -> None:
        """Forget everything: the broker delivers it again."""
        self._dues.clear()
        self._batches.clear()
