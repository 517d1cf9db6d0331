"""Stream consumers of one subscription, and messages for them."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

import magnetar
from magnetar.consume.message import Message
from magnetar.consume.settings import InitialPosition, StreamSettings
from magnetar.consume.stream_consumer import StreamConsumer
from magnetar.opening import Opening
from magnetar.schema.plain import STRING

WAIT_S: Final = 30
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


class Readers:
    """Consumers that acknowledge each message that they get."""

    def __init__(self, client: magnetar.Client, topic: str) -> None:
        self.got: list[tuple[str, str]] = []
        self.consumers: dict[str, StreamConsumer[str]] = {}
        self._client = client
        self._topic = topic
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "Readers":
        return self

    async def __aexit__(self, *raised: object) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._stack.aclose()

    async def add(self, name: str, client: magnetar.Client | None = None) -> StreamConsumer[str]:
        opening = stream(client or self._client, self._topic, name)
        consumer = await self._stack.enter_async_context(opening)
        self.consumers[name] = consumer
        self._tasks[name] = asyncio.create_task(self._read(name, consumer))
        return consumer

    async def _read(self, name: str, consumer: StreamConsumer[str]) -> None:
        async for message in consumer:
            self.got.append((name, message.value))
            await asyncio.sleep(0)
            await consumer.ack(message)

    async def remove(self, name: str) -> None:
        await self.consumers.pop(name).close()
        await asyncio.wait((self._tasks.pop(name),))

    async def until_all(self, sent: Sequence[str]) -> None:
        async with asyncio.timeout(WAIT_S * 2):
            while not set(sent) <= {value for _, value in self.got}:
                await asyncio.sleep(0.01)

    def check_order(self, *, exactly_once: bool) -> None:
        """The first copies of a key's messages come in the order of their sending."""
        values = [value for _, value in self.got]
        first = list(dict.fromkeys(values))
        if exactly_once:
            assert values == first
        last: dict[str, int] = defaultdict(lambda: -1)
        for value in first:
            key, number = value.split(":")
            assert int(number) == last[key] + 1, f"{value} came after {last[key]}"
            last[key] = int(number)

    @property
    def busy(self) -> set[str]:
        """The consumers that got something."""
        return {name for name, _ in self.got}
