"""One SUBSCRIBE on a real broker: connections that break, hand-overs, reading from a place."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

import magnetar
from magnetar.consume.message import RawMessage
from magnetar.consume.receiving import Inbox
from magnetar.consume.segment_consumer import SegmentConsumer
from magnetar.consume.settings import InitialPosition, SubscribeSettings, SubscriptionKind
from magnetar.errors import AlreadyClosed, ConnectionLost, OperationTimedOut
from magnetar.message_id import EARLIEST_ENTRY, EntryId
from tests.client.conftest import MakeTopic, Topic

WAIT_S = 30
QUIET_S = 0.2


@dataclass(frozen=True)
class Place:
    """What is subscribed to."""

    topic: str
    segment_id: int = 0


@dataclass
class Opened:
    consumer: SegmentConsumer
    inbox: Inbox[SegmentConsumer]

    async def take(self, count: int) -> list[RawMessage[SegmentConsumer]]:
        return [await self.inbox.take(WAIT_S) for _ in range(count)]

    async def rest(self) -> list[bytes]:
        found: list[bytes] = []
        while messages := await self.inbox.take_many(1000, QUIET_S):
            found += [each.payload for each in messages]
        return found

    def break_connection(self) -> None:
        assert self.consumer.connection is not None
        self.consumer.connection.abort(ConnectionLost("The test broke it."))


@asynccontextmanager
async def opened(
    client: magnetar.Client,
    topic: Topic,
    *,
    kind: SubscriptionKind = SubscriptionKind.EXCLUSIVE,
    start_after: EntryId | None = None,
    queue_size: int = 1000,
) -> AsyncIterator[Opened]:
    segment = f"segment://{topic.name.removeprefix('topic://')}/0000-ffff-0"
    inbox: Inbox[SegmentConsumer] = Inbox(10_000, 100_000_000)
    how = SubscribeSettings(
        subscription="s",
        kind=kind,
        durable=start_after is None,
        start_after=start_after,
        initial_position=InitialPosition.EARLIEST,
        receiver_queue_size=queue_size,
    )
    consumer = SegmentConsumer(client.context, Place(segment), how, inbox)
    await consumer.open(WAIT_S)
    yield Opened(consumer, inbox)
    await consumer.close()


async def send(client: magnetar.Client, topic: Topic, begin: int, end: int) -> list[bytes]:
    data = [b"%03d" % number for number in range(begin, end)]
    async with client.producer(topic.name) as producer:
        await asyncio.gather(*(producer.send(each) for each in data))
    return data


def payloads(messages: list[RawMessage[SegmentConsumer]]) -> list[bytes]:
    return [each.payload for each in messages]


async def test_unacked_messages_come_again_after_a_lost_connection(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic()
    sent = await send(client, made, 0, 30)
    async with opened(client, made, queue_size=10) as one:
        messages = await one.take(20)
        assert payloads(messages) == sent[:20]
        one.consumer.acknowledge_up_to(messages[14].entry_id)
        await one.consumer.confirmed()
        one.break_connection()
        one.consumer.acknowledge_up_to(messages[16].entry_id)
        await one.consumer.confirmed()
        last = [each for each in await one.rest() if each > sent[16]]
        assert last == sent[17:]


async def test_a_hand_over_waits_for_what_was_handed_out(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic()
    sent = await send(client, made, 0, 20)
    async with opened(client, made) as one:
        messages = await one.take(5)
        leaving = asyncio.create_task(one.consumer.leave_in_order())
        await asyncio.sleep(0)
        with pytest.raises(OperationTimedOut):
            await one.inbox.take(QUIET_S)
        one.consumer.acknowledge_up_to(messages[3].entry_id)
        await asyncio.sleep(0)
        assert not leaving.done()
        one.consumer.acknowledge_up_to(messages[4].entry_id)
        await asyncio.wait_for(leaving, WAIT_S)
        with pytest.raises(AlreadyClosed):
            one.consumer.acknowledge(messages[4].entry_id)
        async with opened(client, made) as two:
            assert [each for each in await two.rest() if each > sent[4]] == sent[5:]


async def test_an_exclusive_consumer_asks_for_everything_again(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic()
    sent = await send(client, made, 0, 50)
    async with opened(client, made, queue_size=5) as one:
        for _ in range(5):
            messages = await one.take(10)
            assert payloads(messages) == sent[:10]
            one.consumer.redeliver([messages[3].entry_id])
        assert await one.rest() == sent


async def test_reading_without_a_subscription_goes_on_behind_what_came(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic()
    sent = await send(client, made, 0, 30)
    async with opened(client, made, start_after=EARLIEST_ENTRY, queue_size=10) as one:
        messages = await one.take(15)
        one.break_connection()
        sent += await send(client, made, 30, 40)
        assert payloads(messages) + await one.rest() == sent
    async with opened(client, made, start_after=messages[7].entry_id) as two:
        assert await two.rest() == sent[8:]


async def test_only_so_much_is_fetched_ahead(client: magnetar.Client, topic: MakeTopic) -> None:
    made = await topic()
    async with client.producer(made.name, batching=False) as producer:
        await asyncio.gather(*(producer.send(b"%03d" % number) for number in range(60)))
    async with opened(client, made, queue_size=20) as one:
        await one.take(1)
        await asyncio.sleep(QUIET_S)
        assert 10 <= len(one.inbox) <= 20
        assert len(await one.rest()) == 59
