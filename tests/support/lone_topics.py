"""Real topics without a broker: on the embedded stores, in one directory."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from broker.policies.applied_policies import broker_policies
from broker.topics.consumer import Consumer
from broker.topics.context import TopicContext
from broker.topics.producer_names import ProducerNames
from broker.topics.publish_limits import PublishLimits
from broker.topics.sequence_store import KEEP_ALL, SequenceStore
from broker.topics.topic import Topic
from config.settings import load_settings
from magnetar.protocol.names import parse_topic_name
from storage.clock import SystemClock
from storage.ledger.local.disk import RealDisk
from storage.ledger.local.local_store import LocalLedgerStore
from storage.managed_ledger.factory import ManagedLedgerFactory
from storage.metadata.sqlite import SqliteMetadataStore
from txn.counters import TransactionCounters
from txn.decisions import Decisions
from txn.parts import TransactionParts
from txn.segment_owner import SegmentOwner
from txn.store import TransactionStore


class NoEvents:
    """`TopicEvents` that nobody follows."""

    def consumer_attached(self, topic: Topic, subscription: str, consumer: Consumer) -> None:
        """See `TopicEvents`."""

    def consumer_closed(
        self, topic: Topic, subscription: str, consumer: Consumer, *, by_command: bool
    ) -> None:
        """See `TopicEvents`."""

    def subscription_drained(self, topic: Topic, subscription: str) -> None:
        """See `TopicEvents`."""

    def subscription_rewound(self, topic: Topic, subscription: str) -> None:
        """See `TopicEvents`."""

    def unstamped_batch_found(self, topic: Topic) -> None:
        """See `TopicEvents`."""

    def topic_unloaded(self, topic: Topic) -> None:
        """See `TopicEvents`."""


class LoneTopics:
    """Opens topics that serve; `given_up` has those that lost their ledger."""

    def __init__(self, context: TopicContext, ledgers: ManagedLedgerFactory) -> None:
        self._context = context
        self._ledgers = ledgers
        self.given_up: list[Topic] = []

    async def open(self, name: str) -> Topic:
        """Open a topic by its full name, and make it if there is none."""
        topic_name = parse_topic_name(name)
        store = SequenceStore(self._context.clock, lambda: KEEP_ALL)
        ledger = await self._ledgers.open(
            topic_name.ledger_path, create=True, retention=store.retention
        )
        topic = await Topic.load(
            self._context,
            topic_name,
            ledger,
            store=store,
            owner=SegmentOwner(name, self._context.transactions, lambda _: None),
            events=NoEvents(),
            give_up=self.given_up.append,
        )
        topic.opened()
        return topic


@asynccontextmanager
async def lone_topics(directory: Path) -> AsyncIterator[LoneTopics]:
    """Topics over the stores of this directory, which are closed at the end."""
    clock, settings, counters = SystemClock(), load_settings(), TransactionCounters()
    metadata = await SqliteMetadataStore.open(directory / "metadata.db", clock)
    ledgers = LocalLedgerStore(RealDisk(directory), metadata, clock)
    await ledgers.start()
    factory = ManagedLedgerFactory(metadata, ledgers, clock)
    transactions = TransactionStore(metadata, counters)
    policies = broker_policies(settings)
    context = TopicContext(
        clock=clock,
        random=random.Random(1),
        settings=settings,
        producer_names=ProducerNames("alone", 0),
        publish_limits=PublishLimits(connection_bytes=1 << 20, total_bytes=1 << 24),
        transactions=TransactionParts(
            transactions, Decisions(transactions), counters, clock, "alone", eager_epochs=False
        ),
        policies=lambda _: policies,
    )
    try:
        yield LoneTopics(context, factory)
    finally:
        await factory.close()
        await ledgers.close()
        await metadata.close()
