"""One message as it came out of an entry, before a schema has looked at it.

Pure.  Rules: what all messages of an entry share is in one `Entry`; the metadata of a message of a
batch stays bytes until somebody asks for it; nothing here knows consumers, but `segment` carries
whoever is to be told when the message is taken, acknowledged or not.
"""

from typing import Final, Generic, TypeVar

from magnetar.message_id import EntryId
from protocol.pulsar_pb2 import MessageMetadata, SingleMessageMetadata

__all__ = ["Entry", "EntryKey", "Received"]

S_co = TypeVar("S_co", covariant=True)
EntryKey = tuple[int, int]
"""Ledger and entry."""
RECEIVED_OVERHEAD: Final = 200
"""Bytes that a message is counted for beside its payload."""


class Entry:
    """What the messages of one entry have in common."""

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
        """0: not a batch."""
        self.chunks: Final = chunks
        """All entries of a chunked message; `key` is the last one."""


class Received(Generic[S_co]):
    """One message; `segment` is what it came from."""

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
        """Bytes that it is counted for."""
        return len(self.payload) + RECEIVED_OVERHEAD

    @property
    def entry_id(self) -> EntryId:
        """Where it is in its segment."""
        entry = self.entry
        first = entry.chunks[0] if entry.chunks else None
        ledger_id, entry_id = entry.key
        return EntryId(
            ledger_id, entry_id, self.batch_index, entry.batch_size, entry.partition, first
        )

    @property
    def single(self) -> SingleMessageMetadata | None:
        """Its own metadata in a batch; None if it is not of a batch."""
        if self._single is None and self._single_bytes is not None:
            self._single = SingleMessageMetadata.FromString(self._single_bytes)
            self._single_bytes = None
        return self._single

    @property
    def own_metadata(self) -> SingleMessageMetadata | MessageMetadata:
        """Where key, properties, event time and sequence id of this message are."""
        return self.single or self.entry.metadata
