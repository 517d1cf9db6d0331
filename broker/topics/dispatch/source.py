"""What dispatchers need of the subscription and the topic that they send messages of."""

from collections.abc import Collection, Iterable
from typing import Protocol

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
    """Entries, and which of them may be read."""

    @property
    def name(self) -> TopicName:
        """Of the topic."""
        ...

    @property
    def context(self) -> TopicContext:
        """What all topics are given."""
        ...

    @property
    def ledger(self) -> ManagedLedger:
        """Where the entries are."""
        ...

    @property
    def sealed(self) -> bool:
        """True once the ledger is terminated: nothing will ever be appended."""
        ...

    def max_read_position(self) -> Position:
        """Up to where consumers may read: the horizon of transactions."""
        ...

    def is_aborted(self, entry: Entry) -> bool:
        """Whether an entry at or before the horizon is never to be delivered."""
        ...


class HoldingTransactions(Protocol):
    """Transactions that have acknowledged messages, and may still abort."""

    @property
    def pending(self) -> PendingAcks:
        """Their acknowledgements."""
        ...

    def keeps_from(self, consumer: Consumer, txns: Iterable[TxnId]) -> bool:
        """Whether one of these is another one's and has to end before a consumer gets more (A9).

        Remembers it, so that the dispatcher runs again when that may have changed.
        """
        ...

    def open_of(self, consumer: Consumer) -> Collection[TxnId]:
        """Transactions in which a consumer acknowledged, and whose end is not known."""
        ...


class DispatchedSubscription(Protocol):
    """Which messages of a topic are still to be delivered."""

    @property
    def name(self) -> str:
        """Of the subscription."""
        ...

    @property
    def topic(self) -> ReadableTopic:
        """Whose messages they are."""
        ...

    @property
    def cursor(self) -> Cursor:
        """What is acknowledged."""
        ...

    @property
    def partition_index(self) -> int:
        """Of the topic; -1 if it is no partition."""
        ...

    @property
    def messages_held(self) -> HeldMessages | None:
        """What open transactions have acknowledged; None if none ever could."""
        ...

    @property
    def transactional(self) -> HoldingTransactions | None:
        """These transactions; None for a subscription that is not durable."""
        ...

    def now_ms(self) -> int:
        """The broker's clock."""
        ...

    def skip(self, position: Position) -> None:
        """Acknowledge what no consumer is to see."""
        ...

    def look_at_end(self) -> None:
        """Report the end of a sealed topic, when it is so far."""
        ...
