"""The rules, and how each is broken on purpose."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from broker.replication.segment_plan import Part, RemoteLayout, SourceEntry, Unattached, Unplanned
from broker.replication.segment_sender import Planned, SegmentSender
from broker.topics.replicated_ranges import (
    Mark,
    PartRecord,
    PartState,
    ReplicatedRanges,
    Run,
    SourceSegment,
)
from broker.topics.segment_sources import SegmentSources, Session, SourceState, _Source
from magnetar.protocol.ids import Position

BROKEN: Mapping[str, str] = {
    "R1": "the cursor of a child is made when its sender starts",
    "R2": "a segment is sent before its parents are drained",
    "R2-merge": "a merged segment is sent when one of its parents is drained",
    "R2-parents": "a segment is sent when its parents are drained, and not all its ancestors",
    "R2-open": "a sealed segment counts as drained while a transaction in it is open",
    "R2-terminated": "a sealed segment counts as drained before its log is terminated",
    "R3": "an entry goes whole to the segment of its first message",
    "R3-order": "the messages of a part are in another order",
    "R3-bucket": "a part has messages of several entry buckets",
    "R3-chunks": "each chunk of a message counts as an entry of its own",
    "R3-chunks-open": "chunks are given up at an open transaction in a sealed segment",
    "R3-keyless": "a message without key has another hash each time it is sent",
    "R3-keyless-range": "a message without key has a hash that is not of its segment",
    "R4": "reading goes on at the children of a sealed segment while sends to it are unanswered",
    "R5": "what is stored is remembered apart from the entries, and saved now and then",
    "R5-incarnation": "the record does not say which incarnation of the topic it is from",
    "R6-nothing": "children begin without what their parents have",
    "R6-highest": "a merged segment begins with the highest mark of its parents",
    "R6-lowest": "a merged segment begins with the lowest mark of its parents",
    "R6-early": "children take what their parents have when the layout is published",
    "R7": "the sender does not ask what is stored",
    "R7-rest": "an entry that is stored for some hashes counts as stored for all",
    "R7-decided": "a sender is told what is stored while earlier sends are on their way to the log",
    "R7-order": "the segment takes what comes behind a part that it did not store",
    "R8": "a sender may go on beside a newer one",
    "R8-layout": "a sender with an older layout may attach",
    "R8-drained": "a sender does not say that the ancestors of its segment are drained",
    "R8-durable": "what a sender says is not durable before it is answered",
    "R9": "the cursor moves over an entry when one of its parts is answered",
    "R9-sent": "the cursor moves over an entry when it is sent",
    "R9-expired": "the cursor does not move over an expired entry",
    "R10": "a sealed segment is pruned before it is drained",
    "R11-open": "entries of open transactions are sent",
    "R11-aborted": "entries of aborted transactions are sent",
    "R12": "the sender does not compare what is stored with what it can have sent",
    "R12-end": "the sender compares what is stored with the end of its log",
    "R12-drained": "a sender takes it that its segment is drained, and it is not",
    "R12-epochs": "a sender that is refused as an older one, and is not, tries again",
}
"""What is done wrong, by the name of the rule that it breaks."""
SPARE: Mapping[str, str] = {
    "R7-check": "the segment does not compare what comes with what is stored",
    "R8-epoch": "a sender of an older owner ends the session of a newer one",
}
"""What may be left out as long as the other rules are kept."""


@dataclass(frozen=True)
class Rules:
    """The rules as they are, but for one that is broken; "" for none."""

    broken: str = ""

    def breaks(self, rule: str) -> bool:
        """Whether this one is broken."""
        return self.broken == rule

    def sender(self, own_range: tuple[int, int] | None, layout: RemoteLayout) -> SegmentSender:
        """What a sender plans with."""
        made = _SENDERS.get(self.broken, SegmentSender)
        return made(own_range, layout)

    def told(self, stored: ReplicatedRanges) -> ReplicatedRanges:
        """What a sender believes to be stored, of what it is told."""
        if self.breaks("R7"):
            return ReplicatedRanges.nothing(stored.hash_start, stored.hash_end)
        if self.breaks("R7-rest"):
            return stored.all_raised(max(run.mark for run in stored.runs))
        return stored

    @property
    def sources(self) -> type[SegmentSources]:
        """What a segment decides with."""
        return _SOURCES.get(self.broken, SegmentSources)


class _WholeSender(SegmentSender):
    def take(self, entry: SourceEntry) -> Planned | Unattached | Unplanned:
        """Take every message for one with the hashes of the first."""
        if entry.hashes is not None:
            entry = entry._replace(hashes=[entry.hashes[0]] * len(entry.hashes))
        return super().take(entry)


class _DisorderedSender(SegmentSender):
    def take(self, entry: SourceEntry) -> Planned | Unattached | Unplanned:
        """Turn the messages of each part round."""
        planned = super().take(entry)
        if not isinstance(planned, Planned):
            return planned
        turned = [
            each
            if each.part is None
            else each._replace(part=each.part._replace(indexes=_turned(each.part)))
            for each in planned.sends
        ]
        return planned._replace(sends=turned)


def _turned(part: Part) -> tuple[int, ...] | None:
    return None if part.indexes is None else part.indexes[::-1]


class _MixedBucketsSender(SegmentSender):
    def take(self, entry: SourceEntry) -> Planned | Unattached | Unplanned:
        """Take no notice of entry buckets."""
        segments = tuple(each._replace(bucket_splits=()) for each in self._layout.segments)
        self._layout = RemoteLayout(self._layout.epoch, segments)
        return super().take(entry)


class _HastySender(SegmentSender):
    def learn(self, layout: RemoteLayout) -> frozenset[int]:
        """Keep sessions with sealed segments until they end by themselves, and read on."""
        if layout.epoch > self._layout.epoch:
            self._layout = layout
        return frozenset()


class _ImpatientSender(SegmentSender):
    def answered(self, segment_id: int) -> Position | None:
        """Count an entry as done with its first part."""
        session = self._sessions.get(segment_id)
        position = session.unanswered[0] if session is not None else None
        super().answered(segment_id)
        return position


_SENDERS: Mapping[str, type[SegmentSender]] = {
    "R3": _WholeSender,
    "R3-order": _DisorderedSender,
    "R3-bucket": _MixedBucketsSender,
    "R4": _HastySender,
    "R9": _ImpatientSender,
}


class _ForgetfulSources(SegmentSources):
    def replay(self, source_segment: SourceSegment, record: PartRecord) -> None:
        """The entries say nothing."""


class _EmptySources(SegmentSources):
    @classmethod
    def inherited(
        cls, hash_start: int, hash_end: int, parents: Iterable[SegmentSources]
    ) -> "_EmptySources":
        """Begin with nothing."""
        return cls(hash_start, hash_end)


class _OneMarkSources(SegmentSources):
    """Begins with one mark for all hashes of a source segment."""

    @staticmethod
    def mark_of(marks: Sequence[Mark]) -> Mark:
        """The mark, of those of the parents."""
        return max(marks)

    @classmethod
    def inherited(
        cls, hash_start: int, hash_end: int, parents: Iterable[SegmentSources]
    ) -> "_OneMarkSources":
        """See the class."""
        made = super().inherited(hash_start, hash_end, parents)
        for topic in made._topics.values():
            for source in topic.segments.values():
                mark = cls.mark_of([run.mark for run in source.durable.runs])
                source.durable = ReplicatedRanges((Run(hash_start, hash_end, mark),))
                source.accepted = source.durable
        return made


class _LowestSources(_OneMarkSources):
    @staticmethod
    def mark_of(marks: Sequence[Mark]) -> Mark:
        """The lowest one."""
        return min(marks)


class _HastySources(SegmentSources):
    def stored_of(self, session: Session) -> ReplicatedRanges | None:
        """Tell what was accepted, and may not become durable."""
        return self._of(session).accepted


class _TrustingSources(SegmentSources):
    def publish(self, session: Session, sequence: int, record: PartRecord | None) -> PartState:
        """Take everything for new."""
        source = self._of(session)
        source.in_flight += 1
        self._in_flight.append((source, record))
        return PartState.NEW


class _PatientSources(SegmentSources):
    """A session goes on after a part that was lost."""

    def failed(self) -> None:
        """Lose the parts on their way, and end no session."""
        self._in_flight.clear()
        for topic in self._topics.values():
            for source in topic.segments.values():
                source.accepted, source.in_flight = source.durable, 0


class _SharedSources(SegmentSources):
    """Each sender has a session for as long as it likes."""

    def attach(self, state: SourceState) -> Session:
        """End no other session, and refuse no older owner."""
        known = self._source(state.source)
        known.owner_epoch = -1
        before = known.session
        known.session = None
        session = super().attach(state)
        if before is not None:
            before.open = True
        return session

    def stored_of(self, session: Session) -> ReplicatedRanges | None:
        """Tell what is durable."""
        return self._of(session).durable

    def publish(self, session: Session, sequence: int, record: PartRecord | None) -> PartState:
        """Answer what another sender's session has on its way."""
        source = self._of(session)
        in_flight, source.in_flight = source.in_flight, 0
        try:
            state = super().publish(session, sequence, record)
        finally:
            source.in_flight += in_flight
        return state

    def _of(self, session: Session) -> _Source:
        source = self._source(session.source)
        source.session = session
        return super()._of(session)


class _AnyOwnerSources(SegmentSources):
    def attach(self, state: SourceState) -> Session:
        """Take no notice of the newest owner of the source."""
        self._source(state.source).owner_epoch = -1
        return super().attach(state)


class _AnyLayoutSources(SegmentSources):
    def attach(self, state: SourceState) -> Session:
        """Take no notice of the newest layout of the source."""
        cluster, incarnation, _ = state.source
        topic = self._topics.get((cluster, incarnation))
        if topic is not None:
            topic.layout_epoch = -1
        return super().attach(state)


_SOURCES: Mapping[str, type[SegmentSources]] = {
    "R5": _ForgetfulSources,
    "R6-nothing": _EmptySources,
    "R6-highest": _OneMarkSources,
    "R6-lowest": _LowestSources,
    "R7-decided": _HastySources,
    "R7-check": _TrustingSources,
    "R7-order": _PatientSources,
    "R8": _SharedSources,
    "R8-epoch": _AnyOwnerSources,
    "R8-layout": _AnyLayoutSources,
}
