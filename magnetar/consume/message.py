"""A message as decoded from an entry, and as a consumer hands it out.  Pure."""

from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Generic, TypeVar, cast

from magnetar.message_id import EntryId, MessageId, Positions
from magnetar.protocol.ids import from_wire
from magnetar.protocol.pulsar_pb2 import MessageMetadata, SingleMessageMetadata
from magnetar.schema.schema import Schema

__all__ = ["Entry", "EntryKey", "Message", "RawMessage"]


T = TypeVar("T")
S_co = TypeVar("S_co", covariant=True)
EntryKey = tuple[int, int]
"""The ids of the ledger and the entry."""
MESSAGE_OVERHEAD_BYTES: Final = 200
"""Bytes that count for a message beside its payload."""


_NOT_DECODED: Final = object()
_NO_POSITIONS: Final[Positions] = MappingProxyType({})


class Entry:
    """The data that all messages of one entry share."""

    __slots__ = ("batch_size", "chunks", "key", "metadata", "partition", "redelivery_count")

    def __init__(
        self,
        key: EntryKey,
        partition: int,
        redelivery_count: int,
        metadata: MessageMetadata,
        batch_size: int,
        chunks: tuple[EntryKey, ...] = (),
    ) -> None:
        self.key: Final = key
        self.partition: Final = partition
        self.redelivery_count: Final = redelivery_count
        self.metadata: Final = metadata
        self.batch_size: Final = batch_size
        """Messages in the batch; 0 if it is not a batch."""
        self.chunks: Final = chunks
        """All entries of a chunked message; `key` is the last one."""


class RawMessage(Generic[S_co]):
    """One decoded message; `segment` is the segment consumer that received it."""

    __slots__ = ("_single", "_single_bytes", "batch_index", "entry", "payload", "segment")

    def __init__(
        self,
        segment: S_co,
        entry: Entry,
        batch_index: int,
        single: bytes | None,
        payload: bytes,
    ) -> None:
        """`single` are the bytes of its `SingleMessageMetadata` in a batch."""
        self.segment: Final = segment
        self.entry: Final = entry
        self.batch_index: Final = batch_index
        self.payload: Final = payload
        self._single_bytes = single
        self._single: SingleMessageMetadata | None = None

    @property
    def size(self) -> int:
        """The bytes that this message counts for in an inbox."""
        return len(self.payload) + MESSAGE_OVERHEAD_BYTES

    @property
    def entry_id(self) -> EntryId:
        """The id of this message in its segment."""
        entry = self.entry
        first = entry.chunks[0] if entry.chunks else None
        ledger_id, entry_id = entry.key
        return EntryId(
            ledger_id, entry_id, self.batch_index, entry.batch_size, entry.partition, first
        )

    @property
    def single(self) -> SingleMessageMetadata | None:
        """The metadata of this message in its batch; None for a message alone in its entry."""
        if self._single is None and self._single_bytes is not None:
            self._single = SingleMessageMetadata.FromString(self._single_bytes)
            self._single_bytes = None
        return self._single

    @property
    def own_metadata(self) -> SingleMessageMetadata | MessageMetadata:
        """The metadata with the key, properties and event time of this message."""
        return self.single or self.entry.metadata


class Message(Generic[T]):
    """A message that a consumer hands out; immutable.

    Metadata and value are parsed when they are first used.  Two messages are never equal, but their
    ids may be.
    """

    __slots__ = (
        "_positions",
        "_properties",
        "_schema",
        "_value",
        "received",
        "segment_id",
        "topic",
    )

    def __init__(
        self,
        received: RawMessage[object],
        schema: Schema[T],
        topic: str,
        segment_id: int,
        positions: Positions = _NO_POSITIONS,
    ) -> None:
        """`positions` is the position vector of an ordered consumer, which must not change."""
        self.received: Final = received
        """The decoded message, for consumers."""
        self.topic: Final = topic
        """The topic of the subscription, as the broker resolved its name."""
        self.segment_id: Final = segment_id
        self._schema = schema
        self._positions = positions
        self._value: object = _NOT_DECODED
        self._properties: Mapping[str, str] | None = None

    def __repr__(self) -> str:
        return f"Message({self.topic}, {self.id}, {len(self.data)} bytes)"

    @property
    def value(self) -> T:
        """The value, decoded at the first use; None for a message without a value.

        Raises `InvalidMessage`, at each use, if the schema cannot decode the bytes.
        """
        if self._value is _NOT_DECODED:
            self._value = (
                None if self.is_null else self._schema.decode(self.data, self.schema_version)
            )
        return cast("T", self._value)

    @property
    def data(self) -> bytes:
        """The payload; empty for a message without a value."""
        return self.received.payload

    @property
    def is_null(self) -> bool:
        """Whether the message has no value, which marks its key as deleted."""
        return self.received.own_metadata.null_value

    @property
    def id(self) -> MessageId:
        """The id, with the position vector if the consumer is ordered."""
        return MessageId(self.received.entry_id, self.segment_id, self._positions)

    @property
    def key(self) -> str | None:
        """The key, in base64 if the producer gave bytes (`has_bytes_key`)."""
        own = self.received.own_metadata
        return own.partition_key if own.HasField("partition_key") else None

    @property
    def has_bytes_key(self) -> bool:
        """Whether the key was given as bytes."""
        return self.received.own_metadata.partition_key_b64_encoded

    @property
    def key_bytes(self) -> bytes | None:
        """The key's bytes, as the producer gave them."""
        key = self.key
        if key is None or not self.has_bytes_key:
            return None if key is None else key.encode()
        try:
            return b64decode(key, validate=True)
        except Base64Error:
            return key.encode()

    @property
    def ordering_key(self) -> bytes | None:
        """The key that replaces `key` where consumers share keys."""
        own = self.received.own_metadata
        return own.ordering_key if own.HasField("ordering_key") else None

    @property
    def properties(self) -> Mapping[str, str]:
        """Names and values that the producer gave."""
        if self._properties is None:
            own = self.received.own_metadata
            self._properties = MappingProxyType({each.key: each.value for each in own.properties})
        return self._properties

    @property
    def publish_time_ms(self) -> int:
        """The time when the producer sent it, by its clock, in milliseconds since 1970."""
        return self.received.entry.metadata.publish_time

    @property
    def event_time_ms(self) -> int | None:
        """The time that the producer's application gave, in milliseconds since 1970."""
        return self.received.own_metadata.event_time or None

    @property
    def redelivery_count(self) -> int:
        """The number of earlier deliveries to consumers of the subscription."""
        return self.received.entry.redelivery_count

    @property
    def producer_name(self) -> str:
        """The name of its producer."""
        return self.received.entry.metadata.producer_name

    @property
    def sequence_id(self) -> int:
        """The sequence id that the producer gave to the message."""
        single = self.received.single
        if single is not None and single.HasField("sequence_id"):
            return from_wire(single.sequence_id)
        return from_wire(self.received.entry.metadata.sequence_id)

    @property
    def size_bytes(self) -> int:
        """Bytes of the payload, decompressed."""
        return len(self.received.payload)

    @property
    def replicated_from(self) -> str | None:
        """The cluster from which the message was copied; None if it was sent to this cluster."""
        metadata = self.received.entry.metadata
        return metadata.replicated_from if metadata.HasField("replicated_from") else None

    @property
    def schema_version(self) -> bytes | None:
        """The version of the topic's schema that it was written with."""
        metadata = self.received.entry.metadata
        return metadata.schema_version if metadata.HasField("schema_version") else None
