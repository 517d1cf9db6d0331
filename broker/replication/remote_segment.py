"""`RemoteSegmentProducer`: the sender of a segment, attached to one segment of another cluster."""

from collections import deque
from contextlib import suppress
from typing import NamedTuple

from broker.replication.cluster_producer import ClusterProducer, require_segments_taken
from broker.replication.errors import RemoteRefused, at_cluster
from broker.replication.segment_plan import RemoteSegment
from broker.topics.replicated_ranges import ReplicatedRanges, SourceSegment
from broker.topics.segment_sources import SourceState
from broker.topics.source_positions import REPLICATOR_PREFIX
from magnetar.context import ClientContext
from magnetar.errors import MagnetarError, ProducerFenced, error_of
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.wire.connection import Connection, PeerKind


class SessionOwner:
    """Sends by sessions with remote segments.  Only asynchronous methods wait.

    This class itself does nothing: a closed producer has it.
    """

    async def source_state(self) -> SourceState:
        """The state that the other cluster gets when a session begins.  Raises why none may."""
        raise RemoteRefused("The sender is closed.")

    async def accept(self, segment_id: int, stored: ReplicatedRanges) -> None:
        """Take what a remote segment has.  Raises if that cannot be of the log here."""

    async def fenced(self, state: SourceState) -> None:
        """The other cluster has a newer layout, or a newer owner.  Raises if there is none."""

    def session_begun(self, segment_id: int, stored: ReplicatedRanges) -> None:
        """Send what the segment lacks."""

    def session_ended(self, segment_id: int, error: MagnetarError) -> None:
        """Send nothing for now: what is in flight will not be answered."""

    def refused(self, error: MagnetarError, segment_id: int | None = None) -> None:
        """Attaching failed; it is tried again."""

    def stored(self, segment_id: int) -> None:
        """The oldest send of the session is durable."""

    def failed(self, error: Exception) -> None:
        """Nothing more is tried, because of a defect: begin anew."""


class _Sent(NamedTuple):
    """A send without answer; `sent_s` is the loop's time."""

    sequence_id: int
    sent_s: float


class RemoteSegmentProducer(ClusterProducer):
    """Holds a session with one segment there, and begins another one when it has ended.

    A session ends with the connection, and with the first send that is refused (R7 of
    `../../docs/decisions/replicated-segments.md`).
    """

    def __init__(
        self,
        context: ClientContext,
        topic: str,
        cluster: str,
        source: SourceSegment,
        segment: RemoteSegment,
        owner: SessionOwner,
    ) -> None:
        """`topic` is the name of the segment there; `source` is the segment here."""
        name = f"{REPLICATOR_PREFIX}{source.cluster}.{source.segment_id}"
        super().__init__(context, topic, cluster, name)
        self.segment = segment
        self._owner = owner
        self._unanswered: deque[_Sent] = deque()
        self._stored = ReplicatedRanges.nothing(segment.hash_start, segment.hash_end)

    @property
    def oldest_s(self) -> float | None:
        """When the oldest send without answer was sent; None without any."""
        return self._unanswered[0].sent_s if self._unanswered else None

    def send(self, sequence_id: int, entry: bytes, messages: int) -> None:
        """Send a part or chunk, with so many messages.  Call during a session."""
        self._unanswered.append(_Sent(sequence_id, self.context.loop.time()))
        self.write_send(sequence_id, entry, messages)

    # Attachment

    def describe(self) -> str:
        """The name used in errors."""
        return f"The sender {self.name} to {self.topic} of cluster {self.cluster!r}"

    async def require_topic(self) -> None:
        """See `ClusterProducer`.  The layout there has the segment."""

    def note_refused(self, error: RemoteRefused) -> None:
        """See `ClusterProducer`."""
        self._owner.refused(error, self.segment.segment_id)

    async def open_there(self, connection: Connection) -> None:
        """Send PRODUCER, and take what is stored there."""
        segment = self.segment
        try:
            require_segments_taken(connection, self.cluster)
            state = await self._owner.source_state()
        except MagnetarError as error:
            raise self.refusal_of(error) from error
        # Late answers to what an earlier session sent are dropped.
        self.producer_id = self.context.ids.producer_id()
        connection.attach(PeerKind.PRODUCER, self.producer_id, self)
        answer = await self.answer_of(self._open_session(connection, state))
        try:
            self._stored = ReplicatedRanges.from_wire(
                answer.producer_success.replicated_ranges, segment.hash_start, segment.hash_end
            )
            await self._owner.accept(segment.segment_id, self._stored)
        except (ValueError, MagnetarError) as error:
            refused = error if isinstance(error, MagnetarError) else self._impossible(error)
            with suppress(MagnetarError, TimeoutError):
                await self.leave(connection)
            raise self.refusal_of(refused) from error

    async def _open_session(self, connection: Connection, state: SourceState) -> pb.BaseCommand:
        command = self.next_command()
        command.source_state.CopyFrom(state.to_wire())
        try:
            return await connection.request(
                pb.BaseCommand(type=pb.BaseCommand.PRODUCER, producer=command)
            )
        except ProducerFenced as error:
            try:
                await self._owner.fenced(state)
            except MagnetarError as reason:
                raise self.refusal_of(reason) from error
            raise

    def _impossible(self, error: ValueError) -> RemoteRefused:
        return RemoteRefused(f"{self.describe()} got an answer that cannot be: {error}")

    def begin(self, connection: Connection) -> None:
        """See `ClusterProducer`."""
        self._owner.session_begun(self.segment.segment_id, self._stored)

    def detached(self, error: MagnetarError) -> None:
        """Tell the owner."""
        self._unanswered.clear()
        self._owner.session_ended(self.segment.segment_id, error)

    def failed(self, error: MagnetarError) -> None:
        """Tell the owner: this is a defect."""
        self._owner.failed(error.__cause__ if isinstance(error.__cause__, Exception) else error)

    async def close(self) -> None:
        """See `Attachment`."""
        self._unanswered.clear()
        await super().close()

    def leave_owner(self) -> None:
        """See `ClusterProducer`."""
        self._owner = SessionOwner()

    def take_receipt(self, receipt: pb.CommandSendReceipt) -> None:
        """See `ClusterProducer`."""
        if not self._unanswered or self._unanswered[0].sequence_id != receipt.sequence_id:
            self.end_session(self.unexpected_receipt())
            return
        self._unanswered.popleft()
        self.pauses.entry_stored()
        self._owner.stored(self.segment.segment_id)

    def take_refusal(self, refused: pb.CommandSendError) -> None:
        """See `ClusterProducer`.  It ends the session."""
        reason = at_cluster(self.cluster, error_of(refused.error, refused.message))
        self.end_session(RemoteRefused(reason))

    def end_session(self, error: RemoteRefused) -> None:
        """End the session, for a reason that statistics show, and begin another after a pause."""
        self._owner.refused(error, self.segment.segment_id)
        self.again(error)
