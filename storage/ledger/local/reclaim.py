"""Gives space back: drops log files without a living ledger, and merges sparse ones."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import structlog

from magnetar.protocol.server_error import MagnetarError
from storage.damage import DamageReport
from storage.ledger.local.codec import RECORD_HEADER_BYTES
from storage.ledger.local.compaction import Compaction, DamagedSource
from storage.ledger.local.disk import Disk
from storage.ledger.local.entry_reader import usable_index
from storage.ledger.local.ledger_records import LedgerRecords
from storage.ledger.local.limits import LedgerLimits
from storage.ledger.local.log_files import LogFile, LogFiles, index_name

_log = structlog.get_logger(__name__)

DeletionGuard = Callable[[], AbstractContextManager[bool]]
"""Entered around removals and merges; yields whether they may happen now."""

SMALL_FRACTION = 8
"""A file is small below file_bytes / this, and this many small files are worth a merge."""
GAIN_FRACTION = 64
"""A merge of few files must free at least file_bytes / this."""


def unguarded() -> AbstractContextManager[bool]:
    """The guard of a store without backups."""
    return nullcontext(True)


class FileUsage(NamedTuple):
    """The entries of living ledgers in a file: bytes with record headers, and records."""

    file: LogFile
    live_bytes: int
    live_records: int


@dataclass(slots=True)
class ReclaimReport:
    """Numbers of files: dropped without a living ledger, merged into others, removed from disk."""

    dropped: int = 0
    merged: int = 0
    removed: int = 0


def usage_of(disk: Disk, files: Sequence[LogFile], live: AbstractSet[int]) -> list[FileUsage]:
    """Job side: add up the entries of living ledgers in each file."""
    found = []
    for file in files:
        live_bytes = live_records = 0
        for run in usable_index(disk, file).runs():
            if run.ledger_id in live:
                records = run.last - run.first + 1
                live_records += records
                live_bytes += run.payload_bytes + records * RECORD_HEADER_BYTES
        found.append(FileUsage(file, live_bytes, live_records))
    return found


def choose_sources(usages: Sequence[FileUsage], limits: LedgerLimits) -> list[LogFile]:
    """The files to merge next, [] if no merge is worth its writes.

    Sparse files (less than half alive) and, if there are many, small ones; as many as fit into one.
    """
    sparse = [one for one in usages if one.live_bytes * 2 < one.file.end]
    small_bytes = limits.file_bytes // SMALL_FRACTION
    small = [one for one in usages if one.file.end < small_bytes and one not in sparse]
    candidates = sparse + (small if len(small) + len(sparse) >= SMALL_FRACTION else [])
    chosen: list[FileUsage] = []
    size = records = 0
    for one in sorted(candidates, key=lambda one: one.file.number):
        size += one.live_bytes
        records += one.live_records
        if len(chosen) >= limits.compact_sources or size > limits.file_bytes:
            break
        if chosen and records > limits.file_records:
            break
        chosen.append(one)
    gain = sum(one.file.end - one.live_bytes for one in chosen)
    if len(chosen) < SMALL_FRACTION and gain < limits.file_bytes // GAIN_FRACTION:
        return []
    return [one.file for one in chosen]


class Reclaim:
    """Runs passes in the background, after deletions and new sealed files.

    Damaged files are left to the operator.  While data is lost and the operator did not choose to
    go on without it, nothing is dropped, merged or removed: it may be what is left.  While a backup
    runs nothing is removed from the disk and no merged file is published; both happen later.
    """

    def __init__(
        self,
        disk: Disk,
        files: LogFiles,
        records: LedgerRecords,
        limits: LedgerLimits,
        rng: random.Random,
        guard: DeletionGuard,
        damage: DamageReport,
        listing: Callable[[], Awaitable[None]],
        on_lost: Callable[[int, int], None],
    ) -> None:
        """`listing` makes the list of the files durable (see `log_listing`).

        `on_lost` is called with ledger id and entry id of an entry that does not verify.
        """
        self._on_lost = on_lost
        self._damage = damage
        self._listing = listing
        self._disk = disk
        self._files = files
        self._records = records
        self._limits = limits
        self._rng = rng
        self._guard = guard
        self._superfluous: list[str] = []
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()

    def start(self, superfluous: Sequence[str]) -> None:
        """Start; `superfluous` are the files that recovery left behind."""
        self._superfluous.extend(superfluous)
        self._wanted.set()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def wake(self) -> None:
        """Run a pass soon, as a ledger was deleted or a file sealed."""
        self._wanted.set()

    async def close(self) -> None:
        """Stop.  The next start removes unfinished files."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                await self.run_once()
            except (OSError, MagnetarError) as error:
                _log.warning("ledger_reclaim_failed", error=str(error), action="tried again later")
                self._wanted.set()
            except Exception:  # noqa: BLE001 - else no space would ever come back
                _log.exception("ledger_reclaim_failed", action="tried again later")
                self._wanted.set()
            if self._superfluous and not self._damage.keeps_everything:
                self._wanted.set()
            await asyncio.sleep(self._limits.reclaim_pause_s)

    async def run_once(self) -> ReclaimReport:
        """One pass.  Raises `OSError`, `MetadataError`."""
        async with self._lock:
            report = ReclaimReport()
            while not self._damage.keeps_everything:
                # The files are listed before the ledgers' records.  A record is made before the
                # first entry, and ids are never given twice: so a ledger in these files without a
                # record is deleted, and one just being made has no entry in them.
                fixed = tuple(file for file in self._files.sealed if not file.damaged)
                live = frozenset(map(int, await self._records.list_ids()))
                usages = await self._disk.read(partial(usage_of, self._disk, fixed, live))
                dead = [one.file for one in usages if not one.live_records]
                self._replace(dead, None)
                report.dropped += len(dead)
                report.removed += await self._remove()
                sources = choose_sources([one for one in usages if one.live_records], self._limits)
                if not sources or not await self._merge(sources, live):
                    return report
                report.merged += len(sources)
            return report

    def _replace(self, gone: list[LogFile], made: LogFile | None) -> None:
        """Take files off the list; they are removed from the disk later, in this order."""
        # A merged file must not be removed before the files that it replaces, or a start would find
        # those alive again.  It is listed after them, so it goes later.
        if gone:
            self._files.replace(gone, made)
            for file in gone:
                self._superfluous += [file.name, index_name(file.number)]

    async def _remove(self) -> int:
        """Remove superfluous files from the disk, unless a backup runs."""
        names = self._superfluous.copy()

        def job() -> bool:
            with self._guard() as allowed:
                if allowed:
                    for name in names:
                        self._disk.unlink(name)
                    self._disk.sync_directory()
                return allowed

        if not names:
            return 0
        # Off the list first: a crash in between must not make a start miss these files.
        await self._listing()
        if not await self._disk.maintain(job):
            return 0
        del self._superfluous[: len(names)]
        _log.info("ledger_space_reclaimed", files=len(names))
        return len(names)

    async def _merge(self, sources: list[LogFile], live: AbstractSet[int]) -> bool:
        header = (self._files.take_number(), self._rng.getrandbits(64))
        step_bytes = self._limits.compact_step_bytes
        merge = Compaction(self._disk, header, sources, live, step_bytes)
        try:
            written = await self._disk.maintain(merge.step)
            while written:
                await asyncio.sleep(written / self._limits.compact_bytes_per_s)
                written = await self._disk.maintain(merge.step)
            made = await self._disk.maintain(partial(self._publish, merge))
        except DamagedSource as damaged:
            damaged.file.damaged = True
            _log.error("ledger_log_damaged", file=damaged.file.name, offset=damaged.place.offset)
            self._on_lost(damaged.ledger_id, damaged.entry_id)
            await self._disk.maintain(merge.abandon)
            return True
        except OSError as error:
            _log.warning("ledger_merge_failed", error=str(error), action="tried again later")
            await self._disk.maintain(merge.abandon)
            return False
        if made is None:
            self._wanted.set()
            return False
        self._replace(sources, made)
        return True

    def _publish(self, merge: Compaction) -> LogFile | None:
        """Job side: give a merged file its name, unless a backup runs."""
        # In the copy it would hide its sources, and with them entries of ledgers that were deleted
        # after the metadata were copied.
        with self._guard() as allowed:
            if allowed:
                return merge.finish()
            merge.abandon()
            return None
