"""`Replications`: what this broker sends to other clusters."""

import random
from collections.abc import Awaitable, Callable, Collection, Iterator
from functools import partial
from typing import TYPE_CHECKING, Protocol
from weakref import WeakSet

import structlog

from broker.policies.clusters import Clusters
from broker.replication.errors import RemoteRefused
from broker.replication.list_checks import ListChecks, ReplicationList
from broker.replication.non_persistent_topic import ReplicatedNonPersistentTopic
from broker.replication.replicated_segment import ReplicatedSegment
from broker.replication.segment_subscriptions import Exchange
from broker.replication.subscription_backlog import EntryRoom
from broker.replication.subscriptions import (
    Connected,
    ReplicatedSubscriptions,
    SnapshotCounts,
)
from broker.replication.topic_replication import ReplicatedTopic
from broker.topics.non_persistent.topic import NonPersistentTopic
from broker.topics.replication import NonPersistentReplication, NoReplication, TopicReplication
from broker.topics.schemas import SchemaRegistry
from broker.topics.subscription_positions import PositionsTold, SubscriptionsLeft
from broker.topics.topic import Topic
from config.settings import Settings
from magnetar.background_tasks import BackgroundTasks
from magnetar.errors import InvalidArgument
from magnetar.protocol.ids import EARLIEST, LATEST
from magnetar.protocol.names import NamespaceName, TopicDomain, TopicName, segment_name
from magnetar.protocol.server_error import MagnetarError
from storage.callbacks import SlicedCalls

if TYPE_CHECKING:
    from broker.replication.batch_opener import BatchOpener
    from broker.replication.remote_cluster import RemoteCluster
    from broker.topics.source_topics import SourceTopics

Replicated = ReplicatedTopic | ReplicatedSegment | ReplicatedNonPersistentTopic
log = structlog.get_logger(__name__)


class Partitions(Protocol):
    """The numbers of partitions of topics."""

    async def count(self, topic: TopicName) -> int:
        """The number of partitions of a topic; 0 for one without."""
        ...


class Replications:
    """The replicators of the topics that are loaded here, and the connections that they share."""

    def __init__(
        self,
        settings: Settings,
        clusters: Clusters,
        schemas: SchemaRegistry,
        partitions: Partitions,
        rng: random.Random,
        is_migrated: Callable[[TopicName], Awaitable[bool]],
        list_of: Callable[[NamespaceName], frozenset[str]],
    ) -> None:
        """`list_of` gives the list of clusters of a namespace, as far as it is known.

        `is_migrated` says whether a topic or partition is a segment of a scalable topic.
        """
        self.local = settings.cluster_name
        self.schemas = schemas
        # As with Apache Pulsar's replicationStartAt.
        self.start = EARLIEST if settings.replication_start_at == "earliest" else LATEST
        self.partitions = partitions.count
        self.is_migrated = is_migrated
        self.list_of = list_of
        self._clusters = clusters
        self._topics: WeakSet[ReplicatedTopic] = WeakSet()
        self._segments: WeakSet[ReplicatedSegment] = WeakSet()
        self._non_persistent: WeakSet[ReplicatedNonPersistentTopic] = WeakSet()
        self._batches: BatchOpener | None = None
        self._source_topics: SourceTopics | None = None
        self._exchange: Exchange | None = None
        self._restarts = SlicedCalls[tuple[str, Replicated], Callable[[], None]](
            lambda restart: restart()
        )
        """Topics that are to reach a cluster in another way."""
        self.snapshots = SnapshotCounts()
        """The counts of snapshots of replicated subscriptions."""
        self.subscription_entries = EntryRoom()
        """The entries of segments that replicated subscriptions have not acknowledged."""
        clusters.on_change(self._cluster_changed)
        self._random = rng
        self._settings = settings
        self._reached: dict[str, RemoteCluster] = {}
        self._tasks = BackgroundTasks(log, failure_event="cluster_not_closed")
        self._checks = BackgroundTasks(log, failure_event="replication_lists_not_checked")
        self.lists = ListChecks(self.local, self._lists_in_force, self._list_there, self._checks)
        """Whether the lists of the other clusters have the same names."""

    def of(self, topic: Topic) -> TopicReplication:
        """The replication of a topic that is being loaded."""
        if topic.name.domain is TopicDomain.SEGMENT:
            segment = ReplicatedSegment(topic, self, self._segment_drained)
            self._segments.add(segment)
            return segment
        if topic.name.domain is not TopicDomain.PERSISTENT:
            return NoReplication()
        replicated = ReplicatedTopic(topic, self)
        self._topics.add(replicated)
        return replicated

    def of_non_persistent(self, topic: NonPersistentTopic) -> NonPersistentReplication:
        """The replication of a non-persistent topic that is being made."""
        replicated = ReplicatedNonPersistentTopic(topic, self)
        self._non_persistent.add(replicated)
        return replicated

    def subscriptions(self, topic: Topic, connected: Connected) -> ReplicatedSubscriptions:
        """The subscriptions of a topic that other clusters have too."""
        return ReplicatedSubscriptions(
            topic, self.local, connected, self._settings, self.snapshots, self._random
        )

    @property
    def pending_snapshots(self) -> int:
        """Snapshots of replicated subscriptions that wait for other clusters."""
        return sum(each.subscriptions.pending for each in self._topics)

    def cluster(self, name: str) -> "RemoteCluster":
        """The connections to a cluster.

        Raises `RemoteRefused` for one that is not registered, or cannot be reached as it is.
        """
        known = self._reached.get(name)
        if known is not None:
            return known
        data = self._clusters.get(name)
        if data is None:
            raise RemoteRefused(
                f"There is no cluster {name!r} here: register it with PUT /admin/v2/clusters/"
                f"{name}, or take it out of the list."
            )
        # Not imported at the top: a broker that is alone starts sooner.
        from broker.replication.access import access_of  # noqa: PLC0415
        from broker.replication.remote_cluster import RemoteCluster  # noqa: PLC0415

        try:
            made = RemoteCluster(name, access_of(data, self._settings), self._random)
        except InvalidArgument as error:
            raise RemoteRefused(f"Cluster {name!r} cannot be reached: {error}") from error
        self._reached[name] = made
        return made

    async def tell_positions(
        self, cluster: str, topic: TopicName, told: PositionsTold
    ) -> SubscriptionsLeft:
        """See `OtherClusters`."""
        return await self.cluster(cluster).tell_positions(topic, told)

    def make_partitions(self, topic: TopicName, count: int, clusters: Collection[str]) -> None:
        """Give a topic, which has `count` partitions now, as many in these clusters.

        It is done in the background, and what fails is logged.
        A replicator does the same before it sends.  Until then a client there could make the topic
        without partitions.
        """
        for remote in sorted(set(clusters) - {self.local}):
            self._tasks.start(self._make_partitions(topic, count, remote))

    async def _make_partitions(self, topic: TopicName, count: int, remote: str) -> None:
        try:
            await self.cluster(remote).require_partitions(topic, count)
        except MagnetarError as error:
            log.warning(
                "partitions_not_replicated", topic=str(topic), cluster=remote, error=str(error)
            )

    def use_source_topics(
        self, sources: "SourceTopics", ask_soon: Callable[[TopicName, str], None]
    ) -> None:
        """Take the scalable topics of this cluster, which are made after this.

        `ask_soon` has the leader of a topic ask a cluster about its subscriptions.
        """
        self._source_topics = sources
        settings = self._settings
        self._exchange = Exchange(
            settings.enable_replicated_subscriptions,
            settings.replicated_subscriptions_snapshot_frequency_ms / 1000,
            ask_soon,
            self.subscription_entries,
        )
        sources.on_incarnation(self._incarnation_changed)

    @property
    def batches(self) -> "BatchOpener":
        """Opens the batches of segments."""
        # Not imported at the top: a broker that is alone starts sooner.
        from broker.replication.batch_opener import BatchOpener  # noqa: PLC0415

        if self._batches is None:
            self._batches = BatchOpener()
        return self._batches

    def source_topics(self) -> "SourceTopics":
        """The scalable topics of this cluster."""
        assert self._source_topics is not None, "segments are loaded once scalable topics are there"
        return self._source_topics

    @property
    def exchange(self) -> Exchange:
        """How the positions of subscriptions of scalable topics are exchanged."""
        assert self._exchange is not None, "segments are loaded once scalable topics are there"
        return self._exchange

    def _segment_drained(self, topic: Topic) -> None:
        """Let the segments go on that may have waited for one that another cluster has now (R2)."""
        parent = segment_name(topic.name).parent
        for each in self._segments:
            if each.parent == parent:
                each.ancestor_drained()

    def _incarnation_changed(self, topic: TopicName, incarnation: int | None) -> None:
        """Begin all sessions of a topic anew that other clusters know by another number."""
        for each in self._segments:
            if each.parent == topic:
                each.incarnation_changed(incarnation)

    def _lists_in_force(self) -> Iterator[ReplicationList]:
        loaded: list[ReplicatedTopic | ReplicatedSegment] = [*self._topics, *self._segments]
        for topic in loaded:
            if (here := topic.replication_list) is not None:
                yield here

    async def _list_there(self, remote: str, here: ReplicationList) -> frozenset[str] | None:
        return await self.cluster(remote).replication_list(here.holder)

    def _cluster_changed(self, name: str) -> None:
        """Reach a cluster as its record says now."""
        old = self._reached.pop(name, None)
        self.lists.cluster_changed(name)
        loaded: list[Replicated] = [*self._topics, *self._segments, *self._non_persistent]
        self._restarts.call_all({(name, topic): partial(topic.restart, name) for topic in loaded})
        if old is not None:
            self._tasks.start(old.close(), f"old connections to {name}")

    async def close(self) -> None:
        """Close all connections; the topics are closed already."""
        self._restarts.clear()
        await self._checks.stop()
        await self._tasks.stop()
        for cluster in self._reached.values():
            await cluster.close()
