"""One face of two clients, ours and the official Java one: what the workloads ask of either.

Rules: each session has a client of its own, so that one that fails leaves the others alone; what a
client raises is a `ClientFailed`, but by `commit`, which tells what is known of the end.  When a
transaction with acknowledgements of a consumer does not commit, or one could not be made,
`take_back` is called, so that its messages come again.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import magnetar
from magnetar.errors import (
    InvalidTransactionStatus,
    MagnetarError,
    TransactionConflict,
    TransactionFailed,
    TransactionNotFound,
    TransactionTimedOut,
)
from tests.cluster.histories.history import Outcome, Write
from tests.interop.java_client import (
    JavaClient,
    JavaConsumer,
    JavaFailed,
    JavaMessage,
    JavaProducer,
    JavaTransaction,
)
from tests.java.stock_driver import StockDriver

OPERATION_TIMEOUT_S: Final = 10
TRANSACTION_TIMEOUT_S: Final = 10
WAIT_S: Final = 0.2
"""How long a consumer waits for a first message."""
ABORTED: Final = (
    InvalidTransactionStatus,
    TransactionConflict,
    TransactionFailed,
    TransactionNotFound,
    TransactionTimedOut,
)
"""What our client's `commit` raises when the transaction is aborted, or will be by the broker."""
NOT_ASKED: Final = "TransactionHasOperationFailedException"
"""What the Java client throws when it does not ask for a commit, as something before it failed."""


class ClientFailed(Exception):
    """The client raised, on something other than a commit."""


@dataclass(frozen=True)
class Received:
    """A message, where it is stored, and the client's own of it."""

    key: str
    value: str
    place: magnetar.MessageId
    handle: object


class Transaction(Protocol):
    """One of either client, open."""

    async def commit(self) -> Outcome:
        """Ask for the commit; what is known of it."""
        ...

    async def abort(self) -> None:
        """Ask for the abort.  If that fails the deadline aborts it."""
        ...


class Consumer(Protocol):
    """One of either client."""

    async def receive(self, limit: int) -> Sequence[Received]:
        """At most so many; none if nothing comes for a while."""
        ...

    async def ack(
        self, messages: Sequence[Received], transaction: Transaction | None
    ) -> Sequence[Received]:
        """Each of them, or all up to the last one of an ordered one; those that it used."""
        ...

    async def take_back(self, messages: Sequence[Received], *, acknowledged: bool) -> None:
        """Have them again: their transaction did not commit."""
        ...

    async def close(self) -> None:
        """Leave."""
        ...


class Session(Protocol):
    """A client of either kind."""

    async def begin(self) -> Transaction:
        """A transaction."""
        ...

    async def send(self, topic: str, writes: Iterable[Write], transaction: Transaction) -> None:
        """All of them in this order; returns when all are stored."""
        ...

    async def queue(self, topic: str, subscription: str) -> Consumer:
        """A consumer that acknowledges one by one."""
        ...

    async def stream(self, topic: str, subscription: str) -> Consumer:
        """A consumer that acknowledges cumulatively."""
        ...

    async def reader(self, topic: str) -> Consumer:
        """A checkpoint consumer, from the first message on."""
        ...

    async def close(self) -> None:
        """Close everything."""
        ...


# Ours


@dataclass(frozen=True)
class OurTransaction:
    """One of our client."""

    of_client: magnetar.Transaction

    async def commit(self) -> Outcome:
        try:
            await self.of_client.commit()
        except ABORTED:
            return Outcome.FAILED
        except MagnetarError:
            return Outcome.UNKNOWN
        return Outcome.OK

    async def abort(self) -> None:
        try:
            await self.of_client.abort()
        except MagnetarError:
            pass


class OurConsumer:
    """A consumer of our client, of any kind."""

    def __init__(
        self,
        consumer: magnetar.QueueConsumer[str]
        | magnetar.StreamConsumer[str]
        | magnetar.CheckpointConsumer[str],
    ) -> None:
        self._consumer = consumer

    async def receive(self, limit: int) -> Sequence[Received]:
        messages = await self._consumer.receive_batch(limit, WAIT_S)
        return [Received(each.key or "", each.value, each.id, each) for each in messages]

    async def ack(
        self, messages: Sequence[Received], transaction: Transaction | None
    ) -> Sequence[Received]:
        assert transaction is None or isinstance(transaction, OurTransaction)
        within = transaction.of_client if transaction is not None else None
        handles = [_ours(each) for each in messages]
        try:
            if isinstance(self._consumer, magnetar.QueueConsumer):
                await self._consumer.ack(handles, transaction=within)
            elif isinstance(self._consumer, magnetar.StreamConsumer):
                await self._consumer.ack(handles[-1], transaction=within)
        except MagnetarError as error:
            raise ClientFailed from error
        return messages

    async def take_back(self, messages: Sequence[Received], *, acknowledged: bool) -> None:
        if acknowledged:
            return  # They come again by themselves.
        if isinstance(self._consumer, magnetar.StreamConsumer):
            self._consumer.redeliver_unacknowledged()
        elif isinstance(self._consumer, magnetar.QueueConsumer):
            for each in messages:
                self._consumer.nack(_ours(each))

    async def close(self) -> None:
        await self._consumer.close()


def _ours(received: Received) -> magnetar.Message[str]:
    assert isinstance(received.handle, magnetar.Message)
    return received.handle


class OurSession:
    """A client of ours."""

    def __init__(self, client: magnetar.Client) -> None:
        self._client = client
        self._producers: dict[str, magnetar.Producer[str]] = {}

    @classmethod
    async def open(cls, url: str) -> OurSession:
        """A client of the brokers there."""
        return cls(await magnetar.connect(url, operation_timeout_s=OPERATION_TIMEOUT_S))

    async def begin(self) -> Transaction:
        try:
            begun = await self._client.transaction(timeout_s=TRANSACTION_TIMEOUT_S)
        except MagnetarError as error:
            raise ClientFailed from error
        return OurTransaction(begun)

    async def send(self, topic: str, writes: Iterable[Write], transaction: Transaction) -> None:
        assert isinstance(transaction, OurTransaction)
        within = transaction.of_client
        try:
            if topic not in self._producers:
                self._producers[topic] = await self._client.producer(topic, schema=str)
            producer = self._producers[topic]
            sends = [
                producer.send_nowait(each.value, key=each.key, transaction=within)
                for each in writes
            ]
        except MagnetarError as error:
            raise ClientFailed from error
        for outcome in await asyncio.gather(*sends, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise ClientFailed from outcome

    async def queue(self, topic: str, subscription: str) -> Consumer:
        return OurConsumer(
            await self._client.queue_consumer(
                topic, subscription, schema=str, initial_position="earliest"
            )
        )

    async def stream(self, topic: str, subscription: str) -> Consumer:
        return OurConsumer(
            await self._client.stream_consumer(
                topic, subscription, schema=str, initial_position="earliest"
            )
        )

    async def reader(self, topic: str) -> Consumer:
        return OurConsumer(await self._client.checkpoint_consumer(topic, schema=str))

    async def close(self) -> None:
        await self._client.close()


# Java's


@dataclass(frozen=True)
class TheirTransaction:
    """One of the Java client."""

    of_client: JavaTransaction

    async def commit(self) -> Outcome:
        try:
            await self.of_client.commit()
        except JavaFailed as error:
            if NOT_ASKED not in str(error):
                return Outcome.UNKNOWN
            return Outcome.FAILED
        return Outcome.OK

    async def abort(self) -> None:
        try:
            await self.of_client.abort()
        except JavaFailed:
            pass


@dataclass
class TheirConsumer:
    """A consumer of the Java client, of any kind.

    After an abort it is opened anew: the official client keeps copies of what comes again.  Of an
    ordered one second copies are left out; of a queue the broker refuses them.
    """

    client: JavaClient
    kind: str
    topic: str
    subscription: str
    opened: JavaConsumer | None = None
    handed_out: set[magnetar.MessageId] = field(default_factory=set)

    async def receive(self, limit: int) -> Sequence[Received]:
        consumer = await self._open()
        try:
            messages = await consumer.receive(limit, quiet_ms=round(WAIT_S * 1000))
        except JavaFailed as error:
            raise ClientFailed from error
        received = [
            Received(each.key or "", str(each.value), magnetar.MessageId.from_bytes(each.id), each)
            for each in messages
        ]
        if self.kind == "stream":
            return [each for each in received if self._is_first_copy(each)]
        return received

    def _is_first_copy(self, message: Received) -> bool:
        first = message.place not in self.handed_out
        self.handed_out.add(message.place)
        return first

    async def ack(
        self, messages: Sequence[Received], transaction: Transaction | None
    ) -> Sequence[Received]:
        assert transaction is None or isinstance(transaction, TheirTransaction)
        consumer = await self._open()
        try:
            dropped = await consumer.ack(
                *(_theirs(each).id for each in messages),
                transaction=transaction.of_client if transaction is not None else None,
            )
        except JavaFailed as error:
            raise ClientFailed from error
        self.handed_out -= {messages[n].place for n in dropped}
        return [each for n, each in enumerate(messages) if n not in dropped]

    async def take_back(self, messages: Sequence[Received], *, acknowledged: bool) -> None:
        await self.close()

    async def close(self) -> None:
        consumer, self.opened = self.opened, None
        self.handed_out.clear()
        if consumer is not None:
            try:
                await consumer.close()
            except JavaFailed:
                pass

    async def _open(self) -> JavaConsumer:
        if self.opened is None:
            try:
                self.opened = await self._subscribe()
            except JavaFailed as error:
                raise ClientFailed from error
        return self.opened

    async def _subscribe(self) -> JavaConsumer:
        if self.kind == "queue":
            return await self.client.queue(self.topic, self.subscription, "string")
        if self.kind == "stream":
            name = f"stream-{uuid.uuid4().hex[:8]}"
            return await self.client.stream(
                self.topic, self.subscription, "string", consumer_name=name
            )
        return await self.client.checkpoint_consumer(self.topic, "string")


def _theirs(received: Received) -> JavaMessage:
    assert isinstance(received.handle, JavaMessage)
    return received.handle


class TheirSession:
    """A client of the Java process."""

    def __init__(self, client: JavaClient) -> None:
        self._client = client
        self._producers: dict[str, JavaProducer] = {}

    @classmethod
    async def open(cls, driver: StockDriver, url: str, admin_url: str) -> TheirSession:
        """A client of the brokers there."""
        return cls(
            await asyncio.to_thread(
                lambda: JavaClient.start(
                    driver,
                    url,
                    admin_url,
                    operationTimeoutS=OPERATION_TIMEOUT_S,
                    transactionTimeoutS=TRANSACTION_TIMEOUT_S,
                )
            )
        )

    async def begin(self) -> Transaction:
        try:
            return TheirTransaction(await self._client.begin())
        except JavaFailed as error:
            raise ClientFailed from error

    async def send(self, topic: str, writes: Iterable[Write], transaction: Transaction) -> None:
        assert isinstance(transaction, TheirTransaction)
        messages = list(writes)
        try:
            if topic not in self._producers:
                self._producers[topic] = await self._client.producer(topic, "string")
            await self._producers[topic].send(
                [each.value for each in messages],
                keys=[each.key for each in messages],
                transaction=transaction.of_client,
            )
        except JavaFailed as error:
            raise ClientFailed from error

    async def queue(self, topic: str, subscription: str) -> Consumer:
        return TheirConsumer(self._client, "queue", topic, subscription)

    async def stream(self, topic: str, subscription: str) -> Consumer:
        return TheirConsumer(self._client, "stream", topic, subscription)

    async def reader(self, topic: str) -> Consumer:
        return TheirConsumer(self._client, "reader", topic, "")

    async def close(self) -> None:
        await asyncio.to_thread(self._client.end)
