"""Scalable topics under this project's client."""

import asyncio
import time
import urllib.request
from typing import Final, NamedTuple

import uvloop

import magnetar
from bench.replication.topics import BATCH, DELAY_S, PAYLOAD_BYTES
from tests.java.broker_under_test import BrokerUnderTest
from tests.java.two_clusters import rest

KEYS: Final = 1000
PENDING: Final = 5_000
RECEIVED: Final = 1000
LATEST: Final = magnetar.Checkpoint.LATEST
COUNTER: Final = "pulsar_in_messages_total{"


class ScalableTopics(NamedTuple):
    """Topics of so many segments at each broker.

    With as many here as there each entry goes as it is; else batches are divided.
    """

    here: int
    there: int

    def make(self, first: BrokerUnderTest, second: BrokerUnderTest, topic: str) -> None:
        """See `Topics`."""
        for broker, segments in ((second, self.there), (first, self.here)):
            rest(broker, "PUT", f"scalable/{topic}?numInitialSegments={segments}", {})

    def stored(self, broker: BrokerUnderTest, topic: str) -> int:
        """See `Topics`."""
        try:
            with urllib.request.urlopen(f"{broker.admin_url}/metrics", timeout=30) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            return 0
        of_topic = f'topic="segment://{topic}/'
        return sum(
            round(float(line.rpartition(" ")[2]))
            for line in lines
            if line.startswith(COUNTER) and of_topic in line
        )

    def publish(self, broker: BrokerUnderTest, topic: str, count: int, *, batched: bool) -> None:
        """See `Topics`."""
        uvloop.run(_publish(broker.url, topic, count, batched=batched))

    def delays_ms(
        self, first: BrokerUnderTest, second: BrokerUnderTest, topic: str, rate: int
    ) -> list[float]:
        """See `Topics`."""
        return uvloop.run(_delays_ms(first.url, second.url, topic, rate))


async def _publish(url: str, topic: str, count: int, *, batched: bool) -> None:
    payload = b"x" * PAYLOAD_BYTES
    async with (
        magnetar.connect(url) as client,
        client.producer(
            f"topic://{topic}",
            batching=batched,
            batch_max_messages=BATCH,
            max_pending_messages=PENDING,
        ) as producer,
    ):
        for number in range(count):
            await producer.room()
            producer.send_nowait(payload, key=f"k{number % KEYS}")
        await producer.flush()


async def _delays_ms(first: str, second: str, topic: str, rate: int) -> list[float]:
    count = int(rate * DELAY_S)
    taken: list[float] = []
    async with (
        magnetar.connect(first) as here,
        magnetar.connect(second) as there,
        here.producer(f"topic://{topic}", batching=False) as producer,
        there.checkpoint_consumer(f"topic://{topic}", start=LATEST) as consumer,
    ):

        async def receive() -> None:
            while len(taken) < count:
                for message in await consumer.receive_batch(RECEIVED, timeout_s=60):
                    sent_s = float(message.value.rstrip(b"x"))
                    taken.append(1000 * (time.monotonic() - sent_s))

        receiving = asyncio.create_task(receive())
        began_s = time.monotonic()
        for number in range(count):
            await asyncio.sleep(max(0.0, began_s + number / rate - time.monotonic()))
            stamp = b"%r" % time.monotonic()
            producer.send_nowait(stamp.ljust(PAYLOAD_BYTES, b"x"), key=f"k{number % KEYS}")
        await receiving
    return taken
