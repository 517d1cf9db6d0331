"""A MESSAGE and the messages in it.

Pure; time is given.  Rules:

- Everything of an entry is unpacked before anything of it is handed out.
- What is acknowledged already, removed by compaction, or before the place where reading began is
  left out.
- An entry that cannot be unpacked is reported with the reason, by which the broker counts it as
  acknowledged: it would come for ever.  One that is encrypted is left at the broker: somebody may
  have the key.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from magnetar.compression import decompress
from magnetar.consume.ack_tracker import AckTracker
from magnetar.consume.chunk_assembly import ChunkAssembly, is_chunk
from magnetar.consume.received import Entry, EntryKey, Received
from magnetar.errors import InvalidMessage
from magnetar.message_id import EntryId
from protocol.ack_set import from_words, pending_all
from protocol.batch_scan import Scanned, scan_batch
from protocol.frame_error import FrameError, MalformedBatch
from protocol.ids import from_wire
from protocol.message import parse_metadata, payload_of
from protocol.pulsar_pb2 import CommandAck, CommandMessage

__all__ = ["Decoded", "Decoder", "permits_of"]

S = TypeVar("S")


@dataclass(slots=True)
class Decoded(Generic[S]):
    """What came of a MESSAGE."""

    key: EntryKey
    permits: int = 1
    """What the broker counted it for."""
    messages: list[Received[S]] = field(default_factory=list)
    damage: "CommandAck.ValidationError | None" = None
    """What is wrong with it, as the broker is told."""
    why: str = ""
    """What is wrong with it, or why it is left at the broker."""
    again: tuple[EntryKey, ...] = ()
    """Entries to be asked for again: pieces of messages that were given up."""
    too_old: tuple[EntryKey, ...] = ()
    """Entries to be acknowledged: pieces of messages that will not be complete."""
    failure: InvalidMessage | None = None
    """Why nothing of the segment can be read any more."""


class Decoder(Generic[S]):
    """Of one segment consumer; `segment` is what its messages carry."""

    __slots__ = ("_after", "_chunks", "_segment", "_tracker")

    def __init__(
        self,
        segment: S,
        chunks: ChunkAssembly,
        tracker: AckTracker | None,
        after: EntryId | None = None,
    ) -> None:
        """Without a `tracker` nothing is acknowledged.  Nothing up to `after` is handed out."""
        self._segment = segment
        self._chunks = chunks
        self._tracker = tracker
        self._after = after

    def decode(self, message: CommandMessage, entry: bytes | None, now_ms: int) -> Decoded[S]:
        """`entry` is None if its checksum was wrong; `now_ms` since 1970."""
        where = message.message_id
        key = from_wire(where.ledger_id), from_wire(where.entry_id)
        if entry is None:
            return Decoded(key, damage=CommandAck.ChecksumMismatch, why="its checksum is wrong")
        try:
            metadata = parse_metadata(entry)
        except FrameError as error:
            return Decoded(key, damage=CommandAck.BatchDeSerializeError, why=str(error))
        is_batch = metadata.HasField("num_messages_in_batch")
        decoded: Decoded[S] = Decoded(key, max(metadata.num_messages_in_batch, 1))
        if metadata.encryption_keys:
            decoded.why = "it is encrypted"
            return decoded
        payload: bytes | memoryview = payload_of(entry)
        chunks: tuple[EntryKey, ...] = ()
        if is_chunk(metadata):
            assembled = self._chunks.add(key, metadata, bytes(payload), now_ms)
            decoded.again, decoded.too_old = assembled.again, assembled.too_old
            decoded.failure = assembled.failure
            if assembled.payload is None:
                return decoded
            payload, chunks, is_batch = assembled.payload, assembled.chunks, False
        size = metadata.num_messages_in_batch if is_batch else 0
        about = Entry(key, where.partition, message.redelivery_count, metadata, size, chunks)
        self._unpack(decoded, about, payload, message.ack_set)
        return decoded

    def _unpack(
        self,
        decoded: Decoded[S],
        about: Entry,
        payload: bytes | memoryview,
        ack_set: Sequence[int],
    ) -> None:
        metadata = about.metadata
        try:
            unpacked = decompress(metadata.compression, payload, metadata.uncompressed_size)
            data = unpacked if isinstance(unpacked, bytes) else bytes(unpacked)
            if about.metadata.num_messages_in_batch <= 0:
                raise MalformedBatch("it says that it is a batch without messages")
            if about.batch_size:
                self._batch(decoded, about, data, ack_set)
            else:
                self._single(decoded, about, data)
        except InvalidMessage as error:
            decoded.damage, decoded.why = CommandAck.DecompressionError, str(error)
        except FrameError as error:
            decoded.damage, decoded.why = CommandAck.BatchDeSerializeError, str(error)

    def _single(self, decoded: Decoded[S], about: Entry, data: bytes) -> None:
        if self._after is not None and about.key <= self._after.key:
            return
        tracker = self._tracker
        if tracker is not None:
            new = tracker.delivered_chunks(about.chunks) if about.chunks else None
            if new is None:
                new = tracker.delivered(about.key)
            if not new:
                return
        decoded.messages.append(Received(self._segment, about, -1, None, data))

    def _batch(
        self, decoded: Decoded[S], about: Entry, data: bytes, ack_set: Sequence[int]
    ) -> None:
        size = about.batch_size
        every = pending_all(size)
        mine = from_words(ack_set, size) if ack_set else every
        scanned = scan_batch(data, size)
        compacted = about.metadata.compacted_batch_indexes
        if mine == every and len(scanned) == size and not compacted and self._after is None:
            visible = every
        else:
            visible = self._visible(about, scanned)
        pending = mine & visible
        if self._tracker is not None:
            pending = self._tracker.delivered_batch(about.key, size, mine, visible)
        segment, add = self._segment, decoded.messages.append
        if pending == every:
            for index, single, payload in scanned:
                add(Received(segment, about, index, single, payload))
        else:
            for index, single, payload in scanned:
                if pending >> index & 1:
                    add(Received(segment, about, index, single, payload))

    def _visible(self, about: Entry, scanned: list[Scanned]) -> int:
        """The bits of the messages of a batch that are there, behind where reading began."""
        visible = 0
        for index, _, _ in scanned:
            visible |= 1 << index
        for index in about.metadata.compacted_batch_indexes:
            if 0 <= index < about.batch_size:
                visible &= ~(1 << index)
        after = self._after
        if after is not None and about.key <= after.key:
            begin = about.batch_size if about.key < after.key else after.batch_index + 1
            if about.key == after.key and after.batch_index < 0:
                begin = about.batch_size
            visible = visible >> begin << begin
        return visible


def permits_of(entry: bytes | None) -> int:
    """What the broker counts an entry for, which nobody unpacks."""
    try:
        return 1 if entry is None else max(parse_metadata(entry).num_messages_in_batch, 1)
    except FrameError:
        return 1
