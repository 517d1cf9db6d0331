"""Brokers that break one rule of v4 clients' transactions (L) each."""

from collections.abc import Sequence

from broker.topics.consumer import Consumer
from broker.topics.dispatch.earlier_messages import EarlierMessages
from broker.topics.dispatch.outdated_messages import OutdatedMessages
from broker.topics.dispatch.single_active import SingleActiveDispatcher
from broker.transactions.service import Transactions
from magnetar.protocol.ids import Position
from magnetar.protocol.names import TopicName
from magnetar.protocol.received import Send
from magnetar.protocol.txn_id import CoordinatorId, TxnId
from txn.header import EndVerdict, decide_end
from txn.records import AckedPosition, Header, TxnState


async def takes_every_topic(self: Transactions, name: TopicName) -> None:
    """L1 broken: a topic that cannot take part is added."""


def names_nothing(send: Send) -> Send:
    """L2 broken: a message that names no transaction is stored as it is."""
    return send


async def waits_for_nobody(self: Transactions, txn: TxnId, end: TxnState) -> None:
    """L3 broken: an END is answered when it is written."""


def ends_once(
    header: Header | None, action: TxnState, owner: str | None, *, is_attempt: bool = False
) -> EndVerdict:
    """L4 broken: the same END again is refused."""
    verdict = decide_end(header, action, owner, is_attempt=is_attempt)
    return EndVerdict.OTHERWISE if verdict is EndVerdict.DONE else verdict


def sees_no_conflict(self: object, acks: Sequence[AckedPosition]) -> None:
    """L5 broken: a message is held for a second transaction."""


def serves_every_coordinator(self: Transactions, coordinator: CoordinatorId) -> None:
    """L7 broken: a broker says that it serves a coordinator that another one leads."""


def refuses_nothing_outdated(
    self: OutdatedMessages, consumer: Consumer, position: Position
) -> None:
    """L8 broken: what another active consumer acknowledged is acknowledged once more."""


def takes_what_another_has(self: SingleActiveDispatcher, consumer: Consumer) -> None:
    """L8 broken: a consumer acknowledges what the active one was sent after it."""


def refuses_nobody_that_comes_back(
    self: EarlierMessages, consumer: Consumer, *, sent: bool
) -> None:
    """L9 broken: a consumer that connected anew acknowledges what another one has used."""
