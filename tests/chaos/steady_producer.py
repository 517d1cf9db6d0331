"""Producers that outlive their broker, as the official client's do.

Rules: a producer keeps its name and its id, raises its epoch at each reconnect, and resends in
order what has no receipt before it sends anything new.  Its messages say who sent them and count
from 0 without a gap, so that a reader can tell what is missing, doubled or out of order.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from functools import partial
from struct import Struct
from typing import Final

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import Position
from magnetar.protocol.message import build_batch, iter_batch
from tests.support.broker_process import BrokerProcess
from tests.support.raw_client import BrokerError, Delivery, RawClient, RawProducer, Receipt
from tests.support.waiting import end, until

CONTENT: Final = Struct(">IQ")
FILLER: Final = bytes(300)
WINDOW: Final = 64
RETRY_PAUSE_S: Final = 0.02
EXIT_S: Final = 5
"""How long a process may take to end."""
DUPLICATE: Final = Position(-1, -1)
"""The receipt of a resend that was durable already."""


class Said(AssertionError):
    """The broker answered what it must not."""


class SteadyProducer:
    """One producer name on one topic.  With `batch` above 1 each SEND holds so many messages.

    With `keys` each message has one of so many keys, in turn.  With `targets` each message is for
    one of these lists of clusters, in turn; an empty one names all.  `window` is the number of
    SENDs without a receipt; `pause_s` is how long it waits after a receipt.
    """

    def __init__(
        self,
        topic: str,
        number: int,
        *,
        name: str = "",
        batch: int = 1,
        keys: int = 0,
        targets: Sequence[Sequence[str]] = ((),),
        window: int = WINDOW,
        pause_s: float = 0,
    ) -> None:
        self.topic = topic
        self.number = number
        self.receipts: dict[int, Position] = {}
        self.resent = 0
        self._name = name
        self._chosen_name = bool(name)
        self._batch = batch
        self._keys = keys
        self._targets = targets
        self._window = window
        self._pause_s = pause_s
        self._epoch = -1
        self._next = 0
        self._pending: deque[tuple[int, bytes]] = deque()
        self._room = asyncio.Event()
        self._closed = False
        self._fault: BrokerError | None = None

    @property
    def sent(self) -> int:
        """Messages written so far, with or without receipt: their numbers are 0 to one less."""
        return self._next

    def first_of(self, number: int) -> int:
        """The number under which the SEND that holds this message has its receipt."""
        return number - number % self._batch

    def key_of(self, number: int) -> str | None:
        """The key of a message, None without."""
        return f"k{number % self._keys}" if self._keys else None

    def is_for(self, number: int, cluster: str) -> bool:
        """Whether a message is for another cluster."""
        named = self._targets_of(number)
        return not named or cluster in named

    def _targets_of(self, number: int) -> Sequence[str]:
        return self._targets[number % len(self._targets)]

    async def produce(self, client: RawClient, stop: asyncio.Event) -> None:
        """Send on this connection until `stop`, and then until nothing lacks a receipt.

        A producer that the broker closes, as the topic is unloaded, is opened again.  Raises
        `BrokerError` with ServiceNotReady for a topic that another broker has.
        """
        while not (stop.is_set() and self._epoch >= 0 and not self._pending):
            producer = await self._open(client)
            watching = asyncio.create_task(self._watch(producer))
            try:
                await self._produce(producer, client, stop)
            finally:
                await end(watching)

    async def _watch(self, producer: RawProducer) -> None:
        while (await producer.events.get()).type != pb.BaseCommand.CLOSE_PRODUCER:
            pass
        self._closed = True
        self._room.set()

    async def _open(self, client: RawClient) -> RawProducer:
        self._epoch += 1
        self._closed = False
        self._fault = None
        options = pb.CommandProducer(
            producer_id=self.number,
            epoch=self._epoch,
            user_provided_producer_name=self._chosen_name,
        )
        if self._name:
            options.producer_name = self._name
        producer = await client.create_producer(self.topic, options)
        self._name = producer.name
        self.resent += len(self._pending)
        for sequence, frame in self._pending:
            producer.send_frame(sequence, frame, partial(self._take, sequence))
        return producer

    async def _produce(self, producer: RawProducer, client: RawClient, stop: asyncio.Event) -> None:
        while not (self._closed or (stop.is_set() and not self._pending)):
            while len(self._pending) < self._window and not stop.is_set():
                self._send(producer)
            self._room.clear()
            await client.wait(self._room.wait())
            if self._pause_s:
                await asyncio.sleep(self._pause_s)
            if self._fault is not None and self._fault.code == pb.ServiceNotReady:
                raise self._fault
            if self._fault is not None:
                raise Said(f"{self.topic}: {self._fault}")

    def _send(self, producer: RawProducer) -> None:
        first, self._next = self._next, self._next + self._batch
        numbers = range(first, self._next)
        contents = [CONTENT.pack(self.number, number) + FILLER for number in numbers]
        metadata = pb.MessageMetadata(
            publish_time=first + 1,
            partition_key=self.key_of(first),
            replicate_to=self._targets_of(first),
        )
        send = pb.CommandSend()
        payload = contents[0]
        if self._batch > 1:
            send.num_messages = metadata.num_messages_in_batch = self._batch
            send.highest_sequence_id = metadata.highest_sequence_id = numbers[-1]
            payload = build_batch(
                (self._single(number), content)
                for number, content in zip(numbers, contents, strict=True)
            )
        _, frame = producer.frame(payload, metadata=metadata, send=send, sequence_id=first)
        self._pending.append((first, frame))
        producer.send_frame(first, frame, partial(self._take, first))

    def _single(self, number: int) -> pb.SingleMessageMetadata:
        key = self.key_of(number)
        return pb.SingleMessageMetadata(payload_size=0, sequence_id=number, partition_key=key)

    def _take(self, first: int, receipt: Receipt) -> None:
        self._room.set()
        if isinstance(receipt, BrokerError):
            self._fault = self._fault or receipt
            return
        self._pending.popleft()
        self.receipts[first] = position_of(receipt.message_id)


def position_of(message_id: pb.MessageIdData) -> Position:
    """The place that an id names; `DUPLICATE` for ledger -1."""
    if message_id.ledger_id >= 2**63:
        return DUPLICATE
    return Position(message_id.ledger_id, message_id.entry_id)


def numbers_in(delivery: Delivery) -> list[tuple[int, int]]:
    """(producer number, message number) of each message in an entry."""
    if delivery.metadata.HasField("num_messages_in_batch"):
        batch = iter_batch(delivery.payload, delivery.metadata.num_messages_in_batch)
        contents = [bytes(payload) for _, payload in batch]
    else:
        contents = [delivery.payload]
    numbers: list[tuple[int, int]] = []
    for content in contents:
        producer, number = CONTENT.unpack_from(content)
        numbers.append((producer, number))
    return numbers


async def produce(
    broker: BrokerProcess, producers: list[SteadyProducer], stop: asyncio.Event
) -> None:
    """Keep all producers on one connection, opened again whenever the broker was killed."""
    while True:
        run = broker.run
        try:
            client = await broker.connect()
        except OSError:
            await asyncio.sleep(RETRY_PAUSE_S)
            continue
        work = [asyncio.create_task(producer.produce(client, stop)) for producer in producers]
        try:
            await asyncio.gather(*work)
        except ConnectionError:
            await must_be_loss(client, broker, run)
        except BrokerError as error:
            if error.code != pb.ServiceNotReady:
                raise
        else:
            return
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            await client.close()


async def must_be_loss(client: RawClient, broker: BrokerProcess, run: int) -> None:
    """Raise `Said` if the connection ended for another reason than the end of that run.

    Connections of a process that kills itself may be closed a moment before it has ended.
    """
    why = client.closed.result()
    if why.startswith("protocol violated"):
        raise Said(why)
    try:
        await until(lambda: broker.run != run or not broker.running, EXIT_S)
    except TimeoutError:
        raise Said(why) from None
