"""Statistics: messages, bytes and age of backlogs, and rates, of topics and scalable topics."""

import asyncio
import time
from itertools import pairwise
from typing import Any

import pytest

from broker.admin.topic_stats import stats_of_all
from broker.app.service import Broker
from broker.topics.rate_timer import RateTimer
from broker.topics.topic_stats import (
    consumer_rates,
    producer_rates,
    subscription_rates,
    topic_rates,
    topic_stats,
)
from magnetar.cli.main import build_app as build_commands
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import EARLIEST
from magnetar.protocol.names import parse_topic_name
from tests.support.bounds import set_bound
from tests.support.commands import run_command
from tests.support.raw_client import RawClient
from tests.support.waiting import count_turns, until, until_awaited
from tests.unit.broker.admin.conftest import Rest
from tests.unit.broker.transactions.conftest import TransactionClient

TOPIC = "persistent://public/default/t"
STATS = "/admin/v2/persistent/public/default/t/stats"


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


async def test_a_broker_shows_its_loaded_topics_by_namespace_and_domain(creating: Rest) -> None:
    path = "/admin/v2/broker-stats/topics"
    assert await creating.get(path) == {}
    await creating.done("PUT", "/admin/v2/namespaces/public/other")
    await creating.done("PUT", "/admin/v2/scalable/public/default/scalable")
    client = await RawClient.open("127.0.0.1", creating.binary_port)
    names = (TOPIC, f"{TOPIC}2", "persistent://public/other/t", "non-persistent://public/other/t")
    for name in names:
        await client.subscribe(name, "s")
        await (await client.create_producer(name)).send(b"x")
    found = await creating.get(path)
    assert isinstance(found, dict)
    shown = {
        (namespace, bundle, domain): stats
        for namespace, by_bundle in found.items()
        for bundle, by_domain in by_bundle.items()
        for domain, stats in by_domain.items()
    }
    bundle = "0x00000000_0xffffffff"
    assert [(place, list(stats)) for place, stats in shown.items()] == [
        (("public/default", bundle, "persistent"), [TOPIC, f"{TOPIC}2"]),
        (("public/other", bundle, "non-persistent"), ["non-persistent://public/other/t"]),
        (("public/other", bundle, "persistent"), ["persistent://public/other/t"]),
    ]
    stats = shown["public/default", bundle, "persistent"][TOPIC]
    assert (stats["msgInCounter"], stats["subscriptions"]["s"]["msgBacklog"]) == (1, 1)
    assert "backlogSize" not in stats, "entries may have to be read for that"
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


async def test_others_go_on_while_many_subscriptions_are_shown(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "SUBSCRIPTIONS_SHOWN_AT_ONCE", 2)
    topic = await broker.topics.get(parse_topic_name(TOPIC), create=True)
    for number in range(40):
        await topic.create_subscription(f"s{number}", EARLIEST)
    turns = count_turns()
    stats = await topic_stats(topic, "owner")
    subscriptions = stats["subscriptions"]
    assert isinstance(subscriptions, dict)
    assert list(subscriptions) == [f"s{number}" for number in range(40)]
    assert turns() >= 2 * 20  # while they are counted, and while they are shown


async def test_consumers_of_a_topic_are_counted_as_they_come_and_go(broker: Broker) -> None:
    client = await RawClient.open("127.0.0.1", broker.port)
    shared = pb.CommandSubscribe(sub_type=pb.CommandSubscribe.Shared)
    consumers = [await client.subscribe(TOPIC, name, shared) for name in ("a", "a", "b")]
    topic = await broker.topics.get(parse_topic_name(TOPIC), create=False)
    assert topic.consumer_count == 3
    await consumers[0].close()
    assert topic.consumer_count == 2
    await consumers[2].unsubscribe()
    assert topic.consumer_count == 1
    await client.close()
    await until(lambda: topic.consumer_count == 0)


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


async def subscription_shown(rest: Rest, path: str = STATS) -> dict[str, Any]:
    stats = await rest.get(path)
    assert isinstance(stats, dict)
    found: dict[str, Any] = stats["subscriptions"]["s"]
    return found


async def test_blocked_consumers_and_the_times_of_their_messages_are_shown(creating: Rest) -> None:
    base = "/admin/v2/persistent/public/default/p"
    await creating.done("PUT", base + "/partitions", 1)
    partition = base + "-partition-0"
    for limit in ("Consumer", "Subscription"):
        await creating.done("POST", f"{base}/maxUnackedMessagesOn{limit}", 2)
    client = await RawClient.open("127.0.0.1", creating.binary_port)
    name = "persistent://public/default/p-partition-0"
    shared = pb.CommandSubscribe(sub_type=pb.CommandSubscribe.Shared)
    consumer = await client.subscribe(name, "s", shared, permits=10)
    shown = await subscription_shown(creating, partition + "/stats")
    assert not shown["blockedSubscriptionOnUnackedMsgs"]
    assert shown["lastConsumedTimestamp"] == shown["lastAckedTimestamp"] == 0
    begun_ms = int(time.time() * 1000)
    producer = await client.create_producer(name)
    for _ in range(3):
        await producer.send(b"x")
    received = [await consumer.receive() for _ in range(2)]
    shown = await subscription_shown(creating, partition + "/stats")
    one = shown["consumers"][0]
    assert shown["blockedSubscriptionOnUnackedMsgs"]
    assert one["blockedConsumerOnUnackedMsgs"]
    assert begun_ms <= one["lastConsumedTimestamp"] == shown["lastConsumedTimestamp"]
    assert (await subscription_shown(creating, base + "/partitioned-stats"))[
        "blockedSubscriptionOnUnackedMsgs"
    ]
    await consumer.ack_answered(*(each.message_id for each in received))
    await client.close()
    shown = await subscription_shown(creating, base + "/partitioned-stats")
    assert shown["consumers"] == []
    assert not shown["blockedSubscriptionOnUnackedMsgs"]
    # The third message may be sent before or after that.
    assert begun_ms <= min(shown["lastConsumedTimestamp"], shown["lastAckedTimestamp"])


async def test_open_and_aborted_transactions_are_counted(creating: Rest) -> None:
    client = await RawClient.open("127.0.0.1", creating.binary_port)
    producer = await client.create_producer(TOPIC)
    transactions = TransactionClient(client)
    most, least = await transactions.begin()
    await transactions.add_partitions((most, least), TOPIC)
    await producer.send(
        b"x",
        send=pb.CommandSend(txnid_most_bits=most, txnid_least_bits=least),
        metadata=pb.MessageMetadata(txnid_most_bits=most, txnid_least_bits=least),
    )
    stats = await creating.get(STATS)
    assert isinstance(stats, dict)
    assert (stats["ongoingTxnCount"], stats["abortedTxnCount"]) == (1, 0)
    await transactions.end((most, least), pb.ABORT)
    stats = await creating.get(STATS)
    assert isinstance(stats, dict)
    assert (stats["ongoingTxnCount"], stats["abortedTxnCount"]) == (0, 1)
    assert stats["committedTxnCount"] == 0
    committed = await transactions.begin()
    await transactions.add_partitions(committed, TOPIC)
    await transactions.end(committed, pb.COMMIT)
    stats = await creating.get(STATS)
    assert isinstance(stats, dict)
    assert stats["committedTxnCount"] == 1
    await client.close()


async def test_a_topic_shows_its_time_of_creation_whenever_it_is_loaded(creating: Rest) -> None:
    base = "/admin/v2/persistent/public/default"
    begun_ms = int(time.time() * 1000)
    await creating.done("PUT", f"{base}/p/partitions", 2)
    partition = f"{base}/p-partition-1"
    shown = await creating.get(f"{partition}/stats")
    assert isinstance(shown, dict)
    created_ms = shown["topicCreationTimeStamp"]
    assert begun_ms <= created_ms <= int(time.time() * 1000)
    client = await RawClient.open("127.0.0.1", creating.binary_port)
    producer = await client.create_producer("persistent://public/default/p-partition-1")
    await producer.send(b"x")
    await client.close()
    await creating.done("PUT", f"{partition}/unload")
    whole = await creating.get(f"{base}/p/partitioned-stats")
    assert isinstance(whole, dict)
    each = [one["topicCreationTimeStamp"] for one in whole["partitions"].values()]
    assert created_ms == each[1] >= begun_ms
    assert whole["topicCreationTimeStamp"] == min(each)
    shown = await creating.get(f"{partition}/stats")
    assert isinstance(shown, dict)
    assert shown["topicCreationTimeStamp"] == created_ms


@pytest.mark.parametrize("action", [None, pb.COMMIT, pb.ABORT], ids=["plain", "commit", "abort"])
async def test_a_subscription_shows_when_acknowledgements_moved_its_mark_delete_position(
    creating: Rest, action: "pb.TxnAction | None"
) -> None:
    client = await RawClient.open("127.0.0.1", creating.binary_port)
    shared = pb.CommandSubscribe(sub_type=pb.CommandSubscribe.Shared)
    consumer = await client.subscribe(TOPIC, "s", shared, permits=3)
    producer = await client.create_producer(TOPIC)
    for _ in range(3):
        await producer.send(b"x")
    received = [await consumer.receive() for _ in range(3)]
    begun_ms = int(time.time() * 1000)
    name = "lastMarkDeleteAdvancedTimestamp"
    await consumer.ack_answered(received[1].message_id)
    assert (await subscription_shown(creating))[name] == 0
    if action is None:
        await consumer.ack_answered(received[0].message_id)
    else:
        transactions = TransactionClient(client)
        txn = await transactions.begin()
        await transactions.add_subscription(txn, TOPIC, "s")
        ack = consumer.ack_command([received[0].message_id], False, None)
        ack.txnid_most_bits, ack.txnid_least_bits = txn
        await client.request(pb.BaseCommand.ACK, ack)
        assert (await subscription_shown(creating))[name] == 0
        await transactions.end(txn, action)
    shown = (await subscription_shown(creating))[name]
    assert shown == 0 if action == pb.ABORT else shown >= begun_ms
    await client.close()


@pytest.mark.parametrize("ordered", [True, False])
async def test_hash_ranges_that_consumers_share_out_are_shown(
    creating: Rest, *, ordered: bool
) -> None:
    client = await RawClient.open("127.0.0.1", creating.binary_port)
    policy = pb.KeySharedMeta(
        key_shared_mode=pb.AUTO_SPLIT, allow_out_of_order_delivery=not ordered
    )
    options = pb.CommandSubscribe(sub_type=pb.CommandSubscribe.Key_Shared, key_shared_meta=policy)
    consumers = [await client.subscribe(TOPIC, "s", options) for _ in range(3)]
    shown = await subscription_shown(creating)
    ranges = [one["keyHashRangeArrays"] for one in shown["consumers"]]
    hashes = sorted(each for some in ranges for each in some)
    assert (hashes[0][0], hashes[-1][1]) == (0, 65535)
    assert all(low[1] + 1 == high[0] for low, high in pairwise(hashes))
    assert all(len(some) > 10 for some in ranges)
    for consumer in consumers[1:]:
        await consumer.close()
    shown = await subscription_shown(creating)
    assert [one["keyHashRangeArrays"] for one in shown["consumers"]] == [[[0, 65535]]]
    await client.close()


async def test_hash_ranges_that_a_consumer_has_chosen_are_shown(creating: Rest) -> None:
    client = await RawClient.open("127.0.0.1", creating.binary_port)
    sticky = pb.KeySharedMeta(key_shared_mode=pb.STICKY, hash_ranges=[pb.IntRange(start=0, end=99)])
    options = pb.CommandSubscribe(sub_type=pb.CommandSubscribe.Key_Shared, key_shared_meta=sticky)
    await client.subscribe(TOPIC, "s", options)
    shown = await subscription_shown(creating)
    assert shown["consumers"][0]["keyHashRangeArrays"] == [[0, 99]]
    await client.close()


async def test_topics_show_their_newest_publish_time_and_gaps_of_acknowledgements(
    creating: Rest,
) -> None:
    base = "/admin/v2/persistent/public/default/p"
    await creating.done("PUT", base + "/partitions", 2)
    name = "persistent://public/default/p-partition-1"
    client = await RawClient.open("127.0.0.1", creating.binary_port)
    shared = pb.CommandSubscribe(sub_type=pb.CommandSubscribe.Shared)
    begun_ms = int(time.time() * 1000)
    consumer = await client.subscribe(name, "s", shared, permits=3)
    stats = await creating.get(base + "/partitioned-stats")
    assert isinstance(stats, dict)
    assert (stats["lastPublishTimeStamp"], stats["offloadedStorageSize"]) == (0, 0)
    producer = await client.create_producer(name)
    for number in range(3):
        await producer.send(b"x", metadata=pb.MessageMetadata(publish_time=1000 + number))
    received = [await consumer.receive() for _ in range(3)]
    await consumer.ack_answered(received[1].message_id)
    for path in (f"{base}-partition-1/stats", base + "/partitioned-stats"):
        stats = await creating.get(path)
        assert isinstance(stats, dict)
        assert stats["lastPublishTimeStamp"] == 1002
        assert (stats["nonContiguousDeletedMessagesRanges"], stats["waitingPublishers"]) == (1, 0)
        shown = await subscription_shown(creating, path)
        assert shown["nonContiguousDeletedMessagesRanges"] == 1
        assert begun_ms <= shown["lastConsumedFlowTimestamp"] <= shown["lastConsumedTimestamp"]
        assert shown["consumers"][0]["lastConsumedFlowTimestamp"] >= begun_ms
        assert shown["lastExpireTimestamp"] == 0
    await creating.done("POST", f"{base}-partition-1/subscription/s/expireMessages/1")
    assert (await subscription_shown(creating, path))["lastExpireTimestamp"] >= begun_ms
    await client.close()


@pytest.mark.parametrize("kind", [pb.CommandSubscribe.Shared, pb.CommandSubscribe.Key_Shared])
async def test_messages_that_came_back_and_wait_are_shown(
    creating: Rest, kind: pb.CommandSubscribe.SubType
) -> None:
    client = await RawClient.open("127.0.0.1", creating.binary_port)
    consumer = await client.subscribe(TOPIC, "s", pb.CommandSubscribe(sub_type=kind), permits=2)
    producer = await client.create_producer(TOPIC)
    for _ in range(2):
        await producer.send(b"x")
    for _ in range(2):
        await consumer.receive()
    assert (await subscription_shown(creating))["msgInReplay"] == 0
    client.send(
        pb.BaseCommand.REDELIVER_UNACKNOWLEDGED_MESSAGES,
        pb.CommandRedeliverUnacknowledgedMessages(consumer_id=consumer.consumer_id),
    )

    async def are_back() -> bool:
        return bool((await subscription_shown(creating))["msgInReplay"] == 2)

    await until_awaited(are_back)
    shown = await subscription_shown(creating)
    if kind == pb.CommandSubscribe.Key_Shared:
        assert (shown["keySharedMode"], shown["allowOutOfOrderDelivery"]) == ("AUTO_SPLIT", False)
    else:
        assert "keySharedMode" not in shown
    await client.close()


def test_a_partitioned_topic_shows_how_its_partitions_share_out_keys() -> None:
    sharing = {"keySharedMode": "STICKY", "allowOutOfOrderDelivery": True}
    unused = {"subscriptions": {"s": {"type": "None"}}}
    used = {"subscriptions": {"s": {"type": "Key_Shared", **sharing}}}
    shown = stats_of_all([unused, used])["subscriptions"]
    assert isinstance(shown, dict)
    assert sharing.items() <= shown["s"].items()
