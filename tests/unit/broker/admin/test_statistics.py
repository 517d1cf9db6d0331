"""Statistics: messages, bytes and age of backlogs, and rates, of topics and scalable topics."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from broker.app.service import Broker
from broker.topics.rates import RateSampler
from broker.topics.traffic import Traffic
from magnetar.cli.main import build_app as build_commands
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import EARLIEST
from magnetar.protocol.names import parse_topic_name
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


async def test_acknowledged_messages_leave_the_sizes(creating: Rest) -> None:
    await publish_batches(creating, TOPIC)
    await creating.done("POST", "/admin/v2/persistent/public/default/t/subscription/s/skip_all")
    stats = await creating.get(STATS)
    assert isinstance(stats, dict)
    subscription = stats["subscriptions"]["s"]
    assert (subscription["msgBacklog"], subscription["messagesInBacklog"]) == (0, 0)
    assert "earliestMsgPublishTimeInBacklogs" not in stats


def test_rates_are_differences_of_counters() -> None:
    traffic = Traffic()
    traffic.observe(100.0, 50, 5000, 10, 1000)
    assert traffic.as_members(incoming=True)["msgRateIn"] == 0
    traffic.observe(110.0, 150, 25_000, 30, 3000)
    assert traffic.as_members(incoming=True) == {
        "msgRateIn": 10.0,
        "msgThroughputIn": 2000.0,
        "msgRateOut": 2.0,
        "msgThroughputOut": 200.0,
    }
    assert set(traffic.as_members(incoming=False)) == {"msgRateOut", "msgThroughputOut"}
    traffic.observe(120.0, 0, 0, 0, 0)
    assert traffic.messages_in == 0


async def test_rates_of_loaded_topics_are_sampled(broker: Broker) -> None:
    now_s = [0.0]
    sampler = RateSampler(broker.topics.loaded, lambda: now_s[0])
    topic = await broker.topics.get(parse_topic_name(TOPIC), create=True)
    await topic.create_subscription("s", EARLIEST)
    client = await RawClient.open("127.0.0.1", broker.port)
    producer = await client.create_producer(TOPIC)
    await sampler.sample()
    consumer = await client.subscribe(TOPIC, "s", permits=100)
    for _ in range(20):
        await producer.send(b"x")
        await consumer.receive()
    now_s[0] = 10.0
    await sampler.sample()
    assert (topic.rates.messages_in, topic.rates.messages_out) == (2.0, 2.0)
    assert topic.subscriptions["s"].rates.messages_out == 2.0
    assert topic.rates.bytes_in > 20
    await client.close()


async def test_command_shows_units_rates_and_age(creating: Rest) -> None:
    await creating.done("PUT", "/admin/v2/scalable/public/default/orders")
    await creating.done("PUT", "/admin/v2/scalable/public/default/orders/subscriptions/s")
    segment = "segment://public/default/orders/0000-ffff-0"
    await publish_batches(creating, segment)
    arguments = ["topics", "stats", "orders", "--admin-url", creating.base]
    result = await asyncio.to_thread(CliRunner().invoke, build_commands(), arguments)
    assert result.exit_code == 0, result.output
    assert "backlog 10 entries (1000 messages, 10." in result.output
    assert "s old" in result.output
    assert "messages/s" in result.output
