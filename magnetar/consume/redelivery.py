"""Messages that the application could not process: when the broker is asked for them again.

Pure; time is given.  Rules:

- The delay grows with the number of times that the broker delivered the message before: the first
  one, times the multiplier for each, up to a limit.
- Entries are asked for, not messages: of a batch all comes again that nobody has acknowledged.
- An entry is forgotten when every message of it that was asked for again is acknowledged after all;
  messages of a batch that were not asked for do not count.
- What falls due within a tick is asked for together.  An entry is asked for once, at the earliest
  time that was asked of it.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Final

from magnetar.consume.received import EntryKey

__all__ = ["Redelivery", "delay_ms"]

TICKS: Final = 10
"""Into so many ticks the first delay is divided."""


def delay_ms(min_ms: int, max_ms: int, multiplier: float, redelivery_count: int) -> int:
    """How long a message waits that was delivered so many times before this one."""
    delay: float = min_ms
    for _ in range(redelivery_count):
        if delay >= max_ms or multiplier == 1:
            break
        delay *= multiplier
    return min(int(delay), max_ms)


class Redelivery:
    """The negative acknowledgements of one segment consumer."""

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
    def next_ms(self) -> int | None:
        """When something falls due."""
        return self._ticks[0] if self._ticks else None

    def due(self, now_ms: int) -> list[EntryKey]:
        """What is to be asked for now."""
        found: list[EntryKey] = []
        while self._ticks and self._ticks[0] <= now_ms:
            tick = heappop(self._ticks)
            for key in self._due.pop(tick):
                if self.waiting.get(key) == tick:
                    del self.waiting[key], self._indexes[key]
                    found.append(key)
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
        """The broker delivers everything again anyway."""
        self.waiting.clear()
        self._indexes.clear()
        self._due.clear()
        self._ticks.clear()
