"""Messages that are sent now and delivered later, on a real broker: never early, never lost."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import magnetar
from magnetar import InitialPosition, Message, QueueConsumer
from magnetar.opening import Opening
from tests.client.conftest import MakeTopic
from tests.support.broker_process import BrokerProcess, running

WAIT_S = 30
PEER_TICK_MS = 1_000
"""delayedDeliveryTickTimeMillis: unless told to be strict, Apache Pulsar is early by as much."""
NAME = "topic://public/default/orders"
PATH = "/scalable/public/default/orders"


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def queue(client: magnetar.Client, topic: str) -> Opening[QueueConsumer[str]]:
    return client.queue_consumer(topic, "q", schema=str, initial_position=InitialPosition.EARLIEST)


async def receive(consumer: QueueConsumer[str]) -> tuple[str, int, Message[str]]:
    """A value, when it came, and its message."""
    message = await consumer.receive(WAIT_S)
    return message.value, now_ms(), message


@pytest.fixture
async def own_broker(tmp_path: Path) -> AsyncIterator[BrokerProcess]:
    async with running(tmp_path, {"sealed_segment_prune_interval_s": 1}) as process:
        await process.create_scalable("orders", 1)
        yield process


async def statistics(broker: BrokerProcess) -> dict[str, object]:
    status, stats = await broker.rest("GET", f"{PATH}/stats")
    assert status == 200
    assert isinstance(stats, dict)
    return dict(stats["subscriptions"]["q"])


async def test_queue_consumers_get_it_at_its_time_and_stream_consumers_at_once(
    client: magnetar.Client, topic: MakeTopic, on_peer: bool
) -> None:
    made = await topic()
    early_ms = PEER_TICK_MS if on_peer else 0
    async with (
        queue(client, made.name) as consumer,
        client.stream_consumer(made.name, "s", schema=str) as stream,
        client.producer(made.name, schema=str) as producer,
    ):
        due_ms = now_ms() + 3_000
        await producer.send("at", key="k", deliver_at_ms=due_ms)
        await producer.send("after", key="k", deliver_after_s=4.0)
        await producer.send("soon", key="k")
        assert [(await stream.receive(WAIT_S)).value for _ in range(3)] == ["at", "after", "soon"]
        got = [await receive(consumer) for _ in range(3)]
        assert [value for value, _, _ in got] == ["soon", "at", "after"]
        assert got[1][1] >= due_ms - early_ms
        assert got[2][1] >= due_ms + 1_000 - early_ms
        assert {message.redelivery_count for _, _, message in got} == {0}


@pytest.mark.magnetar_only("its broker is started and killed here, and is Magnetar")
async def test_they_wait_over_the_death_of_their_broker(own_broker: BrokerProcess) -> None:
    url = f"pulsar://127.0.0.1:{own_broker.port}"
    async with magnetar.connect(url) as client, queue(client, NAME) as consumer:
        due_ms = now_ms() + 8_000
        async with client.producer(NAME, schema=str) as producer:
            await producer.send("meanwhile", deliver_after_s=0.5)
            await producer.send("late", deliver_at_ms=due_ms)
            await producer.send("soon")
            in_hand = await receive(consumer)
            assert in_hand[0] == "soon"
        assert await own_broker.metric("pulsar_subscription_delayed") >= 1
        own_broker.kill()
        await own_broker.start()
        got = [await receive(consumer) for _ in range(2)]
        assert [value for value, _, _ in got] == ["meanwhile", "late"]
        assert got[1][1] >= due_ms
        await consumer.ack([message for _, _, message in (in_hand, *got)], wait=True)
        found = await statistics(own_broker)
        assert (found["msgBacklog"], found["msgDelayed"]) == (0, 0)
    assert own_broker.faults() == []


@pytest.mark.magnetar_only("its broker is started and killed here, and is Magnetar")
async def test_a_sealed_segment_stays_until_what_waits_in_it_is_acknowledged(
    own_broker: BrokerProcess,
) -> None:
    async def parent_is_there() -> bool:
        status, record = await own_broker.rest("GET", PATH)
        assert status == 200
        assert isinstance(record, dict)
        return "0" in record["segments"]

    url = f"pulsar://127.0.0.1:{own_broker.port}"
    async with magnetar.connect(url) as client, queue(client, NAME) as consumer:
        async with client.producer(NAME, schema=str) as producer:
            due_ms = now_ms() + 6_000
            await producer.send("late", deliver_at_ms=due_ms)
            status, _ = await own_broker.rest("POST", f"{PATH}/split/0")
            assert status in (200, 204)
            await producer.send("to a child")
        value, _, message = await receive(consumer)
        assert value == "to a child"
        await consumer.ack(message, wait=True)
        found = await statistics(own_broker)
        assert (found["msgBacklog"], found["msgDelayed"]) == (1, 1)
        value, came_ms, message = await receive(consumer)
        assert value == "late"
        assert came_ms >= due_ms
        assert await parent_is_there()
        await consumer.ack(message)
        async with asyncio.timeout(WAIT_S):
            while await parent_is_there():
                await asyncio.sleep(0.1)
    assert own_broker.faults() == []
