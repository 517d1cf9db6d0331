"""One message on its way, and one SEND.

Pure.  Rules: an `Outgoing` is in one place at a time: the hold of its topic, the queue of a
segment, or a `Sent` of that segment.  Whoever asked for it looks only at its `outcome`; what nobody
waits for any more (its outcome is done: time is up, the caller was cancelled) is not sent if it was
not yet.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from magnetar.message_id import MessageId
from magnetar.transactions.work import Work

MESSAGE_OVERHEAD_BYTES = 64
"""What is counted for a message beside its payload, key and properties."""


class Outcome(Protocol):
    """What becomes of a message; an `asyncio.Future` in the shell."""

    def done(self) -> bool:
        """Whether it is decided."""
        ...

    def set_result(self, result: MessageId, /) -> None:
        """It is stored, there."""

    def set_exception(self, exception: BaseException, /) -> None:
        """It is not stored, or nobody knows."""


class Awaited(Protocol):
    """What a message waits for before it may be sent; an `asyncio.Future` in the shell."""

    def done(self) -> bool:
        """Whether the wait is over."""
        ...


class Outgoing:
    """One message.  `size` is what it counts for, bytes; times are ms since 1970.

    `key` is as it is on the wire, of a `bytes_key` in base64.  `bucket_hash` are the 16 bits that
    choose its entry bucket.  `sequence_id` is the user's, `number` the one that it is sent under.
    `txn` is the transaction's id (most and least bits); `awaits`: until the transaction knows the
    segment.  `counted`: it takes room in its producer.  `first_chunk`: the entry of its first
    chunk, once stored.  `deadline`: when it fails, in seconds of the loop's clock.  `place`: which
    of its producer's messages it is, from 1 on.
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
        self.awaits: Awaited | None = None
        self.size = len(payload) + MESSAGE_OVERHEAD_BYTES
        if key is not None:
            self.size += len(key)
        if ordering_key is not None:
            self.size += len(ordering_key)
        if properties:
            self.size += sum(len(name) + len(value) for name, value in properties.items())


class Sent:
    """One SEND: a message, a batch, or one chunk of a message.

    `parts` is its frame, to be written one after the other; it is the same when it is sent again.
    `index`, of `chunks` many, is which chunk it is.  `in_doubt`: a connection was lost since it was
    sent, so it may be stored though nobody has said so.
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
        messages: Sequence[Outgoing],
        parts: tuple[bytes, bytes],
        checksum: int,
        *,
        index: int = 0,
        chunks: int = 1,
    ) -> None:
        """`highest` is that of its messages; `checksum` the CRC32C of the second part."""
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
        """Whether somebody waits for one of its messages."""
        return any(not message.outcome.done() for message in self.messages)
