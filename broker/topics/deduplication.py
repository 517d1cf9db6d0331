"""The last sequence id of each producer of a topic, by which repeated messages are recognised."""

import json
from collections.abc import Collection, Iterable
from typing import NamedTuple

from broker.topics.carried_ids import (
    CarriedId,
    FinalIds,
    RangeTable,
    base_name,
    final_ids,
    first_sequence,
    ids_of_row,
    name_on,
    within,
)
from broker.topics.name_writer import NameWriter
from broker.topics.source_positions import (
    REPLICATOR_PREFIX,
    TO_CLUSTER,
    SourcePositions,
    bounded_key,
    source_positions_of,
)
from config.bounds import SOURCE_CLUSTERS
from magnetar.protocol.ids import Position, from_wire
from magnetar.protocol.names import SegmentName
from magnetar.protocol.pulsar_pb2 import MessageMetadata

SNAPSHOT_PROPERTY = "magnetar.producer-sequences"
SNAPSHOT_BYTES = 256 * 1024
REPLICATED_MEMBER = "replicated"
"""What a snapshot has of the segments of other clusters."""
NO_SEQUENCE = -1
NO_POSITION = Position(-1, -1)
_PARTIAL_COLUMNS = 3
"""Columns of a snapshot's row for an incomplete chunked message; a publish time may follow them."""


class Chunk(NamedTuple):
    """One chunk of a message: which message, which chunk, and whether it is the last one."""

    uuid: str
    chunk_id: int
    last: bool


def chunk_of(metadata: MessageMetadata) -> Chunk | None:
    """The chunk that the metadata describes; None for a whole message."""
    if metadata.num_chunks_from_msg <= 1 or not metadata.HasField("chunk_id"):
        return None
    last = metadata.chunk_id >= metadata.num_chunks_from_msg - 1
    return Chunk(metadata.uuid, metadata.chunk_id, last)


def last_sequence(sequence_id: int, highest_sequence_id: int) -> int:
    """The last sequence id of a message or batch, from the unsigned fields of the wire."""
    first, highest = from_wire(sequence_id), from_wire(highest_sequence_id)
    return highest if highest > max(first, 0) else first


class Origin(NamedTuple):
    """What a replicated message is counted by, where it names no position.

    `name` stands for a producer of the source cluster, apart from producers here of that name.
    """

    name: str
    last: int
    chunk: Chunk | None
    publish_time_ms: int


def origin_of(cluster: str, metadata: MessageMetadata) -> Origin:
    """The origin of a message that the replicator of a cluster brought."""
    # No producer is tracked under a name with this prefix, so none here can have it.
    return Origin(
        bounded_key(f"{REPLICATOR_PREFIX}{cluster}{TO_CLUSTER}{metadata.producer_name}"),
        last_sequence(metadata.sequence_id, metadata.highest_sequence_id),
        chunk_of(metadata),
        metadata.publish_time,
    )


class ProducerSequence:
    """The durable messages of one producer name: a message counts once its append completed.

    `last` is the highest sequence id of the last stored message, `position` is that of its entry.
    Of a chunked message that is not complete, `chunk` is the last stored chunk.  `publish_time_ms`
    is that of the last entry, where it is known.  `carried` are the ids of the segment's parents,
    `writer` is the client that had the name last; both are of segments only.
    """

    __slots__ = (
        "attached",
        "carried",
        "chunk",
        "chunk_sequence",
        "last",
        "position",
        "publish_time_ms",
        "seen_ms",
        "writer",
    )

    def __init__(self, last: int = NO_SEQUENCE) -> None:
        self.last = last
        self.position = NO_POSITION
        self.publish_time_ms: int | None = None
        self.chunk: Chunk | None = None
        self.chunk_sequence = NO_SEQUENCE
        self.attached = 0
        self.seen_ms = 0
        self.carried: tuple[CarriedId, ...] = ()
        self.writer: NameWriter | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing of the name is stored, here or on the segment's parents."""
        return self.position == NO_POSITION and not self.carried

    def last_seen_ms(self, now_ms: int) -> int:
        """When its producer was last attached: now, if it is."""
        return now_ms if self.attached else self.seen_ms

    def end_repeated(self, first: int | None, last: int, request_id: int | None) -> None:
        """Drop the carried ids of a client that counts from the start again with this message."""
        self.carried = tuple(
            each for each in self.carried if not each.is_repeated_by(first, last, request_id)
        )

    def stored(self, sequence: int, position: Position, chunk: Chunk | None) -> None:
        """Note that an entry of this producer is durable."""
        self.position = position
        self.publish_time_ms = None
        if chunk is not None and not chunk.last:
            self.chunk = chunk
            self.chunk_sequence = sequence
        else:
            self.last = sequence


class SequenceGuard:
    """Recognises messages that are not above the last accepted one (Pulsar's deduplication).

    A message is accepted when the ledger has taken its entry.  A message that is refused, say
    because its transaction has ended, uses no sequence id.  The guard starts from what is durable.
    """

    __slots__ = ("_chunk", "_chunk_sequence", "_last")

    def __init__(self, durable: ProducerSequence) -> None:
        self._last = durable.last
        self._chunk = durable.chunk
        self._chunk_sequence = durable.chunk_sequence

    def is_duplicate(self, sequence: int, chunk: Chunk | None) -> bool:
        """Whether the message was accepted before; changes nothing."""
        if sequence <= self._last:
            return True
        return chunk is not None and self._is_known_chunk(sequence, chunk)

    def accept(self, sequence: int, chunk: Chunk | None) -> None:
        """Count the message as accepted; called when the ledger has taken its entry."""
        if chunk is None or chunk.last:
            self._last = sequence
        if chunk is not None:
            self._chunk = chunk
            self._chunk_sequence = sequence

    def _is_known_chunk(self, sequence: int, chunk: Chunk) -> bool:
        # All chunks of a message have its sequence id: the chunk's id decides among them.
        known = self._chunk
        return (
            known is not None
            and sequence == self._chunk_sequence
            and chunk.uuid == known.uuid
            and chunk.chunk_id <= known.chunk_id
        )


class ResendGuard(SequenceGuard):
    """A `SequenceGuard` for the resend phase of a reconnect; `over` once that has ended.

    A producer that reconnects (epoch above 0) resends all that it has no receipt for.  The durable
    messages among these are duplicates, whatever the policy says.
    """

    __slots__ = ("_not_after_ms", "over")

    def __init__(self, durable: ProducerSequence) -> None:
        super().__init__(durable)
        self._not_after_ms = durable.publish_time_ms
        self.over = False

    def is_resend(self, sequence: int, chunk: Chunk | None, publish_time_ms: int) -> bool:
        """Whether the message is durable already; the first one that is not ends the phase."""
        # Published after the last durable one: an earlier program used the same producer name.
        younger = self._not_after_ms is not None and publish_time_ms > self._not_after_ms
        if not younger and self.is_duplicate(sequence, chunk):
            return True
        self.over = True
        return False


class Deduplication:
    """The producers of one topic.  `limit` and `keep_ms` bound those that are not attached.

    `sources` are the clusters whose replicators publish here, at most `source_limit` that are away.
    """

    def __init__(self, *, limit: int, keep_ms: int, source_limit: int = SOURCE_CLUSTERS) -> None:
        self._limit = limit
        self._keep_ms = keep_ms
        self._sequences: dict[str, ProducerSequence] = {}
        self.sources = SourcePositions(source_limit)
        self.left_out = 0
        """Number of names that did not fit the SNAPSHOT_BYTES of the last snapshot."""

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to save."""
        return not self._sequences and not len(self.sources)

    @property
    def known(self) -> Collection[ProducerSequence]:
        """The durable state of each producer name."""
        return self._sequences.values()

    def get(self, name: str) -> ProducerSequence | None:
        """The durable state of a producer name, if anything is known."""
        return self._sequences.get(name)

    def attach(self, name: str) -> ProducerSequence:
        """The state of a producer that begins to publish; it stays while that is attached."""
        sequence = self._sequences.setdefault(name, ProducerSequence())
        sequence.attached += 1
        return sequence

    def detach(self, name: str, now_ms: int) -> None:
        """Note that the producer left; its state stays for a while."""
        sequence = self._sequences.pop(name)
        sequence.attached -= 1
        sequence.seen_ms = now_ms
        if sequence.attached or not sequence.is_empty:
            self._sequences[name] = sequence
            self._forget(now_ms)

    def replay(self, metadata: MessageMetadata, position: Position, now_ms: int) -> None:
        """Count an entry that is stored after the snapshot."""
        if metadata.HasField("marker_type"):
            return
        if metadata.HasField("replicated_from"):
            self._replay_replicated(metadata, position, now_ms)
            return
        sequence = self._sequences.pop(metadata.producer_name, None) or ProducerSequence()
        last = last_sequence(metadata.sequence_id, metadata.highest_sequence_id)
        if sequence.carried:
            first = first_sequence(
                metadata.sequence_id, metadata.highest_sequence_id, metadata.num_messages_in_batch
            )
            # It was stored, so its client was the writer of the carried ids.
            sequence.carried = tuple(
                each
                for each in sequence.carried
                if each.writer is None or not each.is_repeated_by(first, last, each.writer[0])
            )
        sequence.stored(last, position, chunk_of(metadata))
        sequence.publish_time_ms = metadata.publish_time
        sequence.seen_ms = now_ms
        self._sequences[metadata.producer_name] = sequence
        if len(self._sequences) > 2 * self._limit:
            self._forget(now_ms)

    def _replay_replicated(
        self, metadata: MessageMetadata, position: Position, now_ms: int
    ) -> None:
        # That the cluster's replicator publishes by position is durable before its first message.
        # Else the property may be a copy, which an application made of another message.
        source = self.sources.get(metadata.replicated_from)
        positions = None if source is None else source_positions_of(metadata)
        if source is None or positions is None:
            self.count_origin(origin_of(metadata.replicated_from, metadata), position, now_ms)
        else:
            source.last, source.seen_ms = positions[-1], now_ms

    def count_origin(self, origin: Origin, position: Position, now_ms: int) -> None:
        """Count a durable message of a producer of another cluster."""
        sequence = self._sequences.pop(origin.name, None) or ProducerSequence()
        sequence.stored(origin.last, position, origin.chunk)
        sequence.publish_time_ms = origin.publish_time_ms
        sequence.seen_ms = now_ms
        self._sequences[origin.name] = sequence
        if len(self._sequences) > 2 * self._limit:
            self._forget(now_ms)

    # Layout changes

    def final(self, segment: SegmentName, *, changed_ms: int, now_ms: int) -> list[FinalIds]:
        """The ids of all names at the end of a segment, for those that a layout change made."""
        self._forget(now_ms)
        found: list[FinalIds] = []
        for name, known in self._sequences.items():
            writer = known.writer
            live = None if writer is None else writer.live(changed_ms)
            carried = known.carried
            if writer is not None and writer.sent:
                carried = tuple(each._replace(writer=live) for each in carried)
            own: CarriedId | None = None
            if known.last != NO_SEQUENCE:
                m1_hashes = None if writer is None else writer.m1_hashes
                own = CarriedId(segment.hash_start, segment.hash_end, known.last, m1_hashes, live)
            ids = final_ids(segment, own, carried)
            if ids:
                seen_ms = known.last_seen_ms(now_ms)
                found.append(FinalIds(*base_name(name, segment), seen_ms, ids))
        return found

    def inherit(self, segment: SegmentName, finals: Iterable[FinalIds], now_ms: int) -> None:
        """Take over the ids of a segment's parents.

        A name that is in use already was not checked against them, so it goes without.
        """
        gathered: dict[str, list[FinalIds]] = {}
        for each in finals:
            name = name_on(each.name, segment, numbered=each.numbered)
            gathered.setdefault(name, []).append(each)
        for name, of_parents in gathered.items():
            known = self._sequences.get(name) or ProducerSequence()
            if known.attached or known.position != NO_POSITION:
                continue
            known.carried = within(segment, (row for each in of_parents for row in each.ids))
            known.seen_ms = max(each.seen_ms for each in of_parents)
            if known.carried:
                self._sequences[name] = known
        self._sort()
        self._forget(now_ms)

    # Snapshots

    def snapshot(self, position: Position, now_ms: int, replicated: str = "") -> str:
        """All that is durable up to `position`, as at most SNAPSHOT_BYTES of text.

        `replicated` is the JSON of the segment's `SegmentSources`, which is never left out.  Names
        that were unused for longest are left out first, and counted in `left_out`.
        """
        self._forget(now_ms)
        rows: list[str] = []
        carried: list[str] = []
        writers: list[str] = []
        ranges = RangeTable()
        bytes_left, self.left_out = SNAPSHOT_BYTES - len(replicated), 0
        sources: list[str] = []
        for cluster, row_of_cluster in self.sources.rows(now_ms).items():
            member = f"{_text(cluster)}:{_text(row_of_cluster)}"
            if len(member) < bytes_left:
                bytes_left -= len(member) + 1
                sources.append(member)
            else:
                self.left_out += 1
        for name, known in sorted(
            self._sequences.items(),
            key=lambda item: (item[1].attached > 0, item[1].seen_ms),
            reverse=True,
        ):
            row = _text(_row(name, known, now_ms)) if known.position != NO_POSITION else ""
            ids = writer = ""
            ranges_before = len(ranges)
            # Brokers of the version before read the rows alone.
            if known.carried:
                seen_ms = known.last_seen_ms(now_ms)
                ids = f"{_text(name)}:{_text([seen_ms, *ranges.row_of(known.carried)])}"
            if known.writer is not None and (row or ids or known.attached):
                writer = _text(known.writer.to_row(attached=known.attached > 0))
                writer = f"{_text(name)}:{writer}"
            size = len(row) + len(ids) + len(writer)
            if len(ranges) > ranges_before:
                size += len(_text(ranges.rows(ranges_before)))
            if size < bytes_left:
                bytes_left -= size + 3
                rows += [row] if row else []
                carried += [ids] if ids else []
                writers += [writer] if writer else []
            else:
                ranges.drop(ranges_before)
                self.left_out += 1
        where = f"[{position.ledger_id},{position.entry_id}]"
        text = f'{{"position":{where},"producers":[{",".join(rows)}]'
        if len(ranges):
            text += f',"ranges":{_text(ranges.rows())}'
        for member, members in (("carried", carried), ("writers", writers), ("sources", sources)):
            if members:
                text += f',"{member}":{{{",".join(members)}}}'
        ranges_of_clusters = f',"{REPLICATED_MEMBER}":{replicated}' if replicated else ""
        return text + ranges_of_clusters + "}"

    def load(self, snapshot: str) -> Position:
        """Take over a snapshot; returns the position up to which it counts."""
        content = json.loads(snapshot)
        for name, last, ledger_id, entry_id, seen_ms, *partial in reversed(content["producers"]):
            sequence = ProducerSequence(last)
            sequence.position = Position(ledger_id, entry_id)
            sequence.seen_ms = seen_ms
            if len(partial) % _PARTIAL_COLUMNS:
                sequence.publish_time_ms = partial.pop()
            if partial:
                chunk_sequence, uuid, chunk_id = partial
                sequence.chunk = Chunk(uuid, chunk_id, last=False)
                sequence.chunk_sequence = chunk_sequence
            self._sequences[name] = sequence
        ranges = dict(enumerate(content.get("ranges", ())))
        for name, (seen_ms, *ids) in content.get("carried", {}).items():
            known = self._sequences.setdefault(name, ProducerSequence())
            known.carried = ids_of_row(ids, ranges)
            known.seen_ms = seen_ms
        for name, row in content.get("writers", {}).items():
            known = self._sequences.setdefault(name, ProducerSequence())
            known.writer = NameWriter.from_row(row)
        self.sources.load(content.get("sources", {}))
        self._sort()
        return Position(*content["position"])

    def _sort(self) -> None:
        """Bring the names into the order in which they are forgotten."""
        names = sorted(self._sequences.items(), key=lambda item: item[1].seen_ms)
        self._sequences = dict(names)

    def _forget(self, now_ms: int) -> None:
        """Drop producers that are not attached: too old ones, and the oldest above the limit."""
        idle = [name for name, known in self._sequences.items() if not known.attached]
        surplus = len(idle) - self._limit
        for name in idle:
            if surplus > 0 or now_ms - self._sequences[name].seen_ms > self._keep_ms:
                del self._sequences[name]
                surplus -= 1
            else:
                break


def _text(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _row(name: str, known: ProducerSequence, now_ms: int) -> list[str | int]:
    seen_ms = known.last_seen_ms(now_ms)
    row: list[str | int] = [name, known.last, *known.position, seen_ms]
    if known.chunk is not None and known.chunk_sequence > known.last:
        row += [known.chunk_sequence, known.chunk.uuid, known.chunk.chunk_id]
    if known.publish_time_ms is not None:
        row.append(known.publish_time_ms)
    return row
