"""Workers that consume, transform and produce in transactions, whatever happens to the brokers.

Rules:

- Every transaction writes one message at least, and each of its messages tells the transaction, its
  place in it, how many there are, and the inputs that the transaction acknowledged: so what readers
  see says by itself whether a transaction is whole.
- A worker commits only when everything that it did was answered; after anything else it aborts.
- Now and then a worker leaves a transaction open, which then ends at its deadline.
- What is told of an end is kept: a commit that was answered must be seen, an abort never.  An END
  without answer is asked for again on the next connection, until there is an answer.
- A lost connection is replaced by a new one; no message is ever sent twice.
"""

import asyncio
import enum
import random
from collections.abc import Callable, Sequence
from typing import Final

from magnetar.protocol import pulsar_pb2 as pb
from tests.support.batch_acks import messages_in, partial_id, permits_of
from tests.support.broker_process import BrokerProcess
from tests.support.raw_client import BrokerError, Delivery, RawConsumer, RawProducer
from tests.support.routed_client import RoutedClient

Kind = pb.BaseCommand
TxnBits = tuple[int, int]
PAUSE_S: Final = 0.05
ANSWER_S: Final = 8.0
"""Longer than any stop that the test makes; what takes longer is given up with its connection."""
INPUT_S: Final = 0.05
COORDINATORS: Final = 16
SHORT_TTL_MS: Final = 1500
LONG_TTL_MS: Final = 3_600_000
LEFT_OPEN: Final = 0.3
"""Share of the transactions with a short timeout that are left open."""


class Outcome(enum.Enum):
    """What is known about the end of a transaction."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    UNKNOWN = "unknown"


class Acks(enum.Enum):
    """How a worker acknowledges its inputs: the type of its subscription goes with it."""

    INDIVIDUAL = pb.CommandSubscribe.Shared
    """Messages of a batch too, each by itself."""
    CUMULATIVE = pb.CommandSubscribe.Failover


class Lost(Exception):
    """The broker closed a producer or consumer."""


def payload(name: str, place: int, count: int, inputs: Sequence[str]) -> bytes:
    """`name` is unique among all transactions."""
    return f"{name}|{place}|{count}|{','.join(inputs)}".encode()


def parsed(data: bytes) -> tuple[str, int, int, list[str]]:
    """The transaction, the place, how many, the inputs."""
    name, place, count, inputs = data.decode().split("|")
    return name, int(place), int(count), [each for each in inputs.split(",") if each]


class TransactingWorker:
    """See the module's rules.  `outputs` gives the topics that may be written to now.

    `scalable` False: a client before version 5, whose transactions are on ordinary topics alone.
    """

    def __init__(
        self,
        number: int,
        rng: random.Random,
        outputs: Callable[[], Sequence[str]],
        inputs: str,
        subscription: str,
        *,
        scalable: bool = True,
        acks: Acks = Acks.INDIVIDUAL,
    ) -> None:
        self.number = number
        self._scalable = scalable
        self._acks = acks
        self.outcomes: dict[str, Outcome] = {}
        self.left_open = 0
        self._rng = rng
        self._outputs = outputs
        self._inputs = inputs
        self._subscription = subscription
        self._routes: RoutedClient | None = None
        self._producers: dict[str, RawProducer] = {}
        self._consumer: RawConsumer | None = None
        self._asked, self._owed = False, 1
        self._in_part: list[Delivery] = []
        """Batches of which the transaction acknowledges some messages."""
        self._unsettled: list[tuple[str, TxnBits, pb.TxnAction]] = []

    @property
    def committed(self) -> int:
        """Commits that were answered."""
        return sum(outcome is Outcome.COMMITTED for outcome in self.outcomes.values())

    async def run(self, brokers: Sequence[BrokerProcess], stop: asyncio.Event) -> None:
        """Transaction after transaction; returns when the last one is settled."""
        while not stop.is_set() or self._unsettled:
            try:
                await self._work(brokers, stop)
            except (OSError, TimeoutError, BrokerError, Lost):
                await self._drop()
                await asyncio.sleep(PAUSE_S)
        await self._drop()

    async def _work(self, brokers: Sequence[BrokerProcess], stop: asyncio.Event) -> None:
        if self._routes is None:
            self._routes = RoutedClient(brokers, ANSWER_S)
        routes = self._routes
        while self._unsettled:
            await self._settle(routes)
        while not stop.is_set():
            await self._transaction(routes)

    async def _drop(self) -> None:
        routes, self._routes = self._routes, None
        self._producers.clear()
        self._forget_consumer()
        if routes is not None:
            await routes.close()

    def _forget_consumer(self) -> None:
        self._consumer = None
        self._asked, self._owed = False, 1
        self._in_part = []

    async def _transaction(self, routes: RoutedClient) -> None:
        rng = self._rng
        short = rng.random() < 0.1
        new = pb.CommandNewTxn(
            tc_id=rng.randrange(COORDINATORS),
            txn_ttl_millis=SHORT_TTL_MS if short else LONG_TTL_MS,
            scalable=self._scalable,
        )
        client = await routes.to_coordinator(new.tc_id)
        begun = (await client.request(Kind.NEW_TXN, new)).new_txn_response
        txn = (begun.txnid_most_bits, begun.txnid_least_bits)
        name = f"{self.number}.{len(self.outcomes)}"
        self.outcomes[name] = Outcome.UNKNOWN
        self._unsettled.append((name, txn, pb.ABORT))
        whole = await self._fill(routes, txn, name)
        if short and rng.random() < LEFT_OPEN:
            # No commit is ever asked for, so it can only abort.
            self.outcomes[name] = Outcome.ABORTED
            self.left_open += 1
            del self._unsettled[-1]
        else:
            if whole and rng.random() < 0.75:
                self._unsettled[-1] = (name, txn, pb.COMMIT)
            if short and rng.random() < 0.5:
                await asyncio.sleep(SHORT_TTL_MS / 1000 * rng.uniform(0.5, 1.5))
            await self._settle(routes)
        await self._return_inputs(self.outcomes[name])
        if not whole:
            routes.forget()

    async def _fill(self, routes: RoutedClient, txn: TxnBits, name: str) -> bool:
        """Whether all of it was taken.  A refusal of one part leaves the connection as it is."""
        rng = self._rng
        inputs = await self._take_inputs(routes, txn)
        count = rng.choice((1, 2, 2, 3, 5, 20))
        places = [rng.choice(self._outputs()) for _ in range(count)]
        if rng.randrange(2):
            add = pb.CommandAddPartitionToTxn(
                partitions=sorted(set(places)), scalable=self._scalable
            )
            add.txnid_most_bits, add.txnid_least_bits = txn
            client = await routes.to_coordinator(txn[0])
            await client.request(Kind.ADD_PARTITION_TO_TXN, add)
        taken = await asyncio.gather(
            *(
                self._send(routes, txn, topic, payload(name, place, count, inputs))
                for place, topic in enumerate(places)
            ),
            return_exceptions=True,
        )
        refused = [each for each in taken if isinstance(each, BaseException)]
        if any(not isinstance(each, BrokerError) for each in refused):
            raise refused[0]
        return not refused

    async def _take_inputs(self, routes: RoutedClient, txn: TxnBits) -> list[str]:
        """Acknowledge some inputs in the transaction; what cannot be loses the connection."""
        found: list[str] = []
        ids: list[pb.MessageIdData] = []
        for _ in range(self._rng.choice((0, 1, 1, 2))):
            consumer = await self._subscribed(routes)
            if not self._asked:
                consumer.flow(self._owed)
                self._asked = True
            try:
                delivery = await consumer.receive(INPUT_S)
            except TimeoutError:
                break
            self._asked, self._owed = False, permits_of(delivery)
            names, named = self._choose(delivery)
            found += names
            ids.append(named)
        if ids and self._consumer is not None:
            cumulative = self._acks is Acks.CUMULATIVE
            ack = self._consumer.ack_command(ids[-1:] if cumulative else ids, cumulative, None)
            ack.txnid_most_bits, ack.txnid_least_bits = txn
            await self._consumer.client.request(Kind.ACK, ack)
        return found

    def _choose(self, delivery: Delivery) -> tuple[list[str], pb.MessageIdData]:
        """Choose the messages of a delivery to acknowledge: all, or some of its batch."""
        every = messages_in(delivery.payload, delivery.metadata, delivery.command.ack_set)
        chosen = every
        if self._acks is Acks.INDIVIDUAL and len(every) > 1 and self._rng.random() < 0.7:
            chosen = sorted(
                self._rng.sample(every, self._rng.randrange(1, len(every))), key=lambda of: of[1]
            )
            self._in_part.append(delivery)
        indexes = [index for _, place in chosen for index in place]
        return [body.decode() for body, _ in chosen], partial_id(delivery, indexes)

    async def _return_inputs(self, outcome: Outcome) -> None:
        """Have the broker send what the ended transaction did not use."""
        consumer, in_part = self._consumer, self._in_part
        if consumer is None:
            return
        self._in_part = []
        if in_part:
            consumer.redeliver(*(each.message_id for each in in_part))
        if self._acks is Acks.CUMULATIVE and outcome is not Outcome.COMMITTED:
            self._forget_consumer()
            await consumer.close()

    async def _subscribed(self, routes: RoutedClient) -> RawConsumer:
        while self._consumer is not None and not self._consumer.events.empty():
            if self._consumer.events.get_nowait().type != Kind.ACTIVE_CONSUMER_CHANGE:
                raise Lost
        if self._consumer is None:
            options = pb.CommandSubscribe(
                sub_type=self._acks.value,
                initial_position=pb.CommandSubscribe.Earliest,
                consumer_name=f"worker-{self.number}",
            )
            client = await routes.to_owner(self._inputs)
            self._consumer = await client.subscribe(self._inputs, self._subscription, options)
        return self._consumer

    async def _send(self, routes: RoutedClient, txn: TxnBits, topic: str, data: bytes) -> None:
        producer = self._producers.get(topic)
        if producer is None or not producer.events.empty():
            client = await routes.to_owner(topic)
            producer = self._producers[topic] = await client.create_producer(topic)
        most, least = txn
        sending = asyncio.ensure_future(
            producer.send(
                data,
                metadata=pb.MessageMetadata(txnid_most_bits=most, txnid_least_bits=least),
                send=pb.CommandSend(txnid_most_bits=most, txnid_least_bits=least),
            )
        )
        closed = asyncio.ensure_future(producer.events.get())
        try:
            await asyncio.wait((sending, closed), return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                raise Lost
            sending.result()
        finally:
            sending.cancel()
            closed.cancel()

    async def _settle(self, routes: RoutedClient) -> None:
        """END of the oldest that is not settled, until it is answered."""
        name, (most, least), action = self._unsettled[0]
        command = pb.CommandEndTxn(
            txnid_most_bits=most,
            txnid_least_bits=least,
            txn_action=action,
            scalable=self._scalable,
        )
        committing = action == pb.COMMIT
        client = await routes.to_coordinator(most)
        try:
            await client.request(Kind.END_TXN, command)
            self.outcomes[name] = Outcome.COMMITTED if committing else Outcome.ABORTED
        except BrokerError as error:
            if error.code == pb.InvalidTxnStatus:
                self.outcomes[name] = Outcome.ABORTED if committing else Outcome.COMMITTED
            elif error.code != pb.TransactionNotFound:
                raise
        del self._unsettled[0]
