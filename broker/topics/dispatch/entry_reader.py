"""The reader of a dispatcher: entries from the cache at once, or from disk, one read at a time."""

import asyncio
import enum
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Final

import structlog

from broker.topics.compaction.reading import ReadableEntries
from config.bounds import READ_BATCH_BYTES, READ_BATCH_ENTRIES, READ_RETRY_MAX_S, READ_RETRY_MIN_S
from magnetar.protocol.backoff import Backoff
from magnetar.protocol.ids import Position
from magnetar.protocol.server_error import MagnetarError
from storage.callbacks import ignore
from storage.managed_ledger.types import Entry

log = structlog.get_logger(__name__)


class Absent(enum.Enum):
    """Reason why a requested position has no entry (yet)."""

    PENDING = "a read is under way"
    GONE = "the ledger has no such entry"


PENDING: Final = Absent.PENDING
GONE: Final = Absent.GONE


class EntryReader:
    """Reads a managed ledger forward, and single positions on demand.

    Reading ahead stays within READ_BATCH_ENTRIES and READ_BATCH_BYTES.  `ready` is called when a
    read from disk has ended, so that another call makes sense.  `skip` maps a position to the first
    unacknowledged one from there on: reads from disk begin at that one.
    """

    __slots__ = (
        "_backoff",
        "_closed",
        "_generation",
        "_gone",
        "_ledger",
        "_ready",
        "_replayed",
        "_retry",
        "_skip",
        "_task",
        "buffer",
        "position",
    )

    def __init__(
        self,
        ledger: ReadableEntries,
        start: Position,
        *,
        skip: Callable[[Position], Position],
        ready: Callable[[], None],
    ) -> None:
        self.buffer: deque[Entry] = deque()
        self.position = start
        self._ledger = ledger
        self._skip = skip
        self._ready = ready
        self._replayed: dict[Position, Entry] = {}
        self._gone: set[Position] = set()
        self._generation = 0
        self._task: asyncio.Task[None] | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._backoff = Backoff(READ_RETRY_MIN_S, READ_RETRY_MAX_S)
        self._closed = False

    @property
    def next_position(self) -> Position:
        """Position of the next entry, or of its place if it does not exist yet."""
        return self.buffer[0].position if self.buffer else self.position

    @property
    def busy(self) -> bool:
        """Whether a read from disk is under way or waits to be tried again."""
        return self._task is not None or self._retry is not None

    def fill(self, limit: Position, max_entries: int) -> bool:
        """Fill `buffer`, if it is empty, with entries up to and including `limit`.

        False when there is nothing to read now; then either something new will be appended, or
        `ready` will be called.
        """
        if self.buffer:
            return True
        if self.position > limit or self.busy or self._closed:
            return False
        count = min(max_entries, READ_BATCH_ENTRIES)
        entries = self._ledger.read_cached(self.position, count, READ_BATCH_BYTES)
        if entries is None:
            self.position = self._skip(self.position)
            if self.position > limit:
                return False
            self._start(partial(self._read_forward, self._generation, limit))
            return False
        self._buffer(entries, limit)
        return bool(self.buffer)

    def at(self, position: Position, is_dense: Callable[[], bool]) -> "Entry | Absent":
        """The entry at `position`, unless it is `GONE`; `PENDING` when `ready` will be called.

        If it must be read from disk and `is_dense`, those behind it are read too, for later calls.
        """
        entry = self._replayed.pop(position, None)
        if entry is not None:
            return entry
        entries = self._ledger.read_cached(position, 1, READ_BATCH_BYTES)
        if entries and entries[0].position == position:
            return entries[0]
        if position in self._gone:
            self._gone.discard(position)
            return GONE
        if not self.busy and not self._closed:
            self._start(partial(self._read_single, self._generation, position, dense=is_dense()))
        return PENDING

    def seek(self, position: Position, ledger: ReadableEntries | None = None) -> None:
        """Go on at `position`, or at the first entry after it; of `ledger` if that is given."""
        if ledger is not None:
            self._ledger = ledger
        # A read of an earlier generation is dropped when it ends.
        self._generation += 1
        self.buffer.clear()
        self._replayed.clear()
        self._gone.clear()
        self.position = position

    def close(self) -> None:
        """Read no more; `ready` is not called again."""
        self._closed = True
        self._generation += 1
        self.buffer.clear()
        self._replayed.clear()
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._task is not None:
            self._task.cancel()
        self._ready = ignore
        self._skip = _same

    def _buffer(self, entries: Iterable[Entry], limit: Position) -> None:
        last = None
        for entry in entries:
            if entry.position > limit:
                break
            self.buffer.append(entry)
            last = entry
        if last is not None:
            self.position = self._ledger.next_position(last.position)

    def _start(self, read: Callable[[], Coroutine[None, None, None]]) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(read))

    async def _run(self, read: Callable[[], Coroutine[None, None, None]]) -> None:
        try:
            await read()
        except Exception as error:
            # Tried again, later each time, as long as the dispatcher lives: consumers see a pause.
            known = isinstance(error, MagnetarError)
            pause_s = self._backoff.pause_s()
            log.warning(
                "dispatch_read_failed",
                ledger=self._ledger.name,
                error=str(error),
                next_try_s=pause_s,
                exc_info=None if known else error,
            )
            self._task = None
            if not self._closed:
                loop = asyncio.get_running_loop()
                self._retry = loop.call_later(pause_s, self._again)
            return
        self._task = None
        self._backoff.reset()
        if not self._closed:
            self._ready()

    def _again(self) -> None:
        self._retry = None
        self._ready()

    async def _read_forward(self, generation: int, limit: Position) -> None:
        entries = await self._ledger.read(
            self.position,
            max_entries=READ_BATCH_ENTRIES,
            max_bytes=READ_BATCH_BYTES,
            up_to=limit,
        )
        if generation != self._generation:
            return
        if entries:
            self._buffer(entries, limit)
        else:
            # All up to there is gone, such as what compaction removed: it is not read again.
            self.position = max(limit.following, self._ledger.next_position(limit))

    async def _read_single(self, generation: int, position: Position, *, dense: bool) -> None:
        max_entries = READ_BATCH_ENTRIES if dense else 1
        entries = await self._ledger.read(
            position, max_entries=max_entries, max_bytes=READ_BATCH_BYTES
        )
        if generation != self._generation:
            return
        self._replayed = {entry.position: entry for entry in entries}
        if position not in self._replayed:
            self._gone.add(position)


def _same(position: Position) -> Position:
    return position
