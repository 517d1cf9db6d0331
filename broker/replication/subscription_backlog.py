"""Pure: what a replicated subscription has not acknowledged in a segment, by where it is from.

A message has one name in all clusters: the source segment, and its position there.  The owner of a
segment holds a `SubscriptionBacklog` for each replicated subscription, and gives it the entries in
the order of the log.  It says what other clusters are told, and which entries are acknowledged by
what they tell (rules F1 to F9 of `../../docs/decisions/replicated-subscriptions-of-segments.md`;
F10 and F11 are for what surrounds it).
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable
from itertools import takewhile
from math import inf
from typing import Final, NamedTuple

from broker.topics.deduplication import chunk_of
from broker.topics.replicated_ranges import EVERYTHING, SourceSegment, record_of
from config.bounds import (
    REPLICATED_SUBSCRIPTION_ENTRIES,
    REPLICATED_SUBSCRIPTION_ENTRIES_ASSURED,
    REPLICATED_SUBSCRIPTION_ENTRIES_OF_BROKER,
)
from magnetar.protocol.ids import EARLIEST, Position
from magnetar.protocol.pulsar_pb2 import MessageMetadata

NONE_LEFT: Final = EVERYTHING.position
"""Instead of the first entry that is left: there is none, and none will come."""


class StoredEntry(NamedTuple):
    """What is known of an entry of the segment.

    `copied_from` are segment and position of the source; None for an entry of this segment, which
    the clusters of `clusters` get, None for all of them.  `uuid` is of a chunked message, and
    `is_last` says whether it is whole with this chunk.  `of_no_origin` is an entry that is neither:
    it stays until it is acknowledged here.
    """

    position: Position
    copied_from: tuple[SourceSegment, Position] | None = None
    clusters: Collection[str] | None = None
    uuid: str = ""
    is_last: bool = True
    of_no_origin: bool = False


def stored_entry_of(metadata: MessageMetadata, position: Position) -> StoredEntry:
    """What an entry says of itself; one that no rule is for is of no origin."""
    nobody = StoredEntry(position, of_no_origin=True)
    if metadata.marker_type:
        return nobody
    chunk = chunk_of(metadata)
    # Two clusters may have chunked messages with one uuid.
    uuid = "" if chunk is None else f"{metadata.replicated_from}/{chunk.uuid}"
    is_last = chunk is None or chunk.last
    if not metadata.replicated_from:
        return StoredEntry(position, None, tuple(metadata.replicate_to) or None, uuid, is_last)
    try:
        found = record_of(metadata)
    except ValueError:
        return nobody
    if found is None:
        return nobody if is_last else StoredEntry(position, uuid=uuid, is_last=False)
    source, record = found
    return StoredEntry(position, (source, record.position), None, uuid, is_last)


class _Message(NamedTuple):
    """An entry whose messages are all here, and the chunks before it."""

    at: Position
    """In the source."""
    entries: tuple[Position, ...]
    clusters: Collection[str] | None


class EntryRoom:
    """How many entries the backlogs of a broker hold together."""

    def __init__(self) -> None:
        self.held = 0

    @property
    def is_scarce(self) -> bool:
        """Whether so many are held that there may soon be no room for more."""
        return 2 * self.held > REPLICATED_SUBSCRIPTION_ENTRIES_OF_BROKER

    def for_one(self) -> float:
        """How many of them one backlog may hold now."""
        is_full = self.held >= REPLICATED_SUBSCRIPTION_ENTRIES_OF_BROKER
        return REPLICATED_SUBSCRIPTION_ENTRIES_ASSURED if is_full else inf


class SubscriptionBacklog:
    """The entries of one segment that one subscription has not acknowledged, by their origin.

    Those of one source segment are in the order of their source positions in each log, so that the
    first one is the lowest (F2).
    """

    def __init__(
        self,
        mark_delete: Position,
        is_acknowledged: Callable[[Position], bool],
        *,
        limit: int = REPLICATED_SUBSCRIPTION_ENTRIES,
        room: EntryRoom | None = None,
        progress: Callable[[], object] = object,
    ) -> None:
        """Begin at a cursor's mark-delete position; `is_acknowledged` asks that cursor.

        With `limit` entries that are not acknowledged, or as `room` has it for those of several
        backlogs, there is no room for more.  `progress` is a value that is another one once more
        are acknowledged.
        """
        self._is_acknowledged = is_acknowledged
        self._limit = limit
        self._room = room or EntryRoom()
        self._read = mark_delete
        self._held = 0
        self._progress = progress
        self._counted: object = None
        """The progress when all entries were counted last."""
        self._messages: dict[SourceSegment | None, deque[_Message]] = {}
        """By source; None: of this segment."""
        self._chunks: dict[str, list[Position]] = {}
        """By uuid: the chunks of messages that are not whole; those of several attempts too."""
        self._others: list[Position] = []
        """Entries of no origin."""
        self._last: dict[SourceSegment, Position] = {}
        """The source position of the last copy that was read."""

    @property
    def read(self) -> Position:
        """The log was read up to here, or is acknowledged up to here."""
        return self._read

    def moved(self, mark_delete: Position) -> None:
        """Take note of the mark-delete position: what it has passed need not be read."""
        self._read = max(self._read, mark_delete)

    def has_room(self) -> bool:
        """Whether one more entry may be read."""
        if self._held < self._most():
            return True
        self._count_again()
        return self._held < self._most()

    def make_room(self) -> None:
        """Leave the room of what was acknowledged behind others to those who may need it."""
        if self._held and self._room.is_scarce:
            self._count_again()

    def _count_again(self) -> None:
        # Of many entries it takes long: not again and again while nothing is acknowledged.
        progress = self._progress()
        if progress != self._counted:
            self._counted = progress
            self._drop_acknowledged()

    @property
    def waits_for_others(self) -> bool:
        """Whether it has no room now, and would have some if other backlogs held less."""
        return self._most() <= self._held < self._limit

    def close(self) -> None:
        """Hold nothing any more: what was read is not used again."""
        self._room.held -= self._held
        self._room = EntryRoom()
        self._room.held = self._held

    def add(self, entry: StoredEntry) -> None:
        """Take the next entry of the log; those that are acknowledged may be left out."""
        self._read = max(self._read, entry.position)
        source, at = entry.copied_from or (None, entry.position)
        if source is not None and not entry.of_no_origin and entry.is_last:
            self._last[source] = max(at, self._last.get(source, EARLIEST))
        if self._is_acknowledged(entry.position):
            return
        self._hold(1)
        if entry.of_no_origin:
            self._others.append(entry.position)
            return
        if not entry.is_last:
            self._chunks.setdefault(entry.uuid, []).append(entry.position)
            return
        earlier = self._chunks.pop(entry.uuid, []) if entry.uuid else []
        message = _Message(at, (*earlier, entry.position), entry.clusters)
        self._messages.setdefault(source, deque()).append(message)

    # What is told to others

    def acknowledged_below(self, cluster: str, answered: Position) -> Position:
        """All entries of this segment below this position, as far as that cluster gets them, are.

        It is not past `answered`, up to which the cluster has answered all that it gets (F1).
        """
        own = self._messages.get(None, deque())
        self._drop_front(own)
        for message in own:
            if _is_for(message, cluster) and not self._is_done(message):
                return min(message.at, answered.following)
        return min(self._read, answered).following

    def has_own(self, cluster: str, sent_after: Position, answered: Position) -> bool:
        """Whether an answer of that cluster may acknowledge an entry; see `acknowledge_own`."""
        own = self._messages.get(None, deque())
        return any(
            _is_for(each, cluster) and each.entries[0] > sent_after and not self._is_done(each)
            for each in takewhile(lambda message: message.at <= answered, own)
        )

    def first_copy(self, source: SourceSegment, *, is_all_read: bool) -> Position:
        """The source position of the first copy that is not acknowledged (F2), or may not be.

        `is_all_read`: no entry of the log was left to read when this was asked (F5).
        """
        copies = self._messages.get(source, deque())
        self._drop_front(copies)
        if copies:
            return copies[0].at
        return NONE_LEFT if is_all_read else self._last.get(source, EARLIEST)

    # What others tell

    def acknowledge_copies(self, source: SourceSegment, below: Position) -> list[Position]:
        """The entries to acknowledge as their source is acknowledged below a position (F1)."""
        copies = self._messages.get(source, deque())
        taken: list[_Message] = []
        while copies and copies[0].at < below:
            taken.append(copies.popleft())
        return self._entries_of(taken)

    def acknowledge_own(
        self, cluster: str, below: Position, sent_after: Position, answered: Position
    ) -> list[Position]:
        """The entries to acknowledge as a cluster's first copy that is left is at `below` (F2).

        It has copies of what is after `sent_after`, where its replicator began, and up to
        `answered`, where that was when the cluster was asked (F3).
        """
        own = self._messages.get(None, deque())
        taken: list[_Message] = []
        kept: deque[_Message] = deque()
        while own and own[0].at < below and own[0].at <= answered:
            message = own.popleft()
            is_there = _is_for(message, cluster) and message.entries[0] > sent_after
            (taken if is_there else kept).append(message)
        own.extendleft(reversed(kept))
        return self._entries_of(taken)

    def acknowledge_pruned(
        self, cluster: str, incarnation: int, segments: Collection[int]
    ) -> list[Position]:
        """The entries to acknowledge as their source segments are not in their topic now (F8).

        The caller sees that the layout with these segments is not older than one it has known.
        """
        pruned = [
            source
            for source in self._messages.keys() | self._last.keys()
            if source is not None
            and source[:2] == (cluster, incarnation)
            and source.segment_id not in segments
        ]
        entries: list[Position] = []
        for source in pruned:
            self._last.pop(source, None)
            entries += self._entries_of(self._messages.pop(source, ()))
        return entries

    # Helpers

    def _most(self) -> float:
        return min(self._limit, self._room.for_one())

    def _hold(self, more: int) -> None:
        self._held += more
        self._room.held += more
        assert 0 <= self._held <= self._room.held

    def _is_done(self, message: _Message) -> bool:
        return all(self._is_acknowledged(each) for each in message.entries)

    def _drop_front(self, messages: deque[_Message]) -> None:
        while messages and self._is_done(messages[0]):
            self._hold(-len(messages.popleft().entries))

    def _entries_of(self, messages: Iterable[_Message]) -> list[Position]:
        entries = [each for message in messages for each in message.entries]
        self._hold(-len(entries))
        return [each for each in entries if not self._is_acknowledged(each)]

    def _drop_acknowledged(self) -> None:
        """Forget entries that were acknowledged behind others that are not."""
        for source, messages in list(self._messages.items()):
            left = deque(each for each in messages if not self._is_done(each))
            if left:
                self._messages[source] = left
            else:
                del self._messages[source]
        for uuid, positions in list(self._chunks.items()):
            self._chunks[uuid] = [each for each in positions if not self._is_acknowledged(each)]
            if not self._chunks[uuid]:
                del self._chunks[uuid]
        self._others = [each for each in self._others if not self._is_acknowledged(each)]
        whole = sum(len(each.entries) for kept in self._messages.values() for each in kept)
        held = whole + sum(map(len, self._chunks.values())) + len(self._others)
        self._hold(held - self._held)


def _is_for(message: _Message, cluster: str) -> bool:
    return message.clusters is None or cluster in message.clusters
