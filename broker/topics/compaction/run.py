"""One compaction of a topic: two passes, and the switch to the new compacted ledger."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from secrets import token_bytes
from tempfile import TemporaryFile
from typing import ClassVar, Final, Protocol

import structlog

from broker.topics.compaction.entries import message_count, messages_of, with_messages
from broker.topics.compaction.newest_messages import NewestMessages
from broker.topics.compaction.pace import Pace
from config.bounds import (
    COMPACTION_BYTES_PER_S,
    COMPACTION_LOOP_SHARE,
    COMPACTION_READ_ENTRIES,
    COMPACTION_SLICE_S,
    COMPACTION_THREAD_BYTES,
    COMPACTION_THREAD_MESSAGES,
    COMPACTION_WRITE_BYTES,
    READ_BATCH_BYTES,
)
from magnetar.protocol.ids import EARLIEST, Position
from magnetar.protocol.server_error import MagnetarError, OperatorError, ServerError
from storage.ledger.store import LedgerBusy, LedgerError, WritableLedger
from storage.managed_ledger.compacted import CompactedLedger
from storage.managed_ledger.compacted_record import encode_compacted
from storage.managed_ledger.ledger import ManagedLedger
from storage.managed_ledger.types import Entry

log = structlog.get_logger(__name__)
_BUSY_PAUSE_S: Final = 0.05
_SMALL_BYTES: Final = 4096


class CompactedTopic(Protocol):
    """A topic that is compacted."""

    @property
    def ledger(self) -> ManagedLedger:
        """The topic's entries."""
        ...

    def max_read_position(self) -> Position:
        """The last position that consumers may read."""
        ...

    def is_aborted(self, entry: Entry) -> bool:
        """Whether an entry at or before the max read position is never to be delivered."""
        ...


class EntriesChanged(OperatorError):
    """Entries were lost between the two passes of a compaction."""

    code: ClassVar[ServerError] = ServerError.PERSISTENCE_ERROR


@dataclass(frozen=True, slots=True)
class Counts:
    """Messages that a run read and removed."""

    read: int = 0
    removed: int = 0


async def compact(topic: CompactedTopic, scratch: Path | None) -> Counts:
    """Compact a topic up to its max read position; its cursor of compaction exists.

    A file without a name is made in the directory `scratch`, or in that of the system.  Raises
    `LedgerError`, `MetadataError`, `ManagedLedgerFenced`, `ManagedLedgerClosed`, `CursorNotFound`,
    `EntriesChanged`, `OSError`.
    """
    ledger, horizon = topic.ledger, topic.max_read_position()
    compaction = ledger.compaction
    before = compaction.horizon
    if horizon.entry_id < 0 or (before is not None and horizon <= before):
        return Counts()
    pace = Pace(
        share=COMPACTION_LOOP_SHARE, slice_s=COMPACTION_SLICE_S, bytes_per_s=COMPACTION_BYTES_PER_S
    )
    with ExitStack() as held:
        file = held.enter_context(TemporaryFile(dir=scratch))
        old = compaction.use()
        if old is not None:
            held.callback(compaction.leave, old)
        source = _Source(ledger, old, before, horizon)
        newest = NewestMessages(file, token_bytes(16))
        await _number(topic, source, newest, pace)
        for read_bytes in newest.resolve():
            await pace.spend(read_bytes)
        made = await compaction.begin()
        try:
            kept = await _copy(source, newest, made, pace)
            await made.close()
            await compaction.commit(made, horizon, empty=not kept)
        except BaseException:
            await _abandon(ledger, made)
            raise
    return Counts(newest.messages, newest.messages - kept)


class _Source:
    """The old compacted ledger up to its horizon, and the topic's entries up to the new one."""

    def __init__(
        self,
        ledger: ManagedLedger,
        old: CompactedLedger | None,
        before: Position | None,
        horizon: Position,
    ) -> None:
        self._ledger = ledger
        self._old = old
        self._before = before
        self._horizon = horizon

    async def parts(self) -> AsyncIterator[list[Entry]]:
        """The entries in order, in lists of bounded size; the same in each pass."""
        ledger = self._ledger
        if self._old is not None:
            start = EARLIEST
            while entries := await self._old.read(
                start, max_entries=COMPACTION_READ_ENTRIES, max_bytes=READ_BATCH_BYTES
            ):
                yield entries
                last = entries[-1].position
                start = last.following
        start = EARLIEST if self._before is None else ledger.next_position(self._before)
        while entries := await ledger.read(
            start,
            max_entries=COMPACTION_READ_ENTRIES,
            max_bytes=READ_BATCH_BYTES,
            up_to=self._horizon,
        ):
            yield entries
            start = ledger.next_position(entries[-1].position)


async def _number(
    topic: CompactedTopic, source: _Source, newest: NewestMessages, pace: Pace
) -> None:
    """Pass 1: number the messages, and note the key of each."""
    async for entries in source.parts():
        pace.resume()
        for entry in entries:
            if _is_large(entry.data):
                found = await asyncio.to_thread(messages_of, entry.data)
                pace.resume()
            else:
                found = messages_of(entry.data)
            hidden = found.transaction is not None and topic.is_aborted(entry)
            newest.add(found, hidden=hidden)
            await pace.spend(len(entry.data))
        if newest.full:
            await asyncio.to_thread(newest.spill)
            pace.resume()


async def _copy(source: _Source, newest: NewestMessages, made: WritableLedger, pace: Pace) -> int:
    """Pass 2: copy the kept messages; returns their number."""
    writer, messages, kept_total = _Writer(made), 0, 0
    async for entries in source.parts():
        pace.resume()
        for entry in entries:
            count = message_count(entry.data)
            messages += count
            if messages > newest.messages:
                raise _changed()
            kept = newest.kept_of(count)
            kept_total += len(kept)
            if count > COMPACTION_THREAD_MESSAGES or len(entry.data) > COMPACTION_THREAD_BYTES:
                left = await asyncio.to_thread(with_messages, entry.data, count, kept)
                pace.resume()
            else:
                left = with_messages(entry.data, count, kept)
            if left is not None:
                await writer.write(encode_compacted(Entry(entry.position, left)))
            await pace.spend(len(entry.data) + (0 if left is None else len(left)))
    await writer.finish()
    if messages != newest.messages:
        raise _changed()
    return kept_total


def _is_large(data: bytes) -> bool:
    """Whether reading the messages of an entry would hold the event loop up."""
    if len(data) > COMPACTION_THREAD_BYTES:
        return True
    # A compressed batch may have many messages in few bytes; a small one not many.
    return len(data) > _SMALL_BYTES and message_count(data) > COMPACTION_THREAD_MESSAGES


def _changed() -> EntriesChanged:
    return EntriesChanged(
        "Entries of the topic were lost while it was compacted: compact it again, and look at the "
        "disks."
    )


async def _abandon(ledger: ManagedLedger, made: WritableLedger) -> None:
    try:
        await ledger.compaction.abandon(made)
    except MagnetarError as error:
        # The record names it as unused: the next load of the topic deletes it.
        log.info("compaction_ledger_left", name=ledger.name, error=str(error))


class _Writer:
    """Appends entries to a ledger, with a bound of bytes that are not yet durable."""

    def __init__(self, ledger: WritableLedger) -> None:
        self._ledger = ledger
        self._waiting_bytes = 0
        self._progress = asyncio.Event()
        self._error: LedgerError | None = None

    async def write(self, data: bytes) -> None:
        """Append an entry; waits while too many bytes are on their way.  Raises `LedgerError`."""
        await self._wait_below(COMPACTION_WRITE_BYTES)
        while True:
            try:
                self._ledger.append(data, lambda _, error: self._done(len(data), error))
            except LedgerBusy:
                await asyncio.sleep(_BUSY_PAUSE_S)
            else:
                self._waiting_bytes += len(data)
                return

    async def finish(self) -> None:
        """Return when everything is durable.  Raises `LedgerError`."""
        await self._wait_below(1)

    async def _wait_below(self, limit_bytes: int) -> None:
        while self._error is None and self._waiting_bytes >= limit_bytes:
            self._progress.clear()
            await self._progress.wait()
        if self._error is not None:
            raise self._error

    def _done(self, size_bytes: int, error: LedgerError | None) -> None:
        self._waiting_bytes -= size_bytes
        self._error = self._error or error
        self._progress.set()
