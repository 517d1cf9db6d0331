"""Transactions of one process: its coordinators, decisions, collectors and watches."""

import asyncio
from collections.abc import Sequence
from typing import ClassVar, Protocol

import structlog

from broker.placement import Placement
from broker.policies.namespaces import NamespaceNotFound, TenantNotFound
from broker.topics.topic import Topic, TopicNotFound
from broker.transactions.assignment_watches import AssignmentWatches
from config.bounds import CLOCK_SKEW_MAX_MS
from config.settings import Settings
from magnetar.protocol.names import InvalidTopicName, TopicName, parse_topic_name
from magnetar.protocol.server_error import MagnetarError
from magnetar.protocol.txn_id import TxnId
from storage.clock import Clock
from storage.managed_ledger.factory import ManagedLedgerFactory
from storage.metadata.counted_metadata import CountedMetadata
from txn import records
from txn.cleanup_requests import CleanupRequests
from txn.collector import Collector
from txn.coordinator_elections import CoordinatorBrokers, Leader
from txn.coordinators import Coordinators
from txn.counters import TransactionCounters
from txn.decisions import Decisions
from txn.errors import InvalidTxnStatus, TransactionEnded
from txn.key_collector import TransactionKeyCollector
from txn.parts import TransactionParts
from txn.records import AckRecord, Claim
from txn.store import TransactionStore

log = structlog.get_logger(__name__)

_NOT_FOUND = (TopicNotFound, NamespaceNotFound, TenantNotFound)


class KnownTopics(Protocol):
    """The topics of the broker, as transactions use them."""

    async def get(self, name: TopicName, *, create: bool) -> Topic:
        """The topic, loaded.  Raises `TopicNotFound`."""
        ...

    async def exists(self, name: TopicName) -> bool:
        """Whether a topic of that name is stored."""
        ...


class TransactionsHost(Protocol):
    """Interface: the parts of the broker that transactions use."""

    settings: Settings
    clock: Clock
    metadata: CountedMetadata
    managed_ledgers: ManagedLedgerFactory
    placement: Placement

    @property
    def broker_id(self) -> str:
        """`host:port` of the REST address: Pulsar's broker id."""
        ...

    @property
    def topics(self) -> KnownTopics:
        """Topics; from the start of the broker on."""
        ...


class Transactions:
    """Starts and stops the parts that serve transactions in this process.

    It is created before the topics and stopped after them.  Decisions are followed from `start`,
    before the first topic is loaded, until `stop`, after the last one is closed.  Coordinators run
    from `serve` until `stop_serving`.

    `enabled` False only means that no client may begin or use a transaction.  Open transactions
    still end at their deadlines and are collected, and entries of open and aborted transactions
    stay hidden from readers.
    """

    collector_class: ClassVar[type[Collector]] = Collector

    def __init__(self, broker: TransactionsHost) -> None:
        settings, me = broker.settings, broker.placement.me
        self.enabled = settings.transactions_enabled
        self.counters = TransactionCounters()
        self.store = TransactionStore(
            broker.metadata, self.counters, elapsed_s=asyncio.get_running_loop().time
        )
        self.decisions = Decisions(self.store)
        self.parts = TransactionParts(
            store=self.store,
            decisions=self.decisions,
            counters=self.counters,
            clock=broker.clock,
            broker_id=broker.broker_id,
            eager_epochs=broker.managed_ledgers.limits.claim_on_open,
            clock_slack_ms=(
                2 * CLOCK_SKEW_MAX_MS if broker.managed_ledgers.limits.claim_on_open else 0
            ),
        )
        self.coordinators = Coordinators(
            self.parts,
            Leader(me.broker_id, me.url, me.url_tls, me.web_url or None, me.web_url_tls),
            parallelism=settings.transaction_coordinators,
            max_open=settings.transaction_max_open_per_coordinator,
            session_timeout_ms=settings.metadata_store_session_timeout_ms,
            electorate=_electorate(broker.placement),
        )
        self._forget_brokers = broker.placement.on_brokers(self.coordinators.balance)
        self.collector = self.collector_class(
            self.parts,
            self.coordinators.leads,
            self._clean_segment,
            interval_s=settings.transaction_gc_interval_s,
            retention_s=settings.transaction_gc_retention_s,
        )
        self.key_collector = TransactionKeyCollector(
            self.coordinators,
            interval_s=settings.transaction_gc_interval_s,
            retention_s=settings.transaction_key_retention_s,
        )
        self._forget_changes = self.coordinators.on_change(self.key_collector.notice_change)
        self.cleanup_requests = CleanupRequests(self.store, self._clean_segment)
        self.watches = AssignmentWatches(self.coordinators)
        self._broker = broker

    async def start(self) -> None:
        """Follow the headers of transactions.  Raises `MetadataError`."""
        await self.store.recount()
        self.decisions.start()

    async def serve(self) -> None:
        """Lead coordinators and collect records, from now on.

        Raises `CoordinatorCountDiffers`, `MetadataError`.
        """
        await self.coordinators.start()
        self.collector.start()
        self.key_collector.start()
        self.cleanup_requests.start()

    async def stop_serving(self) -> None:
        """Give up all coordinators and stop collecting.  May be called again."""
        self._forget_brokers()
        self._forget_changes()
        self.watches.close()
        await self.cleanup_requests.stop()
        await self.collector.stop()
        await self.key_collector.stop()
        await self.coordinators.stop()

    async def stop(self) -> None:
        """Stop following headers.  May be called again."""
        await self.decisions.stop()

    async def join(self, txn: TxnId, name: TopicName) -> None:
        """Have a topic join a transaction, if this process owns the topic.

        Any other error is only logged: the first SEND joins too, and answers with it.  Raises
        `InvalidTxnStatus` when the transaction has ended.
        """
        broker = self._broker
        if not broker.placement.owns(name):
            return
        try:
            topic = await broker.topics.get(name, create=False)
            await topic.buffer.join(txn)
        except TransactionEnded as error:
            raise InvalidTxnStatus(str(error)) from error
        except InvalidTxnStatus:
            raise
        except MagnetarError as error:
            log.debug("transaction_not_joined", txn=str(txn), topic=str(name), error=str(error))

    async def _clean_segment(self, segment: str, found: Sequence[Claim | AckRecord]) -> bool:
        """Clean up records of ended transactions on a segment (W11, A6); False: not owned here.

        A segment that nobody owns is loaded by the broker that would be chosen for it.  Any error
        that refuses the load is raised.
        """
        try:
            name = parse_topic_name(segment)
        except InvalidTopicName:
            # No segment can have this name, so nothing goes by its records.
            await self._delete(found)
            return True
        if self._broker.placement.owner_of(name).broker_id != self._broker.broker_id:
            return False
        try:
            topic = await self._broker.topics.get(name, create=False)
        except _NOT_FOUND:
            # A segment that is stored may be served again, and then it goes by these records: they
            # stay for the collector's next round.  Only of a segment that is gone they are deleted.
            if await self._broker.topics.exists(name):
                raise
            await self._delete(found)
            return True
        await topic.buffer.rescan()
        acks = [record for record in found if isinstance(record, AckRecord)]
        for holder in sorted({ack.subscription for ack in acks}):
            subscription = topic.subscriptions.get(holder)
            if subscription is not None and subscription.transactional is not None:
                await subscription.transactional.pending.rescan()
            elif holder not in topic.ledger.cursors:
                # The subscription is gone: a stored one has a cursor (A6).
                await self._delete([ack for ack in acks if ack.subscription == holder])
        return True

    async def _delete(self, found: Sequence[Claim | AckRecord]) -> None:
        """Delete records by their exact keys (W6): their segment or subscription is gone."""
        for record in found:
            if isinstance(record, Claim):
                key = records.claim_key(record.txn, record.segment, record.epoch)
            else:
                key = records.ack_key(record)
            await self.store.delete_operation(record.txn, key)


def _electorate(placement: Placement) -> CoordinatorBrokers | None:
    if not placement.shared:
        return None
    return CoordinatorBrokers(lambda: placement.candidates, placement.live_session)
