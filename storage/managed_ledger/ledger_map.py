"""Pure: the ledgers of one stream in order, and arithmetic on positions over them."""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from magnetar.protocol.ids import EARLIEST, LATEST, Position
from storage.ledger.store import LedgerAssertion
from storage.offload.context import OffloadContext


@dataclass(slots=True)
class LedgerInfo:
    """One ledger of a stream.  `closed_ms` is the wall-clock time of its end, 0 while open."""

    ledger_id: int
    entries: int = 0
    size_bytes: int = 0
    closed_ms: int = 0
    offload: OffloadContext | None = None
    """The copy of it, or the attempt to make one."""

    @property
    def hot(self) -> bool:
        """Whether the ledger itself is still there."""
        return self.offload is None or not (self.offload.complete and self.offload.hot_deleted)

    @property
    def last(self) -> Position:
        """Position of its last entry; entry -1 when empty."""
        return Position(self.ledger_id, self.entries - 1)


class LedgerMap:
    """The ledgers of one stream in order, and arithmetic on positions over them.

    Ledger ids rise.  An entry exists if its ledger is listed and its id is below `entries`.
    Methods take positions that do not exist, too: these lie between their neighbours.

    A rank is the number of entries at or before a position, counted from the first entry that the
    map ever had.  Dropping ledgers from the front changes no rank, so the difference of two ranks
    is a number of entries.
    """

    __slots__ = ("_before", "_ids", "_infos", "_last_known", "total", "total_size_bytes")

    def __init__(self, infos: Iterable[LedgerInfo] = ()) -> None:
        self._ids: list[int] = []
        self._infos: list[LedgerInfo] = []
        self._before: list[int] = []
        self._last_known = EARLIEST
        self.total = 0
        """Rank of the end: entries ever known."""
        self.total_size_bytes = 0
        """Bytes of the listed ledgers."""
        for info in infos:
            self.add(info)

    @property
    def infos(self) -> list[LedgerInfo]:
        """The ledgers, oldest first.  Not to be changed."""
        return self._infos

    @property
    def last(self) -> LedgerInfo | None:
        """The newest ledger."""
        return self._infos[-1] if self._infos else None

    @property
    def entry_count(self) -> int:
        """Entries of the listed ledgers."""
        return self.total - self._before[0] if self._before else 0

    @property
    def end(self) -> Position:
        """The position after the last entry; the next entry gets it, unless a new ledger begins."""
        if self._infos:
            info = self._infos[-1]
            return Position(info.ledger_id, info.entries)
        return self._last_known.following

    def get(self, ledger_id: int) -> LedgerInfo | None:
        """The ledger of that id, if listed."""
        index = bisect_left(self._ids, ledger_id)
        if index < len(self._ids) and self._ids[index] == ledger_id:
            return self._infos[index]
        return None

    def require_newer(self, ledger_id: int) -> None:
        """Raise `LedgerAssertion` unless the id is above all that the stream ever had."""
        newest = max(self._ids[-1] if self._ids else -1, self._last_known.ledger_id)
        if ledger_id <= newest:
            raise LedgerAssertion(
                f"Ledger {ledger_id} was given to a stream that already had {newest}: ids must "
                "rise, so the ledger store lost its id counter; restore it."
            )

    def add(self, info: LedgerInfo) -> None:
        """Append the next ledger.  Raises `LedgerAssertion` if its id does not rise."""
        self.require_newer(info.ledger_id)
        self._ids.append(info.ledger_id)
        self._infos.append(info)
        self._before.append(self.total)
        self.total += info.entries
        self.total_size_bytes += info.size_bytes

    def remember(self, position: Position) -> None:
        """Note a position that the stream once had, though its ledger is gone."""
        self._last_known = max(self._last_known, position)

    def grow(self, entries: int, size_bytes: int) -> None:
        """Count entries that were added to the newest ledger."""
        info = self._infos[-1]
        info.entries += entries
        info.size_bytes += size_bytes
        self.total += entries
        self.total_size_bytes += size_bytes

    def drop(self, ledger_ids: Collection[int]) -> None:
        """Forget ledgers: any from the front, or an empty one anywhere."""
        if not ledger_ids:
            return
        if self._infos:
            self._last_known = max(self._last_known, self._infos[-1].last)
        kept: list[int] = []
        for index, info in enumerate(self._infos):
            if info.ledger_id not in ledger_ids:
                kept.append(index)
                continue
            if info.entries and kept:
                raise LedgerAssertion(
                    f"Ledger {info.ledger_id} was to be dropped from the middle of a stream: "
                    "report this as a defect."
                )
            self.total_size_bytes -= info.size_bytes
        self._ids = [self._ids[index] for index in kept]
        self._before = [self._before[index] for index in kept]
        self._infos = [self._infos[index] for index in kept]

    def contains(self, position: Position) -> bool:
        """True if there is an entry at that position."""
        info = self.get(position.ledger_id)
        return info is not None and 0 <= position.entry_id < info.entries

    def rank(self, position: Position) -> int:
        """Number of entries at or before the position."""
        index = bisect_right(self._ids, position.ledger_id) - 1
        if index < 0:
            return self._before[0] if self._before else self.total
        entries = self._infos[index].entries
        if self._ids[index] == position.ledger_id:
            entries = min(max(position.entry_id + 1, 0), entries)
        return self._before[index] + entries

    def size_after(self, position: Position) -> int:
        """Bytes of the entries after a position.

        An estimate within its ledger, whose entries count as equally large.
        """
        index = bisect_left(self._ids, position.ledger_id)
        size_bytes = 0
        if index < len(self._ids) and self._ids[index] == position.ledger_id:
            info = self._infos[index]
            after = info.entries - min(max(position.entry_id + 1, 0), info.entries)
            size_bytes = info.size_bytes * after // max(info.entries, 1)
            index += 1
        return size_bytes + sum(info.size_bytes for info in self._infos[index:])

    def with_size_after(self, size_bytes: int) -> Position:
        """The first entry of the newest ones that have at most so many bytes; `end` if none does.

        It is the inverse of `size_after`, and an estimate as that.
        """
        left = size_bytes
        for info in reversed(self._infos):
            if info.size_bytes > left:
                entries = left * info.entries // info.size_bytes
                return self.next(Position(info.ledger_id, info.entries - entries - 1))
            left -= info.size_bytes
        return self.at_or_after(EARLIEST)

    def at(self, rank: int) -> Position:
        """The entry with `rank` entries before it; `end` beyond the last one."""
        if not self._before or rank >= self.total:
            return self.end
        rank = max(rank, self._before[0])
        index = bisect_right(self._before, rank) - 1
        return Position(self._ids[index], rank - self._before[index])

    def at_or_after(self, position: Position) -> Position:
        """The first entry at or after it; `end` if there is none."""
        info = self.get(position.ledger_id)
        if info is not None and 0 <= position.entry_id < info.entries:
            return position
        index = bisect_left(self._ids, position.ledger_id)
        if info is not None and position.entry_id >= 0:
            index += 1
        for later in self._infos[index:]:
            if later.entries:
                return Position(later.ledger_id, 0)
        return self.end

    def next(self, position: Position) -> Position:
        """The first entry after it; `end` if there is none."""
        return self.at_or_after(position.following)

    def before(self, position: Position) -> Position:
        """The last entry before it; entry -1 of the first ledger if there is none."""
        if position.entry_id > 0:
            info = self.get(position.ledger_id)
            if info is not None and info.entries:
                return Position(position.ledger_id, min(position.entry_id, info.entries) - 1)
        index = bisect_left(self._ids, position.ledger_id)
        for earlier in reversed(self._infos[:index]):
            if earlier.entries:
                return earlier.last
        if self._infos:
            return Position(self._ids[0], -1)
        return self._last_known

    def end_after(self, position: Position) -> Position:
        """The end of the first ended ledger that ends after `position`; `LATEST` if none does."""
        for info in self._infos[bisect_left(self._ids, position.ledger_id) :]:
            if info.closed_ms == 0:
                break
            if info.last > position:
                return info.last
        return LATEST
