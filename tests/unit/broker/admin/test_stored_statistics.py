"""Statistics of partitions that are not loaded: from what is stored, without loading them."""

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.admin.topic_stats import stats_of_all
from broker.app.service import Broker
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.names import parse_topic_name
from storage.ledger.store import LedgerError
from tests.support.embedded_broker import running
from tests.support.raw_client import RawClient
from tests.unit.broker.admin.conftest import Rest, asking_broker

BASE = "/admin/v2/persistent/public/default/p"
PARTITION = "persistent://public/default/p-partition-1"
AN_HOUR_AGO_MS = int(time.time() * 1000) - 3_600_000
NOT_STORED = {
    "committedTxnCount",
    "abortedTxnCount",
    "ongoingTxnCount",
    "compaction",
    "ownerBroker",
    "publishRateLimitedTimes",
    "topicEpoch",
}
"""Members of a loaded topic's statistics that its owner alone knows."""


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with running(tmp_path, backlog_quota_default_limit_bytes=10**9) as broker:
        yield broker


@pytest.fixture
async def rest(broker: Broker) -> AsyncIterator[Rest]:
    async with asking_broker(broker) as rest:
        yield rest


async def publish(rest: Rest) -> None:
    """Ten messages; the subscription `s` has acknowledged the first one and the third."""
    await rest.done("PUT", f"{BASE}/partitions", 3)
    client = await RawClient.open("127.0.0.1", rest.binary_port)
    shared = pb.CommandSubscribe(
        sub_type=pb.CommandSubscribe.Shared,
        subscription_properties=[pb.KeyValue(key="team", value="a")],
    )
    consumer = await client.subscribe(PARTITION, "s", shared, permits=10)
    await client.subscribe(PARTITION, "whole")
    producer = await client.create_producer(PARTITION)
    for number in range(10):
        metadata = pb.MessageMetadata(publish_time=AN_HOUR_AGO_MS + number)
        await producer.send(b"x" * 100, metadata=metadata)
    received = [await consumer.receive() for _ in range(3)]
    await consumer.ack_answered(received[0].message_id, received[2].message_id)
    await client.close()


async def partitioned(rest: Rest) -> tuple[dict[str, object], dict[str, object]]:
    """The statistics of all partitions together, and those of the one with messages."""
    found = await rest.get(f"{BASE}/partitioned-stats")
    assert isinstance(found, dict)
    return found, found["partitions"][PARTITION]


async def test_partitions_that_are_not_loaded_show_what_is_stored(
    broker: Broker, rest: Rest
) -> None:
    await publish(rest)
    loaded_all, loaded = await partitioned(rest)
    await rest.done("PUT", f"{BASE}/unload")
    assert not broker.topics.loaded()
    stored_all, stored = await partitioned(rest)
    assert not broker.topics.loaded()
    assert stored.keys() == loaded.keys() - NOT_STORED
    same = (
        "storageSize",
        "backlogQuotaLimitSize",
        "backlogQuotaLimitTime",
        "oldestBacklogMessageSubscriptionName",
        "earliestMsgPublishTimeInBacklogs",
        "lastPublishTimeStamp",
        "nonContiguousDeletedMessagesRanges",
        "deduplicationStatus",
        "offloadedStorageSize",
    )
    assert {name: stored[name] for name in same} == {name: loaded[name] for name in same}
    assert isinstance(stored["oldestBacklogMessageAgeSeconds"], int)
    assert stored["oldestBacklogMessageAgeSeconds"] >= 3600
    of_subscriptions = (
        "msgBacklog",
        "nonContiguousDeletedMessagesRanges",
        "earliestMsgPublishTimeInBacklog",
        "isDurable",
        "isReplicated",
        "subscriptionProperties",
        "consumers",
    )
    shown: list[dict[str, dict[str, object]]] = []
    for one in (stored, loaded):
        subscriptions = one["subscriptions"]
        assert isinstance(subscriptions, dict)
        assert list(subscriptions) == ["s", "whole"]
        shown.append(
            {
                name: {member: each[member] for member in of_subscriptions}
                for name, each in subscriptions.items()
            }
        )
        assert one["backlogSize"] == subscriptions["whole"]["backlogSize"]
    assert shown[0] == shown[1]
    assert shown[0]["s"]["msgBacklog"] == 8
    for name in ("storageSize", "earliestMsgPublishTimeInBacklogs", "lastPublishTimeStamp"):
        assert stored_all[name] == loaded_all[name]
    assert stored_all["msgInCounter"] == 0


async def test_partitions_that_are_loaded_are_shown_by_their_owner(
    broker: Broker, rest: Rest
) -> None:
    await publish(rest)
    await rest.done("PUT", f"{BASE}/unload")
    await broker.topics.get(parse_topic_name(PARTITION), create=False)
    _, shown = await partitioned(rest)
    assert shown["ownerBroker"] == broker.placement.broker_id
    assert list(broker.topics.loaded()) == [PARTITION]


async def test_statistics_are_shown_without_times_that_cannot_be_read(
    broker: Broker, rest: Rest, monkeypatch: pytest.MonkeyPatch
) -> None:
    await publish(rest)
    await rest.done("PUT", f"{BASE}/unload")

    async def fail(*_: object) -> None:
        raise LedgerError("The disk is gone.")

    monkeypatch.setattr("storage.managed_ledger.stored_stream.StoredStream.entry", fail)
    _, shown = await partitioned(rest)
    subscriptions = shown["subscriptions"]
    assert isinstance(subscriptions, dict)
    assert subscriptions["s"]["msgBacklog"] == 8
    assert not {"earliestMsgPublishTimeInBacklogs", "lastPublishTimeStamp"} & shown.keys()
    assert shown["oldestBacklogMessageAgeSeconds"] == -1


def test_messages_of_a_backlog_are_added_only_if_all_are_known() -> None:
    known: dict[str, object] = {"msgBacklog": 2, "messagesInBacklog": 20}
    empty, unknown = {"msgBacklog": 0}, {"msgBacklog": 3}
    for each, messages in (((known, known, empty), 40), ((known, unknown), None)):
        found = stats_of_all({"subscriptions": {"s": one}} for one in each)["subscriptions"]
        assert isinstance(found, dict)
        assert found["s"].get("messagesInBacklog") == messages
