"""Subscriptions that nobody uses are deleted when their policy says so, and not before."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.app.service import Broker
from broker.topics.idle_topics import IdleTopics
from broker.topics.topic import Topic
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import EARLIEST
from storage.managed_ledger.compacted_record import COMPACTION_CURSOR
from tests.support.clocks import FakeClock
from tests.support.embedded_broker import running_at
from tests.support.raw_client import RawClient
from tests.support.waiting import until
from tests.unit.broker.admin.conftest import asking_broker
from tests.unit.broker.topics.test_topics import name_of

TOPIC = "persistent://public/default/t"
NAMESPACE = "/admin/v2/namespaces/public/default"
MINUTE_MS = 60_000
LIMIT_MS = 10 * MINUTE_MS


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def broker(tmp_path: Path, clock: FakeClock) -> AsyncIterator[Broker]:
    async with running_at(clock, None, tmp_path, subscription_expiration_time_minutes=10) as broker:
        yield broker


async def loaded(broker: Broker, name: str = TOPIC) -> Topic:
    return await broker.topics.get(name_of(name), create=True)


async def names_after_check(broker: Broker, topic: Topic) -> list[str]:
    await broker.subscription_expiry.check()
    return sorted(topic.subscriptions)


async def test_a_subscription_without_consumers_expires_and_others_stay(
    broker: Broker, clock: FakeClock
) -> None:
    topic = await loaded(broker)
    client = await RawClient.open("127.0.0.1", broker.port)
    consumer = await client.subscribe(TOPIC, "used")
    for name in ("unused", COMPACTION_CURSOR):
        await topic.create_subscription(name, EARLIEST)
    clock.ms += LIMIT_MS - 1
    assert await names_after_check(broker, topic) == [COMPACTION_CURSOR, "unused", "used"]
    clock.ms += 1
    assert await names_after_check(broker, topic) == [COMPACTION_CURSOR, "used"]
    assert "unused" not in topic.ledger.cursors
    # The time begins when the last consumer leaves.
    await consumer.close()
    clock.ms += LIMIT_MS - 1
    assert await names_after_check(broker, topic) == [COMPACTION_CURSOR, "used"]
    again = await client.subscribe(TOPIC, "used")
    clock.ms += LIMIT_MS
    assert await names_after_check(broker, topic) == [COMPACTION_CURSOR, "used"]
    await again.close()
    clock.ms += LIMIT_MS
    assert await names_after_check(broker, topic) == [COMPACTION_CURSOR]
    await client.close()


async def test_a_restart_neither_forgets_the_time_nor_counts_the_time_of_use(
    tmp_path: Path, clock: FakeClock
) -> None:
    settings: dict[str, object] = {"subscription_expiration_time_minutes": 10}
    async with running_at(clock, None, tmp_path, **settings) as broker:
        topic = await loaded(broker)
        client = await RawClient.open("127.0.0.1", broker.port)
        await client.subscribe(TOPIC, "used")
        await topic.create_subscription("unused", EARLIEST)
        clock.ms += LIMIT_MS - MINUTE_MS
    async with running_at(clock, None, tmp_path, **settings) as broker:
        topic = await loaded(broker)
        assert await names_after_check(broker, topic) == ["unused", "used"]
        clock.ms += MINUTE_MS
        assert await names_after_check(broker, topic) == ["used"]
        clock.ms += LIMIT_MS - 2 * MINUTE_MS
        assert await names_after_check(broker, topic) == ["used"]
        clock.ms += MINUTE_MS
        assert await names_after_check(broker, topic) == []
        await client.close()


async def test_a_subscription_in_use_when_its_broker_died_is_unused_since_the_next_load(
    broker: Broker, clock: FakeClock
) -> None:
    topic = await loaded(broker)
    client = await RawClient.open("127.0.0.1", broker.port)
    consumer = await client.subscribe(TOPIC, "s")
    await topic.ledger.cursors["s"].persist()
    # What a broker finds that opens the ledger now, as after a crash.
    assert topic.ledger.cursors["s"].unused_since_ms is None
    await consumer.close()
    assert topic.ledger.cursors["s"].unused_since_ms == clock.ms
    await client.close()


@pytest.mark.parametrize("level", [NAMESPACE, "/admin/v2/persistent/public/default/t"])
async def test_the_time_counts_from_the_change_of_the_policy(
    tmp_path: Path, clock: FakeClock, level: str
) -> None:
    async with running_at(clock, None, tmp_path) as broker, asking_broker(broker) as rest:
        topic = await loaded(broker)
        await topic.create_subscription("s", EARLIEST)
        clock.ms += 10 * LIMIT_MS
        assert await names_after_check(broker, topic) == ["s"]
        await rest.done("POST", f"{level}/subscriptionExpirationTime", 10)
        assert await names_after_check(broker, topic) == ["s"]
        clock.ms += LIMIT_MS
        assert await names_after_check(broker, topic) == []
        assert await rest.get(f"{level}/subscriptionExpirationTime") == 10
        await rest.done("DELETE", f"{level}/subscriptionExpirationTime")
        assert await rest.call("GET", f"{level}/subscriptionExpirationTime") == (204, "")


async def test_an_unloaded_topic_is_loaded_when_a_subscription_is_due(
    broker: Broker, clock: FakeClock
) -> None:
    now_s = 0.0
    await broker.idle_topics.stop()
    broker.idle_topics = IdleTopics(broker, lambda: now_s)
    topic = await loaded(broker)
    await topic.create_subscription("s", EARLIEST)
    await until(lambda: topic.idle)
    await broker.idle_topics.unload_idle()
    now_s += 300
    await broker.idle_topics.unload_idle()
    assert TOPIC not in broker.topics.loaded()
    clock.ms += LIMIT_MS
    await broker.idle_topics.unload_idle()
    now_s += 300
    await broker.idle_topics.unload_idle()
    topic = broker.topics.loaded()[TOPIC]
    assert await names_after_check(broker, topic) == []


async def test_subscriptions_of_segments_do_not_expire(broker: Broker, clock: FakeClock) -> None:
    async with asking_broker(broker) as rest:
        await rest.done("PUT", "/admin/v2/scalable/public/default/s")
        segment = await loaded(broker, "segment://public/default/s/0000-ffff-0")
        await segment.create_subscription("q", EARLIEST)
        clock.ms += 10 * LIMIT_MS
        assert await names_after_check(broker, segment) == ["q"]


async def test_a_consumer_that_comes_during_the_check_keeps_its_subscription(
    broker: Broker, clock: FakeClock
) -> None:
    topic = await loaded(broker)
    subscription = await topic.create_subscription("s", EARLIEST)
    clock.ms += LIMIT_MS
    client = await RawClient.open("127.0.0.1", broker.port)
    await client.subscribe(TOPIC, "s", pb.CommandSubscribe(sub_type=pb.CommandSubscribe.Shared))
    assert not await topic.unsubscribe_if(subscription, lambda: not subscription.consumers)
    assert await names_after_check(broker, topic) == ["s"]
    await client.close()


async def test_a_subscription_with_acknowledgements_in_an_open_transaction_stays(
    broker: Broker, clock: FakeClock
) -> None:
    topic = await loaded(broker)
    client = await RawClient.open("127.0.0.1", broker.port)
    producer = await client.create_producer(TOPIC)
    consumer = await client.subscribe(TOPIC, "s", permits=1)
    await producer.send(b"x")
    received = await consumer.receive()
    begun = await client.request(
        pb.BaseCommand.NEW_TXN,
        pb.CommandNewTxn(tc_id=0, txn_ttl_millis=3_600_000, scalable=True),
    )
    txn = begun.new_txn_response
    ack = consumer.ack_command([received.message_id], False, None)
    ack.txnid_most_bits, ack.txnid_least_bits = txn.txnid_most_bits, txn.txnid_least_bits
    await client.request(pb.BaseCommand.ACK, ack)
    subscription = topic.subscriptions["s"]
    assert subscription.messages_held is not None
    assert subscription.messages_held.any
    await consumer.close()
    clock.ms += LIMIT_MS
    assert await names_after_check(broker, topic) == ["s"]
    await client.close()
