"""Topics that nobody uses are deleted when a policy says so, and no others."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.app.service import Broker
from broker.topics.idle_topics import IdleTopics
from broker.topics.inactive_topics import InactiveTopics
from broker.topics.registry import TopicRegistry
from broker.topics.topic import TopicNotFound, TopicUnavailable
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import EARLIEST
from magnetar.protocol.names import parse_topic_name
from storage.metadata.store import MetadataError
from tests.support.embedded_broker import running
from tests.support.raw_client import RawClient
from tests.support.waiting import until
from tests.unit.broker.admin.conftest import Rest, asking_broker
from tests.unit.broker.placement.cluster import Cluster
from tests.unit.broker.topics.test_topics import name_of

TOPIC = "persistent://public/default/t"
PATH = "/admin/v2/persistent/public/default"
NAMESPACE = "/admin/v2/namespaces/public/default"
LIMIT_S = 60


class Checks:
    """The broker's checks, at times that a test chooses."""

    def __init__(self, broker: Broker, rest: Rest, client: RawClient) -> None:
        self.broker, self.rest, self.client = broker, rest, client
        self.now_s = 0.0
        broker.inactive_topics = InactiveTopics(broker, lambda: self.now_s)

    async def set_policy(self, mode: str = "delete_when_no_subscriptions", **more: object) -> None:
        body = {
            "inactiveTopicDeleteMode": mode,
            "maxInactiveDurationSeconds": LIMIT_S,
            "deleteWhileInactive": True,
        }
        await self.rest.done("POST", f"{NAMESPACE}/inactiveTopicPolicies", body | more)

    async def check(self) -> None:
        await self.broker.inactive_topics.check()

    async def time_passes(self, seconds: float = LIMIT_S) -> None:
        await self.check()
        self.now_s += seconds
        await self.check()

    async def exists(self, topic: str = TOPIC) -> bool:
        return await self.broker.topics.exists(name_of(topic))


@pytest.fixture
async def checks(tmp_path: Path) -> AsyncIterator[Checks]:
    async with running(tmp_path) as broker, asking_broker(broker) as rest:
        await broker.inactive_topics.stop()
        client = await RawClient.open("127.0.0.1", broker.port)
        yield Checks(broker, rest, client)
        await client.close()


async def test_nothing_is_deleted_by_default(checks: Checks) -> None:
    await checks.broker.topics.get(name_of(TOPIC), create=True)
    await checks.time_passes(10**6)
    assert await checks.exists()


async def test_a_topic_without_clients_and_subscriptions_is_deleted_with_its_records(
    checks: Checks,
) -> None:
    await checks.set_policy()
    producer = await checks.client.create_producer(TOPIC)
    await producer.send(b"x")
    await checks.rest.done("POST", f"{PATH}/t/maxProducers", 5)
    await checks.time_passes()
    assert await checks.exists(), "a producer is attached"
    await producer.close()
    topic = checks.broker.topics.loaded()[TOPIC]
    await until(lambda: topic.idle)
    await checks.time_passes(LIMIT_S - 1)
    assert await checks.exists()
    checks.now_s += 1
    await checks.check()
    assert not await checks.exists()
    assert checks.broker.topics.loaded() == {}
    await checks.rest.done("PUT", f"{PATH}/t")
    assert await checks.rest.call("GET", f"{PATH}/t/maxProducers") == (204, "")


async def test_a_client_between_two_checks_begins_the_time_anew(checks: Checks) -> None:
    await checks.set_policy()
    topic = await checks.broker.topics.get(name_of(TOPIC), create=True)
    await checks.check()
    producer = await checks.client.create_producer(TOPIC)
    await producer.close()
    await until(lambda: topic.idle)
    checks.now_s += LIMIT_S
    await checks.check()
    assert await checks.exists()
    checks.now_s += LIMIT_S
    await checks.check()
    assert not await checks.exists()


async def test_statistics_are_no_use(checks: Checks) -> None:
    await checks.set_policy()
    await checks.broker.topics.get(name_of(TOPIC), create=True)
    await checks.check()
    await checks.rest.get(f"{PATH}/t/stats")
    checks.now_s += LIMIT_S
    await checks.check()
    assert not await checks.exists()


@pytest.mark.parametrize(
    ("mode", "caught_up", "deleted"),
    [
        ("delete_when_no_subscriptions", True, False),
        ("delete_when_subscriptions_caught_up", False, False),
        ("delete_when_subscriptions_caught_up", True, True),
    ],
)
async def test_the_mode_decides_about_topics_with_subscriptions(
    checks: Checks, mode: str, caught_up: bool, deleted: bool
) -> None:
    await checks.set_policy(mode)
    producer = await checks.client.create_producer(TOPIC)
    consumer = await checks.client.subscribe(TOPIC, "s", permits=1)
    await producer.send(b"x")
    received = await consumer.receive()
    await checks.time_passes()
    if caught_up:
        consumer.ack(received.message_id)
    await producer.close()
    await checks.time_passes()
    assert await checks.exists(), "a consumer is attached"
    await consumer.close()
    topic = checks.broker.topics.loaded()[TOPIC]
    await until(lambda: topic.idle)
    await checks.time_passes()
    assert await checks.exists() is not deleted


async def test_deletion_waits_for_retention(checks: Checks) -> None:
    await checks.set_policy()
    await checks.broker.topics.get(name_of(TOPIC), create=True)
    for minutes in (-1, 2):
        retention = {"retentionTimeInMinutes": minutes, "retentionSizeInMB": -1}
        await checks.rest.done("POST", f"{NAMESPACE}/retention", retention)
        await checks.time_passes(119)
        assert await checks.exists()
    checks.now_s += 1
    await checks.check()
    assert not await checks.exists()


async def test_a_partition_is_deleted_and_the_partitioned_topic_stays(checks: Checks) -> None:
    await checks.set_policy()
    await checks.rest.done("PUT", f"{PATH}/p/partitions", 2)
    partition = "persistent://public/default/p-partition-0"
    await checks.broker.topics.get(name_of(partition), create=False)
    await checks.time_passes()
    assert not await checks.exists(partition)
    shown = await checks.rest.get(f"{PATH}/p/partitions")
    assert isinstance(shown, dict)
    assert shown["partitions"] == 2
    producer = await checks.client.create_producer(partition)
    await producer.send(b"x")


async def test_an_operator_excepts_a_topic(checks: Checks) -> None:
    await checks.set_policy()
    await checks.rest.done("PUT", f"{PATH}/t")
    body = {
        "inactiveTopicDeleteMode": "delete_when_no_subscriptions",
        "maxInactiveDurationSeconds": 1,
        "deleteWhileInactive": False,
    }
    await checks.rest.done("POST", f"{PATH}/t/inactiveTopicPolicies", body)
    await checks.time_passes()
    assert await checks.exists()


async def test_segments_are_not_deleted(checks: Checks) -> None:
    await checks.set_policy()
    await checks.rest.done("PUT", "/admin/v2/scalable/public/default/s")
    segment = name_of("segment://public/default/s/0000-ffff-0")
    await checks.broker.topics.get(segment, create=False)
    await checks.rest.done("PUT", f"{PATH}/m")
    await checks.rest.done("POST", "/admin/v2/scalable/public/default/m/migrate")
    legacy = name_of("persistent://public/default/m")
    topic = await checks.broker.topics.get(legacy, create=False)
    await until(lambda: topic.idle)
    await checks.time_passes()
    for name in (segment, legacy):
        assert await checks.broker.topics.get(name, create=False)


async def test_a_topic_that_waits_for_its_deletion_stays_loaded(checks: Checks) -> None:
    await checks.set_policy(maxInactiveDurationSeconds=3600)
    now_s = 0.0
    await checks.broker.idle_topics.stop()
    idle = IdleTopics(checks.broker, lambda: now_s)
    for name, subscribed in ((TOPIC, False), (f"{TOPIC}2", True)):
        topic = await checks.broker.topics.get(name_of(name), create=True)
        if subscribed:
            await topic.create_subscription("s", EARLIEST)
    await idle.unload_idle()
    now_s += 300
    await idle.unload_idle()
    assert list(checks.broker.topics.loaded()) == [TOPIC]


async def test_a_topic_whose_deletion_failed_is_deleted_later(
    checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    await checks.set_policy()
    await checks.broker.topics.get(name_of(TOPIC), create=True)

    async def away(*_: object, **__: object) -> None:
        raise MetadataError("The store is away.")

    with monkeypatch.context() as patched:
        patched.setattr(type(checks.broker.managed_ledgers), "delete", away)
        await checks.time_passes()
        patched.setattr(TopicRegistry, "get", away)
        await checks.time_passes()
    assert await checks.exists()
    await checks.time_passes()
    assert not await checks.exists()
    await checks.check()
    assert checks.broker.topics.loaded() == {}


async def test_a_producer_that_comes_during_the_deletion_loses_nothing(checks: Checks) -> None:
    await checks.set_policy()
    await checks.broker.topics.get(name_of(TOPIC), create=True)
    await checks.check()
    checks.now_s += LIMIT_S
    deleting = asyncio.ensure_future(checks.check())
    sent = []
    for _ in range(5):
        producer = await checks.client.create_producer(TOPIC)
        await producer.send(b"x")
        sent.append(producer)
    await deleting
    assert await checks.exists()
    topic = checks.broker.topics.loaded()[TOPIC]
    assert topic.messages_in_total == 5


async def test_owner_that_was_replaced_unnoticed_deletes_nothing(cluster: Cluster) -> None:
    first = await cluster.add(broker_delete_inactive_topics_enabled=True)
    second = await cluster.add()
    name = parse_topic_name(TOPIC)
    topic = await first.broker.topics.get(name, create=True)
    await first.broker.inactive_topics.stop()
    # The first broker stands still: its session ends, and another broker takes the topic.
    first.view.watching.clear()
    await first.view.expire(quietly=True)
    await until(lambda: not second.placement.known_owner(name))
    client = await second.client()
    producer = await client.create_producer(TOPIC)
    await producer.send(b"x")
    with pytest.raises(TopicUnavailable, match="used meanwhile"):
        await first.broker.topics.delete_if(topic, lambda: True)
    first.view.watching.set()
    await second.broker.topics.unload(name)
    again = await second.broker.topics.get(name, create=False)
    assert again.ledger.last_confirmed.entry_id == 0


async def test_a_deleted_topic_is_not_found_without_auto_creation(checks: Checks) -> None:
    await checks.set_policy()
    await checks.broker.topics.get(name_of(TOPIC), create=True)
    await checks.time_passes()
    with pytest.raises(TopicNotFound):
        await checks.broker.topics.get(name_of(TOPIC), create=False)


async def test_a_topic_with_messages_of_an_open_transaction_stays(checks: Checks) -> None:
    await checks.set_policy()
    producer = await checks.client.create_producer(TOPIC)
    begun = await checks.client.request(
        pb.BaseCommand.NEW_TXN,
        pb.CommandNewTxn(tc_id=0, txn_ttl_millis=3_600_000, scalable=True),
    )
    most, least = begun.new_txn_response.txnid_most_bits, begun.new_txn_response.txnid_least_bits
    await producer.send(
        b"x",
        metadata=pb.MessageMetadata(txnid_most_bits=most, txnid_least_bits=least),
        send=pb.CommandSend(txnid_most_bits=most, txnid_least_bits=least),
    )
    await producer.close()
    await checks.time_passes()
    assert await checks.exists()
    end = pb.CommandEndTxn(
        txnid_most_bits=most, txnid_least_bits=least, txn_action=pb.COMMIT, scalable=True
    )
    await checks.client.request(pb.BaseCommand.END_TXN, end)
    topic = checks.broker.topics.loaded()[TOPIC]
    await until(lambda: topic.idle)
    await checks.time_passes()
    assert not await checks.exists()
