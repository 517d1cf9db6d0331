"""Reading of a compacted topic: its compacted ledger up to the horizon, then the topic."""

from dataclasses import dataclass
from typing import Protocol

from magnetar.protocol.ids import EARLIEST, LATEST, Position
from storage.managed_ledger.compacted import CompactedLedger, StreamCompaction
from storage.managed_ledger.cursor import Cursor
from storage.managed_ledger.types import Entry


class ReadableEntries(Protocol):
    """Entries in order, as a dispatcher reads them: those of a topic, or of a compacted topic."""

    @property
    def name(self) -> str:
        """The path of the managed ledger."""
        ...

    def read_cached(self, start: Position, max_entries: int, max_bytes: int) -> list[Entry] | None:
        """Entries from the first at or after `start`, from memory; None: use `read`."""
        ...

    async def read(
        self, start: Position, *, max_entries: int, max_bytes: int, up_to: Position | None = None
    ) -> list[Entry]:
        """Entries from the first at or after `start`, none after `up_to`; [] at the end."""
        ...

    def next_position(self, position: Position) -> Position:
        """The first entry after `position`."""
        ...


class CompactableEntries(ReadableEntries, Protocol):
    """The entries of a topic, and its compacted ledger."""

    @property
    def compaction(self) -> StreamCompaction:
        """The compacted ledger."""
        ...


@dataclass(frozen=True, slots=True)
class ReadStart:
    """The place where a subscription began: its cursor cannot be at entries that were trimmed.

    It counts as long as the cursor's mark-delete is still `mark_delete`, where it was then.
    """

    position: Position
    mark_delete: Position

    @classmethod
    def after(cls, start: Position, cursor: Cursor) -> "ReadStart | None":
        """Of a cursor that was made to begin after `start`."""
        if start == LATEST:
            return None
        if start == EARLIEST:
            return cls(EARLIEST, cursor.mark_delete)
        return cls(start.following, cursor.mark_delete)

    @classmethod
    def at(cls, position: Position, cursor: Cursor) -> "ReadStart | None":
        """Of a cursor that was moved to `position`."""
        return None if position == LATEST else cls(position, cursor.mark_delete)

    @classmethod
    def loaded(cls, cursor: Cursor) -> "ReadStart | None":
        """Of a cursor that was loaded: nothing is known unless it acknowledged nothing."""
        return cls(EARLIEST, cursor.mark_delete) if cursor.mark_delete.entry_id < 0 else None

    def of(self, cursor: Cursor) -> Position | None:
        """The position, if the cursor has acknowledged nothing since."""
        return self.position if cursor.mark_delete == self.mark_delete else None


class CompactedView:
    """The entries of a topic as they were compacted when the view was made; `close` ends it.

    Later compactions do not change it: the consumer's cursor keeps the entries after the horizon.
    """

    __slots__ = ("_closed", "_entries", "_ledger", "horizon", "unmarked_up_to")

    def __init__(
        self,
        entries: CompactableEntries,
        ledger: CompactedLedger,
        horizon: Position,
        unmarked_up_to: Position,
    ) -> None:
        self._entries = entries
        self._ledger = ledger
        self._closed = False
        self.horizon = horizon
        """The last position that the compacted ledger covers."""
        self.unmarked_up_to = unmarked_up_to
        """Up to here the cursor's mark-delete does not mean that a message was acknowledged."""

    @classmethod
    def open(
        cls, entries: CompactableEntries, start: Position, unmarked_up_to: Position
    ) -> "CompactedView | None":
        """A view for reads from `start` on; None if the topic itself is to be read."""
        horizon = entries.compaction.horizon
        if horizon is None or start > horizon:
            return None
        ledger = entries.compaction.use()
        return None if ledger is None else cls(entries, ledger, horizon, unmarked_up_to)

    @property
    def name(self) -> str:
        """The path of the managed ledger."""
        return self._entries.name

    def read_cached(self, start: Position, max_entries: int, max_bytes: int) -> list[Entry] | None:
        """See `ReadableEntries`: nothing up to the horizon is in memory."""
        if start <= self.horizon:
            return None
        return self._entries.read_cached(start, max_entries, max_bytes)

    async def read(
        self, start: Position, *, max_entries: int, max_bytes: int, up_to: Position | None = None
    ) -> list[Entry]:
        """See `ReadableEntries`.  Entries of the compacted ledger come even if after `up_to`."""
        if start <= self.horizon:
            found = await self._ledger.read(start, max_entries=max_entries, max_bytes=max_bytes)
            if found:
                return found
            start = self._entries.next_position(self.horizon)
        return await self._entries.read(
            start, max_entries=max_entries, max_bytes=max_bytes, up_to=up_to
        )

    def next_position(self, position: Position) -> Position:
        """The position to read after `position`."""
        if position < self.horizon:
            return position.following
        return self._entries.next_position(position)

    def copy(self) -> "CompactedView":
        """The same view, to be closed by itself."""
        self._entries.compaction.use_again(self._ledger)
        return CompactedView(self._entries, self._ledger, self.horizon, self.unmarked_up_to)

    async def last(self) -> Entry | None:
        """The last entry of the compacted ledger.  Raises the errors of reading."""
        return await self._ledger.last()

    def close(self) -> None:
        """Let the compacted ledger go.  Idempotent."""
        if not self._closed:
            self._closed = True
            self._entries.compaction.leave(self._ledger)
