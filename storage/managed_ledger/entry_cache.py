"""The newest entries of all ledgers in memory, so that tailing consumers never touch the disk."""

from collections import deque
from collections.abc import Sequence

from storage.managed_ledger.types import Entry

ENTRY_OVERHEAD_BYTES = 256
"""Rough size of the objects of one entry, besides its data."""
_COMPACT_AT = 64


class _Run:
    """Consecutive entries of one ledger from `first` on; those before index `head` are evicted."""

    __slots__ = ("alive", "entries", "first", "groups", "head", "ledger_id", "size_bytes")

    def __init__(self, ledger_id: int, first: int) -> None:
        self.ledger_id = ledger_id
        self.entries: list[Entry | None] = []
        self.first = first
        self.head = 0
        self.size_bytes = 0
        self.groups = 0
        self.alive = True


class EntryCache:
    """The newest entries of all ledgers, bounded in bytes for the process.

    Above the bound the oldest group of entries is evicted first.  Readers share the entry objects.
    Each call costs O(1) for each entry added, however many ledgers there are.
    """

    __slots__ = ("_groups", "_runs", "_stale_groups", "max_bytes", "size_bytes")

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.size_bytes = 0
        # One run without holes for each ledger id, so that finding an entry is one subtraction.
        self._runs: dict[int, _Run] = {}
        self._groups: deque[tuple[_Run, int, int]] = deque()
        self._stale_groups = 0

    def add(self, ledger_id: int, entries: Sequence[Entry], data_bytes: int) -> None:
        """Add a completed group: successive entries of one ledger with `data_bytes` of data."""
        if not entries:
            return
        first = entries[0].position.entry_id
        run = self._runs.get(ledger_id)
        if run is not None and run.first + len(run.entries) != first:
            self.drop(ledger_id)
            run = None
        if run is None:
            run = self._runs[ledger_id] = _Run(ledger_id, first)
        size = len(entries) * ENTRY_OVERHEAD_BYTES + data_bytes
        run.entries.extend(entries)
        run.size_bytes += size
        run.groups += 1
        self._groups.append((run, len(entries), size))
        self.size_bytes += size
        while self.size_bytes > self.max_bytes:
            self._evict()

    def run(self, ledger_id: int, first: int, last: int) -> Sequence[Entry] | None:
        """Entries first..last of a ledger as far as they are cached; None if `first` is not."""
        run = self._runs.get(ledger_id)
        if run is None:
            return None
        start = first - run.first
        if start < run.head or start >= len(run.entries):
            return None
        return run.entries[start : last - run.first + 1]  # type: ignore[return-value]

    def drop(self, ledger_id: int) -> None:
        """Remove all entries of a ledger."""
        run = self._runs.pop(ledger_id, None)
        if run is None:
            return
        self.size_bytes -= run.size_bytes
        self._stale_groups += run.groups
        run.alive = False
        run.entries = []
        if self._stale_groups > _COMPACT_AT and 2 * self._stale_groups > len(self._groups):
            self._groups = deque(group for group in self._groups if group[0].alive)
            self._stale_groups = 0

    def _evict(self) -> None:
        run, count, size = self._groups.popleft()
        if not run.alive:
            self._stale_groups -= 1
            return
        end = run.head + count
        run.entries[run.head : end] = [None] * count
        run.head = end
        run.groups -= 1
        run.size_bytes -= size
        self.size_bytes -= size
        if run.head == len(run.entries):
            del self._runs[run.ledger_id]
            run.alive = False
        elif run.head > _COMPACT_AT and 2 * run.head > len(run.entries):
            del run.entries[: run.head]
            run.first += run.head
            run.head = 0
