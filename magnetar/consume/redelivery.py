"""The times at which messages are requested again.  Pure: time is given."""

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import Final

from magnetar.consume.ack_tracker import bit_of
from magnetar.consume.message import EntryKey

__all__ = ["ProcessingTimeouts", "Redelivery", "delay_ms"]


TICKS: Final = 10
"""The least number of ticks in the first delay, or in a timeout."""
MAX_TICK_MS: Final = 1000


def delay_ms(min_ms: int, max_ms: int, multiplier: float, redelivery_count: int) -> int:
    """The delay of a message that was delivered `redelivery_count` times before."""
    delay: float = min_ms
    for _ in range(redelivery_count):
        if delay >= max_ms or multiplier == 1:
            break
        delay *= multiplier
    return min(int(delay), max_ms)


class Redelivery:
    """The negative acknowledgements of one segment consumer.

    The delay is the first one, times the multiplier for each earlier delivery, up to a limit.
    Entries that fall due within a tick are requested together.  An entry is requested once, at the
    earliest of its times, with the bits of its messages; brokers that redeliver whole entries send
    all unacknowledged messages of a batch.  An entry is forgotten when all its messages here are
    acknowledged after all.
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
        """The entries to request, each with its time."""
        self._indexes: dict[EntryKey, set[int]] = {}
        """The messages to request of each entry, by their index in the batch."""
        self._due: dict[int, list[EntryKey]] = {}
        self._ticks: list[int] = []

    def __len__(self) -> int:
        return len(self.waiting)

    def add(
        self, keys: Sequence[EntryKey], redelivery_count: int, now_ms: int, index: int = -1
    ) -> None:
        """Request these entries when the delay is over, for the message with this index."""
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
        """The entries to request, and the bits of their messages (`bit_of`)."""
        return {key: _bits_of(indexes) for key, indexes in self._indexes.items()}

    @property
    def next_ms(self) -> int | None:
        """The next time at which entries fall due, or None."""
        return self._ticks[0] if self._ticks else None

    def due(self, now_ms: int) -> dict[EntryKey, int]:
        """Remove and return the entries to request now, as of `messages`."""
        found: dict[EntryKey, int] = {}
        while self._ticks and self._ticks[0] <= now_ms:
            tick = heappop(self._ticks)
            for key in self._due.pop(tick):
                if self.waiting.get(key) == tick:
                    del self.waiting[key]
                    found[key] = _bits_of(self._indexes.pop(key))
        return found

    def forget(self, key: EntryKey, index: int = -1) -> None:
        """Forget a message that was acknowledged after all; -1 is the whole entry."""
        indexes = self._indexes.get(key)
        if indexes is None:
            return
        indexes.discard(index)
        if index < 0 or not indexes:
            del self.waiting[key], self._indexes[key]

    def clear(self) -> None:
        """Forget everything, as the broker delivers it again."""
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
    """The processing timeouts of the messages that the application has, of one segment consumer.

    The time of a message begins when it is handed out, and ends when it is acknowledged (also in a
    transaction) or negatively acknowledged.  It falls due after the timeout, at most a tick later;
    messages that fall due within a tick are requested together.  Whole entries are requested: all
    unacknowledged messages of a batch come again, so the times of all of them end.
    """

    __slots__ = ("_batches", "_dues", "_tick_ms", "_timeout_ms")

    def __init__(self, timeout_ms: int) -> None:
        assert timeout_ms > 0
        self._timeout_ms: Final = timeout_ms
        self._tick_ms: Final = max(1, min(timeout_ms // TICKS, MAX_TICK_MS))
        self._dues: dict[tuple[int, int, int], int] = {}
        """Times by ledger, entry and index; the earliest first, as all timeouts are equal."""
        self._batches: dict[EntryKey, int] = {}
        """The bits of the messages in batches."""

    def __len__(self) -> int:
        return len(self._dues)

    def handed_out(self, key: EntryKey, index: int, now_ms: int) -> int:
        """Begin the time of a message, index -1 if it is not in a batch; returns when it is due."""
        message = (*key, index)
        self._dues.pop(message, None)
        # Time is given in whole milliseconds: the next tick is never too early.
        due_ms = ((now_ms + self._timeout_ms) // self._tick_ms + 1) * self._tick_ms
        self._dues[message] = due_ms
        if index >= 0:
            self._batches[key] = self._batches.get(key, 0) | 1 << index
        return due_ms

    def end(self, key: EntryKey, index: int) -> bool:
        """End the time of a message; returns False if it had ended before."""
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
        """End the times of all messages of these entries, as they are requested again."""
        for key in keys:
            self._dues.pop((*key, -1), None)
            left = self._batches.pop(key, 0)
            while left:
                index = left.bit_length() - 1
                del self._dues[(*key, index)]
                left ^= 1 << index

    @property
    def next_ms(self) -> int | None:
        """The next time at which messages fall due, or None."""
        return next(iter(self._dues.values()), None)

    def due(self, now_ms: int) -> list[EntryKey]:
        """Remove and return the entries to request now."""
        found: dict[EntryKey, None] = {}
        for (ledger_id, entry_id, _), due_ms in self._dues.items():
            if due_ms > now_ms:
                break
            found[ledger_id, entry_id] = None
        self.end_all(found)
        return list(found)

    def clear(self) -> None:
        """Forget everything, as the broker delivers it again."""
        self._dues.clear()
        self._batches.clear()
