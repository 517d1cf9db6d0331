"""Reads the stored backlogs of topics that no broker has loaded.

The metrics show those of subscriptions; a topic with one of a replicator is loaded, to be sent.
"""

import asyncio
from typing import Protocol

import structlog

from broker.placement import Placement
from broker.policies.clusters import Clusters
from broker.topics.registry import TopicRegistry
from broker.topics.replication import is_replicator_cursor
from broker.topics.topic import Topic
from broker.topics.topic_requests import ListTopicSubscriptions
from config.bounds import (
    STORED_BACKLOGS_PAGE,
    STORED_BACKLOGS_PAUSE_S,
    STORED_BACKLOGS_PER_S,
    STORED_BACKLOGS_RETRY_S,
    UNLOADED_BACKLOGS,
)
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.names import InvalidTopicName, TopicDomain, TopicName, parse_ledger_path
from magnetar.protocol.server_error import MagnetarError
from storage.managed_ledger.factory import ManagedLedgerFactory
from storage.managed_ledger.records import NAMES_INDEX, is_ledger_key
from storage.metadata.counted_metadata import CountedMetadata
from storage.metadata.keys import LAST
from storage.metadata.store import is_cut

log = structlog.get_logger(__name__)
_WITH_LEDGER = (TopicDomain.PERSISTENT, TopicDomain.SEGMENT)


class StoredBacklogsHost(Protocol):
    """The parts of a broker that `StoredBacklogs` uses."""

    metadata: CountedMetadata
    managed_ledgers: ManagedLedgerFactory
    topics: TopicRegistry
    placement: Placement
    clusters: Clusters


class StoredBacklogs:
    """Reads the backlogs of topics that no broker has loaded, STORED_BACKLOGS_PER_S each second.

    A broker that is alone reads all of them once, after its start; `IdleTopics` passes on those of
    topics that it unloads later.  A topic that is unloaded while a replicator has a backlog is
    loaded again.

    In a cluster the leader does it for all brokers: it reads all of them when it becomes the
    leader, and later those of topics that an owner gives up.  So each topic is shown once: by its
    owner, or by the leader.

    What cannot be read or loaded is tried again after STORED_BACKLOGS_RETRY_S where there are other
    clusters: they would not get what they lack.
    """

    def __init__(self, broker: StoredBacklogsHost) -> None:
        self._broker = broker
        self._given_up: dict[TopicName, None] = {}
        self._failed: dict[TopicName, None] = {}
        self._unloaded = asyncio.Event()
        self._tasks = BackgroundTasks(log)
        self._forget_owners = broker.placement.on_change(self._owner_changed)

    def start(self) -> None:
        """Read in the background."""
        shared = self._broker.placement.shared
        if not shared:
            self._broker.topics.after_unload = self._topic_unloaded
        self._tasks.see_through("stored_backlogs", self._lead if shared else self._read_alone)

    async def stop(self) -> None:
        """Read no more.  May be called again."""
        self._forget_owners()
        await self._tasks.stop()

    @property
    def _leads(self) -> bool:
        leader = self._broker.placement.leader
        return leader is not None and leader.broker_id == self._broker.placement.broker_id

    @property
    def _is_replicating(self) -> bool:
        """Whether topics may have to be loaded, as there are other clusters."""
        return len(self._broker.clusters.names()) > 1

    def _owner_changed(self, name: TopicName) -> None:
        if self._leads and name.domain in _WITH_LEDGER and not self._is_owned(name):
            self._given_up[name] = None

    def _topic_unloaded(self, topic: Topic) -> None:
        if any(each.backlog for each in topic.replicator_cursors.values()):
            self._given_up[topic.name] = None
            self._unloaded.set()

    def _is_owned(self, name: TopicName) -> bool:
        placement = self._broker.placement
        return placement.shared and placement.known_owner(name) is not None

    async def _read_alone(self) -> None:
        """Read at the start, and again what was unloaded too early, or failed."""
        await self._read_all()
        while True:
            await self._unloaded.wait()
            self._unloaded.clear()
            # A topic whose ledger fails is not loaded all the time.
            await asyncio.sleep(STORED_BACKLOGS_PAUSE_S)
            await self._read_given_up()

    async def _lead(self) -> None:
        """Read as long as this broker is the leader, whenever it is."""
        while True:
            if self._leads:
                await self._read_all()
                while self._leads:
                    await self._read_given_up()
                    await asyncio.sleep(STORED_BACKLOGS_PAUSE_S)
                self._given_up.clear()
                self._failed.clear()
                self._broker.topics.unloaded.clear()
            await asyncio.sleep(STORED_BACKLOGS_PAUSE_S)

    async def _read_all(self) -> None:
        """Read the backlogs of all topics, page by page.  Raises `MetadataError`."""
        after = ""
        while True:
            hits = await self._broker.metadata.scan_index(
                NAMES_INDEX, after, LAST, limit=STORED_BACKLOGS_PAGE
            )
            for hit in hits:
                if not self._leads:
                    return
                if self._broker.topics.unloaded.is_full and not self._is_replicating:
                    log.warning("stored_backlogs_left_out", shown=UNLOADED_BACKLOGS)
                    return
                if is_ledger_key(hit.record.key):
                    await self._read_path(hit.index_key)
            if not is_cut(hits, STORED_BACKLOGS_PAGE, None):
                return
            # "!" is the first character that a name may have.
            after = f"{hits[-1].index_key}!"

    async def _read_given_up(self) -> None:
        while self._leads and self._given_up:
            name = next(iter(self._given_up))
            del self._given_up[name]
            await self._read(name)

    async def _read_path(self, ledger_path: str) -> None:
        try:
            name = parse_ledger_path(ledger_path)
        except InvalidTopicName:
            return  # It is no topic's.
        await self._read(name)

    async def _read(self, name: TopicName) -> None:
        topics = self._broker.topics
        if str(name) in topics.loaded() or self._is_owned(name):
            return
        topics.unloaded.expect(name)
        try:
            stream = await self._broker.managed_ledgers.stored_stream(name.ledger_path)
        except MagnetarError as error:
            log.debug("stored_backlog_not_read", topic=str(name), error=str(error))
            self._try_again(name)
        else:
            cursors = {} if stream is None else stream.cursors
            if any(
                is_replicator_cursor(subscription) and cursor.backlog
                for subscription, cursor in cursors.items()
            ):
                await self._load(name)
                return
            topics.unloaded.remember_expected(
                name, {subscription: cursor.backlog for subscription, cursor in cursors.items()}
            )
        await asyncio.sleep(1 / STORED_BACKLOGS_PER_S)

    async def _load(self, name: TopicName) -> None:
        """Load a topic here, or at another broker, as another cluster lacks some of it."""
        try:
            await self._broker.topics.cluster.ask(ListTopicSubscriptions(name))
        except MagnetarError as error:
            log.warning("replicated_topic_not_loaded", topic=str(name), error=str(error))
            self._try_again(name)

    def _try_again(self, name: TopicName) -> None:
        if self._is_replicating:
            if not self._failed:
                self._tasks.start(self._retry())
            self._failed[name] = None

    async def _retry(self) -> None:
        await asyncio.sleep(STORED_BACKLOGS_RETRY_S)
        self._given_up |= self._failed
        self._failed.clear()
        self._unloaded.set()
