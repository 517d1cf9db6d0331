"""Reading from checkpoints on a real broker: positions, layouts that change, groups."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

import magnetar
from magnetar.checkpoint import Checkpoint
from magnetar.consume.checkpoint_consumer import CheckpointConsumer
from magnetar.consume.settings import CheckpointSettings, InitialPosition, StreamSettings
from magnetar.consume.stream_consumer import StreamConsumer
from magnetar.errors import NotAllowed, OperationTimedOut
from magnetar.opening import Opening
from magnetar.schema.plain import STRING
from tests.client.conftest import MakeTopic
from tests.support.waiting import until

WAIT_S = 30
SILENCE_S = 0.2


@asynccontextmanager
async def reading(
    client: magnetar.Client,
    topic: str,
    start: Checkpoint = Checkpoint.EARLIEST,
    *,
    group: str | None = None,
    name: str | None = None,
) -> AsyncIterator[CheckpointConsumer[str]]:
    settings = CheckpointSettings(consumer_name=name)
    async with Opening(
        lambda: CheckpointConsumer(client.context, topic, STRING, settings, start, group)
    ) as consumer:
        yield consumer


async def send(client: magnetar.Client, topic: str, *values: str) -> set[str]:
    async with client.producer(topic, schema=STRING) as producer:
        await asyncio.gather(*(producer.send(value, key=value) for value in values))
    return set(values)


def values(prefix: str, count: int = 12) -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


async def read(consumer: CheckpointConsumer[str], count: int) -> set[str]:
    return {(await consumer.receive(WAIT_S)).value for _ in range(count)}


async def nothing_more(consumer: CheckpointConsumer[str]) -> None:
    with pytest.raises(OperationTimedOut):
        await consumer.receive(SILENCE_S)


async def test_reading_goes_on_behind_a_checkpoint(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic(3)
    sent = await send(client, made.name, *values("a"))
    async with reading(client, made.name) as consumer:
        first = await read(consumer, 5)
        kept = consumer.checkpoint().to_bytes()
        assert await read(consumer, len(sent) - 5) == sent - first
        await nothing_more(consumer)
    async with reading(client, made.name, Checkpoint.from_bytes(kept)) as consumer:
        assert await read(consumer, len(sent) - 5) == sent - first
        await nothing_more(consumer)


async def test_a_checkpoint_before_the_first_message_keeps_every_position(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic(3)
    await send(client, made.name, *values("a"))
    async with reading(client, made.name) as consumer:
        await read(consumer, 12)
        kept = consumer.checkpoint()
    async with reading(client, made.name, kept) as consumer:
        again = consumer.checkpoint()
    assert again == kept
    sent = await send(client, made.name, "b")
    async with reading(client, made.name, again) as consumer:
        assert await read(consumer, 1) == sent
        await nothing_more(consumer)


async def test_latest_is_where_the_topic_ended_when_it_was_opened(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic(3)
    await send(client, made.name, *values("a"))
    async with reading(client, made.name, Checkpoint.LATEST) as consumer:
        kept = consumer.checkpoint()
        sent = await send(client, made.name, *values("b"))
        await made.split(0)
        sent |= await send(client, made.name, *values("c"))
        assert await read(consumer, len(sent)) == sent
        await nothing_more(consumer)
    async with reading(client, made.name, kept) as consumer:
        assert await read(consumer, len(sent)) == sent
        await nothing_more(consumer)


async def test_segments_that_are_made_later_are_read_from_their_beginning(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic(1)
    sent = await send(client, made.name, *values("a"))
    async with reading(client, made.name) as consumer:
        await made.split(0)
        sent |= await send(client, made.name, *values("b"))
        await made.merge(1, 2)
        sent |= await send(client, made.name, *values("c"))
        assert await read(consumer, len(sent)) == sent
        assert consumer.segment_ids == {0, 1, 2, 3}
        kept = consumer.checkpoint()
    assert set(kept.positions) == {0, 1, 2, 3}
    async with reading(client, made.name, kept) as consumer:
        await nothing_more(consumer)


async def test_a_group_divides_the_segments(client: magnetar.Client, topic: MakeTopic) -> None:
    made = await topic(4)
    async with (
        reading(client, made.name, group="g", name="one") as one,
        reading(client, made.name, group="g", name="two") as two,
    ):
        await until(lambda: len(one.segment_ids) == len(two.segment_ids) == 2)
        sent = await send(client, made.name, *values("a", 40))
        got: set[str] = set()
        async with asyncio.timeout(WAIT_S):
            while got != sent:
                for consumer in (one, two):
                    got |= {each.value for each in await consumer.receive_batch(100, 0.05)}
        assert set(one.checkpoint().positions) == one.segment_ids
        assert one.segment_ids.isdisjoint(two.segment_ids)


@pytest.mark.magnetar_only("a group may be of both kinds")
async def test_a_group_is_of_one_kind(client: magnetar.Client, topic: MakeTopic) -> None:
    made = await topic(1)
    settings = StreamSettings(initial_position=InitialPosition.EARLIEST)
    async with Opening(lambda: StreamConsumer(client.context, made.name, "g", STRING, settings)):
        with pytest.raises(NotAllowed):
            async with reading(client, made.name, group="g"):
                pass
