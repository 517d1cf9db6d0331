"""Messages that the application has had for too long: when the broker is asked for them again.

Pure; time is given, and never goes back.  Rules:

- The time of a message begins when it is handed out and ends when it is acknowledged (in a
  transaction too) or negatively acknowledged.  It is over after the timeout and never sooner, at
  most a tick later: what falls due within a tick is asked for together.
- Entries are asked for, not messages: of a batch all comes again that nobody has acknowledged.  So
  the time of all its messages ends with it, and begins anew when they are handed out again.
- Known is what is handed out and neither acknowledged nor asked for again, nothing else.
"""

from collections.abc import Iterable
from typing import Final

from magnetar.consume.received import EntryKey

__all__ = ["ProcessingTimeouts"]

TICKS: Final = 10
"""Into so many ticks the timeout is divided at least."""
MAX_TICK_MS: Final = 1000


class ProcessingTimeouts:
    """Of one segment consumer."""

    __slots__ = ("_batches", "_dues", "_tick_ms", "_timeout_ms")

    def __init__(self, timeout_ms: int) -> None:
        assert timeout_ms > 0
        self._timeout_ms: Final = timeout_ms
        self._tick_ms: Final = max(1, min(timeout_ms // TICKS, MAX_TICK_MS))
        self._dues: dict[tuple[int, int, int], int] = {}
        """By ledger, entry and index in the batch; the earliest first, as all wait equally long."""
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
        """These entries are asked for again."""
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
        """The broker delivers everything again anyway."""
        self._dues.clear()
        self._batches.clear()
