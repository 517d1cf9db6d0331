"""The newest entries of all ledgers in memory, so that tailing consumers never touch the disk.

Rules:

- One bound in bytes for the process; above it the group of entries that came first goes first.
- For each ledger it holds one contiguous run, so any look-up is one subtraction.
- Entries are the very objects that were published: every reader shares them.
- `add`, `run` and dropping cost O(1) for each entry put in, however many ledgers there are.
"""

from collections import deque
from collections.abc import Sequence

from storage.managed_ledger.types import Entry

ENTRY_OVERHEAD_BYTES = 256
"""Memory of one entry beside its data: the objects around it, roughly."""
_COMPACT_AT = 64


class _Run:
    """Entries `first`.. of one ledger; those before `head` were evicted."""

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
    """The newest entries of all ledgers, bounded in bytes.

    Keyed by ledger id, which is unique in the process.
    """

    __slots__ = ("_groups", "_runs", "_stale_groups", "max_bytes", "size_bytes")

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.size_bytes = 0
        self._runs: dict[int, _Run] = {}
        self._groups: deque[tuple[_Run, int, int]] = deque()
        self._stale_groups = 0

    def add(self, ledger_id: int, entries: Sequence[Entry], data_bytes: int) -> None:
        """Put in a completed group: successive entries of one ledger with `data_bytes` of data."""
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
        """Entries first..last of a ledger as far as they are held; None if `first` is not."""
        run = self._runs.get(ledger_id)
        if run is None:
            return None
        start = first - run.first
        if start < run.head or start >= len(run.entries):
            return None
        return run.entries[start : last - run.first + 1]  # type: ignore[return-value]

    def drop(self, ledger_id: int) -> None:
        """Forget a ledger."""
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
