"""Pure: from a MESSAGE to the messages in it, and the permits they use; time is given."""

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
    """How many more messages one segment consumer asks its broker for.

    - The broker sends an entry while it has a permit left, and takes one for each message of it, so
      a batch may bring more than was asked for. All messages of a batch count, also those that were
      acknowledged before; Apache Pulsar does not count these. So a broker may have more permits
      than is known here, never less: else a consumer would wait for ever. When something comes
      though no permit should be left, what is known is put right.
    - What the broker may send and what waits in the inbox are together at most the queue's size,
      but for batches. Half of it is asked for at a time, when the application has taken as much.
    """

    __slots__ = ("_at_broker", "_size", "_threshold", "_waiting")

    def __init__(self, queue_size: int) -> None:
        """`queue_size` in messages, at least 1."""
        self._size = queue_size
        self._threshold = max(1, queue_size // 2)
        self._at_broker = 0
        self._waiting = 0

    @property
    def waiting(self) -> int:
        """Messages in the inbox."""
        return self._waiting

    def reset(self) -> None:
        """The broker knows nothing of this consumer any more, and nothing waits."""
        self._at_broker = 0
        self._waiting = 0

    def keep(self, messages: int) -> None:
        """So many wait in the inbox that were not counted."""
        self._waiting += messages

    def arrived(self, messages: int, kept: int) -> None:
        """An entry of so many messages came, of which `kept` go into the inbox."""
        self._at_broker = max(self._at_broker, 1) - messages
        self._waiting += kept

    def taken(self, messages: int = 1) -> bool:
        """So many left the inbox; whether to ask for more."""
        self._waiting -= messages
        return self._size - self._waiting - self._at_broker >= self._threshold

    def to_ask(self) -> int:
        """The permits to send with FLOW now; 0 if it is not time.  They are counted as sent."""
        # What a batch brought beyond the permits is a debt at the broker, which is filled up too.
        missing = self._size - self._waiting - self._at_broker
        if missing < self._threshold or self._waiting >= self._size:
            return 0
        self._at_broker += missing
        return missing


def is_chunk(metadata: MessageMetadata) -> bool:
    """Whether an entry is a piece of a message that has several."""
    return metadata.num_chunks_from_msg > 1


@dataclass(frozen=True, slots=True)
class AssembledChunks:
    """The result of taking in a piece."""

    payload: bytes | None = None
    """The whole payload, compressed as it was sent, if this piece was the last one."""
    chunks: tuple[EntryKey, ...] = ()
    """Then, all its entries."""
    again: tuple[EntryKey, ...] = ()
    """Entries of messages that were given up, to be asked for again."""
    too_old: tuple[EntryKey, ...] = ()
    """Entries that were given up for good."""
    failure: InvalidMessage | None = None
    """More are incomplete than can be kept, and none may be given up."""


@dataclass(slots=True)
class _IncompleteMessage:
    total: int
    size: int
    since_ms: int
    keys: list[EntryKey] = field(default_factory=list)
    pieces: list[bytes] = field(default_factory=list)
    received: int = 0

    def takes(self, index: int, size: int) -> bool:
        """Whether the piece of that index and size is the next one."""
        return index == len(self.keys) and self.received + size <= self.size


class ChunkAssembly:
    """The incomplete messages of one segment consumer, put together from their pieces.

    - The pieces of a message have one `uuid`, come in order, and each is an entry of its own.
    - A piece that is not the next one ends its message: what had come is given up, and so is the
      piece. A piece that came before is dropped alone: it was delivered twice.
    - Only so many messages may be incomplete at a time, with so many bytes: the oldest are given up
      for newer ones, save that one alone may have more bytes. One that is incomplete for too long
      is given up too. So are pieces that promise more than a limit.
    - Who reads in order (`in_order`) gets nothing again that lies before what was acknowledged. So
      there the oldest are not given up for newer ones: it fails. And it is known which messages lie
      across a place, complete ones that were not acknowledged (or handed out) included
      (`open_across`).
    - What is given up was seen by nobody. What is too old is to be acknowledged, since its rest
      will not come any more; anything else is to be asked for again.
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
        """`expire_after_ms` 0: never.  Bytes: `max_size` of a message, `max_bytes` of all."""
        self._in_order = in_order
        self._max_pending = max(max_pending, ordered_pending) if in_order else max_pending
        self._complete: dict[EntryKey, EntryKey] = {}
        """In order: the first entry of those that are complete and not passed, by the last one."""
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
        """Take a piece in."""
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
            self.waits(pending.keys)
        return AssembledChunks(b"".join(pending.pieces), tuple(pending.keys), again, too_old)

    def clear(self) -> None:
        """Forget incomplete messages, as they are delivered again; in order they are kept."""
        if not self._in_order:
            self._pending.clear()
            self._held = 0

    def waits(self, keys: Sequence[EntryKey]) -> None:
        """In order: a complete message of these entries is not acknowledged, or not handed out."""
        self._complete[keys[-1]] = keys[0]

    def passed(self, key: EntryKey) -> None:
        """In order: everything up to this entry is acknowledged, or handed out."""
        for last in [each for each in self._complete if each <= key]:
            del self._complete[last]

    def open_across(self, key: EntryKey) -> EntryKey | None:
        """In order: the first entry of messages that begin before an entry and end behind it."""
        firsts = [each.keys[0] for each in self._pending.values() if each.keys]
        firsts += [first for last, first in self._complete.items() if last > key]
        return min((first for first in firsts if first <= key), default=None)

    @property
    def held_bytes(self) -> int:
        """Bytes of the messages that are incomplete."""
        return self._held

    def _too_much(self, metadata: MessageMetadata, size: int) -> InvalidMessage | None:
        """In order: why a piece cannot be kept beside the others."""
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
        f"More than {limit} messages in pieces are incomplete, and reading in order none of them "
        "can be left out; look for producers that end in the middle of messages, or give "
        "max_pending_chunked_messages a larger number."
    )


def _too_large(limit: int) -> InvalidMessage:
    return InvalidMessage(
        f"Messages in pieces of more than {limit} bytes are incomplete, and reading in order none "
        "of them can be left out; look for producers that end in the middle of messages, or give "
        "max_pending_chunked_bytes a larger number."
    )


@dataclass(slots=True)
class DecodedEntry(Generic[S]):
    """The result of decoding a MESSAGE."""

    key: EntryKey
    permits: int = 1
    """Permits that the broker counted it for."""
    messages: list[RawMessage[S]] = field(default_factory=list)
    damage: "CommandAck.ValidationError | None" = None
    """The validation error to report to the broker."""
    why: str = ""
    """The reason, in words, why it cannot be read here."""
    again: tuple[EntryKey, ...] = ()
    """Entries to be asked for again: pieces of messages that were given up."""
    too_old: tuple[EntryKey, ...] = ()
    """Entries to be acknowledged: pieces of messages that will not be complete."""
    failure: InvalidMessage | None = None
    """Why nothing of the segment can be read any more."""


class Decoder(Generic[S]):
    """Unpacks the entries of one segment consumer; `segment` is what their messages carry.

    - Everything of an entry is unpacked before anything of it is handed out.
    - What is acknowledged already, removed by compaction, or before the place where reading began
      is left out.
    - An entry that cannot be unpacked is reported with the reason, by which the broker counts it as
      acknowledged: it would come for ever. One that is encrypted is left at the broker: somebody
      may have the key.
    """

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

    def decode(self, message: CommandMessage, entry: bytes | None, now_ms: int) -> DecodedEntry[S]:
        """`entry` is None if its checksum was wrong; `now_ms` since 1970."""
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
    """Return the permits that the broker counts an entry for, without unpacking it."""
    try:
        return 1 if entry is None else max(parse_metadata(entry).num_messages_in_batch, 1)
    except FrameError:
        return 1
