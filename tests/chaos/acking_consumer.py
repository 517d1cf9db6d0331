"""Consumers that outlive their broker, and remember what they acknowledged and what that is worth.

Rules: an acknowledgement that was answered is durable, and with it every earlier one of the same
consumer; one without an answer may come back after a crash.  One entry in seven is never
acknowledged, so it must come back after every crash.
"""

import asyncio
import random
from typing import Final

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import Position
from tests.chaos.steady_producer import RETRY_PAUSE_S, must_be_loss, position_of
from tests.support.broker_process import BrokerProcess
from tests.support.raw_client import BrokerError, Delivery, RawClient, RawConsumer

SUBSCRIPTION: Final = "work"
PERMITS: Final = 2000
ACK_GROUP: Final = 16
ANSWERED_IN: Final = 4
"""One group of acknowledgements in so many asks for an answer."""


def is_kept(position: Position) -> bool:
    """Whether the consumer never acknowledges the entry."""
    return position.entry_id % 7 == 3


class AckingConsumer:
    """A Shared consumer of one topic."""

    def __init__(self, topic: str, number: int, rng: random.Random) -> None:
        self.topic = topic
        self.seen: set[Position] = set()
        self._seen_since_connect: set[Position] = set()
        self.durable: set[Position] = set()
        self.came_back: list[Position] = []
        self._number = number
        self._rng = rng
        self._acked: set[Position] = set()
        self._group: list[pb.MessageIdData] = []
        self._answers: set[asyncio.Task[None]] = set()

    def came_again(self, positions: set[Position]) -> bool:
        """Whether all of these came on the present connection."""
        return positions <= self._seen_since_connect

    async def consume(self, client: RawClient) -> None:
        """Receive and acknowledge on this connection until it ends."""
        self._group.clear()
        self._seen_since_connect = set()
        options = pb.CommandSubscribe(
            sub_type=pb.CommandSubscribe.Shared,
            consumer_id=self._number,
            initial_position=pb.CommandSubscribe.Earliest,
        )
        consumer = await client.subscribe(self.topic, SUBSCRIPTION, options, permits=PERMITS)
        taken = 0
        while True:
            delivery = await client.wait(consumer.messages.get(), timeout_s=600)
            self._take(consumer, delivery)
            taken += max(delivery.metadata.num_messages_in_batch, 1)
            if taken >= PERMITS // 2:
                consumer.flow(taken)
                taken = 0

    def _take(self, consumer: RawConsumer, delivery: Delivery) -> None:
        position = position_of(delivery.message_id)
        self.seen.add(position)
        self._seen_since_connect.add(position)
        if position in self.durable:
            self.came_back.append(position)
        if is_kept(position):
            return
        self._group.append(delivery.message_id)
        if len(self._group) < ACK_GROUP:
            return
        ids, self._group = self._group, []
        self._acked.update(map(position_of, ids))
        if self._rng.randrange(ANSWERED_IN):
            consumer.ack(*ids)
        else:
            answer = asyncio.create_task(self._answered(consumer, ids, set(self._acked)))
            self._answers.add(answer)
            answer.add_done_callback(self._answers.discard)

    async def _answered(
        self, consumer: RawConsumer, ids: list[pb.MessageIdData], acked: set[Position]
    ) -> None:
        try:
            await consumer.ack_answered(*ids)
        except ConnectionError:
            return
        self.durable |= acked

    def forget_unanswered(self) -> None:
        """The connection is lost: what was not answered may come again, and count only then."""
        self._acked = set()


async def consume(broker: BrokerProcess, consumers: list[AckingConsumer]) -> None:
    """Keep all consumers on one connection, opened again whenever the broker was killed."""
    while True:
        run = broker.run
        try:
            client = await broker.connect()
        except OSError:
            await asyncio.sleep(RETRY_PAUSE_S)
            continue
        work = [asyncio.create_task(consumer.consume(client)) for consumer in consumers]
        try:
            await asyncio.gather(*work)
        except ConnectionError:
            await must_be_loss(client, broker, run)
        except BrokerError as error:
            if error.code != pb.ServiceNotReady:
                raise
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            for consumer in consumers:
                consumer.forget_unanswered()
            await client.close()
