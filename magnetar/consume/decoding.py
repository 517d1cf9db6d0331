"""`Decoder`, which decodes a MESSAGE, with chunked messages and permits.  Pure: time is given."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from magnetar.bounds import ORDERED_CHUNKED_MESSAGES
from magnetar.compression import decompress
from magnetar.consume.ack_tracker import AckTracker
from magnetar.consume.message import Entry, EntryKey, RawMessage
from magnetar.errors import InvalidMessage
from magnetar.message_id import EntryId
from magnetar.protocol.ack_set import from_words, pending_all
from magnetar.protocol.batch_scan import Scanned, scan_batch
from magnetar.protocol.frame_error import FrameError, MalformedBatch
from magnetar.protocol.ids import from_wire
from magnetar.protocol.message import parse_metadata, payload_of
from magnetar.protocol.pulsar_pb2 import CommandAck, CommandMessage, MessageMetadata

__all__ = [
    "AssembledChunks",
    "ChunkAssembly",
    "DecodedEntry",
    "Decoder",
    "Permits",
    "is_chunk",
    "permits_of",
]


S = TypeVar("S")


class Permits:
    """The permits of one segment consumer at its broker.

    The permits at the broker and the messages in the inbox are together at most the queue's size,
    except for batches: a broker sends an entry while it has a permit, and uses one for each
    message of it.  At least half of the queue's size is given at a time, when the application has
    taken as many messages.
    """

    __slots__ = ("_at_broker", "_size", "_threshold", "_waiting")

    def __init__(self, queue_size: int) -> None:
        """`queue_size` is in messages, at least 1."""
        self._size = queue_size
        self._threshold = max(1, queue_size // 2)
        self._at_broker = 0
        self._waiting = 0

    @property
    def waiting(self) -> int:
        """Messages in the inbox."""
        return self._waiting

    def reset(self) -> None:
        """Begin again: the broker does not know this consumer any more, and the inbox is empty."""
        self._at_broker = 0
        self._waiting = 0

    def keep(self, messages: int) -> None:
        """Count messages in the inbox that were not counted yet."""
        self._waiting += messages

    def arrived(self, messages: int, kept: int) -> None:
        """Count an entry of so many messages, of which `kept` go into the inbox."""
        # All messages of a batch count, though Apache Pulsar does not count those that were
        # acknowledged before.  So the broker may have more permits than counted here, never fewer:
        # then a consumer would wait for ever.  An entry without a permit corrects the count.
        self._at_broker = max(self._at_broker, 1) - messages
        self._waiting += kept

    def taken(self, messages: int = 1) -> bool:
        """Count messages that left the inbox; returns whether to send FLOW."""
        self._waiting -= messages
        return self._size - self._waiting - self._at_broker >= self._threshold

    def to_ask(self) -> int:
        """The permits to send with FLOW now, which count as sent; 0 if it is not time."""
        # Messages of a batch beyond the permits are a debt at the broker, which is paid too.
        missing = self._size - self._waiting - self._at_broker
        if missing < self._threshold or self._waiting >= self._size:
            return 0
        self._at_broker += missing
        return missing


def is_chunk(metadata: MessageMetadata) -> bool:
    """Whether an entry is a chunk of a message with several."""
    return metadata.num_chunks_from_msg > 1


@dataclass(frozen=True, slots=True)
class AssembledChunks:
    """The result of adding a chunk."""

    payload: bytes | None = None
    """The whole payload, compressed as it was sent, if this chunk was the last one."""
    chunks: tuple[EntryKey, ...] = ()
    """All entries of the message, if this chunk was the last one."""
    again: tuple[EntryKey, ...] = ()
    """Entries of dropped messages, to be requested again."""
    too_old: tuple[EntryKey, ...] = ()
    """Entries of expired messages, to be acknowledged: their rest will not come any more."""
    failure: InvalidMessage | None = None
    """The error if more messages are incomplete than can be kept, and none can be dropped."""


@dataclass(slots=True)
class _IncompleteMessage:
    total: int
    size: int
    since_ms: int
    keys: list[EntryKey] = field(default_factory=list)
    pieces: list[bytes] = field(default_factory=list)
    received: int = 0

    def takes(self, index: int, size: int) -> bool:
        """Whether the chunk with that index and size is the next one."""
        return index == len(self.keys) and self.received + size <= self.size


class ChunkAssembly:
    """Assembles the chunked messages of one segment consumer.

    The chunks of a message have one `uuid`, and come in order.  A chunk that is not the next one
    drops the message and the chunk; a chunk that was delivered twice is ignored.  Above the limits
    of messages or bytes the oldest incomplete messages are dropped, except that one alone may have
    more bytes.  A message that is incomplete for too long, or announces too many bytes, is dropped
    too.

    With `in_order` a broker does not send again what lies before the acknowledged position.  So the
    oldest messages are not dropped for newer ones: reading fails.  It also knows the messages that
    span a position (`open_across`), also complete ones that are not acknowledged or handed out yet.
    """

    __slots__ = (
        "_complete",
        "_expire_after_ms",
        "_held",
        "_in_order",
        "_max_bytes",
        "_max_pending",
        "_max_size",
        "_pending",
    )

    def __init__(
        self,
        max_pending: int,
        expire_after_ms: int,
        max_size: int,
        *,
        max_bytes: int,
        in_order: bool = False,
        ordered_pending: int = ORDERED_CHUNKED_MESSAGES,
    ) -> None:
        """With `expire_after_ms` 0 no message expires.  `max_size` bounds the bytes of a message,
        `max_bytes` those of all incomplete ones.
        """
        self._in_order = in_order
        self._max_pending = max(max_pending, ordered_pending) if in_order else max_pending
        self._complete: dict[EntryKey, EntryKey] = {}
        """With `in_order`: the first entry of each complete message not yet passed, by its last."""
        self._expire_after_ms = expire_after_ms
        self._max_size = max_size
        self._max_bytes = max_bytes
        self._held = 0
        """Bytes of incomplete messages."""
        self._pending: OrderedDict[str, _IncompleteMessage] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pending)

    def add(
        self, key: EntryKey, metadata: MessageMetadata, piece: bytes, now_ms: int
    ) -> AssembledChunks:
        """Add a chunk."""
        too_old = self._expired(now_ms)
        again: tuple[EntryKey, ...] = ()
        pending = self._pending.get(metadata.uuid)
        if pending is not None and key in pending.keys:
            return AssembledChunks(too_old=too_old)
        if self._in_order and (failure := self._too_much(metadata, len(piece))) is not None:
            return AssembledChunks(too_old=too_old, failure=failure)
        if metadata.chunk_id == 0:
            if pending is not None:
                again = self._give_up(metadata.uuid)
            elif len(self._pending) >= self._max_pending:
                again = self._give_up(next(iter(self._pending)))
            pending = self._begin(metadata, now_ms)
        if pending is None or not pending.takes(metadata.chunk_id, len(piece)):
            again += self._give_up(metadata.uuid)
            if self._is_too_old(metadata.publish_time, now_ms):
                too_old += (key,)
            else:
                again += (key,)
            return AssembledChunks(again=again, too_old=too_old)
        while len(self._pending) > 1 and self._held + len(piece) > self._max_bytes:
            again += self._give_up(next(each for each in self._pending if each != metadata.uuid))
        pending.keys.append(key)
        pending.pieces.append(piece)
        pending.received += len(piece)
        self._held += len(piece)
        if len(pending.keys) < pending.total:
            return AssembledChunks(again=again, too_old=too_old)
        self._give_up(metadata.uuid)
        if pending.received != pending.size:
            return AssembledChunks(again=(*again, *pending.keys), too_old=too_old)
        if self._in_order:
            self.add_complete(pending.keys)
        return AssembledChunks(b"".join(pending.pieces), tuple(pending.keys), again, too_old)

    def clear(self) -> None:
        """Forget incomplete messages, which are delivered again; with `in_order` keep them."""
        if not self._in_order:
            self._pending.clear()
            self._held = 0

    def add_complete(self, keys: Sequence[EntryKey]) -> None:
        """With `in_order`: note a complete message that is not acknowledged or handed out yet."""
        self._complete[keys[-1]] = keys[0]

    def pass_up_to(self, key: EntryKey) -> None:
        """With `in_order`: note that everything up to an entry is acknowledged or handed out."""
        for last in [each for each in self._complete if each <= key]:
            del self._complete[last]

    def open_across(self, key: EntryKey) -> EntryKey | None:
        """With `in_order`: the first entry of the messages that span an entry, or None."""
        firsts = [each.keys[0] for each in self._pending.values() if each.keys]
        firsts += [first for last, first in self._complete.items() if last > key]
        return min((first for first in firsts if first <= key), default=None)

    @property
    def held_bytes(self) -> int:
        """Bytes of the incomplete messages."""
        return self._held

    def _too_much(self, metadata: MessageMetadata, size: int) -> InvalidMessage | None:
        """With `in_order`: the error if a chunk exceeds the limits."""
        known = metadata.uuid in self._pending
        if not known and metadata.chunk_id:
            return None
        if not known and len(self._pending) >= self._max_pending:
            return _too_many(self._max_pending)
        others = len(self._pending) - known
        if others and self._held + size > self._max_bytes:
            return _too_large(self._max_bytes)
        return None

    def _begin(self, metadata: MessageMetadata, now_ms: int) -> _IncompleteMessage | None:
        size = metadata.total_chunk_msg_size
        if not 0 <= size <= self._max_size:
            return None
        pending = _IncompleteMessage(metadata.num_chunks_from_msg, size, now_ms)
        self._pending[metadata.uuid] = pending
        return pending

    def _expired(self, now_ms: int) -> tuple[EntryKey, ...]:
        gone: tuple[EntryKey, ...] = ()
        while self._pending:
            uuid, oldest = next(iter(self._pending.items()))
            if not self._is_too_old(oldest.since_ms, now_ms):
                break
            gone += self._give_up(uuid)
        return gone

    def _is_too_old(self, since_ms: int, now_ms: int) -> bool:
        return 0 < self._expire_after_ms < now_ms - since_ms

    def _give_up(self, uuid: str) -> tuple[EntryKey, ...]:
        pending = self._pending.pop(uuid, None)
        if pending is None:
            return ()
        self._held -= pending.received
        return tuple(pending.keys)


def _too_many(limit: int) -> InvalidMessage:
    return InvalidMessage(
        f"More than {limit} chunked messages are incomplete, and an ordered consumer cannot skip "
        "one; look for producers that end in the middle of messages, or give "
        "max_pending_chunked_messages a larger number."
    )


def _too_large(limit: int) -> InvalidMessage:
    return InvalidMessage(
        f"Chunked messages of more than {limit} bytes are incomplete, and an ordered consumer "
        "cannot skip one; look for producers that end in the middle of messages, or give "
        "max_pending_chunked_bytes a larger number."
    )


@dataclass(slots=True)
class DecodedEntry(Generic[S]):
    """The result of decoding a MESSAGE."""

    key: EntryKey
    permits: int = 1
    """Permits that the broker counted for the entry."""
    messages: list[RawMessage[S]] = field(default_factory=list)
    damage: "CommandAck.ValidationError | None" = None
    """The validation error to report to the broker."""
    why: str = ""
    """The reason why the entry cannot be read, in words."""
    again: tuple[EntryKey, ...] = ()
    """Entries to request again: chunks of dropped messages."""
    too_old: tuple[EntryKey, ...] = ()
    """Entries to acknowledge: chunks of messages that will not be complete."""
    failure: InvalidMessage | None = None
    """The error if the segment cannot be read any more."""


class Decoder(Generic[S]):
    """Decodes the entries of one segment consumer; `segment` is attached to their messages.

    Messages that are acknowledged already, removed by compaction, or before the start of reading
    are left out.  An entry that cannot be unpacked has a validation error to report, after which
    the broker counts it as acknowledged; otherwise it would come for ever.  An encrypted entry has
    none, as another consumer may have the key.
    """

    __slots__ = ("_after", "_chunks", "_segment", "_tracker")

    def __init__(
        self,
        segment: S,
        chunks: ChunkAssembly,
        tracker: AckTracker | None,
        after: EntryId | None = None,
    ) -> None:
        """Without a `tracker` nothing is acknowledged.  Messages up to `after` are left out."""
        self._segment = segment
        self._chunks = chunks
        self._tracker = tracker
        self._after = after

    def decode(self, message: CommandMessage, entry: bytes | None, now_ms: int) -> DecodedEntry[S]:
        """Decode a MESSAGE; `entry` is None if its checksum was wrong, `now_ms` is since 1970."""
        where = message.message_id
        key = from_wire(where.ledger_id), from_wire(where.entry_id)
        if entry is None:
            return DecodedEntry(
                key, damage=CommandAck.ChecksumMismatch, why="its checksum is wrong"
            )
        try:
            metadata = parse_metadata(entry)
        except FrameError as error:
            return DecodedEntry(key, damage=CommandAck.BatchDeSerializeError, why=str(error))
        is_batch = metadata.HasField("num_messages_in_batch")
        decoded: DecodedEntry[S] = DecodedEntry(key, max(metadata.num_messages_in_batch, 1))
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
        decoded: DecodedEntry[S],
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

    def _single(self, decoded: DecodedEntry[S], about: Entry, data: bytes) -> None:
        if self._after is not None and about.key <= self._after.key:
            return
        tracker = self._tracker
        if tracker is not None:
            new = tracker.deliver_chunks(about.chunks) if about.chunks else None
            if new is None:
                new = tracker.deliver(about.key)
            if not new:
                return
        decoded.messages.append(RawMessage(self._segment, about, -1, None, data))

    def _batch(
        self, decoded: DecodedEntry[S], about: Entry, data: bytes, ack_set: Sequence[int]
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
            pending = self._tracker.deliver_batch(about.key, size, mine, visible)
        segment, add = self._segment, decoded.messages.append
        if pending == every:
            for index, single, payload in scanned:
                add(RawMessage(segment, about, index, single, payload))
        else:
            for index, single, payload in scanned:
                if pending >> index & 1:
                    add(RawMessage(segment, about, index, single, payload))

    def _visible(self, about: Entry, scanned: list[Scanned]) -> int:
        """The bits of a batch's messages after the start of reading, without compacted ones."""
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
    """The permits that the broker counts for an entry, without unpacking it."""
    try:
        return 1 if entry is None else max(parse_metadata(entry).num_messages_in_batch, 1)
    except FrameError:
        return 1
