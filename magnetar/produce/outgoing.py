"""A message that is being sent, and a SEND.  Pure."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from magnetar.message_id import MessageId
from magnetar.transactions.work import Work

MESSAGE_OVERHEAD_BYTES = 64
"""Bytes that count for a message beside its payload, key and properties."""


class Outcome(Protocol):
    """The outcome of a message; an `asyncio.Future` in the shell."""

    def done(self) -> bool:
        """Whether the outcome is known, or the caller no longer waits for it."""
        ...

    def set_result(self, result: MessageId, /) -> None:
        """Set the id of the stored message."""

    def set_exception(self, exception: BaseException, /) -> None:
        """Set the error; the message is not stored, or that is not known."""


class SendGate(Protocol):
    """A condition before which a message must not be sent."""

    def done(self) -> bool:
        """Whether the wait is over."""
        ...


class OutgoingMessage:
    """One message that is being sent.

    It is in one place at a time: held for its topic, in the queue of a segment, or in a SEND of
    that segment.  The caller sees only its `outcome`.  If that is done before the message was sent
    (a timeout, a cancelled caller), the message is not sent.

    `size` is the number of bytes that it counts for.  Times are in ms since 1970.  `key` is as on
    the wire: base64 for a `bytes_key`.  `bucket_hash` are the 16 bits that choose its entry bucket.
    `sequence_id` is the user's, `number` the one that is sent.  `txn` is the id of its transaction
    (most and least bits); `awaits` is done when the transaction knows the segment.  `counted` says
    whether it counts as pending in its producer.  `first_chunk` is the entry of its first chunk,
    once stored.  `deadline` is when it fails, in seconds of the loop's clock.  `place` counts the
    messages of its producer from 1 on.
    """

    __slots__ = (
        "awaits",
        "bucket_hash",
        "bytes_key",
        "counted",
        "deadline",
        "deliver_at_ms",
        "event_time_ms",
        "first_chunk",
        "key",
        "null_value",
        "number",
        "ordering_key",
        "outcome",
        "payload",
        "place",
        "properties",
        "sequence_id",
        "size",
        "transaction",
        "txn",
    )

    def __init__(
        self,
        outcome: Outcome,
        payload: bytes,
        key: bytes | None = None,
        bucket_hash: int = 0,
        ordering_key: bytes | None = None,
        properties: Mapping[str, str] | None = None,
        event_time_ms: int = 0,
        sequence_id: int | None = None,
        deliver_at_ms: int | None = None,
        *,
        null_value: bool = False,
    ) -> None:
        self.outcome = outcome
        self.payload = payload
        self.key = key
        self.bucket_hash = bucket_hash
        self.ordering_key = ordering_key
        self.properties = properties
        self.event_time_ms = event_time_ms
        self.sequence_id = sequence_id
        self.deliver_at_ms = deliver_at_ms
        self.null_value = null_value
        self.bytes_key = False
        self.number = -1
        self.counted = True
        self.first_chunk: tuple[int, int] | None = None
        self.deadline = 0.0
        self.place = 0
        self.transaction: Work | None = None
        self.txn: tuple[int, int] | None = None
        self.awaits: SendGate | None = None
        self.size = len(payload) + MESSAGE_OVERHEAD_BYTES
        if key is not None:
            self.size += len(key)
        if ordering_key is not None:
            self.size += len(ordering_key)
        if properties:
            self.size += sum(len(name) + len(value) for name, value in properties.items())


class SentEntry:
    """One SEND: a message, a batch, or one chunk of a message.

    `parts` are the bytes of its frame, the same when it is sent again.  `index` is the number of
    the chunk, of `chunks`.  `in_doubt` says that a connection was lost since it was sent, so that
    it may be stored without a receipt.
    """

    __slots__ = (
        "checksum",
        "chunks",
        "highest",
        "in_doubt",
        "index",
        "messages",
        "parts",
        "sequence_id",
    )

    def __init__(
        self,
        sequence_id: int,
        highest: int,
        messages: Sequence[OutgoingMessage],
        parts: tuple[bytes, bytes],
        checksum: int,
        *,
        index: int = 0,
        chunks: int = 1,
    ) -> None:
        """`highest` is the highest sequence id; `checksum` is the CRC32C of the second part."""
        self.sequence_id = sequence_id
        self.highest = highest
        self.messages = messages
        self.parts = parts
        self.checksum = checksum
        self.index = index
        self.chunks = chunks
        self.in_doubt = False

    @property
    def wanted(self) -> bool:
        """Whether a caller still waits for one of its messages."""
        return any(not message.outcome.done() for message in self.messages)
