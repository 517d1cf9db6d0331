"""`ReplicatedTopic`: the replicators of one loaded topic, as its policies say."""

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Protocol

from broker.replication.cluster_replicators import ClusterReplicators, Remotes
from broker.replication.subscriptions import Connected, ReplicatedSubscriptions
from broker.topics.subscription import Subscription
from broker.topics.subscription_markers import Snapshot
from broker.topics.topic import Topic
from magnetar.protocol.ids import Position
from magnetar.protocol.names import TopicName

if TYPE_CHECKING:
    from broker.replication.replicator import Replicator


class TopicRemotes(Remotes, Protocol):
    """`Remotes`, and what the replicators of ordinary topics need beside."""

    def subscriptions(self, topic: Topic, connected: Connected) -> ReplicatedSubscriptions:
        """The replicated subscriptions of a topic."""
        ...

    def is_migrated(self, topic: TopicName, /) -> Awaitable[bool]:
        """Whether a topic or partition is a segment of a scalable topic."""
        ...


class ReplicatedTopic(ClusterReplicators["Replicator"]):
    """Makes and ends the replicators of one ordinary topic."""

    _remotes: TopicRemotes

    def __init__(self, topic: Topic, remotes: TopicRemotes) -> None:
        super().__init__(topic, remotes)
        self._unused: set[str] = set()
        """The clusters for which a cursor was made, and no replicator yet."""
        self._migrated = False
        """It is a segment of a scalable topic now, which the lists do not concern."""
        self.subscriptions = remotes.subscriptions(topic, self._connected)
        """The subscriptions that other clusters have too."""

    @property
    def positions(self) -> None:
        """See `TopicReplication`: a legacy topic was not replicated when it became a segment."""

    async def open(self) -> None:
        """See `TopicReplication`."""
        await self._recognise_segment()
        await super().open()
        if self._wanted():
            self.subscriptions.changed()

    @property
    def cached_snapshots(self) -> int:
        """See `TopicReplication`."""
        return self.subscriptions.cached_snapshots

    def subscriptions_changed(self) -> None:
        """See `TopicReplication`."""
        self.subscriptions.changed()

    def subscription_passed(self, subscription: str, snapshot: Snapshot) -> None:
        """See `TopicReplication`."""
        self.subscriptions.passed(subscription, snapshot)

    def topic_sealed(self) -> None:
        """See `TopicReplication`.  What is stored is sent as before."""

    async def close(self) -> None:
        """See `TopicReplication`."""
        self.subscriptions.close()
        await super().close()

    def _wanted(self) -> frozenset[str]:
        """The clusters that the policies name, without this one."""
        if self._migrated:
            return frozenset()
        return super()._wanted()

    def _whole_topic(self) -> TopicName:
        return self._topic.name.partitioned

    def _first_position(self) -> Position:
        return self._remotes.start

    def _connected(self) -> frozenset[str] | None:
        """The other clusters; None unless the replicators reach all of them.

        One that rests attaches again when a marker is to be sent.
        """
        wanted = self._wanted()
        reached = {
            remote for remote, each in self.replicators.items() if each.connected or each.resting
        }
        return wanted if wanted <= reached else None

    async def _recognise_segment(self) -> None:
        if self._wanted():
            self._migrated = await self._remotes.is_migrated(self._topic.name)

    async def _begin(self, remote: str) -> None:
        await self._recognise_segment()
        if not self._migrated:
            await super()._begin(remote)
            self.subscriptions.changed()

    async def _end(self, remote: str) -> None:
        # A snapshot may have waited for this cluster alone.
        self.subscriptions.cluster_reached()
        await super()._end(remote)

    def _make_replicator(self, remote: str, cursor: Subscription) -> "Replicator":
        # Not imported at the top: a broker that is alone starts sooner.
        from broker.replication.entries import Route  # noqa: PLC0415
        from broker.replication.remote_schemas import RemoteSchemas  # noqa: PLC0415
        from broker.replication.replicator import Replicator  # noqa: PLC0415

        topic, remotes = self._topic, self._remotes
        cluster = remotes.cluster(remote)
        resends = remote not in self._unused
        self._unused.discard(remote)
        return Replicator(
            topic,
            cursor,
            Route(remotes.local, remote),
            cluster,
            RemoteSchemas(remotes.schemas, topic.name.schema_id),
            remotes.partitions,
            self.subscriptions,
            resends=resends,
        )

    async def _open_replicator_cursor(self, remote: str) -> Subscription:
        if remote not in self._with_cursors():
            self._unused.add(remote)
        return await super()._open_replicator_cursor(remote)
