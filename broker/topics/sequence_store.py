"""Keeps the producers' sequence ids of one topic on disk.

Rules:

- A snapshot is one property of the managed ledger.  It is taken after SEQUENCE_SNAPSHOT_ENTRIES
  entries, SEQUENCE_SNAPSHOT_BYTES bytes or SEQUENCE_SNAPSHOT_S, and at close.
- A load takes the snapshot and replays what follows it.  A reader cursor at the snapshot keeps that
  from being trimmed; until it stands, nothing is.
- The last snapshot of a sealed stream covers all its entries and has the publish times of the last
  messages, since later loads may find no entries any more.  If sealing broke off before it was
  taken, the next load takes it.
- Only producers that come back need the sequence ids of a sealed stream.  If its entries are lost
  for good, it knows no producers; the load goes on, for readers.  Any other read error fails the
  load, which is tried again: who came back meanwhile would send again what is stored.
"""

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

    `durable` and the `unsaved` counters are kept by `Publishing`.
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
        """Take what is stored and replay the entries after it."""
        self._ledger = ledger
        self.durable = self._take_snapshot(ledger)
        self._reader = ledger.open_reader_cursor(READER_NAME, self.durable)
        if ledger.state is ManagedLedgerState.TERMINATED:
            await self._load_sealed(ledger)
        else:
            await self._replay(ledger, self.durable)
        self._loaded = True
        # Until here all was kept: let go of what may go, and be told when time lets more go.
        ledger.use_retention(self.retention)

    async def _load_sealed(self, ledger: ManagedLedger) -> None:
        try:
            await self._replay(ledger, self.durable)
        except (NoSuchLedger, CorruptEntry) as error:
            log.warning("sequence_ids_unknown", name=ledger.name, error=str(error))
            # Half of it would pass what is stored for what is not.
            self.sequences = _no_sequences()
            self.unsaved_entries = 0
        if self.unsaved_entries:
            await self.end()
        else:
            await self._release(ledger)

    def _take_snapshot(self, ledger: ManagedLedger) -> Position:
        """Where to go on from; a snapshot that cannot be read is as good as none."""
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
        """A group of appends has completed: see to it that a snapshot follows."""
        if (
            self.unsaved_entries >= SEQUENCE_SNAPSHOT_ENTRIES
            or self.unsaved_bytes >= SEQUENCE_SNAPSHOT_BYTES
        ):
            self._start_saving()
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(SEQUENCE_SNAPSHOT_S, self._start_saving)

    async def save(self) -> None:
        """Make everything that is durable so far known to the next load."""
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
        """The stream is sealed: take the last snapshot, unless that was done before."""
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
        """Find out those of all producers, at most SEQUENCE_READS_AT_ONCE at the same time."""
        left = iter(tuple(self.sequences.known))

        async def read_some() -> None:
            for sequence in left:
                await self.publish_time_of(sequence)

        readers = (read_some() for _ in range(SEQUENCE_READS_AT_ONCE))
        # None goes on alone when another one fails.
        results = await asyncio.gather(*readers, return_exceptions=True)
        for result in results:
            if result is not None:
                raise result

    async def _release(self, ledger: ManagedLedger) -> None:
        """No entry is needed for a replay any more."""
        self._reader = None
        await ledger.delete_cursor(READER_NAME)

    async def close(self) -> None:
        """Save what is not saved."""
        await self._quiet()
        if self.unsaved_entries:
            await self.save()

    async def _quiet(self) -> None:
        """No more snapshots by themselves; the one being taken is waited for."""
        if self._timer is not None:
            self._timer.cancel()
        if self._saving is not None:
            await asyncio.wait({self._saving})

    async def publish_time_of(self, sequence: ProducerSequence) -> None:
        """Find out when the last message of a producer was published, if its entry is there."""
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
