"""Reads everything that a topic holds, for comparison with what was promised."""

from typing import Final

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import Position
from tests.chaos.steady_producer import numbers_in, position_of
from tests.support.broker_process import BrokerProcess
from tests.support.raw_client import Delivery, RawClient, RawConsumer

SUBSCRIPTION: Final = "audit"
"""Made before the first message, never acknowledged on: nothing is trimmed."""
PERMITS: Final = 1000


async def hold_everything(client: RawClient, topic: str) -> None:
    """Make the audit's subscription at the beginning of the topic."""
    options = pb.CommandSubscribe(initial_position=pb.CommandSubscribe.Earliest)
    consumer = await client.subscribe(topic, SUBSCRIPTION, options)
    await consumer.close()


async def subscribe(client: RawClient, topic: str, subscription: str = SUBSCRIPTION) -> RawConsumer:
    """The audit's consumer, which reads from the first entry that the topic ever had."""
    options = pb.CommandSubscribe(initial_position=pb.CommandSubscribe.Earliest)
    return await client.subscribe(topic, subscription, options, permits=PERMITS)


async def read_everything(
    broker: BrokerProcess, topic: str, subscription: str = SUBSCRIPTION
) -> list[tuple[Position, list[tuple[int, int]]]]:
    """Every entry in order: its position, and (producer, number) of each message in it."""
    return [
        (position_of(each.message_id), numbers_in(each))
        for each in await read_entries(broker, topic, subscription)
    ]


async def numbers_by_producer(broker: BrokerProcess, topic: str) -> dict[int, list[int]]:
    """The numbers of the stored messages, in order, by producer."""
    found: dict[int, list[int]] = {}
    for entry in await read_entries(broker, topic):
        for producer, number in numbers_in(entry):
            found.setdefault(producer, []).append(number)
    return found


async def read_entries(
    broker: BrokerProcess, topic: str, subscription: str = SUBSCRIPTION
) -> list[Delivery]:
    """Every entry in order."""
    client = await broker.connect()
    consumer = await subscribe(client, topic, subscription)
    last = position_of((await consumer.last_message_id()).last_message_id)
    found: list[Delivery] = []
    taken = 0
    while last.entry_id >= 0 and (not found or position_of(found[-1].message_id) < last):
        delivery = await consumer.receive()
        found.append(delivery)
        taken += max(delivery.metadata.num_messages_in_batch, 1)
        if taken >= PERMITS // 2:
            consumer.flow(taken)
            taken = 0
    await client.close()
    return found
