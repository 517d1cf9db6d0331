"""`ClusterReplicators`: the replicators of one loaded topic, made and ended as the list says."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar
from weakref import ref

import structlog

from broker.replication.errors import BROKER_FAILED, LoggedReasons
from broker.replication.list_checks import CHECKED_FROM, ListChecks, ReplicationList
from broker.topics.replication import OutboundStats
from broker.topics.schemas import SchemaRegistry
from broker.topics.source_positions import REPLICATOR_PREFIX
from broker.topics.subscription import Subscription
from broker.topics.topic import Topic
from broker.topics.weak_references import require_present
from config.bounds import REPLICATION_RETRY_MAX_S, REPLICATION_RETRY_MIN_S
from magnetar.protocol.backoff import Backoff
from magnetar.protocol.ids import Position
from magnetar.protocol.names import NamespaceName, TopicName
from magnetar.protocol.server_error import MagnetarError

if TYPE_CHECKING:
    from broker.replication.remote_cluster import RemoteCluster
    from broker.replication.sent_counts import SentCounts

log = structlog.get_logger(__name__)


class Remotes(Protocol):
    """The other clusters, and what replicators to them need of this broker."""

    local: str
    """The name of this cluster."""
    schemas: SchemaRegistry
    start: Position
    """The position of a new replicator."""
    lists: ListChecks
    """Whether the lists of other clusters have the same names."""

    def list_of(self, namespace: NamespaceName, /) -> frozenset[str]:
        """The list of clusters of a namespace, as far as it is known."""
        ...

    async def partitions(self, topic: TopicName) -> int:
        """The number of partitions of a topic; 0 for one without."""
        ...

    def cluster(self, name: str) -> "RemoteCluster":
        """The connections to a cluster.  Raises `RemoteRefused` for one that is not registered."""
        ...


class RunningReplicator(Protocol):
    """Sends one topic to one other cluster."""

    subscription: Subscription
    counts: "SentCounts"

    def start(self) -> None:
        """Send what there is."""
        ...

    def apply_rate(self) -> None:
        """Send at the rate that the topic's policies give now."""
        ...

    def outbound_stats(self, now_s: float) -> OutboundStats:
        """What it has sent; `now_s` is the event loop's time."""
        ...

    async def close(self) -> None:
        """Send nothing more; bounded in time."""
        ...


R = TypeVar("R", bound=RunningReplicator)


class ClusterReplicators(ABC, Generic[R]):
    """Makes and ends the replicators of one topic.

    A cluster that the policies add gets a cursor in the topic, then a replicator; of one that
    they no longer name both go.  What fails is tried again.
    """

    def __init__(self, topic: Topic, remotes: Remotes) -> None:
        self.replicators: dict[str, R] = {}
        """The replicators that run now, by the name of the other cluster."""
        self._reference = ref(topic)
        self._remotes = remotes
        self._stopped: list[R] = []
        """The replicators that are to be closed, and then replaced."""
        self._failures: dict[str, str] = {}
        """Why there is no replicator to a cluster yet."""
        self._logged = LoggedReasons()
        self._retry_now = asyncio.Event()
        self._changing: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def _topic(self) -> Topic:
        return require_present(self._reference)

    @property
    def idle(self) -> bool:
        """See `TopicReplication`."""
        return self._changing is None and all(
            each.subscription.backlog == 0 for each in self.replicators.values()
        )

    async def open(self) -> None:
        """See `TopicReplication`."""
        for remote in sorted(self._wanted()):
            await self._open_replicator_cursor(remote)
        self.apply()

    def sample_rates(self, now_s: float) -> None:
        """See `TopicReplication`."""
        for each in self.replicators.values():
            each.counts.sample(now_s)

    def outbound_stats(self, now_s: float) -> Mapping[str, OutboundStats]:
        """See `TopicReplication`."""
        shown = {remote: each.outbound_stats(now_s) for remote, each in self.replicators.items()}
        failed = self._failures.keys() - shown.keys()
        for remote in failed & self._wanted() if failed else ():
            cursor = self._topic.replicator_cursors.get(REPLICATOR_PREFIX + remote)
            backlog = 0 if cursor is None else cursor.backlog
            shown[remote] = OutboundStats.not_begun(backlog, self._failures[remote])
        here = self.replication_list
        if here is None:
            return shown
        lists = self._remotes.lists
        return {
            remote: each._replace(incomplete_list=lists.report(here, remote))
            for remote, each in shown.items()
        }

    def apply(self) -> None:
        """See `TopicReplication`."""
        for each in self.replicators.values():
            each.apply_rate()
        if not (self._closed or self._is_settled() or self._changing):
            self._changing = asyncio.get_running_loop().create_task(self._change())
        if (here := self.replication_list) is not None:
            self._remotes.lists.note(here)

    @property
    def replication_list(self) -> ReplicationList | None:
        """The list of clusters in force here; None unless it has two others, or when closed."""
        topic = self._reference()
        if self._closed or topic is None:
            return None
        others = self._wanted()
        if len(others) < CHECKED_FROM:
            return None
        namespace = topic.name.namespace_name
        of_namespace = self._remotes.list_of(namespace) - {self._remotes.local} == others
        return ReplicationList(namespace if of_namespace else self._whole_topic(), others)

    def restart(self, remote: str) -> None:
        """Make the replicator to a cluster anew, as it is to be reached in another way."""
        if self._closed:
            return
        replicator = self.replicators.pop(remote, None)
        if replicator is not None:
            self._stopped.append(replicator)
        self._retry_now.set()
        self.apply()

    async def close(self) -> None:
        """See `TopicReplication`."""
        self._closed = True
        if self._changing is not None:
            self._changing.cancel()
            await asyncio.wait((self._changing,))
        await asyncio.gather(
            *(each.close() for each in (*self._stopped, *self.replicators.values()))
        )
        self.replicators.clear()
        self._stopped.clear()

    # For subclasses

    @abstractmethod
    def _make_replicator(self, remote: str, cursor: Subscription) -> R:
        """Make a replicator with this cursor.  Raises `RemoteRefused`."""

    @abstractmethod
    def _whole_topic(self) -> TopicName:
        """The topic that may have a list: that of a partition, or of a segment."""

    @abstractmethod
    def _first_position(self) -> Position:
        """The position at which a new replicator begins."""

    def _wanted(self) -> frozenset[str]:
        """The clusters that the policies name, without this one."""
        return self._topic.policies.replication_clusters - {self._remotes.local}

    async def _open_replicator_cursor(self, remote: str) -> Subscription:
        return await self._topic.open_replicator_cursor(
            REPLICATOR_PREFIX + remote, self._first_position()
        )

    def _with_cursors(self) -> set[str]:
        """The clusters for which there is a cursor."""
        return {name.removeprefix(REPLICATOR_PREFIX) for name in self._topic.replicator_cursors}

    # Changes

    def _is_settled(self) -> bool:
        """Whether the replicators and cursors are those that the policies name."""
        done = self._wanted() == self.replicators.keys() == self._with_cursors()
        return done and not self._stopped

    async def _change(self) -> None:
        """Make and end replicators until all is settled; what fails is tried again."""
        backoff = Backoff(REPLICATION_RETRY_MIN_S, REPLICATION_RETRY_MAX_S)
        try:
            while not self._is_settled():
                self._retry_now.clear()
                if await self._step():
                    continue
                with suppress(TimeoutError):
                    async with asyncio.timeout(backoff.pause_s()):
                        await self._retry_now.wait()
        finally:
            self._changing = None

    async def _step(self) -> bool:
        """Make and end each replicator that is to be; returns whether all of this was done."""
        wanted = self._wanted()
        while self._stopped:
            # Before its successor begins, or the other cluster would see two of one name.
            await self._stopped.pop().close()
        ended = (self.replicators.keys() | self._with_cursors()) - wanted
        done = True
        for remote in sorted(ended | (wanted - self.replicators.keys())):
            try:
                await (self._end(remote) if remote in ended else self._begin(remote))
                self._failures.pop(remote, None)
                self._logged.forget(remote)
            except Exception as error:  # noqa: BLE001 - one cluster holds up no other
                done = False
                self._note_failure(remote, error)
        return done

    def _note_failure(self, remote: str, error: Exception) -> None:
        """Note why there is no replicator yet; each reason is logged once until another comes."""
        names = {"topic": str(self._topic.name), "cluster": remote}
        is_new = self._logged.is_new(error, remote)
        if isinstance(error, MagnetarError):
            self._failures[remote] = str(error)
            if is_new:
                log.warning("replication_not_changed", error=str(error), **names)
        else:
            self._failures[remote] = BROKER_FAILED
            if is_new:
                log.error("replication_failed", exc_info=error, **names)

    async def _begin(self, remote: str) -> None:
        cursor = await self._open_replicator_cursor(remote)
        # Nothing is awaited between these: when a record changes, `restart` finds the replicators
        # that know the one of before.
        replicator = self._make_replicator(remote, cursor)
        self.replicators[remote] = replicator
        replicator.start()
        log.info("replication_begun", topic=str(self._topic.name), cluster=remote)

    async def _end(self, remote: str) -> None:
        replicator = self.replicators.pop(remote, None)
        if replicator is not None:
            await replicator.close()
        await self._topic.delete_replicator_cursor(REPLICATOR_PREFIX + remote)
        log.info("replication_ended", topic=str(self._topic.name), cluster=remote)
