"""The records of topic policies, and the policies in force."""

from collections.abc import AsyncIterator

import pytest

from broker.policies.applied_policies import (
    applied_policies,
    applied_value,
    broker_policies,
    values_of_broker,
)
from broker.policies.namespaces import Policies
from broker.policies.policy_kinds import (
    MAX_CONSUMERS,
    MAX_MESSAGE_SIZE,
    MAX_PRODUCERS,
    OF_TOPICS,
    POLICIES,
    RETENTION,
)
from broker.policies.topic_policies import UNSET, PoliciesOfTopic, TopicPolicies, policy_name
from config.settings import load_settings
from magnetar.protocol.names import NamespaceName, parse_topic_name
from storage.clock import SystemClock
from storage.managed_ledger.types import Retention
from storage.metadata.memory import MemoryMetadataStore
from tests.support.waiting import until

TOPIC = parse_topic_name("persistent://t/n/a topic")
NAMESPACE = NamespaceName("t", "n")
KEY = "/admin/topic-policies/t/n/a+topic"


@pytest.fixture
async def store() -> AsyncIterator[MemoryMetadataStore]:
    store = MemoryMetadataStore(SystemClock())
    yield store
    await store.close()


@pytest.fixture
async def policies(store: MemoryMetadataStore) -> AsyncIterator[TopicPolicies]:
    policies = TopicPolicies(store)
    yield policies
    await policies.stop()


async def test_a_change_is_known_at_once_and_followed_elsewhere(
    store: MemoryMetadataStore, policies: TopicPolicies
) -> None:
    other = TopicPolicies(store)
    changes: list[tuple[NamespaceName, str]] = []
    other.on_change(lambda namespace, name: changes.append((namespace, name)))
    await policies.follow(NAMESPACE)
    await other.follow(NAMESPACE)
    await policies.update(TOPIC, lambda found: found.changed("maxProducers", 3, is_global=False))
    assert policies.known(TOPIC) == PoliciesOfTopic({"maxProducers": 3})
    await until(lambda: other.known(TOPIC) == PoliciesOfTopic({"maxProducers": 3}))
    await policies.update(TOPIC, lambda found: found.changed("maxProducers", None, is_global=False))
    await until(lambda: other.known(TOPIC) == PoliciesOfTopic())
    assert set(changes) == {(NAMESPACE, "a topic")}
    await other.stop()


async def test_policies_that_were_set_before_are_known_when_the_namespace_is_followed(
    store: MemoryMetadataStore, policies: TopicPolicies
) -> None:
    await store.put(KEY, b'{"local":{"maxConsumers":1},"global":{"maxConsumers":2}}')
    assert policies.known(TOPIC) == UNSET
    await policies.follow(NAMESPACE)
    assert policies.known(TOPIC).get("maxConsumers") == 1
    assert (await policies.get(TOPIC)).global_ == {"maxConsumers": 2}


async def test_the_record_of_a_deleted_topic_is_deleted(
    store: MemoryMetadataStore, policies: TopicPolicies
) -> None:
    await policies.follow(NAMESPACE)
    await policies.update(TOPIC, lambda found: found.changed("maxProducers", 3, is_global=True))
    await policies.forget(TOPIC)
    assert policies.known(TOPIC) == UNSET
    assert await store.get(KEY) is None


async def test_an_unreadable_record_sets_nothing(
    store: MemoryMetadataStore, policies: TopicPolicies
) -> None:
    await store.put(KEY, b"{")
    await policies.follow(NAMESPACE)
    assert policies.known(TOPIC) == UNSET


@pytest.mark.parametrize(
    "text",
    ["persistent://t/n/x", "persistent://t/n/x-partition-3", "segment://t/n/x/0000-7fff-1"],
)
def test_partitions_and_segments_have_the_policies_of_their_topic(text: str) -> None:
    assert policy_name(parse_topic_name(text)) == "x"


def test_the_local_value_of_a_topic_comes_before_the_global_one_and_before_the_namespace() -> None:
    of_broker = values_of_broker(load_settings(None, {"max_consumers_per_topic": 9}))
    namespace = Policies({"max_consumers_per_topic": 5, "max_producers_per_topic": 6})

    def consumers(namespace: Policies, topic: PoliciesOfTopic) -> object:
        return applied_value(MAX_CONSUMERS, of_broker, namespace, topic)

    assert consumers(Policies(), UNSET) == 9
    assert consumers(namespace, UNSET) == 5
    assert consumers(namespace, PoliciesOfTopic({}, {"maxConsumers": 4})) == 4
    assert consumers(namespace, PoliciesOfTopic({"maxConsumers": 3}, {"maxConsumers": 4})) == 3
    both = applied_policies(of_broker, namespace, PoliciesOfTopic({"maxConsumers": 3}))
    assert (both.max_consumers, both.max_producers) == (3, 6)


def test_a_policy_of_0_is_set_and_a_setting_of_0_is_not() -> None:
    of_broker = values_of_broker(load_settings())
    nothing = {"retentionTimeInMinutes": 0, "retentionSizeInMB": 0}
    assert broker_policies(load_settings()).retention is None
    kept = applied_policies(of_broker, Policies({"retention_policies": nothing}), UNSET)
    assert kept.retention == Retention(0, 0)
    assert applied_value(RETENTION, of_broker, Policies(), UNSET) == nothing


def test_a_value_that_is_not_valid_counts_as_unset() -> None:
    of_broker = values_of_broker(load_settings())
    namespace = Policies({"max_producers_per_topic": "many"})
    assert applied_value(MAX_PRODUCERS, of_broker, namespace, UNSET) == 0


def test_every_policy_of_a_topic_has_a_value_of_the_broker() -> None:
    of_broker = values_of_broker(load_settings())
    for kind in OF_TOPICS.values():
        assert kind.valid(of_broker[kind]), kind.topic_path
    assert MAX_MESSAGE_SIZE in POLICIES


def test_settings_are_the_last_level() -> None:
    settings = load_settings(
        None,
        {
            "max_subscriptions_per_topic": 2,
            "ttl_duration_default_s": 5,
            "auto_subscription_creation": False,
        },
    )
    applied = broker_policies(settings)
    assert (applied.max_subscriptions, applied.message_ttl_s) == (2, 5)
    assert not applied.creates_subscriptions
