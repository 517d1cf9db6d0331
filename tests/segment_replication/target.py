"""The cluster that receives: its layout, its segments, and what it makes of a sender's frames."""

import random
from collections import deque
from typing import NamedTuple

from broker.replication.segment_plan import RemoteLayout, RemoteSegment
from broker.scalable import layout as layouts
from broker.scalable.layout import Segment
from broker.topics.replicated_ranges import PartState
from broker.topics.segment_sources import Session, StaleSender
from magnetar.protocol.server_error import MagnetarError
from tests.segment_replication.rules import Rules
from tests.segment_replication.source import (
    KEYS,
    NO_KEY,
    Attach,
    Chunk,
    Link,
    Message,
    PartFrame,
    reshaped,
)


class Violation(Exception):
    """What the target has is not what the source has."""


class Stored(NamedTuple):
    """An entry of the target's log, or one on its way there."""

    frame: PartFrame
    link: Link


class Judge:
    """Follows what becomes durable: of each key, the messages of the source in order, each once."""

    def __init__(self) -> None:
        self.counts: dict[tuple[int, int], int] = {}
        self.expired: set[Message] = set()
        """Messages that may be missing."""
        self.excluded: set[Message] = set()
        """Messages that must not arrive: aborted ones, and those before the cursor of a life."""
        self.again: set[Message] = set()
        """Messages that may arrive a second time: those after the cursors of a backup."""
        self.keyless: set[Message] = set()
        """Messages without key that have arrived: they have no order."""
        self.chunks: dict[tuple[int, str], int] = {}
        """By segment and uuid: the chunks that a consumer has put together."""

    def check(
        self, segment: Segment, messages: tuple[Message, ...], chunk: Chunk | None = None
    ) -> None:
        """Count an entry.  Raises `Violation`."""
        if chunk is not None:
            self._check_chunk(segment, chunk)
        splits = RemoteSegment(0, 0, 0, segment.entry_bucket_splits)
        stored = [0 if each.key == NO_KEY else KEYS[each.key].bucket for each in messages]
        buckets = {splits.bucket_end(each) for each in stored}
        if len(buckets) > 1:
            raise Violation(f"an entry of segment {segment.segment_id} has several buckets")
        for message in messages:
            if message in self.excluded:
                raise Violation(f"{message} is aborted, or was done before")
            if message.key == NO_KEY:
                if message in self.keyless and not self._may_repeat(message):
                    raise Violation(f"{message}: one is repeated")
                self.keyless.add(message)
                continue
            if not segment.covers(KEYS[message.key].segment):
                raise Violation(
                    f"{message} is on segment {segment.segment_id}, which lacks its key"
                )
            expected = self.expected(message.life, message.key, message.number)
            if message.number < expected and self._may_repeat(message):
                continue
            if message.number != expected:
                what = "repeated" if message.number < expected else "missing before it"
                raise Violation(f"{message}: number {expected} was expected, so one is {what}")
            self.counts[message.life, message.key] = expected + 1

    def expected(self, life: int, key: int, end: int) -> int:
        """The number of the next message of a key, without expired ones before `end`."""
        number = self.counts.get((life, key), 0)
        while number < end and self.may_miss(Message(life, key, number)):
            number += 1
        return number

    def _may_repeat(self, message: Message) -> bool:
        """Whether a message may arrive a second time, which it does now."""
        may = message in self.again
        self.again.discard(message)
        return may

    def may_miss(self, message: Message) -> bool:
        """Whether a message that has not arrived in its turn need not do so."""
        return message in self.expired or message in self.excluded or message in self.keyless

    def _check_chunk(self, segment: Segment, chunk: Chunk) -> None:
        place = segment.segment_id, chunk.uuid
        if chunk.number == 0:
            self.chunks[place] = 0
        if self.chunks.get(place) == chunk.number:
            self.chunks[place] += 1
        if chunk.last and self.chunks.get(place) != chunk.total:
            raise Violation(f"segment {place[0]} has the last chunk of a message without the first")


class TargetSegment:
    """A segment of the target, and its owner."""

    def __init__(self, segment: Segment, rules: Rules, judge: Judge) -> None:
        self.segment = segment
        self.rules = rules
        self.judge = judge
        self.log: list[PartFrame] = []
        self.on_its_way: deque[Stored] = deque()
        self.terminated = False
        self.parents: list[TargetSegment] = []
        """Those whose final ranges it awaits."""
        self.sources = rules.sources(segment.hash_start, segment.hash_end)
        self.snapshot: tuple[object, int] = self.sources.to_json(), 0
        self.sessions: dict[Link, Session] = {}
        self.asking: list[Link] = []
        """Links whose session began, and that were not told yet what is stored."""
        self.links: list[Link] = []

    def connect(self, link: Link) -> None:
        """Take a connection."""
        self.links.append(link)

    def receive(self, link: Link) -> None:
        """Take the next frame of a connection, if it can be taken now."""
        if link.cut or not link.to_remote or (self.parents and not self.terminated):
            return
        frame = link.to_remote.popleft()
        try:
            if self.terminated:
                self.cut(link)
            elif isinstance(frame, Attach):
                self._attach(link, frame)
            else:
                self._publish(link, frame)
        except MagnetarError:
            self.cut(link)

    def _attach(self, link: Link, frame: Attach) -> None:
        try:
            self.sessions[link] = self.sources.attach(frame.state)
        except StaleSender:
            link.refused = True
            raise
        self.asking.append(link)
        if self.rules.breaks("R8-durable"):
            self.sources.saved(self.sources.changes)
        elif self.sources.must_save:
            self.save()
        self.tell()

    def _publish(self, link: Link, frame: PartFrame) -> None:
        state = self.sources.publish(self.sessions[link], frame.sequence, frame.record)
        if state is PartState.NEW:
            self.on_its_way.append(Stored(frame, link))
        else:
            link.to_sender.append(None)

    def tell(self) -> None:
        """Tell senders what is stored, as soon as that is decided."""
        for link in list(self.asking):
            try:
                stored = self.sources.stored_of(self.sessions[link])
            except MagnetarError:
                self.cut(link)
                continue
            if stored is not None:
                self.asking.remove(link)
                link.to_sender.append(stored)

    def store(self) -> None:
        """The first entry on its way becomes durable.  Raises `Violation`."""
        frame, link = self.on_its_way.popleft()
        self.judge.check(self.segment, frame.messages, frame.chunk)
        self.log.append(frame)
        self.sources.stored()
        if not link.cut:
            link.to_sender.append(None)
        self.tell()

    def lose(self) -> None:
        """What is on its way will never be durable, and the owner goes on."""
        self.on_its_way.clear()
        self.sources.failed()
        if not self.rules.breaks("R7-order"):
            for link in list(self.links):
                self.cut(link)
        self.tell()

    def save(self) -> None:
        """Write a snapshot."""
        self.snapshot = self.sources.to_json(), len(self.log)
        self.sources.saved(self.sources.changes)

    def crash(self) -> None:
        """Another owner loads the segment, from the snapshot and the entries after it."""
        self.on_its_way.clear()
        for link in list(self.links):
            self.cut(link)
        rows, position = self.snapshot
        segment = self.segment
        self.sources = self.rules.sources.from_json(rows, segment.hash_start, segment.hash_end)
        for frame in self.log[position:]:
            if frame.record is not None:
                self.sources.replay(frame.source, frame.record)

    def terminate(self) -> None:
        """End the log."""
        self.on_its_way.clear()
        self.sources.failed()
        self.terminated = True
        for link in list(self.links):
            self.cut(link)

    def inherit(self) -> None:
        """Begin with what the parents have, once that is final."""
        early = self.rules.breaks("R6-early")
        if self.parents and (early or all(each.terminated for each in self.parents)):
            parents = [each.sources for each in self.parents]
            start, end = self.segment.hash_start, self.segment.hash_end
            self.sources = self.rules.sources.inherited(start, end, parents)
            self.parents = []
            self.save()

    def cut(self, link: Link) -> None:
        """End a connection; what was answered may still arrive."""
        link.cut = True
        if link in self.links:
            self.links.remove(link)
        if link in self.asking:
            self.asking.remove(link)
        session = self.sessions.pop(link, None)
        if session is not None:
            self.sources.detach(session)


class TargetCluster:
    """The cluster that gets the messages."""

    def __init__(self, rng: random.Random, rules: Rules) -> None:
        self.rng = rng
        self.rules = rules
        self.judge = Judge()
        self.layout = layouts.initial(rng.choice((1, 1, 2, 3)), now_ms=0)
        self.segments = {
            segment_id: TargetSegment(segment, rules, self.judge)
            for segment_id, segment in self.layout.segments.items()
        }

    def seen(self) -> RemoteLayout:
        """The layout as a sender gets it."""
        return RemoteLayout(
            self.layout.epoch,
            tuple(
                RemoteSegment(
                    each.segment_id, each.hash_start, each.hash_end, each.entry_bucket_splits
                )
                for each in self.layout.active
            ),
        )

    def any(self) -> TargetSegment:
        """One of the segments."""
        return self.segments[self.rng.choice(list(self.segments))]

    def reshape(self) -> None:
        """Split, merge or rebucket; parents take what comes until they are terminated."""
        changed = reshaped(self.layout, self.rng, buckets=True)
        if changed is None:
            return
        self.layout = changed.layout
        for child in changed.children:
            made = TargetSegment(child, self.rules, self.judge)
            made.parents = [self.segments[each] for each in child.parent_ids]
            self.segments[child.segment_id] = made
            if self.rules.breaks("R6-early"):
                made.inherit()

    def terminate(self) -> None:
        """End the log of one sealed segment, once it has what its own parents have."""
        for segment_id, segment in self.segments.items():
            sealed = not self.layout.segments[segment_id].active
            if sealed and not segment.terminated and not segment.parents:
                while segment.on_its_way and self.rng.random() < 0.7:
                    segment.store()
                segment.terminate()
                return
