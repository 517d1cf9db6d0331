"""Statistics: messages, bytes and age of backlogs, and rates, of topics and scalable topics."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.app.service import Broker
from broker.topics.rate_timer import RateTimer
from broker.topics.topic_stats import (
    consumer_rates,
    producer_rates,
    subscription_rates,
    topic_rates,
)
from magnetar.cli.main import build_app as build_commands
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import EARLIEST
from magnetar.protocol.names import parse_topic_name
from tests.support.commands import run_command
from tests.support.embedded_broker import running
from tests.support.raw_client import RawClient
from tests.unit.broker.admin.conftest import Rest

TOPIC = "persistent://public/default/t"
STATS = "/admin/v2/persistent/public/default/t/stats"


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with running(tmp_path) as broker:
        yield broker


async def publish_batches(rest: Rest, name: str) -> None:
    """Publish ten batches of 100 messages, of which a subscription has nothing."""
    client = await RawClient.open("127.0.0.1", rest.binary_port)
    await client.subscribe(name, "s")
    producer = await client.create_producer(name)
    now_ms = int(time.time() * 1000)
    for number in range(10):
        batch = pb.MessageMetadata(num_messages_in_batch=100, publish_time=now_ms + number)
        await producer.send(b"x" * 1000, metadata=batch)
    await client.close()


async def test_backlog_is_shown_in_entries_messages_bytes_and_age(creating: Rest) -> None:
    begun_ms = int(time.time() * 1000)
    await publish_batches(creating, TOPIC)
    stats = await creating.get(STATS)
    assert isinstance(stats, dict)
    subscription = stats["subscriptions"]["s"]
    assert (subscription["msgBacklog"], subscription["messagesInBacklog"]) == (10, 1000)
    assert 10_000 < subscription["backlogSize"] == stats["backlogSize"] < 12_000
    earliest_ms = subscription["earliestMsgPublishTimeInBacklog"]
    assert begun_ms <= earliest_ms == stats["earliestMsgPublishTimeInBacklogs"]
    assert {"msgRateIn", "msgThroughputIn", "msgRateOut", "msgThroughputOut"} <= stats.keys()


async def test_partitions_add_their_backlogs(creating: Rest) -> None:
    base = "/admin/v2/persistent/public/default/p"
    await creating.done("PUT", base + "/partitions", 2)
    for index in range(2):
        await publish_batches(creating, f"persistent://public/default/p-partition-{index}")
    stats = await creating.get(base + "/partitioned-stats")
    assert isinstance(stats, dict)
    subscription = stats["subscriptions"]["s"]
    assert (subscription["msgBacklog"], subscription["messagesInBacklog"]) == (20, 2000)
    assert stats["backlogSize"] == subscription["backlogSize"] > 20_000
    assert stats["earliestMsgPublishTimeInBacklogs"] > 0
    assert stats["msgRateIn"] > 0
    assert 1000 < stats["averageMsgSize"] < 1200
    assert subscription["messageAckRate"] == subscription["msgRateOut"] == 0


async def test_acknowledged_messages_leave_the_sizes(creating: Rest) -> None:
    await publish_batches(creating, TOPIC)
    await creating.done("POST", "/admin/v2/persistent/public/default/t/subscription/s/skip_all")
    stats = await creating.get(STATS)
    assert isinstance(stats, dict)
    subscription = stats["subscriptions"]["s"]
    assert (subscription["msgBacklog"], subscription["messagesInBacklog"]) == (0, 0)
    assert "earliestMsgPublishTimeInBacklogs" not in stats


async def test_rates_of_loaded_topics_and_their_clients_are_sampled(broker: Broker) -> None:
    begun_s = asyncio.get_running_loop().time()
    now_s = [begun_s]
    timer = RateTimer(broker.topics.sampled, lambda: now_s[0])
    topic = await broker.topics.get(parse_topic_name(TOPIC), create=True)
    await topic.create_subscription("s", EARLIEST)
    client = await RawClient.open("127.0.0.1", broker.port)
    producer = await client.create_producer(TOPIC)
    consumer = await client.subscribe(TOPIC, "s", permits=100)
    await timer.sample()
    for _ in range(30):
        await producer.send(b"x" * 100)
        await consumer.receive()
    for rest_s in (10, 20, 60):
        now_s[0] = begun_s + rest_s
        await timer.sample()
    subscription = topic.subscriptions["s"]
    later_s = begun_s + 60
    found = topic_rates(topic, later_s)
    assert found.messages_in == found.messages_out == pytest.approx(0.5, rel=0.02)
    assert found.bytes_in == found.bytes_out > 50
    (attached,) = topic.producers.values()
    for one in (
        subscription_rates(subscription, later_s),
        consumer_rates(subscription.consumers[0], later_s),
        producer_rates(attached, later_s),
    ):
        assert one.messages == pytest.approx(0.5, rel=0.02)
    await client.close()
    now_s[0] = begun_s + 200
    await timer.sample()
    assert topic_rates(topic, now_s[0]) == (0, 0, 0, 0)


async def test_every_part_of_statistics_has_its_rates(creating: Rest) -> None:
    client = await RawClient.open("127.0.0.1", creating.binary_port)
    consumer = await client.subscribe(TOPIC, "s", permits=100)
    producer = await client.create_producer(TOPIC)
    for _ in range(3):
        await producer.send(b"x" * 1000)
        await consumer.ack_answered((await consumer.receive()).message_id)
    stats = await creating.get(STATS)
    assert isinstance(stats, dict)
    assert stats["msgRateIn"] > 0 < stats["msgRateOut"]
    assert 1000 < stats["averageMsgSize"] < 1200
    (publisher,) = stats["publishers"]
    assert publisher["msgRateIn"] > 0
    assert publisher["msgThroughputIn"] == pytest.approx(
        publisher["msgRateIn"] * publisher["averageMsgSize"]
    )
    subscription = stats["subscriptions"]["s"]
    for each in (subscription, subscription["consumers"][0]):
        assert each["msgRateOut"] > 0 < each["messageAckRate"]
        assert each["msgThroughputOut"] > 1000 * each["msgRateOut"]
        assert each["msgRateRedeliver"] == 0
    await client.close()


async def test_command_shows_units_rates_and_age(creating: Rest) -> None:
    await creating.done("PUT", "/admin/v2/scalable/public/default/orders")
    await creating.done("PUT", "/admin/v2/scalable/public/default/orders/subscriptions/s")
    segment = "segment://public/default/orders/0000-ffff-0"
    await publish_batches(creating, segment)
    arguments = ["topics", "stats", "orders", "--admin-url", creating.base]
    result = await run_command(build_commands(), arguments)
    assert result.exit_code == 0, result.output
    assert "backlog 10 entries (1000 messages, 10." in result.output
    assert "s old" in result.output
    assert "messages/s" in result.output
    arguments[1:3] = ["segment-stats", "orders", "0"]
    result = await run_command(build_commands(), arguments)
    assert result.exit_code == 0, result.output
    assert "segment 0  at " in result.output
    assert "s: backlog 10 entries" in result.output


async def test_producers_that_wait_for_the_topic_are_counted_apart(creating: Rest) -> None:
    client = await RawClient.open("127.0.0.1", creating.binary_port)
    exclusive = pb.CommandProducer(producer_access_mode=pb.Exclusive)
    holder = await client.create_producer(TOPIC, exclusive)
    waiting = pb.CommandProducer(producer_access_mode=pb.WaitForExclusive)
    await client.create_producer(TOPIC, waiting)
    stats = await creating.get(STATS)
    assert isinstance(stats, dict)
    assert [each["producerName"] for each in stats["publishers"]] == [holder.name]
    assert stats["publishers"][0]["accessMode"] == "Exclusive"
    assert (stats["waitingPublishers"], stats["topicEpoch"]) == (1, 0)
    assert stats["deduplicationStatus"] == "Disabled"
    await client.close()
