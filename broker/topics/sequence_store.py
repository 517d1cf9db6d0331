"""Durable sequence ids of a topic's producers: snapshots, and the replay of later entries."""

import asyncio
from collections.abc import Callable

import structlog

from broker.topics.deduplication import (
    NO_POSITION,
    SNAPSHOT_PROPERTY,
    Deduplication,
    ProducerSequence,
)
from config.bounds import (
    READ_BATCH_BYTES,
    READ_BATCH_ENTRIES,
    SEQUENCE_READS_AT_ONCE,
    SEQUENCE_SNAPSHOT_BYTES,
    SEQUENCE_SNAPSHOT_ENTRIES,
    SEQUENCE_SNAPSHOT_S,
    TRACKED_PRODUCER_MS,
    TRACKED_PRODUCERS,
)
from magnetar.protocol.frames import FrameError
from magnetar.protocol.ids import Position
from magnetar.protocol.message import parse_metadata
from magnetar.protocol.server_error import MagnetarError
from storage.clock import Clock
from storage.ledger.store import CorruptEntry, NoSuchLedger
from storage.managed_ledger.cursor import Cursor
from storage.managed_ledger.ledger import ManagedLedger
from storage.managed_ledger.types import ManagedLedgerState, Retention

log = structlog.get_logger(__name__)

KEEP_ALL = Retention(-1, -1)
READER_NAME = "magnetar.producer-sequences"


class SequenceStore:
    """Saves and loads the sequence ids by which repeated SENDs are recognised.

    A snapshot is one property of the managed ledger.  It is taken after SEQUENCE_SNAPSHOT_ENTRIES
    entries, SEQUENCE_SNAPSHOT_BYTES bytes or SEQUENCE_SNAPSHOT_S, when the topic is sealed, and at
    close.  `PublishPipeline` updates `durable` and the `unsaved` counters.
    """

    def __init__(self, clock: Clock, policy: Callable[[], Retention | None]) -> None:
        self.sequences = _no_sequences()
        self.durable = NO_POSITION
        self.unsaved_entries = 0
        self.unsaved_bytes = 0
        self._clock = clock
        self._policy = policy
        self._ledger: ManagedLedger | None = None
        self._loaded = False
        self._reader: Cursor | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._saving: asyncio.Task[None] | None = None

    def retention(self) -> Retention | None:
        """The namespace's retention, or everything until the sequence ids are loaded."""
        return self._policy() if self._loaded else KEEP_ALL

    async def load(self, ledger: ManagedLedger) -> None:
        """Load the snapshot and replay the entries after it.

        Raises the errors of reading: without its sequence ids a producer that comes back would
        store its messages again, so the load of the topic fails and is tried again.
        """
        self._ledger = ledger
        self.durable = self._take_snapshot(ledger)
        # The cursor keeps the entries after the snapshot from being trimmed.
        self._reader = ledger.open_reader_cursor(READER_NAME, self.durable)
        if ledger.state is ManagedLedgerState.TERMINATED:
            await self._load_sealed(ledger)
        else:
            await self._replay(ledger, self.durable)
        self._loaded = True
        # Nothing was trimmed until now; from now on the policy of the namespace holds.
        ledger.use_retention(self.retention)

    async def _load_sealed(self, ledger: ManagedLedger) -> None:
        try:
            await self._replay(ledger, self.durable)
        except (NoSuchLedger, CorruptEntry) as error:
            # These entries are lost for good.  The topic loads for its readers; only producers that
            # come back need sequence ids.  With half of them, a stored message would pass for new.
            log.warning("sequence_ids_unknown", name=ledger.name, error=str(error))
            self.sequences = _no_sequences()
            self.unsaved_entries = 0
        if self.unsaved_entries:
            # Sealing failed before the last snapshot was taken.
            await self.end()
        else:
            await self._release(ledger)

    def _take_snapshot(self, ledger: ManagedLedger) -> Position:
        """Load the snapshot; returns its position.  An unreadable snapshot counts as none."""
        snapshot = ledger.properties.get(SNAPSHOT_PROPERTY)
        if snapshot is None:
            return NO_POSITION
        try:
            return self.sequences.load(snapshot)
        except (ValueError, KeyError, TypeError) as error:
            log.error("sequence_snapshot_unreadable", name=ledger.name, error=str(error))
            return NO_POSITION

    async def _replay(self, ledger: ManagedLedger, position: Position) -> None:
        now_ms = self._clock.now_ms()
        while True:
            entries = await ledger.read(
                ledger.next_position(position),
                max_entries=READ_BATCH_ENTRIES,
                max_bytes=READ_BATCH_BYTES,
            )
            if not entries:
                return
            for entry in entries:
                position = entry.position
                try:
                    self.sequences.replay(parse_metadata(entry.data), position, now_ms)
                except FrameError as error:
                    log.warning("entry_unreadable", position=tuple(position), error=str(error))
            self.durable = position
            self.unsaved_entries += len(entries)

    def appended(self) -> None:
        """Have a snapshot taken, now or later: a group of appends has completed."""
        if (
            self.unsaved_entries >= SEQUENCE_SNAPSHOT_ENTRIES
            or self.unsaved_bytes >= SEQUENCE_SNAPSHOT_BYTES
        ):
            self._start_saving()
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(SEQUENCE_SNAPSHOT_S, self._start_saving)

    async def save(self) -> None:
        """Take a snapshot of all that is durable so far."""
        if self._ledger is None or self._reader is None or self.durable == NO_POSITION:
            return
        position = self.durable
        text = self.sequences.snapshot(position, self._clock.now_ms())
        entries, size_bytes = self.unsaved_entries, self.unsaved_bytes
        await self._ledger.set_properties({SNAPSHOT_PROPERTY: text})
        self.unsaved_entries -= entries
        self.unsaved_bytes -= size_bytes
        self._reader.acknowledge_up_to(position)

    async def end(self) -> None:
        """Take the last snapshot, of a sealed stream, unless that was done before.

        It covers all entries and has the publish times of the last messages, because later loads
        may find no entries any more.
        """
        await self._quiet()
        if self._ledger is None or self._reader is None:
            return
        try:
            await self._read_publish_times()
            await self.save()
        except MagnetarError as error:
            # The cursor stays, so the next load can replay what was not saved.
            log.warning("sequence_snapshot_failed", error=str(error))
            return
        await self._release(self._ledger)

    async def _read_publish_times(self) -> None:
        """Read the publish times of all producers, SEQUENCE_READS_AT_ONCE at the same time."""
        left = iter(tuple(self.sequences.known))

        async def read_some() -> None:
            for sequence in left:
                await self.publish_time_of(sequence)

        readers = (read_some() for _ in range(SEQUENCE_READS_AT_ONCE))
        # All are awaited even if one fails, so that none goes on alone.
        results = await asyncio.gather(*readers, return_exceptions=True)
        for result in results:
            if result is not None:
                raise result

    async def _release(self, ledger: ManagedLedger) -> None:
        """Delete the cursor: no entry is needed for a replay any more."""
        self._reader = None
        await ledger.delete_cursor(READER_NAME)

    async def close(self) -> None:
        """Take a snapshot if anything is not saved yet, and drop the ledger."""
        await self._quiet()
        try:
            if self.unsaved_entries:
                await self.save()
        finally:
            # The ledger asks this store for its retention.
            self._ledger = self._reader = None

    async def _quiet(self) -> None:
        """Cancel the timer, and wait for a snapshot that is being taken."""
        if self._timer is not None:
            self._timer.cancel()
        if self._saving is not None:
            await asyncio.wait({self._saving})

    async def publish_time_of(self, sequence: ProducerSequence) -> None:
        """Read when the last message of a producer was published, if its entry is still stored."""
        if sequence.publish_time_ms is not None or self._ledger is None:
            return
        position = sequence.position
        if position == NO_POSITION:
            return
        found = await self._ledger.read(position, max_entries=1, max_bytes=1)
        if found and found[0].position == position == sequence.position:
            try:
                sequence.publish_time_ms = parse_metadata(found[0].data).publish_time
            except FrameError as error:
                log.warning("entry_unreadable", position=tuple(position), error=str(error))

    def _start_saving(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._saving is None:
            self._saving = asyncio.get_running_loop().create_task(self._save())

    async def _save(self) -> None:
        try:
            await self.save()
        except MagnetarError as error:
            log.warning("sequence_snapshot_failed", error=str(error))
        finally:
            self._saving = None


def _no_sequences() -> Deduplication:
    return Deduplication(limit=TRACKED_PRODUCERS, keep_ms=TRACKED_PRODUCER_MS)
