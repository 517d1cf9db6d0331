"""Policies of topics over REST, and what they do to clients."""

from pathlib import Path

import pytest

from broker.policies.policy_kinds import OF_TOPICS
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.names import parse_topic_name
from tests.support.embedded_broker import running
from tests.support.raw_client import BrokerError, RawClient
from tests.support.waiting import until
from tests.unit.broker.admin.conftest import TOPIC, Served, asking_broker
from tests.unit.broker.admin.conftest import TOPIC_PATH as PATH

NAMESPACE = "/admin/v2/namespaces/public/default"
VALUES: dict[str, object] = {
    "retention": {"retentionTimeInMinutes": 1, "retentionSizeInMB": 2},
    "deduplicationEnabled": True,
    "autoSubscriptionCreation": {"allowAutoSubscriptionCreation": False},
    "maxProducers": 1,
    "maxConsumers": 2,
    "maxConsumersPerSubscription": 1,
    "maxSubscriptionsPerTopic": 2,
    "maxUnackedMessagesOnConsumer": 3,
    "maxUnackedMessagesOnSubscription": 4,
    "maxMessageSize": 100,
    "subscriptionTypesEnabled": ["Shared"],
    "messageTTL": 60,
    "persistence": {
        "bookkeeperEnsemble": 1,
        "bookkeeperWriteQuorum": 1,
        "bookkeeperAckQuorum": 1,
        "managedLedgerMaxMarkDeleteRate": 0.5,
        "managedLedgerStorageClassName": None,
    },
    "compactionThreshold": 1_000_000,
    "schemaCompatibilityStrategy": "BACKWARD",
    "schemaValidationEnforced": True,
    "subscriptionExpirationTime": 30,
    "inactiveTopicPolicies": {
        "inactiveTopicDeleteMode": "delete_when_subscriptions_caught_up",
        "maxInactiveDurationSeconds": 5,
        "deleteWhileInactive": True,
    },
    "delayedDelivery": {"active": True, "tickTime": 20, "maxDeliveryDelayInMillis": 60_000},
    "publishRate": {"publishThrottlingRateInMsg": 10, "publishThrottlingRateInByte": -1},
    "dispatchRate": {
        "dispatchThrottlingRateInMsg": 10,
        "dispatchThrottlingRateInByte": 2**40,
        "relativeToPublishRate": True,
        "ratePeriodInSecond": 2,
    },
    "subscriptionDispatchRate": {"dispatchThrottlingRateInMsg": -1},
    "subscribeRate": {"subscribeThrottlingRatePerConsumer": 5, "ratePeriodInSecond": 30},
    "replicatorDispatchRate": {"dispatchThrottlingRateInMsg": 10, "ratePeriodInSecond": 2},
}
SHOWN_UNSET: dict[str, object] = {"schemaValidationEnforced": False}
"""Values shown of policies that are not set; others show nothing."""
EARLIEST = pb.CommandSubscribe(initial_position=pb.CommandSubscribe.Earliest)
SHARED = pb.CommandSubscribe(
    sub_type=pb.CommandSubscribe.Shared, initial_position=pb.CommandSubscribe.Earliest
)


def published_now(served: Served) -> pb.MessageMetadata:
    return pb.MessageMetadata(
        producer_name="p", sequence_id=0, publish_time=served.broker.clock.now_ms()
    )


async def refused(
    served: Served, code: "pb.ServerError", subscription: str, **options: object
) -> str:
    with pytest.raises(BrokerError) as caught:
        await served.client.subscribe(TOPIC, subscription, **options)  # type: ignore[arg-type]
    assert caught.value.code == code
    return str(caught.value)


def test_every_policy_of_a_topic_is_tried_here() -> None:
    assert VALUES.keys() == OF_TOPICS.keys()


@pytest.mark.parametrize("name", VALUES)
async def test_a_policy_is_set_shown_and_removed_at_each_level(served: Served, name: str) -> None:
    rest, path = served.rest, f"{PATH}/{name}"
    nothing = (200, SHOWN_UNSET[name]) if name in SHOWN_UNSET else (204, "")
    assert await rest.call("GET", path) == nothing
    unset = await rest.call("GET", f"{path}?applied=true")
    assert unset[0] == 200
    await rest.done("POST", f"{path}?isGlobal=true", VALUES[name])
    assert await rest.call("GET", path) == nothing
    assert await rest.get(f"{path}?isGlobal=true") == VALUES[name]
    assert await rest.get(f"{path}?applied=true") == VALUES[name]
    await rest.done("PUT", path, VALUES[name])
    assert await rest.get(path) == VALUES[name]
    await rest.done("DELETE", f"{path}?isGlobal=true")
    assert await rest.get(f"{path}?applied=true") == VALUES[name]
    await rest.done("DELETE", path)
    assert await rest.call("GET", f"{path}?applied=true") == unset
    assert name in await rest.refused(412, "POST", path, "nonsense")


async def test_policies_are_of_topics_that_exist_and_of_all_partitions(served: Served) -> None:
    rest, base = served.rest, "/admin/v2/persistent/public/default"
    await rest.refused(404, "POST", f"{base}/none/maxProducers", 1)
    await rest.done("PUT", f"{base}/p/partitions", 2)
    reason = await rest.refused(412, "POST", f"{base}/p-partition-0/maxProducers", 1)
    assert "persistent://public/default/p:" in reason
    await rest.done("POST", f"{base}/p/maxProducers", 1)
    for index in range(2):
        partition = f"persistent://public/default/p-partition-{index}"
        await served.client.create_producer(partition)
        with pytest.raises(BrokerError, match="the maximum is 1"):
            await served.client.create_producer(partition)


async def test_policies_of_a_scalable_topic_hold_for_each_segment(served: Served) -> None:
    rest, path = served.rest, "/admin/v2/persistent/public/default/s/maxProducers"
    await rest.refused(404, "POST", path, 1)
    await rest.done("PUT", "/admin/v2/scalable/public/default/s?numInitialSegments=2")
    await rest.done("POST", path, 1)
    for segment in ("0000-7fff-0", "8000-ffff-1"):
        name = f"segment://public/default/s/{segment}"
        await served.client.create_producer(name)
        with pytest.raises(BrokerError, match="the maximum is 1"):
            await served.client.create_producer(name)
    await rest.done("DELETE", "/admin/v2/scalable/public/default/s?force=true")
    await rest.done("PUT", "/admin/v2/scalable/public/default/s")
    assert await rest.call("GET", path) == (204, "")


async def test_policies_stay_in_force_when_a_topic_is_migrated(served: Served) -> None:
    await served.rest.done("POST", f"{PATH}/maxProducers", 3)
    await served.rest.done("POST", "/admin/v2/scalable/public/default/t/migrate")
    assert await served.rest.get(f"{PATH}/maxProducers") == 3
    await served.rest.done("POST", "/admin/v2/scalable/public/default/t/split/1")
    await served.rest.done("POST", f"{PATH}/maxProducers", 1)
    assert await served.rest.get(f"{PATH}/maxProducers?applied=true") == 1


async def test_the_time_to_live_is_also_given_in_the_query(served: Served) -> None:
    for name in ("messageTTL", "subscriptionExpirationTime"):
        await served.rest.done("POST", f"{PATH}/{name}?{name}=5")
        assert await served.rest.get(f"{PATH}/{name}") == 5


async def test_a_topic_of_the_same_name_does_not_inherit_policies(served: Served) -> None:
    await served.rest.done("POST", f"{PATH}/maxProducers", 1)
    await served.rest.done("DELETE", PATH)
    await served.rest.done("PUT", PATH)
    assert await served.rest.call("GET", f"{PATH}/maxProducers") == (204, "")


async def test_all_policies_of_a_topic_are_removed_at_once(served: Served) -> None:
    await served.rest.refused(404, "DELETE", "/admin/v2/persistent/public/default/none/policies")
    await served.rest.done("POST", f"{PATH}/maxProducers", 1)
    await served.rest.done("POST", f"{PATH}/messageTTL?isGlobal=true", 5)
    await served.client.create_producer(TOPIC)
    await served.rest.done("DELETE", f"{PATH}/policies")
    for query in ("", "?isGlobal=true"):
        for name in ("maxProducers", "messageTTL"):
            assert await served.rest.call("GET", f"{PATH}/{name}{query}") == (204, "")
    await served.client.create_producer(TOPIC)
    await served.rest.done("DELETE", f"{PATH}/policies")


async def test_policies_are_in_force_after_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path) as broker, asking_broker(broker) as rest:
        await rest.done("PUT", PATH)
        await rest.done("POST", f"{PATH}/maxProducers", 1)
    async with running(tmp_path) as broker:
        topic = await broker.topics.get(parse_topic_name(TOPIC), create=False)
        assert topic.policies.max_producers == 1


async def test_producers_above_the_maximum_are_refused_and_attached_ones_stay(
    served: Served,
) -> None:
    first = await served.client.create_producer(TOPIC)
    second = await served.client.create_producer(TOPIC)
    await served.rest.done("POST", f"{NAMESPACE}/maxProducersPerTopic", 1)
    await first.send(b"a")
    await second.send(b"b")
    with pytest.raises(BrokerError, match="2 producers, and the maximum is 1") as caught:
        await served.client.create_producer(TOPIC)
    assert caught.value.code == pb.ProducerBusy
    # The topic's value comes before that of the namespace.
    await served.rest.done("POST", f"{PATH}/maxProducers", 3)
    third = await served.client.create_producer(TOPIC)
    await third.close()
    await served.rest.done("DELETE", f"{PATH}/maxProducers")
    for producer in (first, second):
        await producer.close()
    await served.client.create_producer(TOPIC)


async def test_consumers_above_the_maximum_are_refused(served: Served) -> None:
    await served.rest.done("POST", f"{PATH}/maxConsumersPerSubscription", 1)
    await served.rest.done("POST", f"{PATH}/maxConsumers", 2)
    await served.client.subscribe(TOPIC, "a", SHARED)
    reason = await refused(served, pb.ConsumerBusy, "a", options=SHARED)
    assert "maxConsumersPerSubscription" in reason
    await served.client.subscribe(TOPIC, "b", SHARED)
    assert "maxConsumersPerTopic" in await refused(served, pb.ConsumerBusy, "c", options=SHARED)


async def test_subscriptions_above_the_maximum_are_refused(served: Served) -> None:
    await served.rest.done("POST", f"{PATH}/maxSubscriptionsPerTopic", 1)
    await served.client.subscribe(TOPIC, "a", SHARED)
    assert "the maximum is 1" in await refused(served, pb.NotAllowedError, "b")
    reason = await served.rest.refused(409, "PUT", f"{PATH}/subscription/c", {})
    assert "maxSubscriptionsPerTopic" in reason
    await served.client.subscribe(TOPIC, "a", SHARED)


async def test_types_of_subscriptions_that_are_not_enabled_are_refused(served: Served) -> None:
    await served.rest.done("POST", f"{PATH}/subscriptionTypesEnabled", ["Shared"])
    assert "Exclusive" in await refused(served, pb.NotAllowedError, "a")
    await served.client.subscribe(TOPIC, "a", SHARED)


async def test_subscriptions_are_not_created_by_consumers_if_policies_forbid(
    served: Served,
) -> None:
    forbidden = {"allowAutoSubscriptionCreation": False}
    await served.rest.done("POST", f"{NAMESPACE}/autoSubscriptionCreation", forbidden)
    await refused(served, pb.SubscriptionNotFound, "a")
    await served.rest.done("PUT", f"{PATH}/subscription/a", {})
    await served.client.subscribe(TOPIC, "a")


async def test_messages_above_the_maximum_are_refused_and_others_are_stored(
    served: Served,
) -> None:
    producer = await served.client.create_producer(TOPIC)
    await producer.send(b"x" * 1000)
    await served.rest.done("POST", f"{PATH}/maxMessageSize", 100)
    with pytest.raises(BrokerError, match="1000 bytes") as caught:
        await producer.send(b"x" * 1000)
    assert caught.value.code == pb.NotAllowedError
    await producer.send(b"x" * 100)


async def test_consumers_get_as_many_unacknowledged_messages_as_policies_allow(
    served: Served,
) -> None:
    producer = await served.client.create_producer(TOPIC)
    consumer = await served.client.subscribe(TOPIC, "s", SHARED, permits=100)
    await served.rest.done("POST", f"{PATH}/maxUnackedMessagesOnConsumer", 2)
    for index in range(4):
        await producer.send(b"%d" % index)
    assert [(await consumer.receive()).payload for _ in range(2)] == [b"0", b"1"]
    with pytest.raises(TimeoutError):
        await consumer.receive(0.05)
    await served.rest.done("DELETE", f"{PATH}/maxUnackedMessagesOnConsumer")
    assert [(await consumer.receive()).payload for _ in range(2)] == [b"2", b"3"]


async def test_messages_expire_at_connected_and_absent_consumers(served: Served) -> None:
    producer = await served.client.create_producer(TOPIC)
    shared = await served.client.subscribe(TOPIC, "shared", SHARED, permits=2)
    for name in ("absent", "exclusive"):
        await served.rest.done("PUT", f"{PATH}/subscription/{name}", "earliest")
    exclusive = await served.client.subscribe(TOPIC, "exclusive", permits=1)
    for index in range(5):
        await producer.send(b"%d" % index, metadata=published_now(served))
    assert (await exclusive.receive()).payload == b"0"
    assert [(await shared.receive()).payload for _ in range(2)] == [b"0", b"1"]
    topic = served.broker.topics.loaded()[TOPIC]
    await served.rest.done("POST", f"{NAMESPACE}/messageTTL", 60)
    await served.broker.message_expiry.check()
    assert {each.backlog for each in topic.subscriptions.values()} == {5}
    # As if a minute had passed.
    await served.rest.done("POST", f"{PATH}/all_subscription/expireMessages/0")
    assert {each.backlog for each in topic.subscriptions.values()} == {0}
    assert topic.subscriptions["shared"].unacked == 0
    assert topic.subscriptions["absent"].expired_total == 5
    stats = await served.rest.get(f"{PATH}/stats")
    assert isinstance(stats, dict)
    assert stats["subscriptions"]["absent"]["msgRateExpired"] > 0
    await producer.send(b"5")
    for consumer in (shared, exclusive):
        consumer.flow(10)
        assert (await consumer.receive()).payload == b"5"


async def test_old_messages_expire_by_themselves(tmp_path: Path) -> None:
    async with running(
        tmp_path, ttl_duration_default_s=1, message_expiry_check_interval_s=1
    ) as broker:
        client = await RawClient.open("127.0.0.1", broker.port)
        await client.subscribe(TOPIC, "s")
        producer = await client.create_producer(TOPIC)
        await producer.send(b"a")
        topic = broker.topics.loaded()[TOPIC]
        assert topic.subscriptions["s"].backlog == 1
        await until(lambda: topic.subscriptions["s"].backlog == 0)
        await client.close()


async def test_messages_expire_up_to_an_id(served: Served) -> None:
    path = f"{PATH}/subscription/s/expireMessages"
    await served.rest.done("PUT", f"{PATH}/subscription/s", "earliest")
    await served.rest.refused(409, "POST", f"{path}/0")
    producer = await served.client.create_producer(TOPIC)
    ids = [
        (await producer.send(b"%d" % index, metadata=published_now(served))).message_id
        for index in range(4)
    ]
    subscription = served.broker.topics.loaded()[TOPIC].subscriptions["s"]
    body = {"ledgerId": ids[2].ledger_id, "entryId": ids[2].entry_id, "excluded": True}
    await served.rest.done("POST", path, body)
    assert subscription.backlog == 2
    await served.rest.done("POST", path, body | {"excluded": False})
    assert subscription.backlog == 1
    await served.rest.refused(409, "POST", path, body)
    await served.rest.refused(409, "POST", f"{path}/3600")
    await served.rest.refused(404, "POST", f"{PATH}/subscription/none/expireMessages/0")


async def test_messages_delayed_for_longer_than_the_maximum_are_refused_alone(
    served: Served,
) -> None:
    producer = await served.client.create_producer(TOPIC)
    consumer = await served.client.subscribe(TOPIC, "s", SHARED, permits=10)
    await served.rest.done(
        "POST",
        f"{PATH}/delayedDelivery",
        {"active": True, "tickTime": 1, "maxDeliveryDelayInMillis": 1000},
    )

    def delayed_by(delay_ms: int) -> pb.MessageMetadata:
        metadata = published_now(served)
        metadata.deliver_at_time = metadata.publish_time + delay_ms
        return metadata

    with pytest.raises(BrokerError, match="delayed by 1001 ms, and 1000 are the most") as caught:
        await producer.send(b"late", metadata=delayed_by(1001))
    assert caught.value.code == pb.NotAllowedError
    await producer.send(b"in time", metadata=delayed_by(1000))
    await producer.send(b"at once", metadata=published_now(served))
    assert (await consumer.receive()).payload == b"at once"
    assert (await consumer.receive()).payload == b"in time"
    # A namespace's value holds where the topic has none; 0 is no maximum.
    await served.rest.done("DELETE", f"{PATH}/delayedDelivery")
    await producer.send(b"much later", metadata=delayed_by(10**9))


async def test_messages_that_wait_come_at_once_when_delays_are_switched_off(
    served: Served,
) -> None:
    producer = await served.client.create_producer(TOPIC)
    consumer = await served.client.subscribe(TOPIC, "s", SHARED, permits=10)
    metadata = published_now(served)
    metadata.deliver_at_time = metadata.publish_time + 3_600_000
    await producer.send(b"waits", metadata=metadata)
    with pytest.raises(TimeoutError):
        await consumer.receive(0.05)
    await served.rest.done(
        "POST", f"{NAMESPACE}/delayedDelivery", {"active": False, "tickTime": 1000}
    )
    assert (await consumer.receive()).payload == b"waits"
    await producer.send(b"another", metadata=metadata)
    assert (await consumer.receive()).payload == b"another"
    stats = await served.rest.get(f"{PATH}/stats")
    assert isinstance(stats, dict)
    assert stats["subscriptions"]["s"]["msgDelayed"] == 0


@pytest.mark.parametrize("base", [NAMESPACE, PATH])
async def test_policies_without_a_meaning_here_are_refused_by_name(
    served: Served, base: str
) -> None:
    name = "deduplicationSnapshotInterval"
    path = f"{base}/{name}"
    for level in ("", "?isGlobal=true"):
        assert await served.rest.call("GET", path + level) == (204, "")
        assert name in await served.rest.refused(501, "POST", path + level, 60)
        await served.rest.done("DELETE", path + level)
