"""The metadata store in one SQLite file: the embedded default."""

import asyncio
import sqlite3
from collections import deque
from collections.abc import Sequence
from functools import partial as bind
from pathlib import Path
from typing import TypeVar, cast

import structlog

from config import bounds
from storage.clock import Clock
from storage.durable_mark import DurableMark
from storage.metadata import operations
from storage.metadata.batch_thread import BatchThread, Delivery
from storage.metadata.embedded_store import EmbeddedStore, QueuedRequest, error_of_one
from storage.metadata.file_damage import (
    FileDamage,
    StructureCheck,
    check_structure,
    keep_damage,
    load_damage,
    take_sums,
    write_sums,
)
from storage.metadata.group import check_partition_of
from storage.metadata.keys import level_under
from storage.metadata.operations import Operation
from storage.metadata.recent_changes import RecentChanges
from storage.metadata.sqlite_file import connect, metadata_error, open_file
from storage.metadata.sqlite_reader import Children, IndexScan, RangeRead, Scan, SqliteReader
from storage.metadata.sqlite_writer import CommitResult, SqliteWriter
from storage.metadata.store import IndexHit, MetadataError, Record

_log = structlog.get_logger(__name__)

R = TypeVar("R")


class SqliteMetadataStore(EmbeddedStore):
    """`MetadataStore` in one SQLite file: the embedded default.  Made by `open`.

    One thread writes in groups: operations that queue while a commit runs are the next commit.  A
    failed commit (a full disk, an I/O error) fails its operations; reads go on, and so do later
    commits.
    """

    def __init__(self, clock: Clock, path: Path, files: "SqliteConnections") -> None:
        """Take open connections; use `open`."""
        super().__init__(clock)
        self._path = path
        self._check: StructureCheck | None = None
        self._files = files
        self._published_revision = files.writer.revision
        self._early_reads: deque[tuple[int, Delivery]] = deque()
        self._reads = 0
        self._recent = RecentChanges()
        self._commits = BatchThread[QueuedRequest[Operation]](
            "metadata-writer",
            self._commit,
            self._commit_failed,
            weigh=lambda waiting: waiting.request.size,
            max_items=bounds.METADATA_BATCH_OPERATIONS,
            max_weight=bounds.METADATA_BATCH_BYTES,
        )
        # Ranges are read by another thread than single records, so that a long listing delays no
        # look-up.
        self._gets = BatchThread[QueuedRequest[tuple[str, ...]]](
            "metadata-reader",
            self._get,
            self._read_failed,
            weigh=lambda waiting: len(waiting.request),
            max_items=bounds.METADATA_BATCH_OPERATIONS,
            max_weight=bounds.METADATA_BATCH_OPERATIONS,
        )
        self._ranges = BatchThread[QueuedRequest[RangeRead]](
            "metadata-scanner",
            self._read_range,
            self._read_failed,
            weigh=lambda _: 1,
            max_items=1,
            max_weight=1,
        )

    @classmethod
    async def open(cls, path: Path, clock: Clock) -> "SqliteMetadataStore":
        """Open or make the file; the caller holds the lock of its directory.

        Ends all sessions of earlier processes, with their ephemerals.
        Raises `MetadataError`, `UnknownMetadataFile`.
        """
        loop = asyncio.get_running_loop()
        files = await loop.run_in_executor(None, SqliteConnections, path)
        return cls(clock, path, files)

    async def get(
        self, key: str, *, partition: str | None = None, fresh: bool = False
    ) -> Record | None:
        """See `MetadataStore.get`.  Always fresh."""
        # Watchers have got what is in memory, so it is as fresh as the file.
        change = self._recent.find(key)
        if change is None:
            return (await self.get_many((key,), partition=partition))[0]
        self._check_open()
        operations.check_partition(partition)
        record = change.record
        if record is not None:
            check_partition_of(key, record.partition, partition)
        return record

    async def get_many(
        self, keys: Sequence[str], *, partition: str | None = None
    ) -> list[Record | None]:
        """See `MetadataStore.get_many`."""
        for key in keys:
            operations.check_key(key)
        operations.check_partition(partition)
        found = cast(dict[str, Record], await self._read(self._gets, tuple(keys)))
        for key in keys:
            record = found.get(key)
            if record is not None:
                check_partition_of(key, record.partition, partition)
        return [found.get(key) for key in keys]

    async def children(self, key: str) -> list[str]:
        """See `MetadataStore.children`."""
        operations.check_level(key)
        return cast(list[str], await self._read(self._ranges, Children(level_under(key))))

    async def scan(
        self, lo: str, hi: str, *, partition: str | None = None, fresh: bool = False
    ) -> list[Record]:
        """See `MetadataStore.scan`.  Always fresh."""
        operations.check_scan(lo, hi)
        operations.check_partition(partition)
        records = cast(list[Record], await self._read(self._ranges, Scan(lo, hi)))
        if partition is not None:
            for record in records:
                check_partition_of(record.key, record.partition, partition)
        return records

    async def scan_index(
        self,
        index: str,
        lo: str,
        hi: str,
        *,
        partition: str | None = None,
        fresh: bool = False,
        limit: int | None = None,
        max_bytes: int | None = None,
    ) -> list[IndexHit]:
        """See `MetadataStore.scan_index`.  Always fresh."""
        operations.check_index_range(index, lo, hi)
        operations.check_partition(partition)
        read = IndexScan(index, lo, hi, partition, limit, max_bytes)
        return cast(list[IndexHit], await self._read(self._ranges, read))

    @property
    def damage(self) -> FileDamage:
        """The damage of the file that was found so far."""
        return self._files.damage

    def keep_damage(self) -> None:
        """Keep what `damage` has for later starts.  Blocks for a sync."""
        keep_damage(self._path, self._files.damage)

    async def check_structure(self) -> list[str]:
        """Check a large file, which the start did not; returns sentences about what is wrong.

        Takes seconds for each GB.  [] if there is nothing to check, or the store is closed.
        """
        if not self._files.checks_later:
            return []
        try:
            self._check = StructureCheck(self._path)
        except sqlite3.Error as error:
            return [f"The metadata file {self._path} cannot be checked: {error}."]
        return await self._loop.run_in_executor(None, self._check.run)

    def _enqueue(self, waiting: QueuedRequest[Operation]) -> None:
        self._commits.submit(waiting)

    async def _shut_down(self) -> None:
        await self._commits.stop()
        await self._gets.stop()
        await self._ranges.stop()
        if self._check is not None:
            self._check.stop()
        await self._loop.run_in_executor(None, self._files.close)

    def _commit(self, batch: list[QueuedRequest[Operation]]) -> Delivery:
        """On the writing thread."""
        try:
            committed = self._files.writer.commit([waiting.request for waiting in batch])
        except MetadataError as error:
            return self._commit_failed(batch, error)
        return bind(self._publish_commit, batch, committed)

    def _commit_failed(self, batch: list[QueuedRequest[Operation]], error: Exception) -> Delivery:
        _log.error("metadata_commit_failed", operations=len(batch), error=str(error))
        return bind(self._committed, batch, [error_of_one(error) for _ in batch], [])

    def _publish_commit(
        self, batch: list[QueuedRequest[Operation]], committed: CommitResult
    ) -> None:
        self._published_revision = committed.revision
        try:
            self._recent.take(committed.changes)
        except Exception as error:  # noqa: BLE001 - what is stored is stored, and callers wait
            _log.error("changes_not_remembered", exc_info=error)
            self._recent = RecentChanges()
        try:
            self._committed(batch, committed.outcomes, committed.changes)
        finally:
            while self._early_reads and self._early_reads[0][0] <= self._published_revision:
                self._early_reads.popleft()[1]()

    async def _read(self, thread: BatchThread[QueuedRequest[R]], request: R) -> object:
        self._check_open()
        if self._reads >= bounds.METADATA_QUEUE_OPERATIONS:
            raise MetadataError(
                f"The metadata store is {self._reads} reads behind: "
                "look at the disk's read latency, try again later."
            )
        self._reads += 1
        done: asyncio.Future[object] = self._loop.create_future()
        thread.submit(QueuedRequest(request, done))
        return await done

    def _get(self, batch: list[QueuedRequest[tuple[str, ...]]]) -> Delivery:
        """On the reading thread."""
        try:
            keys = (key for waiting in batch for key in waiting.request)
            revision, found = self._files.reader.get(keys)
        except MetadataError as error:
            return self._read_failed(batch, error)
        return bind(self._deliver_read, revision, batch, found)

    def _read_range(self, batch: list[QueuedRequest[RangeRead]]) -> Delivery:
        """On the scanning thread; batches are of one."""
        try:
            revision, found = self._files.scanner.read_range(batch[0].request)
        except MetadataError as error:
            return self._read_failed(batch, error)
        return bind(self._deliver_read, revision, batch, found)

    def _read_failed(self, batch: list[QueuedRequest[R]], error: Exception) -> Delivery:
        return bind(self._complete_reads, batch, error)

    def _deliver_read(self, revision: int, batch: list[QueuedRequest[R]], found: object) -> None:
        # A read can see a commit that watchers have not got yet, as threads race.  It waits for
        # that: no event after a read may be older than the read.
        if revision <= self._published_revision:
            self._complete_reads(batch, found)
        else:
            self._early_reads.append((revision, bind(self._complete_reads, batch, found)))

    def _complete_reads(self, batch: list[QueuedRequest[R]], outcome: object) -> None:
        self._reads -= len(batch)
        for waiting in batch:
            waiting.complete(error_of_one(outcome) if isinstance(outcome, Exception) else outcome)


class SqliteConnections:
    """The three connections to one file: for writes, for reads by key, and for ranges.

    `damage` is what was found to be damaged at the opening.
    """

    __slots__ = ("_mark", "_path", "damage", "reader", "scanner", "writer")

    def __init__(self, path: Path) -> None:
        """Open them and end all old sessions.  Raises `MetadataError`, `UnknownMetadataFile`."""
        self._path = path
        self.damage = FileDamage()
        known = self._load_damage()
        is_new = not path.exists()
        connection = open_file(path)
        self._mark = DurableMark.open(path.with_name(f"{path.name}.commit"))
        self.writer = SqliteWriter(connection, path, self._mark)
        try:
            self._compare_revision()
            if not (is_new or self.damage.checked) and not self.checks_later:
                self.damage.sentences += check_structure(path)
            if len(self.damage.sentences) != known:
                keep_damage(path, self.damage)
            # One process owns the file (by the lock of the data directory): whoever made these
            # sessions is gone.
            expired = self.writer.expire_sessions()
            self.reader = SqliteReader(connect(path, read_only=True), path)
            self.scanner = SqliteReader(connect(path, read_only=True), path)
        except BaseException as error:
            self.writer.close()
            if isinstance(error, sqlite3.Error):
                raise metadata_error(error, path) from error
            raise
        if expired:
            _log.info("metadata_sessions_expired_at_open", sessions=expired)

    @property
    def checks_later(self) -> bool:
        """Whether the file is so large that its structure is checked after the start."""
        return not self.damage.checked and (self._path.stat().st_size > bounds.METADATA_CHECK_BYTES)

    def _load_damage(self) -> int:
        """Take what earlier starts found, and compare the file; returns the former's number."""
        load_damage(self._path, self.damage)
        known = len(self.damage.sentences)
        try:
            take_sums(self._path, self.damage)
        except OSError as error:
            raise MetadataError(
                f"The metadata file {self._path} cannot be checked ({error}): look at the disk."
            ) from error
        return known

    def _compare_revision(self) -> None:
        if self._mark is not None and self.writer.revision < self._mark.values[0]:
            lost = self._mark.values[0] - self.writer.revision
            self.damage.is_behind = True
            self.damage.sentences.append(
                f"The metadata file {self._path} has lost its newest {lost} changes: it is at "
                f"revision {self.writer.revision}, and {self._mark.values[0]} was acknowledged. "
                "Topics may lack ledgers, subscriptions, acknowledgements and transactions."
            )

    def close(self) -> None:
        """Close them; the last one empties the write-ahead log."""
        self.reader.close()
        self.scanner.close()
        self.writer.close()
        try:
            if self._mark is not None:
                self._mark.close()
            write_sums(self._path)
        except OSError as error:
            _log.warning("metadata_sums_not_written", error=str(error))
