"""Transactions of one process: its coordinators, decisions, collectors and watches."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol

import structlog

from broker.placement import BrokerAddress, Placement
from broker.policies.namespaces import NamespaceNotFound, TenantNotFound
from broker.policies.policies_in_force import PoliciesInForce
from broker.policies.policy_kinds import TRANSACTION_COORDINATOR
from broker.topics.cluster_topics import ClusterTopics
from broker.topics.topic import Topic, TopicNotFound
from broker.topics.topic_requests import EndOnTopic
from broker.transactions.assignment_watches import AssignmentWatches
from config.bounds import CLOCK_SKEW_MAX_MS, TXN_END_CARRIED_OUT_S, TXN_JOINS_AT_ONCE
from config.settings import Settings
from magnetar.protocol.names import (
    InvalidTopicName,
    TopicDomain,
    TopicName,
    parse_topic_name,
)
from magnetar.protocol.server_error import MagnetarError, PeerError, ServerError
from magnetar.protocol.txn_id import CoordinatorId, TxnId
from storage.clock import Clock
from storage.managed_ledger.factory import ManagedLedgerFactory
from storage.metadata.counted_metadata import CountedMetadata
from txn import records
from txn.ack_records import for_each
from txn.cleanup_requests import CleanupRequests
from txn.collector import Collector
from txn.coordinator_elections import CoordinatorBrokers, Leader
from txn.coordinators import Coordinators
from txn.counters import TransactionCounters
from txn.decisions import Decisions
from txn.errors import InvalidTxnStatus, TransactionEnded
from txn.key_collector import TransactionKeyCollector
from txn.parts import TransactionParts
from txn.records import AckRecord, Claim, TxnState
from txn.store import TransactionStore

log = structlog.get_logger(__name__)

_NOT_FOUND = (TopicNotFound, NamespaceNotFound, TenantNotFound)


class TransactionsOff(PeerError):
    """Transactions are off, for all clients or for those before version 5."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


class NotInTransactions(PeerError):
    """The topic does not exist, or cannot take part in a transaction of this client."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


class CoordinatorElsewhere(PeerError):
    """Another broker leads the coordinator, or none yet: a v4 client looks it up again."""

    code: ClassVar[ServerError] = ServerError.SERVICE_NOT_READY


class KnownTopics(Protocol):
    """The topics of the broker, as transactions use them."""

    cluster: ClusterTopics

    async def may_be_opened(self, name: TopicName) -> bool:
        """Whether a topic exists, or is a partition that is created at its first use."""
        ...

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
    policies: PoliciesInForce

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
        self.enabled_for_v4 = settings.coordinators_of_v4_clients > 0
        """Whether clients before version 5 may use transactions too."""
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

    def require_enabled(self, *, scalable: bool) -> None:
        """Raise `TransactionsOff` unless a client of this kind may use transactions.

        `scalable`: it is of version 5.
        """
        if not self.enabled:
            raise TransactionsOff(
                "Transactions are switched off on this broker: set transactions_enabled, or use a "
                "client without them."
            )
        if not scalable and not self.enabled_for_v4:
            raise TransactionsOff(
                "Transactions of clients before version 5 are switched off on this broker: set "
                "transaction_coordinator_enabled, or use the v5 client."
            )

    def require_served_to_v4(self, coordinator: CoordinatorId) -> None:
        """Raise unless this broker serves a coordinator to v4 clients (L7).

        `CoordinatorElsewhere`, with which they look it up again; `CoordinatorNotFound`.
        """
        if coordinator < self.coordinators.parallelism and not self.coordinators.leads(coordinator):
            raise CoordinatorElsewhere(
                f"Transaction coordinator {coordinator} is not served here: look it up again."
            )
        self.coordinators.require_served(coordinator)

    def address_of_coordinator(self, number: int) -> BrokerAddress:
        """The broker that serves a coordinator to v4 clients.

        Raises `TransactionsOff`, `TopicNotFound`, `CoordinatorElsewhere`.
        """
        self.require_enabled(scalable=False)
        if number >= self.coordinators.parallelism:
            raise TopicNotFound(
                f"There is no transaction coordinator {number}: there are "
                f"{self.coordinators.parallelism}, numbered from 0."
            )
        leader = self.coordinators.assignments().get(CoordinatorId(number))
        if leader is None:
            raise CoordinatorElsewhere(
                f"Transaction coordinator {number} has no leader yet: look it up again."
            )
        return BrokerAddress(
            leader.broker_url,
            leader.broker_url_tls,
            leader.web_url or "",
            leader.broker_id,
            leader.web_url_tls,
        )

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

    async def require_participants(self, names: Sequence[TopicName]) -> None:
        """Require that topics may take part in a transaction of a v4 client (L1).

        Raises `NotInTransactions` for a topic that is missing or not of the persistent domain, and
        `TransactionsOff` for one whose namespace has them switched off.
        """
        await for_each(names, self._require_participant, at_once=TXN_JOINS_AT_ONCE)

    async def _require_participant(self, name: TopicName) -> None:
        if name.domain is not TopicDomain.PERSISTENT:
            raise NotInTransactions(
                f"{name} takes no part in transactions of clients before version 5: use a "
                "persistent:// topic, or the v5 client."
            )
        if not await self._broker.topics.may_be_opened(name):
            raise NotInTransactions(
                f"{name} takes no part in the transaction, as there is no such topic: create it, "
                "or open a producer first."
            )
        if await self._broker.policies.value(TRANSACTION_COORDINATOR, name) is not True:
            raise TransactionsOff(
                "Transactions of clients before version 5 are switched off in the namespace "
                f"{name.namespace_name}: set its transactionCoordinatorEnabled, or use the v5 "
                "client."
            )

    async def carry_out_end(self, txn: TxnId, end: TxnState) -> None:
        """Have the owners of a transaction's topics carry its end out, so that readers see it (L3).

        It is in the header already, and their watches report it too.  So this returns after
        TXN_END_CARRIED_OUT_S at the latest, and raises nothing.
        """
        try:
            async with asyncio.timeout(TXN_END_CARRIED_OUT_S):
                # Records are deleted after the end is carried out: the ones that are left name all
                # topics and subscriptions on which it is not.
                ends = _ends_of(txn, end, await self.store.operations_of(txn))
                await for_each(ends, self._end_on_topic, at_once=TXN_JOINS_AT_ONCE)
        except (MagnetarError, TimeoutError) as error:
            log.info("transaction_end_not_awaited", txn=str(txn), error=str(error))

    async def _end_on_topic(self, request: EndOnTopic) -> None:
        # Without an owner there are no readers, and the next owner reads the header.
        if self._broker.placement.known_owner(request.topic) is None:
            return
        try:
            await self._broker.topics.cluster.ask(request)
        except MagnetarError as error:
            log.info(
                "transaction_end_not_awaited",
                txn=request.txn,
                topic=str(request.topic),
                error=str(error),
            )

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


def _ends_of(txn: TxnId, end: TxnState, found: Iterable[Claim | AckRecord]) -> Sequence[EndOnTopic]:
    """The requests that carry out the end on each topic that has records of the transaction."""
    subscriptions: dict[str, set[str]] = {}
    for record in found:
        of_topic = subscriptions.setdefault(record.segment, set())
        if isinstance(record, AckRecord):
            of_topic.add(record.subscription)
    return [
        EndOnTopic(
            parse_topic_name(topic),
            str(txn),
            end is TxnState.COMMITTED,
            sorted(subscriptions[topic]),
        )
        for topic in sorted(subscriptions)
    ]


def _electorate(placement: Placement) -> CoordinatorBrokers | None:
    if not placement.shared:
        return None
    return CoordinatorBrokers(lambda: placement.candidates, placement.live_session)
