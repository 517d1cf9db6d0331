"""Transactions of one process: coordinators, decisions, and what every part is given.

Rules:

- What topics and subscriptions keep of transactions is always there: entries of open and aborted
  transactions stay hidden when transactions are switched off.
- Switched off means that no client may begin or use one; those that are open end at their
  deadlines and are collected.
- Decisions are told from before the first topic is loaded until the last one is closed;
  coordinators serve while topics are there.
"""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import structlog

from broker.namespaces import NamespaceNotFound, TenantNotFound
from broker.placement import Placement
from broker.topic import TopicNotFound
from broker.transaction_watches import AssignmentWatches
from protocol.names import InvalidTopicName, TopicName, parse_topic_name
from protocol.server_error import MagnetarError
from txn import records
from txn.collector import Collector
from txn.coordinators import Coordinators
from txn.counters import TransactionCounters
from txn.decisions import Decisions
from txn.errors import InvalidTxnStatus, TransactionEnded
from txn.key_collector import TransactionKeyCollector
from txn.leadership import Electorate, Leader
from txn.nudges import Nudges
from txn.parts import TransactionParts
from txn.records import AckRecord, Claim
from txn.store import TransactionStore
from txn.txn_id import TxnId

if TYPE_CHECKING:
    from broker.service import Broker

log = structlog.get_logger(__name__)

_GONE = (TopicNotFound, NamespaceNotFound, TenantNotFound, InvalidTopicName)


class Transactions:
    """See the module's rules.  Made before topics are, stopped after them."""

    coordinators_class: ClassVar[type[Coordinators]] = Coordinators
    collector_class: ClassVar[type[Collector]] = Collector

    def __init__(self, broker: "Broker") -> None:
        settings = broker.settings
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
        )
        self.coordinators = self.coordinators_class(
            self.parts,
            Leader(broker.broker_id, broker.placement.broker_url, None, broker.placement.web_url),
            parallelism=settings.transaction_coordinators,
            max_open=settings.transaction_max_open_per_coordinator,
            session_timeout_ms=settings.metadata_store_session_timeout_ms,
            electorate=_electorate(broker.placement),
        )
        self._forget_brokers = broker.placement.on_brokers(self.coordinators.balance)
        self.collector = self.collector_class(
            self.parts,
            self.coordinators.leads,
            self._look_again,
            interval_s=settings.transaction_gc_interval_s,
            retention_s=settings.transaction_gc_retention_s,
        )
        self.key_collector = TransactionKeyCollector(
            self.coordinators,
            interval_s=settings.transaction_gc_interval_s,
            retention_s=settings.transaction_key_retention_s,
        )
        self._forget_changes = self.coordinators.on_change(self.key_collector.look)
        self.nudges = Nudges(self.store, self._look_again)
        self.watches = AssignmentWatches(self.coordinators)
        self._broker = broker

    async def start(self) -> None:
        """Begin to tell participants what ended.  Raises `MetadataError`."""
        await self.store.recount()
        self.decisions.start()

    async def serve(self) -> None:
        """Stand for coordinators.  Raises `CoordinatorCountDiffers`, `MetadataError`."""
        await self.coordinators.start()
        self.collector.start()
        self.key_collector.start()
        self.nudges.start()

    async def stop_serving(self) -> None:
        """Lead nothing more.  May be called again."""
        self._forget_brokers()
        self._forget_changes()
        self.watches.close()
        await self.nudges.stop()
        await self.collector.stop()
        await self.key_collector.stop()
        await self.coordinators.stop()

    async def stop(self) -> None:
        """Tell nothing more.  May be called again."""
        await self.decisions.stop()

    async def join(self, txn: TxnId, name: TopicName) -> None:
        """Have the owner of a topic join, if that is this process.  Raises `InvalidTxnStatus`.

        Whatever else is in the way is left to the first SEND, which joins too.
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

    async def _look_again(self, segment: str, found: Sequence[Claim | AckRecord]) -> bool:
        """W11, A6: records of ended transactions were found on a segment; False: not owned here.

        A segment that nobody owns is loaded by the broker that would be chosen for it.
        """
        try:
            name = parse_topic_name(segment)
            if self._broker.placement.owner_of(name).broker_id != self._broker.broker_id:
                return False
            topic = await self._broker.topics.get(name, create=False)
        except _GONE:
            await self._delete(found)
            return True
        await topic.buffer.rescan()
        acks = [record for record in found if isinstance(record, AckRecord)]
        for holder in sorted({ack.subscription for ack in acks}):
            subscription = topic.subscriptions.get(holder)
            if subscription is not None and subscription.transactional is not None:
                await subscription.transactional.pending.rescan()
            else:
                await self._delete([ack for ack in acks if ack.subscription == holder])
        return True

    async def _delete(self, found: Sequence[Claim | AckRecord]) -> None:
        """By exact key (W6): what they speak of is deleted, and their transactions have ended."""
        for record in found:
            if isinstance(record, Claim):
                key = records.claim_key(record.txn, record.segment, record.epoch)
            else:
                key = records.ack_key(record)
            await self.store.delete_operation(record.txn, key)


def _electorate(placement: Placement) -> Electorate | None:
    if not placement.shared:
        return None
    return Electorate(lambda: placement.candidates, placement.live_session)
