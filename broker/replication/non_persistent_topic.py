"""`ReplicatedNonPersistentTopic`: the replicators of one non-persistent topic."""

import asyncio
from collections.abc import Awaitable, Mapping
from typing import TYPE_CHECKING
from weakref import ref

import structlog

from broker.replication.cluster_replicators import Remotes
from broker.replication.errors import RemoteRefused
from broker.topics.non_persistent.topic import NonPersistentTopic
from broker.topics.replication import OutboundStats
from broker.topics.weak_references import require_present
from magnetar.protocol.names import TopicName

if TYPE_CHECKING:
    from broker.replication.non_persistent_replicator import NonPersistentReplicator

log = structlog.get_logger(__name__)


class ReplicatedNonPersistentTopic:
    """Makes and ends the replicators of one non-persistent topic, as its policies say.

    They have no position: a cluster that is added gets what is published from then on.
    """

    def __init__(self, topic: NonPersistentTopic, remotes: Remotes) -> None:
        self.replicators: dict[str, NonPersistentReplicator] = {}
        """The replicators that run now, by the name of the other cluster."""
        self._reference = ref(topic)
        self._remotes = remotes
        self._failures: dict[str, str] = {}
        """Why there is no replicator to a cluster."""
        self._ending: dict[str, asyncio.Task[None]] = {}
        """The ends of replicators that are still leaving, by the name of the other cluster."""
        self._closed = False

    def apply(self) -> None:
        """Begin and end to replicate as the policies of the topic say now."""
        if self._closed:
            return
        topic = require_present(self._reference)
        wanted = topic.policies.replication_clusters - {self._remotes.local}
        for remote in self.replicators.keys() - wanted:
            self._end(remote)
        self._failures.clear()
        for remote in sorted(wanted - self.replicators.keys()):
            self._begin(remote, topic.name)

    def restart(self, remote: str) -> None:
        """Make the replicator to a cluster anew, as it is to be reached in another way."""
        if remote in self.replicators:
            self._end(remote)
        self.apply()

    def send(self, entry: bytes) -> None:
        """Send an entry that was published to the other clusters."""
        for each in self.replicators.values():
            each.send(entry)

    def sample_rates(self, now_s: float) -> None:
        """Read the counters of what is sent; `now_s` is the event loop's time."""
        for each in self.replicators.values():
            each.counts.sample(now_s)

    def outbound_stats(self, now_s: float) -> Mapping[str, OutboundStats]:
        """What is sent, by the other cluster."""
        return {
            **{remote: OutboundStats.not_begun(0, why) for remote, why in self._failures.items()},
            **{remote: each.outbound_stats(now_s) for remote, each in self.replicators.items()},
        }

    async def close(self) -> None:
        """Send nothing more: the topic is closed here.  Bounded in time."""
        self._closed = True
        for remote in list(self.replicators):
            self._end(remote)
        await asyncio.gather(*self._ending.values())

    def _begin(self, remote: str, topic: TopicName) -> None:
        # Not imported at the top: a broker that is alone starts sooner.
        from broker.replication.entries import Route  # noqa: PLC0415
        from broker.replication.non_persistent_replicator import (  # noqa: PLC0415
            NonPersistentReplicator,
        )
        from broker.replication.remote_schemas import RemoteSchemas  # noqa: PLC0415

        remotes = self._remotes
        try:
            cluster = remotes.cluster(remote)
        except RemoteRefused as error:
            # Its record is to be mended, and then `restart` comes.
            self._failures[remote] = str(error)
            log.warning(
                "replication_not_changed", topic=str(topic), cluster=remote, error=str(error)
            )
            return
        left: Awaitable[object] | None = self._ending.get(remote)
        replicator = self.replicators[remote] = NonPersistentReplicator(
            topic,
            Route(remotes.local, remote),
            cluster,
            RemoteSchemas(remotes.schemas, topic.schema_id),
            remotes.partitions,
            left,
        )
        replicator.start()
        log.info("replication_begun", topic=str(topic), cluster=remote)

    def _end(self, remote: str) -> None:
        task = asyncio.get_running_loop().create_task(self.replicators.pop(remote).close())
        self._ending[remote] = task
        task.add_done_callback(
            lambda _: self._ending.pop(remote) if self._ending.get(remote) is task else None
        )
