"""Durable sequence ids and ranges of a topic: snapshots, and the replay of later entries."""

import asyncio
import contextlib
import json
import math
from collections.abc import Callable, Iterable
from typing import ClassVar

import structlog

from broker.topics.carried_ids import FinalRanges, FinalSequences
from broker.topics.deduplication import (
    NO_POSITION,
    REPLICATED_MEMBER,
    SNAPSHOT_PROPERTY,
    Deduplication,
    ProducerSequence,
)
from broker.topics.replicated_ranges import record_of
from broker.topics.segment_sources import SegmentSources
from config.bounds import (
    CARRIED_WAIT_S,
    READ_BATCH_BYTES,
    READ_BATCH_ENTRIES,
    SEQUENCE_ATTACH_S,
    SEQUENCE_READS_AT_ONCE,
    SEQUENCE_SNAPSHOT_BYTES,
    SEQUENCE_SNAPSHOT_ENTRIES,
    SEQUENCE_SNAPSHOT_S,
    SEQUENCE_WRITERS_S,
    TRACKED_PRODUCER_MS,
    TRACKED_PRODUCERS,
)
from magnetar.protocol.frames import FrameError
from magnetar.protocol.ids import Position
from magnetar.protocol.message import parse_metadata
from magnetar.protocol.names import SegmentName
from magnetar.protocol.pulsar_pb2 import MessageMetadata
from magnetar.protocol.server_error import InternalError, MagnetarError, ServerError
from storage.clock import Clock
from storage.ledger.store import CorruptEntry, NoSuchLedger
from storage.managed_ledger.cursor import Cursor
from storage.managed_ledger.ledger import ManagedLedger
from storage.managed_ledger.types import ManagedLedgerState, Retention

log = structlog.get_logger(__name__)

KEEP_ALL = Retention(-1, -1)
READER_NAME = "magnetar.producer-sequences"
AWAITED_PROPERTY = "magnetar.awaited-sequences"
"""The parents whose final sequence ids a segment awaits, a JSON list of their names."""


class SequencesAwaited(InternalError):
    """A segment does not know the sequence ids of its parents yet: try again."""

    code: ClassVar[ServerError] = ServerError.SERVICE_NOT_READY


def awaited_property(parents: Iterable[SegmentName]) -> str:
    """The value of AWAITED_PROPERTY for a segment that a layout change makes of these."""
    return json.dumps([str(parent) for parent in parents])


class SequenceStore:
    """Saves and loads the sequence ids by which repeated SENDs are recognised.

    A snapshot is one property of the managed ledger.  It is taken after SEQUENCE_SNAPSHOT_ENTRIES
    entries, SEQUENCE_SNAPSHOT_BYTES bytes or SEQUENCE_SNAPSHOT_S, when the topic is sealed, and at
    close.  `PublishPipeline` updates `durable` and the `unsaved` counters.

    A segment that a layout change made has the ids of its parents once `inherit` was called.

    The snapshot of a segment also has the ranges that other clusters have replicated to it.
    """

    def __init__(
        self,
        clock: Clock,
        policy: Callable[[], Retention | None],
        segment: SegmentName | None = None,
    ) -> None:
        """`segment` is None for a topic to which nothing is replicated by ranges."""
        self.sequences = _no_sequences()
        self.sources = (
            None if segment is None else SegmentSources(segment.hash_start, segment.hash_end)
        )
        """What is stored here of the segments of other clusters."""
        self.durable = NO_POSITION
        self.unsaved_entries = 0
        self.unsaved_bytes = 0
        self._clock = clock
        self._policy = policy
        self._ledger: ManagedLedger | None = None
        self._loaded = False
        self._reader: Cursor | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._writers_timer: asyncio.TimerHandle | None = None
        self._writers_due_s = math.inf
        """When `_writers_timer` fires; uvloop's handles do not always tell."""
        self._saved_s = -math.inf
        self._saving: asyncio.Task[None] | None = None
        self._unsaved_writers = False
        self._awaiting_save: list[asyncio.Future[None]] = []
        self._left_out = 0
        self._awaited: list[str] = []
        self._inherited = asyncio.Event()

    def retention(self) -> Retention | None:
        """The namespace's retention, or everything until the sequence ids are loaded."""
        return self._policy() if self._loaded else KEEP_ALL

    async def load(self, ledger: ManagedLedger) -> None:
        """Load the snapshot and replay the entries after it.

        Raises the errors of reading: without its sequence ids a producer that comes back would
        store its messages again, so the load of the topic fails and is tried again.
        """
        self._ledger = ledger
        self._awaited = _awaited_of(ledger)
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
            position = self.sequences.load(snapshot)
            if self.sources is not None:
                rows = json.loads(snapshot).get(REPLICATED_MEMBER, [])
                self.sources = SegmentSources.from_json(
                    rows, self.sources.hash_start, self.sources.hash_end
                )
        except (ValueError, KeyError, TypeError) as error:
            log.error("sequence_snapshot_unreadable", name=ledger.name, error=str(error))
            return NO_POSITION
        return position

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
                    self._replay_entry(parse_metadata(entry.data), position, now_ms)
                except (FrameError, ValueError) as error:
                    log.warning("entry_unreadable", position=tuple(position), error=str(error))
            self.durable = position
            self.unsaved_entries += len(entries)

    def _replay_entry(self, metadata: MessageMetadata, position: Position, now_ms: int) -> None:
        if self.sources is None or not metadata.replicated_from:
            self.sequences.replay(metadata, position, now_ms)
            return
        # Of a chunked message only the last chunk has a record.
        found = record_of(metadata)
        if found is not None:
            self.sources.replay(*found)

    def appended(self) -> None:
        """Have a snapshot taken, now or later: a group of appends has completed."""
        if (
            self.unsaved_entries >= SEQUENCE_SNAPSHOT_ENTRIES
            or self.unsaved_bytes >= SEQUENCE_SNAPSHOT_BYTES
        ):
            self._start_saving()
        else:
            self._save_in_time()

    def _save_in_time(self) -> None:
        """Have a snapshot taken in SEQUENCE_SNAPSHOT_S at the latest."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(SEQUENCE_SNAPSHOT_S, self._start_saving)

    async def save(self) -> None:
        """Take a snapshot of all that is durable so far.  Raises the errors of the write."""
        waiting, self._awaiting_save = self._awaiting_save, []
        writers, self._unsaved_writers = self._unsaved_writers, False
        try:
            await self._save_now()
        except MagnetarError as error:
            self._unsaved_writers |= writers
            for each in waiting:
                if not each.done():
                    each.set_exception(error)
            raise
        finally:
            for each in waiting:
                if not each.done():
                    each.set_result(None)

    async def _save_now(self) -> None:
        if self._ledger is None or self._reader is None:
            return
        position, sources = self.durable, self.sources
        told = sources is not None and sources.must_save
        if position == NO_POSITION and self.sequences.is_empty and not told:
            return
        changes = 0 if sources is None else sources.changes
        text = self._snapshot(sources)
        entries, size_bytes = self.unsaved_entries, self.unsaved_bytes
        self._report_left_out(self._ledger.name)
        await self._ledger.set_properties({SNAPSHOT_PROPERTY: text})
        if sources is not None:
            sources.saved(changes)
        self.unsaved_entries -= entries
        self.unsaved_bytes -= size_bytes
        if self._reader is not None and position != NO_POSITION:
            self._reader.acknowledge_up_to(position)

    def _snapshot(self, sources: SegmentSources | None) -> str:
        rows = [] if sources is None else sources.to_json()
        replicated = json.dumps(rows, separators=(",", ":")) if rows else ""
        return self.sequences.snapshot(self.durable, self._clock.now_ms(), replicated)

    def _report_left_out(self, ledger_name: str) -> None:
        """Log that the snapshot lacks names, or has all of them again."""
        left_out, before = self.sequences.left_out, self._left_out
        self._left_out = left_out
        if left_out and not before:
            log.warning(
                "sequence_ids_left_out",
                name=ledger_name,
                names=left_out,
                of=len(self.sequences),
                effect="after a restart, messages that their producers send again are stored twice",
                next="use fewer or shorter producer names",
            )
        elif before and not left_out:
            log.info("sequence_ids_complete", name=ledger_name)

    def writers_changed(self) -> None:
        """Have a snapshot taken soon: the client that has a producer name is another one now."""
        self._unsaved_writers = True
        if self._ledger is not None and self._writers_timer is None:
            self._save_after(SEQUENCE_WRITERS_S)

    async def save_writer(self) -> None:
        """Return when a snapshot that has the newest client of a producer name is durable.

        It begins within SEQUENCE_ATTACH_S, and those that wait meanwhile share it.  Raises the
        errors of the write.
        """
        if self._ledger is None:
            return
        saved: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._awaiting_save.append(saved)
        self._save_after(SEQUENCE_ATTACH_S)
        await saved

    # Layout changes

    @property
    def awaits_parents(self) -> bool:
        """Whether the sequence ids of the segment's parents are not here yet."""
        return bool(self._awaited)

    async def wait_inherited(self) -> None:
        """Return when the sequence ids of the parents are here.  Raises `SequencesAwaited`."""
        if not self._awaited:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._inherited.wait(), CARRIED_WAIT_S)
        if self._awaited:
            raise SequencesAwaited(
                f"The final sequence ids of {', '.join(self._awaited)} are not here yet: try again."
            )

    async def inherit(self, segment: SegmentName, finals: FinalSequences) -> None:
        """Take over the final ids and ranges of the segment's parents, durably.

        Later calls change nothing: messages of the segment may have replaced some of the ids.
        """
        if self._ledger is None or not self._awaited:
            return
        self.sequences.inherit(segment, finals.producers, self._clock.now_ms())
        # Until the ranges are here no sender of another cluster is taken (R6).
        sources = SegmentSources.inherited(
            segment.hash_start,
            segment.hash_end,
            [SegmentSources.from_json(each.sources, *each[:2]) for each in finals.ranges],
        )
        # One write, so that all of it is there when nothing is awaited any more.
        text = self._snapshot(sources)
        self._report_left_out(self._ledger.name)
        await self._ledger.set_properties(
            {SNAPSHOT_PROPERTY: text, AWAITED_PROPERTY: awaited_property(())}
        )
        self.sources = sources
        self._awaited = []
        self._inherited.set()

    def final(self, segment: SegmentName, changed_ms: int) -> FinalSequences:
        """The ids of all names and the ranges, once the segment is sealed.

        `changed_ms` is as for `Deduplication.final`.
        """
        now_ms, sources = self._clock.now_ms(), self.sources
        ids = self.sequences.final(segment, changed_ms=changed_ms, now_ms=now_ms)
        if sources is None:
            return FinalSequences(ids)
        ranges = FinalRanges(sources.hash_start, sources.hash_end, sources.to_json())
        return FinalSequences(ids, [ranges])

    # The end

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
            if self.unsaved_entries or self._unsaved_writers or self._awaiting_save:
                await self.save()
        finally:
            # The ledger asks this store for its retention.
            self._ledger = self._reader = None
            self._inherited.set()

    async def _quiet(self) -> None:
        """Cancel the timers, and wait for a snapshot that is being taken."""
        while self._saving is not None:
            await asyncio.wait({self._saving})
        self._cancel_timers()

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

    def _cancel_timers(self) -> None:
        for timer in (self._timer, self._writers_timer):
            if timer is not None:
                timer.cancel()
        self._timer = self._writers_timer = None

    def _start_saving(self) -> None:
        self._cancel_timers()
        if self._saving is None:
            self._saving = asyncio.get_running_loop().create_task(self._save())

    def _save_after(self, pause_s: float) -> None:
        """Begin a snapshot when the last one began so long ago, or now."""
        loop = asyncio.get_running_loop()
        due_s = self._saved_s + pause_s
        if due_s <= loop.time():
            self._start_saving()
        elif self._writers_timer is None or self._writers_due_s > due_s:
            # A snapshot has all names: many that come and go together take one.
            if self._writers_timer is not None:
                self._writers_timer.cancel()
            self._writers_due_s = due_s
            self._writers_timer = loop.call_at(due_s, self._start_saving)

    async def _save(self) -> None:
        self._saved_s = asyncio.get_running_loop().time()
        try:
            await self.save()
        except MagnetarError as error:
            log.warning("sequence_snapshot_failed", error=str(error))
            # Of a topic that is quiet from now on, too: its space waits for the snapshot.
            self._save_in_time()
        finally:
            self._saving = None
        if self._awaiting_save:
            self._save_after(SEQUENCE_ATTACH_S)
        elif self._unsaved_writers:
            self.writers_changed()


def _awaited_of(ledger: ManagedLedger) -> list[str]:
    return [str(name) for name in json.loads(ledger.properties.get(AWAITED_PROPERTY, "[]"))]


def _no_sequences() -> Deduplication:
    return Deduplication(limit=TRACKED_PRODUCERS, keep_ms=TRACKED_PRODUCER_MS)
