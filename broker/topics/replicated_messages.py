"""Pure: what replicators of other clusters publish, and which of it is stored already.

There are two ways, as in Apache Pulsar.  By position (V2), where the client and the broker announce
`supports_repl_dedup_by_lid_and_eid`: see `source_positions`.  By origin (V1), else: the producer
name and sequence id in a message's metadata are those of the producer in the source cluster.
"""

from collections.abc import Callable
from typing import ClassVar, NamedTuple, Protocol

from broker.topics.deduplication import (
    Deduplication,
    Origin,
    ProducerSequence,
    SequenceGuard,
    origin_of,
)
from broker.topics.publish_errors import MessageRefused
from broker.topics.replicated_ranges import PartRecord
from broker.topics.source_positions import (
    SOURCE_POSITION,
    SourceCluster,
    source_positions_of,
)
from broker.topics.subscription_markers import MARKER_RECEIPT, MARKER_TYPES
from magnetar.protocol.ids import Position
from magnetar.protocol.pulsar_pb2 import MessageMetadata
from magnetar.protocol.received import Send
from magnetar.protocol.server_error import PeerError, ServerError


class SourcePositionMissing(PeerError):
    """A message of a replicator does not say where it is in the source cluster."""

    code: ClassVar[ServerError] = ServerError.PERSISTENCE_ERROR


class ReplicatedMessage(NamedTuple):
    """A message of a replicator: the ids of its receipt, and by what it is recognised.

    `source` is its position in the source cluster, `origin` its producer there, `record` what a
    segment's sender says of a part: one of them is set, and none for a marker, or for a chunk from
    a segment before the last one.
    """

    sequence_id: int
    highest_sequence_id: int
    source: Position | None = None
    origin: Origin | None = None
    record: PartRecord | None = None


class ReplicatedIds(Protocol):
    """Recognises what one replicator publishes to one topic."""

    def read(self, send: Send, metadata: MessageMetadata) -> ReplicatedMessage:
        """Identify a message.  Raises `SourcePositionMissing`, `MessageRefused`."""
        ...

    def is_duplicate(self, message: ReplicatedMessage) -> bool:
        """Whether the message is stored, or about to be, already."""
        ...

    def accept(self, message: ReplicatedMessage) -> None:
        """Count the message: the ledger took it."""
        ...

    def stored(self, message: ReplicatedMessage, position: Position) -> None:
        """Count the message: it is durable at this position."""
        ...

    def lost(self) -> None:
        """Note that a message is not stored, though it is no duplicate."""
        ...

    def end(self) -> None:
        """Note that the replicator left."""
        ...


class IdsByPosition:
    """`ReplicatedIds` by source position (V2).

    Without deduplication, only what a replicator sends first after a reconnect is compared: these
    are the messages of which it has no receipt.
    """

    def __init__(
        self,
        source: SourceCluster,
        deduplicates: Callable[[], bool],
        detach: Callable[[], None],
        *,
        resends: bool,
    ) -> None:
        """`source` is attached already, and `detach` ends that."""
        self._source = source
        self._accepted = source.last
        self._deduplicates = deduplicates
        self._detach = detach
        self._resends = resends

    def read(self, send: Send, metadata: MessageMetadata) -> ReplicatedMessage:
        """See `ReplicatedIds`."""
        if _is_marker(send, metadata):
            return ReplicatedMessage(send.sequence_id, MARKER_RECEIPT)
        positions = source_positions_of(metadata)
        if positions is None:
            raise SourcePositionMissing(
                f"The property {SOURCE_POSITION} of the message is missing or not `ledger:entry`: "
                "have the replicator set it, as it announced supports_repl_dedup_by_lid_and_eid."
            )
        first, last = positions
        return ReplicatedMessage(*first, source=last)

    def is_duplicate(self, message: ReplicatedMessage) -> bool:
        """See `ReplicatedIds`."""
        if message.source is None:
            return False
        known = message.source <= self._accepted
        if self._deduplicates():
            return known
        # The first one that is not stored ends the messages that are sent again.
        self._resends = self._resends and known
        return self._resends

    def accept(self, message: ReplicatedMessage) -> None:
        """See `ReplicatedIds`."""
        if message.source is not None:
            self._accepted = message.source

    def stored(self, message: ReplicatedMessage, position: Position) -> None:
        """See `ReplicatedIds`."""
        if message.source is not None:
            self._source.last = message.source

    def lost(self) -> None:
        """See `ReplicatedIds`.  The replicator is closed, and what it knows with it."""

    def end(self) -> None:
        """See `ReplicatedIds`."""
        self._detach()


class IdsByOrigin:
    """`ReplicatedIds` by the producers of the source cluster (V1), where the topic deduplicates."""

    def __init__(
        self,
        cluster: str,
        sequences: Deduplication,
        deduplicates: Callable[[], bool],
        now_ms: Callable[[], int],
    ) -> None:
        self._cluster = cluster
        self._sequences = sequences
        self._deduplicates = deduplicates
        self._now_ms = now_ms
        self._in_flight: dict[str, tuple[SequenceGuard, int]] = {}
        """By origin: what was accepted, and how many of its messages are not durable yet."""

    def read(self, send: Send, metadata: MessageMetadata) -> ReplicatedMessage:
        """See `ReplicatedIds`."""
        ids = send.sequence_id, send.highest_sequence_id
        if _is_marker(send, metadata):
            return ReplicatedMessage(*ids)
        return ReplicatedMessage(*ids, origin=origin_of(self._cluster, metadata))

    def is_duplicate(self, message: ReplicatedMessage) -> bool:
        """See `ReplicatedIds`."""
        origin = message.origin
        if origin is None or not self._deduplicates():
            return False
        return self._guard(origin)[0].is_duplicate(origin.last, origin.chunk)

    def accept(self, message: ReplicatedMessage) -> None:
        """See `ReplicatedIds`."""
        if message.origin is not None:
            guard, count = self._guard(message.origin)
            guard.accept(message.origin.last, message.origin.chunk)
            self._in_flight[message.origin.name] = guard, count + 1

    def stored(self, message: ReplicatedMessage, position: Position) -> None:
        """See `ReplicatedIds`."""
        origin = message.origin
        if origin is None:
            return
        self._sequences.count_origin(origin, position, self._now_ms())
        guard, count = self._guard(origin)
        if count > 1:
            self._in_flight[origin.name] = guard, count - 1
        else:
            # All is durable, so the durable state has what was accepted.
            self._in_flight.pop(origin.name, None)

    def lost(self) -> None:
        """See `ReplicatedIds`.  The replicator is closed, and what it knows with it."""

    def end(self) -> None:
        """See `ReplicatedIds`."""

    def _guard(self, origin: Origin) -> tuple[SequenceGuard, int]:
        known = self._in_flight.get(origin.name)
        if known is not None:
            return known
        return SequenceGuard(self._sequences.get(origin.name) or ProducerSequence()), 0


def _is_marker(send: Send, metadata: MessageMetadata) -> bool:
    """Whether it is a marker.  Raises `MessageRefused` for one that replicators do not send."""
    if not send.marker and not metadata.marker_type:
        return False
    if metadata.marker_type not in MARKER_TYPES:
        raise MessageRefused(
            f"Markers of type {metadata.marker_type} are not replicated: send those of replicated "
            "subscriptions, or messages."
        )
    return True
