"""Consumers of segments over sockets: hand-over, a segment's end, subscriptions over a split."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.app.service import Broker
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.names import parse_topic_name
from tests.support.embedded_broker import running
from tests.support.raw_client import RawClient
from tests.unit.broker.topics.test_end_to_end import (
    EARLIEST,
    EXCLUSIVE,
    SHARED,
    client_of,
    fill,
    nothing_more,
    options,
    take,
)

PARENT = parse_topic_name("topic://public/default/t")
WHOLE = f"segment://{PARENT.tenant}/{PARENT.namespace}/t/0000-ffff-0"
LOW = f"segment://{PARENT.tenant}/{PARENT.namespace}/t/0000-7fff-1"


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with running(tmp_path) as broker:
        await broker.scalable.create(PARENT, segments=1, properties={})
        yield broker


async def attached(broker: Broker, name: str) -> int:
    topic = await broker.topics.get(parse_topic_name(name), create=False)
    return sum(len(each.consumers) for each in topic.subscriptions.values())


async def test_the_next_exclusive_consumer_waits_for_the_first(broker: Broker) -> None:
    old, new = await client_of(broker), await client_of(broker)
    first = await old.subscribe(WHOLE, "s", options(EXCLUSIVE), permits=100)
    await fill(old, 4, topic=WHOLE)
    got = [await first.receive() for _ in range(4)]
    await first.ack_answered(got[0].message_id)
    waiting = asyncio.create_task(new.subscribe(WHOLE, "s", options(EXCLUSIVE), permits=100))
    await new.ping()
    await old.ping()
    assert not waiting.done()
    await first.close()
    second = await waiting
    assert await take(second, 3) == [1, 2, 3]


async def test_a_lost_connection_hands_over_too(broker: Broker) -> None:
    old, new = await client_of(broker), await client_of(broker)
    await old.subscribe(WHOLE, "s", options(EXCLUSIVE))
    waiting = asyncio.create_task(new.subscribe(WHOLE, "s", options(EXCLUSIVE)))
    await new.ping()
    await old.close()
    await waiting
    assert await attached(broker, WHOLE) == 1


async def test_closing_takes_a_waiting_subscribe_back(broker: Broker) -> None:
    old, new = await client_of(broker), await client_of(broker)
    first = await old.subscribe(WHOLE, "s", options(EXCLUSIVE))
    waiting = asyncio.create_task(new.subscribe(WHOLE, "s", options(EXCLUSIVE, consumer_id=77)))
    await new.ping()
    await new.request(pb.BaseCommand.CLOSE_CONSUMER, pb.CommandCloseConsumer(consumer_id=77))
    with pytest.raises(Exception, match="ServiceNotReady"):
        await waiting
    await first.close()
    assert await attached(broker, WHOLE) == 0


async def test_end_of_segment_is_sent_once_all_is_acknowledged(broker: Broker) -> None:
    client = await client_of(broker)
    consumer = await client.subscribe(WHOLE, "s", options(SHARED), permits=100)
    await fill(client, 3, topic=WHOLE)
    got = [await consumer.receive() for _ in range(3)]
    await broker.scalable.split(PARENT, 0)
    consumer.ack(*[each.message_id for each in got[:2]])
    await client.ping()
    assert consumer.events.empty()
    consumer.ack(got[2].message_id)
    event = await client.wait(consumer.events.get())
    assert event.HasField("reached_end_of_topic")
    late = await client.subscribe(WHOLE, "s", options(SHARED), permits=100)
    assert (await client.wait(late.events.get())).HasField("reached_end_of_topic")
    await client.ping()
    assert consumer.events.empty()


async def test_a_split_loses_no_message_of_a_subscription(broker: Broker) -> None:
    client = await client_of(broker)
    consumer = await client.subscribe(WHOLE, "s", options(SHARED), permits=100)
    await fill(client, 3, topic=WHOLE)
    await broker.scalable.split(PARENT, 0)
    await fill(client, 2, topic=LOW)
    child = await client.subscribe(LOW, "s", options(SHARED), permits=100)
    assert await take(consumer, 3) == [0, 1, 2]
    assert await take(child, 2) == [0, 1]
    stranger = await client.subscribe(LOW, "new", options(SHARED), permits=100)
    assert await nothing_more(stranger)
    earliest = options(SHARED, initial_position=EARLIEST)
    assert await take(await client.subscribe(LOW, "old", earliest, permits=100), 2) == [0, 1]


async def test_missing_segments_are_not_made_by_subscribing(broker: Broker) -> None:
    client: RawClient = await client_of(broker)
    with pytest.raises(Exception, match="TopicNotFound"):
        await client.subscribe(LOW, "s")
