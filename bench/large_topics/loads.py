"""Loads of one large topic, each with the figures that it measures."""

import asyncio
import statistics
import time
from collections.abc import Sequence
from typing import Final

from bench.large_topics.observed import KIB, Observed
from magnetar.protocol import pulsar_pb2 as pb
from tests.support.broker_process import BrokerProcess
from tests.support.raw_client import RawClient
from tests.support.raw_handles import RawConsumer, RawProducer

TOPIC: Final = "persistent://public/default/large"
PATH: Final = "/persistent/public/default/large"
SUBSCRIPTION: Final = "s"
WINDOW: Final = 1000
ACKS: Final = 1000
"""Message ids in one ACK."""
TIMEOUT_S: Final = 1800.0
LATER_MS: Final = 24 * 3_600_000
SENDS: Final = 50
AT_ONCE: Final = 100
SHARED: Final = pb.CommandSubscribe(
    sub_type=pb.CommandSubscribe.Shared, initial_position=pb.CommandSubscribe.Earliest
)
"""Options of a consumer that shares, from the first message on."""


async def connect(broker: BrokerProcess) -> RawClient:
    """A connection that waits long for answers."""
    return await RawClient.open("127.0.0.1", broker.port, timeout_s=TIMEOUT_S)


async def fill(producer: RawProducer, count: int, *, due_ms: int | None = None) -> None:
    """Send so many messages, each an entry of its own, which are due at once or at that time."""
    metadata = None if due_ms is None else pb.MessageMetadata(deliver_at_time=due_ms)
    await producer.send_many((b"x" * 10 for _ in range(count)), window=WINDOW, metadata=metadata)


async def take(consumer: RawConsumer, count: int) -> list[pb.MessageIdData]:
    """The ids of the next messages."""
    return [(await consumer.receive(TIMEOUT_S)).message_id for _ in range(count)]


async def acknowledge(consumer: RawConsumer, ids: Sequence[pb.MessageIdData]) -> None:
    """Acknowledge them one by one, many in a command; the last command is answered."""
    for first in range(0, len(ids) - ACKS, ACKS):
        consumer.ack(*ids[first : first + ACKS])
        await asyncio.sleep(0)
    await consumer.ack_answered(*ids[-ACKS:])


async def stats_ms(broker: BrokerProcess) -> float:
    """How long the statistics of the topic take."""
    began_s = time.monotonic()
    status, answer = await broker.rest("GET", f"{PATH}/stats")
    assert status == 200, answer
    return 1000 * (time.monotonic() - began_s)


async def unacknowledged(observed: Observed, count: int) -> None:
    """Messages that one shared consumer has and does not acknowledge."""
    broker, figures = observed.broker, observed.figures
    sender, first, second = [await connect(broker) for _ in range(3)]
    await fill(await sender.create_producer(TOPIC), count)
    holder = await first.subscribe(TOPIC, SUBSCRIPTION, SHARED)
    before_kib = observed.resident_kib()
    async with observed.phase("deliver"):
        holder.flow(count)
        await take(holder, count)
    figures["held_bytes"] = KIB * (observed.resident_kib() - before_kib) / count
    figures["stats_ms"] = await stats_ms(broker)
    heir = await second.subscribe(TOPIC, SUBSCRIPTION, SHARED, permits=count)
    async with observed.phase("redeliver"):
        began_s = time.monotonic()
        await first.close()
        await take(heir, 1)
        figures["redelivered_first_ms"] = 1000 * (time.monotonic() - began_s)
        await take(heir, count - 1)
    async with observed.phase("restart"):
        broker.kill()
        await broker.start()
        again = await connect(broker)
        heir = await again.subscribe(TOPIC, SUBSCRIPTION, SHARED, permits=count)
        ids = await take(heir, 1)
    ids += await take(heir, count - 1)
    async with observed.phase("acknowledge"):
        await acknowledge(heir, ids)
    figures["peak_kib"] = observed.broker.peak_bytes() / KIB
    figures["disk_kib"] = observed.disk_kib()


async def delayed(observed: Observed, count: int) -> None:
    """Messages that are due tomorrow, then the policy that releases them."""
    broker, figures = observed.broker, observed.figures
    client = await connect(broker)
    producer = await client.create_producer(TOPIC)
    consumer = await client.subscribe(TOPIC, SUBSCRIPTION, SHARED, permits=2 * count)
    await producer.send(b"now")
    await take(consumer, 1)
    before_kib = observed.resident_kib()
    tomorrow_ms = int(1000 * time.time()) + LATER_MS
    async with observed.phase("delay"):
        await fill(producer, count, due_ms=tomorrow_ms)
    figures["held_bytes"] = KIB * (observed.resident_kib() - before_kib) / count
    figures["stats_ms"] = await stats_ms(broker)
    async with observed.phase("restart"):
        broker.kill()
        await broker.start()
        client = await connect(broker)
        consumer = await client.subscribe(TOPIC, SUBSCRIPTION, SHARED, permits=2 * count)
        await take(consumer, 1)  # the one that came at once, and was not acknowledged
    async with observed.phase("release"):
        body = {"active": False, "tickTime": 1000, "maxDeliveryDelayInMillis": 0}
        status, answer = await broker.rest("POST", f"{PATH}/delayedDelivery", body=body)
        assert status == 204, answer
        await take(consumer, count)
    figures["peak_kib"] = observed.broker.peak_bytes() / KIB
    figures["disk_kib"] = observed.disk_kib()


async def holes(observed: Observed, count: int) -> None:
    """Every second message acknowledged: so many holes in the position of a subscription."""
    broker, figures = observed.broker, observed.figures
    client = await connect(broker)
    producer = await client.create_producer(TOPIC)
    consumer = await client.subscribe(TOPIC, SUBSCRIPTION, SHARED, permits=4 * count)
    await fill(producer, 2 * count)
    ids = await take(consumer, 2 * count)
    before_kib, disk_kib = observed.resident_kib(), observed.disk_kib()
    async with observed.phase("acknowledge"):
        await acknowledge(consumer, ids[1::2])
    figures["held_bytes"] = KIB * (observed.resident_kib() - before_kib) / count
    figures["disk_kib"] = observed.disk_kib() - disk_kib
    figures["stats_ms"] = await stats_ms(broker)
    took: list[float] = []
    for _ in range(SENDS):
        began_s = time.monotonic()
        await producer.send(b"behind")
        await consumer.ack_answered(*await take(consumer, 1))
        took.append(1000 * (time.monotonic() - began_s))
    figures["behind_ms"] = statistics.median(took)
    async with observed.phase("restart"):
        broker.kill()
        await broker.start()
        client = await connect(broker)
        consumer = await client.subscribe(TOPIC, SUBSCRIPTION, SHARED, permits=4 * count)
        ids = await take(consumer, 1)
    ids += await take(consumer, count - 1)
    await acknowledge(consumer, ids)
    _, stats = await broker.rest("GET", f"{PATH}/stats")
    assert isinstance(stats, dict)
    assert stats["subscriptions"][SUBSCRIPTION]["msgBacklog"] == 0, "acknowledgements were lost"
    figures["peak_kib"] = observed.broker.peak_bytes() / KIB


async def subscriptions(observed: Observed, count: int) -> None:
    """Durable subscriptions without consumers."""
    broker, figures = observed.broker, observed.figures
    client = await connect(broker)
    producer = await client.create_producer(TOPIC)
    figures["send_alone_ms"] = await _send_ms(producer)
    before_kib, disk_kib = observed.resident_kib(), observed.disk_kib()

    async def subscribe(number: int) -> None:
        await (await client.subscribe(TOPIC, f"s{number}")).close()

    async with observed.phase("create"):
        for first in range(0, count, AT_ONCE):
            some = range(first, min(first + AT_ONCE, count))
            await asyncio.gather(*(subscribe(number) for number in some))
    figures["held_bytes"] = KIB * (observed.resident_kib() - before_kib) / count
    figures["disk_kib"] = observed.disk_kib() - disk_kib
    figures["send_ms"] = await _send_ms(producer)
    figures["stats_ms"] = await stats_ms(broker)
    async with observed.phase("restart"):
        broker.kill()
        await broker.start()
        producer = await (await connect(broker)).create_producer(TOPIC)
    await producer.close()
    async with observed.phase("delete"):
        status, answer = await broker.rest("DELETE", PATH, force="true")
        assert status == 204, answer
    figures["peak_kib"] = observed.broker.peak_bytes() / KIB


async def _send_ms(producer: RawProducer) -> float:
    took: list[float] = []
    for _ in range(SENDS):
        began_s = time.monotonic()
        await producer.send(b"x")
        took.append(1000 * (time.monotonic() - began_s))
    return statistics.median(took)
