"""`ReplicatedSegment`: the replicators of one loaded segment of a scalable topic."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from broker.replication.cluster_replicators import ClusterReplicators, Remotes
from broker.replication.segment_subscriptions import Exchange, SegmentSubscriptions
from broker.topics.subscription import Subscription
from broker.topics.subscription_markers import Snapshot
from broker.topics.topic import Topic
from magnetar.protocol.ids import EARLIEST, Position
from magnetar.protocol.names import TopicName, segment_name
from storage.managed_ledger.types import ManagedLedgerState

if TYPE_CHECKING:
    from broker.replication.batch_opener import BatchOpener
    from broker.replication.segment_replicator import SegmentReplicator
    from broker.replication.sent_positions import SentPositions
    from broker.topics.source_topics import SourceTopics


class SegmentRemotes(Remotes, Protocol):
    """`Remotes`, and what the replicators of segments need beside."""

    @property
    def batches(self) -> "BatchOpener":
        """Opens the batches of segments."""
        ...

    @property
    def exchange(self) -> Exchange:
        """How the positions of subscriptions are exchanged."""
        ...

    def source_topics(self) -> "SourceTopics":
        """The scalable topics of this cluster."""
        ...


class ReplicatedSegment(ClusterReplicators["SegmentReplicator"]):
    """Makes and ends the replicators of one segment.

    A child has the cursors of its parents, whose list may have changed since they were asked: of a
    cluster that the list in force does not name the cursor goes.
    """

    _remotes: SegmentRemotes

    def __init__(
        self, topic: Topic, remotes: SegmentRemotes, drained: Callable[[Topic], None]
    ) -> None:
        """`drained` is called when another cluster has all of the sealed segment."""
        super().__init__(topic, remotes)
        self._drained = drained
        # The topic itself is still being loaded, and neither open nor sealed.
        self._found_terminated = topic.ledger.state is ManagedLedgerState.TERMINATED
        self._found_end = topic.ledger.last_confirmed
        """The end of the log when it was taken over, and whether it was terminated."""
        self._sent: dict[str, SentPositions] = {}
        """The positions sent to each cluster, also of those that left the list (R12)."""
        self.parent = segment_name(topic.name).parent
        """The scalable topic."""
        self.positions = SegmentSubscriptions(topic, self, remotes.exchange)
        """See `TopicReplication`."""

    def apply(self) -> None:
        """See `TopicReplication`."""
        super().apply()
        self.positions.changed()

    @property
    def idle(self) -> bool:
        """See `TopicReplication`."""
        return super().idle and self.positions.quiet

    def listed(self) -> frozenset[str]:
        """See `SentEntries`."""
        return self._wanted()

    def last_sent(self, cluster: str) -> Position | None:
        """See `SentEntries`."""
        sent = self._sent.get(cluster)
        return None if sent is None else sent.last_sent

    @property
    def cached_snapshots(self) -> int:
        """See `TopicReplication`."""
        return 0

    async def incarnation(self) -> int:
        """See `SentEntries`."""
        source = await self._remotes.source_topics().read(segment_name(self._topic.name))
        return source.incarnation

    def subscriptions_changed(self) -> None:
        """See `TopicReplication`."""
        self.positions.changed()

    async def close(self) -> None:
        """See `TopicReplication`."""
        self.positions.close()
        await super().close()

    def subscription_passed(self, subscription: str, snapshot: Snapshot) -> None:
        """See `TopicReplication`."""

    def topic_sealed(self) -> None:
        """See `TopicReplication`."""
        for each in self.replicators.values():
            each.wake()

    def ancestor_drained(self) -> None:
        """Look again whether all ancestors of the segment are drained."""
        for each in self.replicators.values():
            each.ancestor_drained()

    def incarnation_changed(self, incarnation: int | None) -> None:
        """Begin anew at all clusters that know the topic by another number."""
        for each in self.replicators.values():
            each.incarnation_changed(incarnation)

    def _whole_topic(self) -> TopicName:
        return self.parent

    def _first_position(self) -> Position:
        # What was written to a child while its parents are being sealed follows what they get.
        if self._topic.sequence_store.awaits_parents:
            return EARLIEST
        return self._remotes.start

    async def _begin(self, remote: str) -> None:
        await super()._begin(remote)
        self.positions.changed()

    def _make_replicator(self, remote: str, cursor: Subscription) -> "SegmentReplicator":
        # Not imported at the top: a broker that is alone starts sooner.
        from broker.replication.remote_schemas import RemoteSchemas  # noqa: PLC0415
        from broker.replication.segment_replicator import SegmentReplicator  # noqa: PLC0415
        from broker.replication.sent_positions import SentPositions  # noqa: PLC0415

        topic, remotes = self._topic, self._remotes
        sent = self._sent.setdefault(
            remote, SentPositions(self._found_end, terminated=self._found_terminated)
        )
        return SegmentReplicator(
            topic,
            cursor,
            remotes.local,
            remotes.cluster(remote),
            RemoteSchemas(remotes.schemas, topic.name.schema_id),
            remotes.source_topics(),
            remotes.batches,
            sent,
            self._drained,
        )
