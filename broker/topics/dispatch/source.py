"""Interfaces of the subscription and the topic that a dispatcher sends messages of."""

from collections.abc import Collection, Iterable
from typing import Protocol

from broker.policies.applied_policies import AppliedPolicies
from broker.topics.compaction.reading import ReadStart
from broker.topics.consumer import Consumer
from broker.topics.context import TopicContext
from magnetar.protocol.ids import Position
from magnetar.protocol.names import TopicName
from magnetar.protocol.txn_id import TxnId
from storage.managed_ledger.cursor import Cursor
from storage.managed_ledger.ledger import ManagedLedger
from storage.managed_ledger.types import Entry
from txn.held_messages import HeldMessages
from txn.pending_acks import PendingAcks


class ReadableTopic(Protocol):
    """A topic whose entries are read."""

    @property
    def name(self) -> TopicName:
        """Name of the topic."""
        ...

    @property
    def context(self) -> TopicContext:
        """Services that all topics use."""
        ...

    @property
    def policies(self) -> AppliedPolicies:
        """The policies in force."""
        ...

    @property
    def ledger(self) -> ManagedLedger:
        """The topic's entries."""
        ...

    @property
    def sealed(self) -> bool:
        """True once the ledger is terminated: nothing will ever be appended."""
        ...

    def max_read_position(self) -> Position:
        """The last position that consumers may read: the max read position of transactions."""
        ...

    def note_unstamped_batch(self) -> None:
        """Note that a batch of several messages has no entry hashes (PIP-486)."""
        ...

    def is_aborted(self, entry: Entry) -> bool:
        """Whether an entry at or before the max read position is never to be delivered."""
        ...


class HoldingTransactions(Protocol):
    """Transactions that have acknowledged messages, and may still abort."""

    @property
    def pending(self) -> PendingAcks:
        """Their acknowledgements."""
        ...

    def must_wait_for(self, consumer: Consumer, txns: Iterable[TxnId]) -> bool:
        """Whether one of these transactions must end before the consumer gets more (A9).

        The dispatcher runs again when the answer may have changed.
        """
        ...

    def open_of(self, consumer: Consumer) -> Collection[TxnId]:
        """Transactions without a known end in which a consumer acknowledged."""
        ...


class DispatchedSubscription(Protocol):
    """A subscription whose messages are sent."""

    @property
    def name(self) -> str:
        """Name of the subscription."""
        ...

    @property
    def topic(self) -> ReadableTopic:
        """The topic of the subscription."""
        ...

    @property
    def cursor(self) -> Cursor:
        """The acknowledged positions."""
        ...

    @property
    def messages_held(self) -> HeldMessages | None:
        """Messages that open transactions acknowledged; None for a non-durable subscription."""
        ...

    @property
    def transactional(self) -> HoldingTransactions | None:
        """Transactions that hold messages; None for a subscription that is not durable."""
        ...

    @property
    def read_start(self) -> ReadStart | None:
        """The place where it began, if its cursor was not loaded since."""
        ...

    def now_ms(self) -> int:
        """The broker's clock."""
        ...

    def skip(self, position: Position) -> None:
        """Acknowledge an entry that no consumer may see."""
        ...

    def skip_marker(self, entry: Entry) -> None:
        """The same, for a marker: a snapshot of replicated subscriptions is remembered."""
        ...

    def report_end_if_reached(self) -> None:
        """Report the end of a sealed topic, if it is reached."""
        ...
