"""A segment of either cluster, with the cursor of the subscription and what its owner knows."""

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from broker.replication.subscription_backlog import NONE_LEFT, StoredEntry, SubscriptionBacklog
from broker.topics.completeness import (
    INCOMPLETE,
    Completeness,
    Received,
    received_of,
    still_lacking,
)
from broker.topics.replicated_ranges import SourceSegment
from broker.topics.subscription_positions import FirstCopy
from magnetar.protocol.ids import EARLIEST, Position
from tests.replicated_subscriptions.rules import Rules
from tests.segment_replication.source import Log, Message
from tests.segment_replication.target import TargetSegment, Violation

OTHER = "Q"
"""A third cluster, whose messages are in the logs too."""


class LogEntry(NamedTuple):
    """An entry of a log: what is known of it, and its messages."""

    stored: StoredEntry
    messages: tuple[Message, ...]


class ConsumedSegment:
    """One segment: its log, its cursor, and its owner's backlog of the subscription."""

    cluster = ""

    def __init__(self, rules: Rules, limit: int) -> None:
        self.rules = rules
        self.limit = limit
        self.has_cursor = False
        self.acked: set[Position] = set()
        self.durable: set[Position] = set()
        self.told: dict[SourceSegment | str, Position] = {}
        self.backlog = self._new_backlog()

    # The log; each cluster has its own form of it.

    def entries(self) -> Sequence[LogEntry]:
        """All entries of the log."""
        raise NotImplementedError

    @property
    def terminated(self) -> bool:
        """Whether the log has ended."""
        raise NotImplementedError

    # The owner

    def _new_backlog(self) -> SubscriptionBacklog:
        return self.rules.backlog(EARLIEST, lambda each: each in self.acked, limit=self.limit)

    def crash(self) -> None:
        """Another owner has what was durable."""
        self.acked = set(self.durable)
        self.backlog = self._new_backlog()

    def read(self, count: int) -> None:
        """Read on, at most so many entries."""
        if not self.has_cursor:
            return
        for entry in self.entries():
            if entry.stored.position <= self.backlog.read:
                continue
            if count == 0 or not self.backlog.has_room():
                return
            self.backlog.add(self._known(entry.stored))
            count -= 1

    def _known(self, stored: StoredEntry) -> StoredEntry:
        if self.rules.breaks("F6") and stored.copied_from is not None:
            source, at = stored.copied_from
            stored = stored._replace(copied_from=(source._replace(incarnation=0), at))
        if self.rules.breaks("F7") and stored.uuid:
            is_copy = self.cluster == "R"
            stored = stored._replace(
                uuid="", is_last=True, of_no_origin=is_copy and not stored.is_last
            )
        return stored

    def is_all_read(self) -> bool:
        """Whether nothing of the log is left to read."""
        entries = self.entries()
        return not entries or entries[-1].stored.position <= self.backlog.read

    def acknowledge(self, positions: Iterable[Position], consumed: set[Message]) -> None:
        """Acknowledge what another cluster has.  Raises `Violation` for what no consumer has."""
        wanted = set(positions)
        for entry in self.entries():
            if entry.stored.position in wanted:
                for message in entry.messages:
                    if message not in consumed:
                        raise Violation(
                            f"{message} is acknowledged in {self.cluster} by no consumer"
                        )
        self.acked |= wanted

    # Consumers

    def unacknowledged(self) -> list[LogEntry]:
        """What is left for consumers."""
        return [each for each in self.entries() if each.stored.position not in self.acked]

    def is_drained(self) -> bool:
        """Whether the subscription has all of a log that has ended."""
        return self.has_cursor and self.terminated and not self.unacknowledged()

    def consume(self, rng: random.Random, ahead: int) -> list[Message]:
        """Acknowledge an entry, one of the next few; chunks with the last one of their message."""
        left = self.unacknowledged()
        whole = {each.stored.uuid for each in left if each.stored.uuid and each.stored.is_last}
        ready = [
            each
            for each in left
            if each.stored.is_last or (self.terminated and each.stored.uuid not in whole)
        ]
        if not ready or not self.has_cursor:
            return []
        entry = rng.choice(ready[:ahead])
        stored = entry.stored
        self.acked.add(stored.position)
        if stored.uuid:
            self.acked |= {
                each.stored.position
                for each in left
                if each.stored.uuid == stored.uuid and each.stored.position <= stored.position
            }
        return list(entry.messages)


class HomeSegment(ConsumedSegment):
    """A segment of the cluster that the messages are from."""

    cluster = "S"

    def __init__(self, rules: Rules, limit: int, log: Log) -> None:
        self.log = log
        self.sent_after = EARLIEST
        """The replicator began behind this."""
        super().__init__(rules, limit)

    def entries(self) -> Sequence[LogEntry]:
        """See the base class.  An entry without anything is from a third cluster."""
        return [
            LogEntry(
                StoredEntry(each.position, (SourceSegment(OTHER, 7, 0), each.position))
                if not each.messages and each.chunk is None
                else StoredEntry(
                    each.position,
                    uuid="" if each.chunk is None else each.chunk.uuid,
                    is_last=each.chunk is None or each.chunk.last,
                ),
                each.messages,
            )
            for each in self.log.entries
        ]

    @property
    def terminated(self) -> bool:
        """See the base class."""
        return self.log.terminated

    def below(self) -> Position:
        """What it tells the other cluster."""
        if not self.has_cursor:
            return Position(1 << 40, 0) if self.rules.breaks("F10") else EARLIEST
        below = self.backlog.acknowledged_below("R", self.answered())
        entries = self.log.entries
        is_over = self.terminated and (not entries or below > entries[-1].position)
        return NONE_LEFT if is_over else below

    def answered(self) -> Position:
        """The mark-delete position of its replicator."""
        passed = EARLIEST
        for entry in self.log.entries:
            if entry.position not in self.log.acked:
                break
            passed = entry.position
        return passed


class CopySegment(ConsumedSegment):
    """A segment of the other cluster."""

    cluster = "R"

    def __init__(self, rules: Rules, limit: int, segment: TargetSegment) -> None:
        self.segment = segment
        self.from_start = True
        """The subscription was made at the first entry of a log that had lost none."""
        self.complete = True
        """Whether it has had every copy that was not consumed at home before it was made (F11)."""
        self.lacking: dict[int, Mapping[int, Position]] = {}
        """Else up to where copies may be missing, by incarnation, once its owner was asked."""
        self.noted = INCOMPLETE
        """What its cursor notes of what had been received."""
        self.dropped = False
        """It was pruned while the subscription was not there."""
        self._has_cursor = False
        super().__init__(rules, limit)

    @property
    def has_cursor(self) -> bool:
        """Whether it has the subscription."""
        return self._has_cursor

    @has_cursor.setter
    def has_cursor(self, is_there: bool) -> None:
        if is_there and not self._has_cursor:
            # A child that waits for what its parents received does not know it yet.
            self.noted = Completeness(received=None if self.segment.parents else self._received())
        self._has_cursor = is_there

    def crash(self) -> None:
        """See the base class."""
        super().crash()
        self.lacking.clear()

    def is_drained(self) -> bool:
        """See the base class."""
        return self.dropped or super().is_drained()

    def lacks(self, incarnation: int, below: Mapping[int, Position], ids: Collection[int]) -> None:
        """Take note of what home has consumed: of that no copy can be missing."""
        if self.complete or not self.has_cursor:
            return
        lacking = self.lacking.get(incarnation)
        if lacking is None:
            noted = self.noted.received
            lacking = received_of(self._received() if noted is None else noted, "S", incarnation)
        self.lacking[incarnation] = still_lacking(lacking, below, ids)
        if self.segment.sources.is_newest("S", incarnation):
            self.complete = not self.lacking[incarnation]

    def is_late(self, incarnation: int) -> bool:
        """Whether it may lack copies of this incarnation of the topic."""
        return not self.complete and bool(self.lacking.get(incarnation, True))

    def _received(self) -> Received:
        received = self.segment.sources.last_received()
        if self.rules.breaks("F11-ancestors"):
            copies = (each.stored.copied_from for each in self.entries())
            here = {each[0] for each in copies if each is not None}
            return {each: received[each] for each in received.keys() & here}
        return received

    def entries(self) -> Sequence[LogEntry]:
        """See the base class.  An entry without anything was written here."""
        entries = []
        for number, frame in enumerate(self.segment.log):
            stored = StoredEntry(Position(0, number))
            if frame.record is not None:
                stored = stored._replace(copied_from=(frame.source, frame.record.position))
            if frame.chunk is not None:
                stored = stored._replace(uuid=frame.chunk.uuid, is_last=frame.chunk.last)
            entries.append(LogEntry(stored, frame.messages))
        return entries

    @property
    def terminated(self) -> bool:
        """See the base class."""
        return self.segment.terminated

    def first_copy(self, source: SourceSegment) -> FirstCopy | None:
        """What it answers; nothing without the subscription."""
        if not self.has_cursor:
            if self.rules.breaks("F10"):
                return FirstCopy(Position(1 << 40, 0), self.terminated)
            return None
        first = self.backlog.first_copy(source, is_all_read=self.is_all_read())
        return FirstCopy(first, self.terminated)

    def answer(self, source: SourceSegment, below: Position) -> FirstCopy | None:
        """The same, but no more than was told of a source whose copies it may lack (F11)."""
        first = self.first_copy(source)
        lacking = {} if self.complete else self.lacking.get(source.incarnation, {})
        if first is None or source.segment_id not in lacking or self.rules.breaks("F11"):
            return first
        return first._replace(position=min(first.position, below))
