"""Policies of rates over REST, and what they do to clients.

Rates are so low that nobody waits for them: what waits goes on when the policy changes.
"""

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest

from broker.topics.topic import Topic
from magnetar.protocol import pulsar_pb2 as pb
from tests.support.embedded_broker import running
from tests.support.metrics_text import metrics_text
from tests.support.raw_client import BrokerError, RawClient, RawConsumer, RawProducer
from tests.support.waiting import end, until, until_awaited
from tests.unit.broker.admin.conftest import TOPIC, Served, asking_broker
from tests.unit.broker.admin.conftest import TOPIC_PATH as PATH

NAMESPACE = "/admin/v2/namespaces/public/default"
MEMBERS = {
    "publishRate": "publishMaxMessageRate",
    "dispatchRate": "topicDispatchRate",
    "subscriptionDispatchRate": "subscriptionDispatchRate",
    "subscribeRate": "clusterSubscribeRate",
    "replicatorDispatchRate": "replicatorDispatchRate",
}
"""Each policy, and its member in a namespace's record."""
DISPATCH = {
    "dispatchThrottlingRateInMsg": 1,
    "dispatchThrottlingRateInByte": -1,
    "relativeToPublishRate": False,
    "ratePeriodInSecond": 3600,
}
VALUES: Mapping[str, object] = {
    "publishRate": {"publishThrottlingRateInMsg": 1, "publishThrottlingRateInByte": -1},
    "dispatchRate": DISPATCH,
    "subscriptionDispatchRate": DISPATCH,
    "subscribeRate": {"subscribeThrottlingRatePerConsumer": 1, "ratePeriodInSecond": 3600},
    "replicatorDispatchRate": DISPATCH,
}
A_DAY = pb.CommandSend(num_messages=24 * 3600)
"""Such a SEND leaves a debt of a day at one message per second."""
KINDS = [
    pb.CommandSubscribe.Exclusive,
    pb.CommandSubscribe.Shared,
    pb.CommandSubscribe.Failover,
    pb.CommandSubscribe.Key_Shared,
]


def sending(producer: RawProducer, payload: bytes) -> "asyncio.Task[pb.CommandSendReceipt]":
    return asyncio.create_task(producer.send(payload))


def has_limited(topic: Topic) -> bool:
    return topic.publish_rates.times_limited > 0


async def payloads(consumer: RawConsumer, count: int) -> list[bytes]:
    return [(await consumer.receive()).payload for _ in range(count)]


@pytest.mark.parametrize("name", VALUES)
async def test_a_namespace_has_a_rate_under_the_name_of_its_cluster(
    served: Served, name: str
) -> None:
    rest, path = served.rest, f"{NAMESPACE}/{name}"
    assert await rest.call("GET", path) == (204, "")
    await rest.done("POST", path, VALUES[name])
    assert await rest.get(path) == VALUES[name]
    assert await rest.get(f"{PATH}/{name}?applied=true") == VALUES[name]
    record = await rest.get(NAMESPACE)
    assert isinstance(record, dict)
    assert record[MEMBERS[name]] == {"standalone": VALUES[name]}
    await rest.done("DELETE", path)
    assert await rest.call("GET", path) == (204, "")
    for nonsense in ({}, {"nothing": 1}, {"ratePeriodInSecond": "1"}, 5):
        assert name in await rest.refused(412, "POST", path, nonsense)


async def test_a_new_namespace_may_come_with_rates_of_its_own_cluster_only(served: Served) -> None:
    rest, base = served.rest, "/admin/v2/namespaces/public"
    unset: dict[str, object] = {member: {} for member in MEMBERS.values()}
    await rest.done("PUT", f"{base}/a", unset)
    rates = {member: {"standalone": VALUES[name]} for name, member in MEMBERS.items()}
    await rest.done("PUT", f"{base}/b", rates)
    for name, value in VALUES.items():
        assert await rest.call("GET", f"{base}/a/{name}") == (204, "")
        assert await rest.get(f"{base}/b/{name}") == value
    await rest.refused(403, "PUT", f"{base}/c", {"topicDispatchRate": {"other": DISPATCH}})
    await rest.refused(412, "PUT", f"{base}/c", {"topicDispatchRate": {"standalone": 5}})
    await rest.refused(403, "PUT", f"{base}/c", {"replicatorDispatchRate": {"x": DISPATCH}})


async def test_a_single_subscription_has_a_dispatch_rate_of_its_own(served: Served) -> None:
    rest, path = served.rest, f"{PATH}/s/dispatchRate"
    of_topic = DISPATCH | {"dispatchThrottlingRateInMsg": 7}
    assert await rest.call("GET", path) == (204, "")
    await rest.done("POST", f"{PATH}/subscriptionDispatchRate", of_topic)
    assert await rest.get(f"{path}?applied=true") == of_topic
    await rest.done("POST", f"{path}?isGlobal=true", DISPATCH)
    assert await rest.call("GET", path) == (204, "")
    assert await rest.get(f"{path}?applied=true") == DISPATCH
    await rest.done("POST", path, DISPATCH | {"ratePeriodInSecond": 9})
    assert await rest.get(path) == DISPATCH | {"ratePeriodInSecond": 9}
    assert await rest.get(f"{path}?isGlobal=true") == DISPATCH
    assert await rest.get(f"{PATH}/other/dispatchRate?applied=true") == of_topic
    await rest.done("DELETE", f"{path}?isGlobal=true")
    await rest.done("DELETE", path)
    assert await rest.get(f"{path}?applied=true") == of_topic
    await rest.refused(412, "POST", path, 1)
    await rest.refused(404, "POST", "/admin/v2/persistent/public/default/none/s/dispatchRate", 1)


@pytest.mark.parametrize("domain", ["persistent", "non-persistent"])
async def test_a_publish_rate_delays_receipts_of_its_topic_alone_until_it_is_removed(
    served: Served, domain: str
) -> None:
    client, name = served.client, f"{domain}://public/default/x"
    base = f"/admin/v2/{domain}/public/default/x"
    limited = await client.create_producer(name)
    other = await client.create_producer(TOPIC)
    await limited.send(b"a")
    await served.rest.done("POST", f"{NAMESPACE}/publishRate", VALUES["publishRate"])
    await served.rest.done("POST", f"{PATH}/publishRate", {"publishThrottlingRateInMsg": -1})
    await limited.send(b"b", send=A_DAY)
    waiting = [sending(limited, b"%d" % number) for number in range(3)]
    # On the same connection, behind the SENDs that wait.
    await other.send(b"c")
    assert not any(each.done() for each in waiting)
    assert (await served.stats(base))["publishRateLimitedTimes"] == 1
    assert (await served.stats())["publishRateLimitedTimes"] == 0
    assert f'topic="{name}"}} 1.0' in "".join(
        line
        for line in (await metrics_text(served.broker)).splitlines()
        if line.startswith("pulsar_publish_rate_limit_times{")
    )
    await served.rest.done("DELETE", f"{NAMESPACE}/publishRate")
    await asyncio.gather(*waiting)
    await limited.send(b"d")
    assert (await served.stats(base))["publishRateLimitedTimes"] == 1


async def test_sends_that_wait_are_dropped_with_their_connection_and_the_name_is_free(
    served: Served,
) -> None:
    await served.rest.done("POST", f"{PATH}/publishRate", VALUES["publishRate"])
    lost = await RawClient.open("127.0.0.1", served.broker.port)
    named = pb.CommandProducer(producer_name="n", user_provided_producer_name=True)
    producer = await lost.create_producer(TOPIC, named)
    await producer.send(b"a", send=A_DAY)
    waiting = sending(producer, b"b")
    await until(lambda: served.broker.topics.loaded()[TOPIC].publish_rates.times_limited == 1)
    await lost.close()
    await asyncio.gather(waiting, return_exceptions=True)
    await served.client.create_producer(TOPIC, named)
    await served.rest.done("DELETE", f"{PATH}/publishRate")
    assert (await served.stats())["msgInCounter"] == 24 * 3600


@pytest.mark.parametrize("request_", ["PUT unload", "POST terminate"])
async def test_a_topic_with_sends_that_wait_is_unloaded_and_sealed(
    served: Served, request_: str
) -> None:
    producer = await served.client.create_producer(TOPIC)
    await served.rest.done("POST", f"{PATH}/publishRate", VALUES["publishRate"])
    await producer.send(b"a", send=A_DAY)
    waiting = sending(producer, b"b")
    await until(lambda: served.broker.topics.loaded()[TOPIC].publish_rates.times_limited == 1)
    method, operation = request_.split()
    status, _ = await served.rest.call(method, f"{PATH}/{operation}")
    assert status in (200, 204)
    await served.client.wait(producer.events.get())
    assert not waiting.done()
    await end(waiting)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["dispatchRate", "subscriptionDispatchRate", "s/dispatchRate"])
async def test_a_dispatch_rate_holds_messages_back_until_it_changes(
    served: Served, name: str, kind: "pb.CommandSubscribe.SubType"
) -> None:
    rest, client, path = served.rest, served.client, f"{PATH}/{name}"
    await rest.done("POST", path, DISPATCH | {"dispatchThrottlingRateInMsg": 2})
    consumer = await client.subscribe(TOPIC, "s", pb.CommandSubscribe(sub_type=kind), permits=1000)
    producer = await client.create_producer(TOPIC)
    for number in range(6):
        await producer.send(b"%d" % number)
    assert await payloads(consumer, 2) == [b"0", b"1"]
    level = "Topic" if name == "dispatchRate" else "Subscription"
    member = f"dispatchThrottledMsgEventsBy{level}Limit"

    async def throttled() -> bool:
        subscriptions = (await served.stats())["subscriptions"]
        assert isinstance(subscriptions, dict)
        return bool(subscriptions["s"][member])

    await until_awaited(throttled)
    expected = f'subscription="s",topic="{TOPIC}"}}'
    assert any(
        line.startswith("pulsar_subscription_dispatch_throttled_msg_events{")
        and f'reason="{level.lower()}"' in line
        and expected in line
        for line in (await metrics_text(served.broker)).splitlines()
    )
    assert consumer.messages.empty()
    await rest.done("POST", path, DISPATCH | {"dispatchThrottlingRateInMsg": 3})
    assert await payloads(consumer, 3) == [b"2", b"3", b"4"]
    await rest.done("DELETE", path)
    assert await payloads(consumer, 1) == [b"5"]


async def test_a_rate_of_one_subscription_leaves_the_others_alone(served: Served) -> None:
    await served.rest.done("POST", f"{PATH}/slow/dispatchRate", DISPATCH)
    slow = await served.client.subscribe(TOPIC, "slow", permits=1000)
    fast = await served.client.subscribe(TOPIC, "fast", permits=1000)
    producer = await served.client.create_producer(TOPIC)
    for number in range(6):
        await producer.send(b"%d" % number)
    assert len(await payloads(fast, 6)) == 6
    assert await payloads(slow, 1) == [b"0"]
    assert slow.messages.empty()


async def test_a_consumer_that_subscribes_too_often_is_refused_and_others_are_not(
    served: Served,
) -> None:
    named = pb.CommandSubscribe(consumer_name="c", consumer_id=5)
    await served.rest.done("POST", f"{NAMESPACE}/subscribeRate", VALUES["subscribeRate"])
    consumer = await served.client.subscribe(TOPIC, "s", named)
    await consumer.close()
    with pytest.raises(BrokerError, match="subscribeRate") as caught:
        await served.client.subscribe(TOPIC, "s", named)
    assert caught.value.code == pb.NotAllowedError
    other = pb.CommandSubscribe(consumer_name="d")
    await (await served.client.subscribe(TOPIC, "s", other)).close()
    unlimited = {"subscribeThrottlingRatePerConsumer": -1, "ratePeriodInSecond": 30}
    await served.rest.done("POST", f"{PATH}/subscribeRate", unlimited)
    await served.client.subscribe(TOPIC, "s", named)


async def test_rates_of_a_scalable_topic_hold_for_each_segment(served: Served) -> None:
    rest, client, base = served.rest, served.client, "/admin/v2/persistent/public/default/s"
    await rest.done("PUT", "/admin/v2/scalable/public/default/s?numInitialSegments=2")
    await rest.done("POST", f"{base}/publishRate", VALUES["publishRate"])
    await rest.done("POST", f"{base}/subscriptionDispatchRate", DISPATCH)
    for segment in ("0000-7fff-0", "8000-ffff-1"):
        name = f"segment://public/default/s/{segment}"
        consumer = await client.subscribe(name, "c", permits=1000)
        producer = await client.create_producer(name)
        await producer.send(b"a", send=A_DAY)
        assert await payloads(consumer, 1) == [b"a"]
        waiting, topic = sending(producer, b"b"), served.broker.topics.loaded()[name]
        await until(partial(has_limited, topic))
        assert not waiting.done()
        await rest.done("POST", f"{base}/publishRate", {"publishThrottlingRateInMsg": -1})
        await waiting
        await until(partial(bool, topic.subscriptions["c"].throttled))
        assert consumer.messages.empty()
        await rest.done("POST", f"{base}/publishRate", VALUES["publishRate"])


async def test_rates_of_all_topics_together_are_settings(tmp_path: Path) -> None:
    async with (
        running(
            tmp_path,
            broker_publisher_throttling_max_message_rate=1,
            dispatch_throttling_rate_in_byte=1,
        ) as broker,
        asking_broker(broker) as rest,
    ):
        client = await RawClient.open("127.0.0.1", broker.port)
        consumer = await client.subscribe(TOPIC, "s", permits=1000)
        one = await client.create_producer(TOPIC)
        two = await client.create_producer("persistent://public/default/u")
        await one.send(b"a" * 10_000, send=A_DAY)
        waiting = sending(two, b"b")
        assert await payloads(consumer, 1) == [b"a" * 10_000]
        await until(
            lambda: (
                broker.topics.loaded()["persistent://public/default/u"].publish_rates.times_limited
                == 1
            )
        )
        assert not waiting.done()
        await until(lambda: bool(broker.topics.loaded()[TOPIC].subscriptions["s"].throttled))
        stats = await rest.get(f"{PATH}/stats")
        assert isinstance(stats, dict)
        assert stats["subscriptions"]["s"]["dispatchThrottledBytesEventsByBrokerLimit"]
        await end(waiting)
        await client.close()


async def test_settings_are_in_force_where_no_policy_is_set(tmp_path: Path) -> None:
    settings = {
        "max_publish_rate_per_topic_in_messages": 1,
        "max_publish_rate_per_topic_in_bytes": 2,
        "dispatch_throttling_rate_per_topic_in_msg": 3,
        "dispatch_throttling_rate_per_topic_in_byte": 4,
        "dispatch_throttling_rate_per_subscription_in_msg": 5,
        "dispatch_throttling_rate_per_subscription_in_byte": 6,
        "dispatch_throttling_rate_relative_to_publish_rate": True,
        "subscribe_throttling_rate_per_consumer": 7,
        "subscribe_rate_period_per_consumer_s": 8,
        "dispatch_throttling_rate_per_replicator_in_msg": 9,
        "dispatch_throttling_rate_per_replicator_in_byte": 10,
    }
    async with running(tmp_path, **settings) as broker, asking_broker(broker) as rest:
        await rest.done("PUT", PATH)
        shown = [await rest.get(f"{PATH}/{name}?applied=true") for name in VALUES]
    assert [list(each.values()) for each in shown if isinstance(each, dict)] == [
        [1, 2],
        [3, 4, True, 1],
        [5, 6, True, 1],
        [7, 8],
        [9, 10, False, 1],
    ]
