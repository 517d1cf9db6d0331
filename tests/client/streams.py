"""Stream consumers of one subscription, and messages for them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import magnetar
from magnetar.consume.message import Message
from magnetar.consume.settings import InitialPosition, StreamSettings
from magnetar.consume.stream_consumer import StreamConsumer
from magnetar.opening import Opening
from magnetar.schema.plain import STRING

WAIT_S: Final = 10
KEYS: Final = tuple(f"k{number}" for number in range(20))


@asynccontextmanager
async def stream(
    client: magnetar.Client,
    topic: str,
    name: str | None = None,
    *,
    subscription: str = "s",
    hand_over_timeout_s: float | None = None,
) -> AsyncIterator[StreamConsumer[str]]:
    """A stream consumer from the beginning."""
    settings = StreamSettings(
        initial_position=InitialPosition.EARLIEST,
        consumer_name=name,
        hand_over_timeout_s=hand_over_timeout_s,
    )
    async with Opening(
        lambda: StreamConsumer(client.context, topic, subscription, STRING, settings)
    ) as consumer:
        yield consumer


async def send(
    client: magnetar.Client, topic: str, begin: int, count: int, *, batching: bool = True
) -> list[str]:
    """Send so many to each key; what was sent."""
    sent = [f"{key}:{number}" for number in range(begin, begin + count) for key in KEYS]
    async with client.producer(topic, schema=STRING, batching=batching) as producer:
        await asyncio.gather(*(producer.send(each, key=each.split(":")[0]) for each in sent))
    return sent


async def receive(consumer: StreamConsumer[str], count: int) -> list[Message[str]]:
    """The next so many."""
    return [await consumer.receive(WAIT_S) for _ in range(count)]
