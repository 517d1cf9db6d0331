"""The policies in force for a topic: its own, its namespace's, or the broker's settings.  Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from broker.policies.namespaces import Policies
from broker.policies.policy_kinds import (
    AUTO_SUBSCRIPTION_CREATION,
    AUTO_TOPIC_CREATION,
    COMPACTION_THRESHOLD,
    CONSUMER_GRACE,
    DEDUPLICATION,
    DELAYED_DELIVERY,
    INACTIVE_TOPICS,
    MAX_CONSUMERS,
    MAX_CONSUMERS_PER_SUBSCRIPTION,
    MAX_MESSAGE_SIZE,
    MAX_PRODUCERS,
    MAX_SUBSCRIPTIONS,
    MAX_UNACKED_PER_CONSUMER,
    MAX_UNACKED_PER_SUBSCRIPTION,
    MESSAGE_TTL,
    POLICIES,
    RETENTION,
    SUBSCRIPTION_EXPIRATION,
    SUBSCRIPTION_TYPES,
    SUBSCRIPTION_TYPES_ENABLED,
    SUBSCRIPTIONS_CAUGHT_UP,
    WITHOUT_SUBSCRIPTIONS,
    PolicyKind,
)
from broker.policies.topic_policies import UNSET, PoliciesOfTopic
from config.bounds import MAX_MESSAGE_SIZE as LARGEST_MESSAGE
from config.settings import Settings
from storage.managed_ledger.types import MIB, MINUTE_MS, Retention


@dataclass(frozen=True, slots=True)
class InactiveTopicPolicy:
    """When a topic that nobody uses is deleted."""

    caught_up: bool
    """Whether it may have subscriptions, if they have no backlog; else it may have none."""
    max_inactive_s: int


@dataclass(frozen=True, slots=True)
class AppliedPolicies:
    """The values in force for one topic.  A maximum of 0 is no limit."""

    retention: Retention | None
    deduplicates: bool
    creates_subscriptions: bool
    max_producers: int
    max_consumers: int
    max_consumers_per_subscription: int
    max_subscriptions: int
    max_unacked_per_consumer: int
    max_unacked_per_subscription: int
    max_message_bytes: int
    """0: the broker's largest message."""
    subscription_types: frozenset[str]
    """The types that consumers may ask for, by Pulsar's names."""
    message_ttl_s: int
    """Age at which messages count as acknowledged; 0: they never do."""
    compaction_threshold_bytes: int
    """A topic with more after its last compaction is compacted; 0: on request only."""
    subscription_expiration_s: int
    """A subscription that is not used for so long is deleted; 0: none is."""
    inactive_topics: InactiveTopicPolicy | None
    """None: the topic stays, however long nobody uses it."""
    delays_delivery: bool
    delayed_tick_ms: int
    max_delivery_delay_ms: int
    """0: messages may be delayed for as long as producers like."""


def values_of_broker(settings: Settings) -> Mapping[PolicyKind, object]:
    """The broker's values, as REST shows them."""
    return {
        RETENTION: {
            "retentionTimeInMinutes": settings.retention_time_minutes,
            "retentionSizeInMB": settings.retention_size_mb,
        },
        DEDUPLICATION: settings.deduplication,
        AUTO_SUBSCRIPTION_CREATION: {
            "allowAutoSubscriptionCreation": settings.auto_subscription_creation
        },
        COMPACTION_THRESHOLD: settings.broker_service_compaction_threshold_bytes,
        CONSUMER_GRACE: settings.scalable_consumer_grace_period_s,
        MAX_PRODUCERS: settings.max_producers_per_topic,
        MAX_CONSUMERS: settings.max_consumers_per_topic,
        MAX_CONSUMERS_PER_SUBSCRIPTION: settings.max_consumers_per_subscription,
        MAX_SUBSCRIPTIONS: settings.max_subscriptions_per_topic,
        MAX_UNACKED_PER_CONSUMER: settings.max_unacked_messages_per_consumer,
        MAX_UNACKED_PER_SUBSCRIPTION: settings.max_unacked_messages_per_subscription,
        MAX_MESSAGE_SIZE: LARGEST_MESSAGE,
        SUBSCRIPTION_TYPES_ENABLED: list(SUBSCRIPTION_TYPES),
        MESSAGE_TTL: settings.ttl_duration_default_s,
        **_lifecycle_of_broker(settings),
    }


def _lifecycle_of_broker(settings: Settings) -> Mapping[PolicyKind, object]:
    """The broker's values of the creation and deletion of topics and subscriptions, and delays."""
    partitioned = settings.auto_topic_creation_type == "partitioned"
    count = {"defaultNumPartitions": settings.default_num_partitions} if partitioned else {}
    caught_up = settings.broker_delete_inactive_topics_mode == SUBSCRIPTIONS_CAUGHT_UP
    return {
        AUTO_TOPIC_CREATION: {
            "allowAutoTopicCreation": settings.auto_topic_creation,
            "topicType": settings.auto_topic_creation_type,
            **count,
        },
        SUBSCRIPTION_EXPIRATION: settings.subscription_expiration_time_minutes,
        INACTIVE_TOPICS: {
            "inactiveTopicDeleteMode": (
                SUBSCRIPTIONS_CAUGHT_UP if caught_up else WITHOUT_SUBSCRIPTIONS
            ),
            "maxInactiveDurationSeconds": settings.broker_delete_inactive_topics_max_inactive_s,
            "deleteWhileInactive": settings.broker_delete_inactive_topics_enabled,
        },
        DELAYED_DELIVERY: {
            "active": settings.delayed_delivery_enabled,
            "tickTime": settings.delayed_delivery_tick_time_ms,
            "maxDeliveryDelayInMillis": settings.delayed_delivery_max_delay_ms,
        },
    }


def applied_value(
    kind: PolicyKind,
    of_broker: Mapping[PolicyKind, object],
    namespace: Policies,
    topic: PoliciesOfTopic,
) -> object:
    """The value in force, as REST shows it; None if nothing has one."""
    found = None if kind.topic_path is None else topic.get(kind.topic_path)
    if found is None and kind.path is not None:
        found = namespace.raw.get(kind.member)
    if found is None or not kind.valid(found):
        found = of_broker.get(kind)
    return found


def applied_policies(
    of_broker: Mapping[PolicyKind, object], namespace: Policies, topic: PoliciesOfTopic
) -> AppliedPolicies:
    """The policies in force for a topic of this namespace."""
    values = {kind: applied_value(kind, of_broker, namespace, topic) for kind in POLICIES}

    def count(kind: PolicyKind) -> int:
        value = values[kind]
        return value if isinstance(value, int) else 0

    def section(kind: PolicyKind) -> Mapping[str, object]:
        value = values[kind]
        return value if isinstance(value, dict) else {}

    delayed = section(DELAYED_DELIVERY)
    types = values[SUBSCRIPTION_TYPES_ENABLED]
    enabled = frozenset(types) if isinstance(types, list) and types else SUBSCRIPTION_TYPES
    return AppliedPolicies(
        retention=_retention(applied_value(RETENTION, {}, namespace, topic))
        # A setting of 0 means that the broker sets no retention; a policy of 0 is a value.
        or (_retention(of_broker.get(RETENTION)) if any(section(RETENTION).values()) else None),
        deduplicates=values[DEDUPLICATION] is True,
        creates_subscriptions=(
            section(AUTO_SUBSCRIPTION_CREATION)["allowAutoSubscriptionCreation"] is True
        ),
        max_producers=count(MAX_PRODUCERS),
        max_consumers=count(MAX_CONSUMERS),
        max_consumers_per_subscription=count(MAX_CONSUMERS_PER_SUBSCRIPTION),
        max_subscriptions=count(MAX_SUBSCRIPTIONS),
        max_unacked_per_consumer=count(MAX_UNACKED_PER_CONSUMER),
        max_unacked_per_subscription=count(MAX_UNACKED_PER_SUBSCRIPTION),
        max_message_bytes=count(MAX_MESSAGE_SIZE),
        subscription_types=frozenset(enabled),
        message_ttl_s=count(MESSAGE_TTL),
        compaction_threshold_bytes=count(COMPACTION_THRESHOLD),
        subscription_expiration_s=60 * count(SUBSCRIPTION_EXPIRATION),
        inactive_topics=_inactive_topics(section(INACTIVE_TOPICS)),
        delays_delivery=delayed["active"] is True,
        delayed_tick_ms=_number(delayed.get("tickTime")),
        max_delivery_delay_ms=_number(delayed.get("maxDeliveryDelayInMillis")),
    )


def broker_policies(settings: Settings) -> AppliedPolicies:
    """The policies in force where neither the topic nor its namespace sets any."""
    return applied_policies(values_of_broker(settings), Policies(), UNSET)


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


def _inactive_topics(section: Mapping[str, object]) -> InactiveTopicPolicy | None:
    if section["deleteWhileInactive"] is not True:
        return None
    caught_up = section["inactiveTopicDeleteMode"] == SUBSCRIPTIONS_CAUGHT_UP
    return InactiveTopicPolicy(caught_up, _number(section["maxInactiveDurationSeconds"]))


def _retention(value: object) -> Retention | None:
    """Convert Pulsar's minutes and megabytes; -1 means without limit in both."""
    section = value if isinstance(value, dict) else {}
    minutes, megabytes = section.get("retentionTimeInMinutes"), section.get("retentionSizeInMB")
    if not isinstance(minutes, int) or not isinstance(megabytes, int):
        return None
    return Retention(
        time_ms=minutes if minutes < 0 else minutes * MINUTE_MS,
        size_bytes=megabytes if megabytes < 0 else megabytes * MIB,
    )
