"""Group commit of the ledger log: one write and one sync for all entries that wait."""

import asyncio
import enum
import random
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import structlog

from magnetar.protocol.state_table import StateTable
from storage.ledger.local.codec import (
    FILE_HEADER_BYTES,
    GROUP_HEADER_BYTES,
    RECORD_HEADER_BYTES,
    FileHeader,
    crc32c,
    decode_record_header,
    encode_file_header,
    encode_group_header,
    encode_record_header,
)
from storage.ledger.local.disk import Disk, ledger_error
from storage.ledger.local.index import MemoryIndex
from storage.ledger.local.limits import LedgerLimits
from storage.ledger.local.log_files import LogFile, LogFiles
from storage.ledger.store import AppendCallback, LedgerAssertion, LedgerError

_log = structlog.get_logger(__name__)

PAGE_BYTES = 4096


class WriterState(enum.Enum):
    """State of the log: MENDING truncates a file after a failed write."""

    IDLE = "idle"
    WRITING = "writing"
    MENDING = "mending"
    CLOSED = "closed"


ALLOWED: StateTable[WriterState] = StateTable(
    {
        WriterState.IDLE: frozenset({WriterState.WRITING, WriterState.CLOSED}),
        WriterState.WRITING: frozenset({WriterState.IDLE, WriterState.MENDING}),
        WriterState.MENDING: frozenset({WriterState.IDLE}),
        WriterState.CLOSED: frozenset(),
    },
    defect=LedgerAssertion,
)


class Appender(Protocol):
    """The ledger handle that appended an entry."""

    @property
    def ledger_id(self) -> int:
        """Id of the ledger."""
        ...

    def confirm(self, entry_id: int, size: int) -> None:
        """Note that the entry is durable."""
        ...

    def fail(self, error: LedgerError) -> None:
        """Note that an entry failed, so nothing more may be appended."""
        ...


class Append(NamedTuple):
    """One entry to append."""

    appender: Appender
    entry_id: int
    entry: bytes
    crc: int
    done: AppendCallback


class _RewriteAppender:
    """The appender of a durable record that is written once more, into the next file."""

    def __init__(self, ledger_id: int) -> None:
        self.ledger_id = ledger_id

    def confirm(self, entry_id: int, size: int) -> None:
        """Do nothing: it was confirmed before."""

    def fail(self, error: LedgerError) -> None:
        """Do nothing: the record is written again with the next group."""


def _no_callback(entry_id: int, error: LedgerError | None) -> None:
    """Do nothing: the callback of a record that is written once more."""


class _Group(NamedTuple):
    """The group that is being made durable, and its place; `create`: in a new file."""

    file: LogFile
    create: bool
    offset: int
    end: int
    appends: list[Append]


class LogWriter:
    """Queues entries on the loop, and hands them to the disk in groups.

    Entries that queue while a group is made durable are the next group; there is no linger timer.
    Callbacks run in the order of the appends, all of a group in one call of the loop.
    """

    def __init__(
        self,
        disk: Disk,
        files: LogFiles,
        limits: LedgerLimits,
        rng: random.Random,
        on_retired: Callable[[LogFile], None],
        on_durable: Callable[[int, int], None],
    ) -> None:
        """Make a writer that is idle.

        `on_retired` is called with each file that gets no further groups, `on_durable` with number
        and length of the file after each group.
        """
        self._on_durable = on_durable
        self._disk = disk
        self._files = files
        self._limits = limits
        self._rng = rng
        self._on_retired = on_retired
        self._loop = asyncio.get_running_loop()
        self._state = WriterState.IDLE
        self._scheduled = False
        self._queue: list[Append] = []
        self._rewrites: list[Append] = []
        """Durable records to write once more, before the queue."""
        self._group: _Group | None = None
        self._last: LogFile | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._mending: asyncio.Task[None] | None = None

    def follow(self, last: LogFile | None) -> None:
        """Make the next new file name `last` as the file written before it."""
        self._last = last

    def add(self, append: Append) -> None:
        """Queue one entry.  The hot path."""
        self._queue.append(append)
        # The first append of a loop turn schedules the group: all appends of the turn are in it.
        if not self._scheduled and self._state is WriterState.IDLE:
            self._scheduled = True
            self._loop.call_soon(self._begin)

    def withdraw(self, appender: Appender) -> list[Append]:
        """Take this appender's entries out of the queue, and return them."""
        withdrawn = [append for append in self._queue if append.appender is appender]
        if withdrawn:
            self._queue = [append for append in self._queue if append.appender is not appender]
        return withdrawn

    def is_writing(self, appender: Appender) -> bool:
        """Whether entries of this appender are in the group being written."""
        group = self._group
        return group is not None and any(one.appender is appender for one in group.appends)

    async def next_group(self) -> None:
        """Return when the group being written, or the next one if there is none, is decided."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append(waiter)
        await waiter

    def _move(self, state: WriterState) -> None:
        self._state = ALLOWED.move(self._state, state, "The ledger log")

    def _begin(self) -> None:
        """Hand the next group to the disk, if entries wait and the disk is free."""
        self._scheduled = False
        if self._state is not WriterState.IDLE:
            return
        if not self._queue:
            self._wake()
            return
        appends = self._take()
        body = sum([len(append.entry) for append in appends])
        body += RECORD_HEADER_BYTES * len(appends)
        file = self._files.active
        if file is not None and self._is_full(file, body, len(appends)):
            self._retire()
            file = None
        create = file is None
        head = b""
        if file is None:
            file, head = self._new_file()
        offset = len(head) if create else file.end
        seed = file.seed
        head += encode_group_header(file.nonce, offset, body, len(appends))
        buffers = [head]
        for append in appends:
            entry = append.entry
            ledger_id = append.appender.ledger_id
            size = len(entry)
            buffers.append(encode_record_header(seed, ledger_id, append.entry_id, size, append.crc))
            buffers.append(entry)
        end = offset + GROUP_HEADER_BYTES + body
        self._group = _Group(file, create, offset, end, appends)
        self._move(WriterState.WRITING)
        self._disk.append(file.name, buffers, create=create, done=self._decided)

    def _take(self) -> list[Append]:
        """Take the appends of the next group: all, up to the limits of a group."""
        taken = self._rewrites + self._queue
        bytes_left = self._limits.group_bytes
        count = 0
        for append in taken:
            bytes_left -= len(append.entry) + RECORD_HEADER_BYTES
            if count and (bytes_left < 0 or count >= self._limits.file_records):
                break
            count += 1
        self._queue = taken[max(count, len(self._rewrites)) :]
        taken = taken[: max(count, len(self._rewrites))]
        self._rewrites = []
        return taken

    def _is_full(self, file: LogFile, body: int, records: int) -> bool:
        if file.memory is None:
            raise LedgerAssertion(f"The active log file {file.name} has no index: report it.")
        return (
            file.end + GROUP_HEADER_BYTES + body > self._limits.file_bytes
            or file.memory.records + records > self._limits.file_records
        )

    def _new_file(self) -> tuple[LogFile, bytes]:
        last = self._last
        header = FileHeader(
            number=self._files.take_number(),
            nonce=self._rng.getrandbits(64),
            previous=0 if last is None else last.number,
            previous_end=0 if last is None else last.end,
        )
        file = LogFile.growing(header.number, header.nonce, FILE_HEADER_BYTES, MemoryIndex())
        return file, encode_file_header(header)

    def _retire(self) -> None:
        """End the active file: it gets no further groups."""
        file = self._files.retire_active()
        if file is not None:
            self._last = file
            self._on_retired(file)

    def _decided(self, error: OSError | None) -> None:
        """Index a durable group, or deal with its failure."""
        group, self._group = self._group, None
        if group is None:
            raise LedgerAssertion("The disk completed a group that was not written: report it.")
        if error is not None:
            self._failed(group, error)
            return
        file, memory = group.file, group.file.memory
        if memory is None:
            raise LedgerAssertion(f"The active log file {file.name} has no index: report it.")
        if group.create:
            self._files.activate(file)
        file.end = group.end
        # Before anybody learns that the group is durable.
        self._on_durable(file.number, file.end)
        offset = group.offset + GROUP_HEADER_BYTES
        add = memory.add
        for appender, entry_id, entry, _, _ in group.appends:
            size = len(entry)
            add(appender.ledger_id, entry_id, offset, size)
            offset += RECORD_HEADER_BYTES + size
            appender.confirm(entry_id, size)
        self._move(WriterState.IDLE)
        # The disk gets the next group before the callbacks run, so that it is never idle.
        self._begin()
        self.call_back(group.appends, None)
        self._wake()

    def call_back(self, appends: list[Append], error: LedgerError | None) -> None:
        """Run the callbacks of these appends; one that raises does not keep the others."""
        for _, entry_id, _, _, done in appends:
            try:
                done(entry_id, error)
            except Exception as failure:  # noqa: BLE001 - reported to the loop
                self._loop.call_exception_handler(
                    {"message": "append callback failed", "exception": failure}
                )

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _failed(self, group: _Group, error: OSError) -> None:
        """Fail all entries that wait, and mend the log."""
        # After a failed write or sync the bytes behind the last successful group are unknown.  So
        # the file is truncated there and never written again (`_mend`).
        failure = ledger_error(error, "Appending to the ledger log")
        _log.error("ledger_append_failed", file=group.file.name, error=str(error))
        everything = group.appends + self._queue
        self._queue = []
        self._rewrites = [one for one in everything if isinstance(one.appender, _RewriteAppender)]
        lost = [one for one in everything if not isinstance(one.appender, _RewriteAppender)]
        self._move(WriterState.MENDING)
        self._mending = self._loop.create_task(self._mend(group))
        for append in lost:
            append.appender.fail(failure)
        self.call_back(lost, failure)
        self._wake()

    async def _mend(self, group: _Group) -> None:
        """Remove the failed group from the log; the next group goes into a new file."""
        try:
            if group.create:
                await self._disk.maintain(partial(self._disk.unlink, group.file.name))
            else:
                self._rewrites += await self._disk.maintain(partial(self._truncate, group.file))
        except OSError as error:
            _log.warning("ledger_log_not_cut", file=group.file.name, error=str(error))
        except Exception:  # noqa: BLE001 - else nothing could ever be appended again
            _log.exception("ledger_log_not_cut", file=group.file.name)
        if not group.create:
            self._retire()
        self._mending = None
        self._move(WriterState.IDLE)
        self._begin()

    def _truncate(self, file: LogFile) -> list[Append]:
        """Job side: truncate the file to its durable end; returns the records to write again."""
        self._disk.truncate(file.name, file.end)
        # Durable records in the page where the failed write began: that page may not reach the disk
        # any more, and no acknowledged entry may rest on a page whose sync failed.
        records = self._last_page(file)
        self._disk.sync(file.name)
        return records

    def _last_page(self, file: LogFile) -> list[Append]:
        if file.memory is None or file.end % PAGE_BYTES == 0:
            return []
        page = file.end - file.end % PAGE_BYTES
        found: list[Append] = []
        for run in file.memory.memory_runs():
            entry_id = run.last
            while entry_id >= run.first:
                offset, size = run.place(entry_id)
                if offset + RECORD_HEADER_BYTES + size <= page:
                    break
                data = self._disk.pread(file.name, offset, RECORD_HEADER_BYTES + size)
                header = decode_record_header(data[:RECORD_HEADER_BYTES], file.seed)
                entry = data[RECORD_HEADER_BYTES:]
                if header is None or crc32c(entry) != header.payload_crc:
                    _log.error("ledger_record_damaged", file=file.name, offset=offset)
                else:
                    owner = _RewriteAppender(run.ledger_id)
                    found.append(Append(owner, entry_id, entry, header.payload_crc, _no_callback))
                entry_id -= 1
        return sorted(found, key=lambda one: (one.appender.ledger_id, one.entry_id))

    async def close(self) -> None:
        """Wait for the queue, then end the active file, so that a start need not read it through.

        Records to write once more are written too, if the disk takes them at the first attempt.
        """
        await self._idle()
        if self._rewrites:
            self._queue, self._rewrites = self._rewrites, []
            self._begin()
            await self._idle()
        self._move(WriterState.CLOSED)
        self._retire()

    async def _idle(self) -> None:
        while self._state is not WriterState.IDLE or self._queue:
            if self._mending is not None:
                await self._mending
            else:
                await self.next_group()
