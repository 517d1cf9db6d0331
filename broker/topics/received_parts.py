"""What the sender of another cluster's segment publishes to a segment here."""

from typing import Final

from broker.topics.deduplication import chunk_of
from broker.topics.publish_errors import MessageRefused
from broker.topics.replicated_messages import ReplicatedMessage
from broker.topics.replicated_ranges import (
    PartState,
    ReplicatedRanges,
    record_of,
)
from broker.topics.segment_sources import SegmentSources, Session
from magnetar.protocol.ids import Position
from magnetar.protocol.pulsar_pb2 import MessageMetadata
from magnetar.protocol.received import Send


class ReceivedParts:
    """`ReplicatedIds` of one session: parts are recognised by their records (R5, R7).

    The rules are in `../../docs/decisions/replicated-segments.md`.
    """

    def __init__(self, sources: SegmentSources, session: Session) -> None:
        self.session: Final = session
        self.told: ReplicatedRanges | None = None
        """What was stored of the sender's segment when it attached; None: not decided yet."""
        self._sources = sources
        self._failures = sources.failures

    def read(self, send: Send, metadata: MessageMetadata) -> ReplicatedMessage:
        """See `ReplicatedIds`.  Raises `MessageRefused`."""
        source = self.session.source
        if send.marker or metadata.marker_type:
            raise MessageRefused("Markers are not replicated to segments: send messages.")
        try:
            found = record_of(metadata)
        except ValueError as error:
            raise MessageRefused(f"The record of the part cannot be: {error}") from error
        if found is not None and found[0] != source:
            raise MessageRefused(
                f"The part is of segment {found[0].segment_id} of cluster {found[0].cluster}, and "
                f"the sender attached for segment {source.segment_id} of cluster {source.cluster}: "
                "attach for each."
            )
        record = None if found is None else found[1]
        if record is None:
            self._require_inner_chunk(metadata)
        return ReplicatedMessage(send.sequence_id, send.highest_sequence_id, record=record)

    def _require_inner_chunk(self, metadata: MessageMetadata) -> None:
        chunk = chunk_of(metadata)
        if chunk is None or chunk.last or metadata.replicated_from != self.session.source.cluster:
            raise MessageRefused(
                "The message has no record of its source: send it with `replicated_from` and "
                "`replicated_part`, which only the chunks before the last one of a message lack."
            )

    def is_duplicate(self, message: ReplicatedMessage) -> bool:
        """See `ReplicatedIds`.  A new part is to be appended now.

        Raises `PartRefused`.
        """
        state = self._sources.publish(self.session, message.sequence_id, message.record)
        return state is PartState.STORED

    def accept(self, message: ReplicatedMessage) -> None:
        """See `ReplicatedIds`.  It is counted already."""

    def stored(self, message: ReplicatedMessage, position: Position) -> None:
        """See `ReplicatedIds`."""
        if self._sources.failures == self._failures:
            self._sources.stored()
        elif message.record is not None:
            # It was given up with all that was on its way, as another entry was not stored.
            self._sources.replay(self.session.source, message.record)

    def lost(self) -> None:
        """See `ReplicatedIds`.  All senders have to ask anew what is stored."""
        if self._sources.failures == self._failures:
            self._sources.failed()

    def end(self) -> None:
        """See `ReplicatedIds`."""
        self._sources.detach(self.session)
