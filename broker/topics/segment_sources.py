"""Pure: what a segment takes of the segments of other clusters, each message once and in order.

The owner of the segment here holds a `SegmentSources`.  A sender of another cluster attaches, is
told what is stored, and sends what lies past that (rules R5 to R8 of
`../../docs/decisions/replicated-segments.md`).
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Self

from broker.topics.replicated_ranges import (
    EVERYTHING,
    NOTHING,
    Mark,
    PartRecord,
    PartState,
    ReplicatedRanges,
    SourceSegment,
)
from broker.topics.source_positions import REPLICATOR_PREFIX, bounded_key
from config.bounds import (
    MAX_SEGMENTS,
    REPLICATED_RANGES,
    SOURCE_CLUSTERS,
    SOURCE_INCARNATIONS,
)
from magnetar.protocol.ids import LONG_MAX, Position
from magnetar.protocol.pulsar_pb2 import SourceState as WireState
from magnetar.protocol.server_error import PeerError, ServerError


class StaleSender(PeerError):
    """The segment has another owner in its cluster by now, or is not in its topic any more."""

    code: ClassVar[ServerError] = ServerError.PRODUCER_FENCED


class PartRefused(PeerError):
    """A sender sends out of order: it has to attach again, and ask what is stored."""

    code: ClassVar[ServerError] = ServerError.PERSISTENCE_ERROR


class SessionEnded(PartRefused):
    """Another session of the sender has begun, or a part was refused."""


class TooManyRanges(PeerError):
    """A segment remembers no further source segments."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


class SourceRefused(PeerError):
    """What a sender says of its side cannot be."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


class SourceState(NamedTuple):
    """What a sender says of its side when it attaches.

    `owner_epoch` is of the owner of the source segment.  `segments` are all of its topic at
    `layout_epoch`, sealed ones included, and `drained` are those that are its ancestors: nothing of
    them is sent any more (R2).  `acknowledged` is the mark-delete position of the sender's cursor:
    all up to it was answered, so it is stored here, or was never for here.
    """

    source: SourceSegment
    owner_epoch: int
    layout_epoch: int
    segments: frozenset[int]
    drained: frozenset[int]
    acknowledged: Position

    @classmethod
    def from_wire(cls, sender: str, state: WireState) -> Self:
        """Decode it; `sender` is the name of the producer, `pulsar.repl.<cluster>.<segment id>`.

        Raises `SourceRefused`.
        """
        cluster, _, segment_id = sender.removeprefix(REPLICATOR_PREFIX).rpartition(".")
        is_named = bool(cluster) and bounded_key(cluster) == cluster
        if not is_named or segment_id != str(state.segment_id):
            raise SourceRefused(
                f"The sender of segment {state.segment_id} is named {sender!r:.100}: name it "
                f"{REPLICATOR_PREFIX}<cluster>.{state.segment_id}."
            )
        # `EVERYTHING` is no position, and what is less than none could not be loaded again.
        if not all(-1 <= each < LONG_MAX for each in (state.ledger_id, state.entry_id)):
            raise SourceRefused(
                f"The sender of segment {state.segment_id} acknowledged "
                f"{state.ledger_id}:{state.entry_id}, which is no position: send the mark-delete "
                "position of its cursor."
            )
        # Before they are sets: a frame has room for millions of them.
        most = max(len(state.segments), len(state.ancestors))
        segments = frozenset(state.segments[:MAX_SEGMENTS])
        drained = frozenset(state.ancestors[:MAX_SEGMENTS])
        if most > MAX_SEGMENTS or not drained | {state.segment_id} <= segments:
            raise SourceRefused(
                f"The layout of cluster {cluster} came with {most} segments: send all of it, with "
                f"segment {state.segment_id} and its ancestors, and {MAX_SEGMENTS} at most."
            )
        return cls(
            SourceSegment(cluster, state.incarnation, state.segment_id),
            state.owner_epoch,
            state.layout_epoch,
            segments,
            drained - {state.segment_id},
            Position(state.ledger_id, state.entry_id),
        )

    def to_wire(self) -> WireState:
        """Encode it; the name of the producer has the cluster."""
        return WireState(
            incarnation=self.source.incarnation,
            segment_id=self.source.segment_id,
            owner_epoch=self.owner_epoch,
            layout_epoch=self.layout_epoch,
            segments=sorted(self.segments),
            ancestors=sorted(self.drained),
            ledger_id=self.acknowledged.ledger_id,
            entry_id=self.acknowledged.entry_id,
        )


class Session:
    """One attachment of a sender.  It ends with the first part that is refused."""

    __slots__ = ("expected", "open", "source")

    def __init__(self, source: SourceSegment) -> None:
        self.source = source
        self.expected = 0
        """The sequence id of the next part."""
        self.open = True


@dataclass(slots=True)
class _Source:
    """One source segment: what is durable, and what the ledger took but may still lose."""

    durable: ReplicatedRanges
    accepted: ReplicatedRanges
    owner_epoch: int = -1
    session: Session | None = None
    in_flight: int = 0

    def raise_all(self, mark: Mark) -> None:
        """Count everything up to a mark as stored."""
        self.durable = self.durable.all_raised(mark)
        self.accepted = self.accepted.all_raised(mark)


@dataclass(slots=True)
class _Topic:
    """The topic of another cluster in one incarnation; `layout_epoch` is the newest one known."""

    layout_epoch: int = -1
    segments: dict[int, _Source] = field(default_factory=dict)


class SegmentSources:
    """The source segments of which a segment of this cluster has messages.

    The caller appends to the ledger what `publish` calls new, in that order, and says with `stored`
    or `failed` what came of it.
    """

    def __init__(self, hash_start: int, hash_end: int, *, limit: int = REPLICATED_RANGES) -> None:
        """`limit` is the number of ranges above which no further source segment is taken."""
        self._limit = limit
        self._changes = self._saved = self.failures = 0
        self.hash_start = hash_start
        self.hash_end = hash_end
        self._topics: dict[tuple[str, int], _Topic] = {}
        """By cluster and incarnation, those that attached last at the end."""
        self._in_flight: deque[tuple[_Source, PartRecord | None]] = deque()

    @property
    def ranges(self) -> int:
        """The number of ranges that are remembered."""
        return sum(
            len(source.durable.runs)
            for topic in self._topics.values()
            for source in topic.segments.values()
        )

    @property
    def _accepted_ranges(self) -> int:
        """The number of ranges once all that is on its way is durable."""
        return sum(
            len(source.accepted.runs)
            for topic in self._topics.values()
            for source in topic.segments.values()
        )

    # A sender

    def attach(self, state: SourceState) -> Session:
        """Begin a session; an earlier one of the same source ends.

        Raises `StaleSender`, `TooManyRanges`.
        """
        self.require_current(state)
        cluster, incarnation, segment_id = state.source
        clusters = {name for name, _ in self._topics}
        if cluster not in clusters and len(clusters) >= SOURCE_CLUSTERS:
            raise TooManyRanges(
                f"A segment remembers {SOURCE_CLUSTERS} other clusters, and has them: replicate "
                f"from fewer clusters than with {cluster}."
            )
        topic = self._topics.setdefault((cluster, incarnation), _Topic())
        self._changes += state.layout_epoch > topic.layout_epoch
        self._prune(topic, state)
        for ancestor in topic.segments.keys() & state.drained:
            self._changes += self._end(topic.segments[ancestor])
        self._forget(cluster, incarnation)
        new = (state.drained | {segment_id}) - topic.segments.keys()
        if new and self.ranges + len(new) > self._limit:
            raise TooManyRanges(
                f"A segment remembers {self._limit} ranges of other clusters, and has them: "
                f"let cluster {cluster} drain and prune sealed segments."
            )
        for ancestor in state.drained & new:
            self._changes += self._end(self._source(state.source._replace(segment_id=ancestor)))
        source = self._source(state.source)
        source.owner_epoch = state.owner_epoch
        source.raise_all(Mark(*state.acknowledged))
        if source.session is not None:
            source.session.open = False
        source.session = Session(state.source)
        return source.session

    def require_current(self, state: SourceState) -> None:
        """Raise `StaleSender` for a sender with an older layout, or of an older owner (R8)."""
        cluster, incarnation, segment_id = state.source
        topic = self._topics.get((cluster, incarnation), _Topic())
        if state.layout_epoch < topic.layout_epoch:
            # Its segment may have been pruned, and its ranges with it.
            raise StaleSender(
                f"Cluster {cluster} has a newer layout than that of epoch {state.layout_epoch}: "
                "read it again."
            )
        known = topic.segments.get(segment_id)
        if known is not None and state.owner_epoch < known.owner_epoch:
            raise StaleSender(
                f"Segment {segment_id} of cluster {cluster} has a newer owner than that of epoch "
                f"{state.owner_epoch}: leave it to that one."
            )

    def is_newer_known(self, cluster: str, incarnation: int, layout_epoch: int) -> bool:
        """Whether a sender has told a newer layout of that topic than the one of this epoch."""
        topic = self._topics.get((cluster, incarnation))
        return topic is not None and topic.layout_epoch > layout_epoch

    def last_received(self) -> dict[SourceSegment, Position]:
        """By source segment: the last entry of which anything is here, or was."""
        last = {
            SourceSegment(cluster, incarnation, segment_id): max(
                run.mark for run in source.accepted.runs
            )
            for (cluster, incarnation), topic in self._topics.items()
            for segment_id, source in topic.segments.items()
        }
        return {each: mark.position for each, mark in last.items() if mark != NOTHING}

    def is_newest(self, cluster: str, incarnation: int) -> bool:
        """Whether no other incarnation of that topic has attached since, or none ever has."""
        known = [each for name, each in self._topics if name == cluster]
        return not known or known[-1] == incarnation

    def stored_of(self, session: Session) -> ReplicatedRanges | None:
        """What is stored of the sender's segment; None as long as that is not decided.

        It is decided when nothing that earlier sessions sent is on its way to the ledger (R7), and
        what senders said when they attached is saved (R8).  Raises `SessionEnded`.
        """
        source = self._of(session)
        return None if source.in_flight or self.must_save else source.durable

    def publish(self, session: Session, sequence: int, record: PartRecord | None) -> PartState:
        """Decide on a part: NEW is to be appended, STORED to be answered without that.

        A chunk before the last one of its message has no record, and is always new: the last one
        says that the message is stored.  Raises `PartRefused`, which ends
        the session.
        """
        source = self._of(session)
        state = PartState.NEW if record is None else record.state(source.accepted)
        waits = state is PartState.STORED and source.in_flight > 0
        if sequence != session.expected or state is PartState.MIXED or waits:
            session.open = False
            raise PartRefused(
                f"Part {sequence} from segment {session.source.segment_id} of cluster "
                f"{session.source.cluster} is out of order: attach again, and send what is not "
                "stored."
            )
        accepted = _with(source.accepted, record)
        grows = len(accepted.runs) > len(source.accepted.runs)
        if grows and self._accepted_ranges >= 2 * self._limit:
            # A sender names all hashes of the segment, so that only others come here.
            session.open = False
            raise PartRefused(
                f"Part {sequence} from segment {session.source.segment_id} of cluster "
                f"{session.source.cluster} is for some hashes of the segment only, which remembers "
                f"{2 * self._limit} ranges already: send parts for all of its hashes."
            )
        session.expected += 1
        if state is PartState.NEW:
            source.accepted = accepted
            source.in_flight += 1
            self._in_flight.append((source, record))
        return state

    def detach(self, session: Session) -> None:
        """Note that its connection is gone."""
        session.open = False

    # The ledger

    def stored(self) -> None:
        """The first one of the parts that are on their way to the ledger is durable."""
        source, record = self._in_flight.popleft()
        source.durable = _with(source.durable, record)
        source.in_flight -= 1

    def failed(self) -> None:
        """None of the parts on their way is durable, nor will be: every sender has to ask again."""
        self.failures += 1
        self._in_flight.clear()
        for topic in self._topics.values():
            for source in topic.segments.values():
                source.accepted, source.in_flight = source.durable, 0
                if source.session is not None:
                    source.session.open = False

    def replay(self, source_segment: SourceSegment, record: PartRecord) -> None:
        """Count a stored entry that is newer than the snapshot.

        Any producer can write a record.  What senders write is within the bounds: other records
        are passed over.
        """
        if not self._has_room_for(source_segment):
            return
        source = self._source(source_segment)
        durable = _with(source.durable, record)
        grows = len(durable.runs) > len(source.durable.runs)
        if not grows or self.ranges < 2 * self._limit:
            source.durable = source.accepted = durable

    def _has_room_for(self, source_segment: SourceSegment) -> bool:
        """Whether a stored entry may be of this source segment."""
        cluster, incarnation, segment_id = source_segment
        topic = self._topics.get((cluster, incarnation))
        if topic is not None and segment_id in topic.segments:
            return True
        if topic is None:
            incarnations = Counter(name for name, _ in self._topics)
            if incarnations[cluster] >= SOURCE_INCARNATIONS or bounded_key(cluster) != cluster:
                return False
            if cluster not in incarnations and len(incarnations) >= SOURCE_CLUSTERS:
                return False
        return self.ranges < self._limit

    # Layout changes and snapshots

    @classmethod
    def inherited(cls, hash_start: int, hash_end: int, parents: Iterable["SegmentSources"]) -> Self:
        """What a segment of this range begins with; nothing is appended to the parents any more.

        Raises ValueError for parents that overlap.
        """
        made = cls(hash_start, hash_end)
        ranges: dict[SourceSegment, list[ReplicatedRanges]] = {}
        for parent in parents:
            for (cluster, incarnation), topic in parent._topics.items():
                into = made._topics.setdefault((cluster, incarnation), _Topic())
                into.layout_epoch = max(into.layout_epoch, topic.layout_epoch)
                for segment_id, source in topic.segments.items():
                    key = SourceSegment(cluster, incarnation, segment_id)
                    ranges.setdefault(key, []).append(source.durable)
                    child = made._source(key)
                    child.owner_epoch = max(child.owner_epoch, source.owner_epoch)
        for key, found in ranges.items():
            child = made._source(key)
            child.durable = ReplicatedRanges.side_by_side(hash_start, hash_end, found)
            child.accepted = child.durable
        return made

    @property
    def must_save(self) -> bool:
        """Whether senders wait for a snapshot."""
        return self._changes > self._saved

    @property
    def changes(self) -> int:
        """For `saved`, of the snapshot that is made now."""
        return self._changes

    def saved(self, changes: int) -> None:
        """A snapshot is durable; `changes` are those of when it was made."""
        self._saved = max(self._saved, changes)

    def to_json(self) -> list[list[object]]:
        """The snapshot; the newest incarnation of a cluster's topic comes last."""
        return [
            [
                cluster,
                f"{incarnation:016x}",
                topic.layout_epoch,
                [
                    [segment_id, source.owner_epoch, source.durable.to_rows()]
                    for segment_id, source in topic.segments.items()
                ],
            ]
            for (cluster, incarnation), topic in self._topics.items()
        ]

    @classmethod
    def from_json(cls, members: object, hash_start: int, hash_end: int) -> Self:
        """Decode a snapshot.  Raises ValueError."""
        made = cls(hash_start, hash_end)
        try:
            if not isinstance(members, list):
                raise TypeError("no list")
            for cluster, incarnation, layout_epoch, segments in members:
                topic = made._topics.setdefault((str(cluster), int(incarnation, 16)), _Topic())
                topic.layout_epoch = int(layout_epoch)
                for segment_id, owner_epoch, rows in segments:
                    ranges = ReplicatedRanges.from_rows(rows, hash_start, hash_end)
                    topic.segments[int(segment_id)] = _Source(ranges, ranges, int(owner_epoch))
        except (TypeError, ValueError) as error:
            raise ValueError(f"this is no snapshot of replicated ranges: {error!r}") from error
        return made

    def durable(self) -> Mapping[SourceSegment, ReplicatedRanges]:
        """What is durable, by source segment."""
        return {
            SourceSegment(cluster, incarnation, segment_id): source.durable
            for (cluster, incarnation), topic in self._topics.items()
            for segment_id, source in topic.segments.items()
        }

    def _of(self, session: Session) -> _Source:
        source = self._source(session.source)
        if not session.open or source.session is not session:
            raise SessionEnded(
                f"The session of the sender of segment {session.source.segment_id} of cluster "
                f"{session.source.cluster} has ended: attach again."
            )
        return source

    def _source(self, source_segment: SourceSegment) -> _Source:
        cluster, incarnation, segment_id = source_segment
        topic = self._topics.setdefault((cluster, incarnation), _Topic())
        source = topic.segments.get(segment_id)
        if source is None:
            nothing = ReplicatedRanges.nothing(self.hash_start, self.hash_end)
            source = topic.segments[segment_id] = _Source(nothing, nothing)
        return source

    @staticmethod
    def _end(source: _Source) -> bool:
        """Take nothing more of a drained source; whether that is new.

        What expired there may still be on its way, or be sent by an owner that does not know.  It
        must not come after what the children of that segment send.
        """
        if [run.mark for run in source.durable.runs] == [EVERYTHING]:
            return False
        source.raise_all(EVERYTHING)
        if source.session is not None:
            source.session.open = False
        return True

    def _prune(self, topic: _Topic, state: SourceState) -> None:
        """Forget the segments that the source's newest layout does not have.

        `layout_epoch` stays, so that no sender of an older layout sends one of them again.
        """
        topic.layout_epoch = state.layout_epoch
        for segment_id in topic.segments.keys() - state.segments:
            pruned = topic.segments.pop(segment_id)
            if pruned.session is not None:
                pruned.session.open = False

    def _forget(self, cluster: str, incarnation: int) -> None:
        """Move this incarnation to the end, and forget the oldest of its cluster."""
        self._topics[cluster, incarnation] = self._topics.pop((cluster, incarnation))
        known = [key for key in self._topics if key[0] == cluster]
        for key in known[:-SOURCE_INCARNATIONS]:
            for source in self._topics.pop(key).segments.values():
                if source.session is not None:
                    source.session.open = False


def _with(ranges: ReplicatedRanges, record: PartRecord | None) -> ReplicatedRanges:
    if record is None:
        return ranges
    return ranges.raised(record.hash_start, record.hash_end, record.mark)
