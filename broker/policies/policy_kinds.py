"""The policies that are served: their names over REST, their members in records, their values.

Pure.  `POLICIES` is the table.  A policy of a namespace is a member of the namespace's record,
under Pulsar's own name.  A policy of a topic is a member of the topic's record (`topic_policies`),
under the name of its REST resource.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from broker.policies.json_numbers import INT32_MAX, is_number
from broker.policies.schema_compatibility import CompatibilityStrategy
from config.bounds import MAX_PARTITIONS

UNDEFINED = "UNDEFINED"
"""Pulsar's name for a namespace without a strategy of its own."""
SUBSCRIPTION_TYPES = ("Exclusive", "Shared", "Failover", "Key_Shared")
"""Pulsar's names of the types of subscriptions, in policies and statistics."""
_RETENTION_MEMBERS = frozenset({"retentionTimeInMinutes", "retentionSizeInMB"})
_AUTO_CREATION_MEMBERS = frozenset({"allowAutoTopicCreation", "topicType", "defaultNumPartitions"})
_AUTO_SUBSCRIPTION_MEMBER = "allowAutoSubscriptionCreation"
WITHOUT_SUBSCRIPTIONS = "delete_when_no_subscriptions"
SUBSCRIPTIONS_CAUGHT_UP = "delete_when_subscriptions_caught_up"
_DELETE_MODES = (WITHOUT_SUBSCRIPTIONS, SUBSCRIPTIONS_CAUGHT_UP)
_INACTIVE_MEMBERS = frozenset(
    {"inactiveTopicDeleteMode", "maxInactiveDurationSeconds", "deleteWhileInactive"}
)
_DELAYED_MEMBERS = frozenset({"active", "tickTime", "maxDeliveryDelayInMillis"})


@dataclass(frozen=True, slots=True, eq=False)
class PolicyKind:
    """One policy: its resources, its member in a namespace's record, its valid values.

    `path` is the resource under a namespace, and `topic_path` the one under a topic; None where the
    policy does not exist at that level.
    """

    path: str | None
    member: str
    valid: Callable[[object], bool]
    wanted: str
    """The valid values in words, for errors."""
    topic_path: str | None = None
    unset: tuple[object, ...] = ()
    """Values that mean the broker's setting when they come with a new namespace."""
    is_query: bool = False
    """Whether a topic's value may come as a query parameter of this name instead of the body."""
    shown_unset: int | None = None
    """What GET answers for a namespace without it, where Pulsar's tools need a number."""
    of_segments: bool = True
    """Whether it holds for the segments of a scalable topic."""


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_retention(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == _RETENTION_MEMBERS
        and all(is_number(limit, -1, INT32_MAX) for limit in value.values())
    )


def _is_auto_creation(value: object) -> bool:
    if not isinstance(value, dict) or not value.keys() <= _AUTO_CREATION_MEMBERS:
        return False
    kind, count = value.get("topicType"), value.get("defaultNumPartitions")
    if kind == "partitioned":
        fits = is_number(count, 1, MAX_PARTITIONS)
    else:
        fits = kind in (None, "non-partitioned") and count is None
    return isinstance(value.get("allowAutoTopicCreation"), bool) and fits


def _is_auto_subscription_creation(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {_AUTO_SUBSCRIPTION_MEMBER}
        and isinstance(value[_AUTO_SUBSCRIPTION_MEMBER], bool)
    )


def _is_inactive_topics(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == _INACTIVE_MEMBERS
        and value["inactiveTopicDeleteMode"] in _DELETE_MODES
        and is_number(value["maxInactiveDurationSeconds"], 1, INT32_MAX)
        and isinstance(value["deleteWhileInactive"], bool)
    )


def _is_delayed_delivery(value: object) -> bool:
    # Clients before Pulsar 4 know no maximum.
    return (
        isinstance(value, dict)
        and {"active", "tickTime"} <= value.keys() <= _DELAYED_MEMBERS
        and isinstance(value["active"], bool)
        and is_number(value["tickTime"], 0, INT32_MAX)
        and is_number(value.get("maxDeliveryDelayInMillis", 0), 0)
    )


def _is_long(value: object) -> bool:
    return is_number(value, -1)


def _is_size(value: object) -> bool:
    return is_number(value, 0)


def _is_count(value: object) -> bool:
    return is_number(value, 0, INT32_MAX)


def _is_strategy(value: object) -> bool:
    return isinstance(value, str) and value in CompatibilityStrategy.__members__


def _are_types(value: object) -> bool:
    return isinstance(value, list) and all(each in SUBSCRIPTION_TYPES for each in value)


_FLAG = "true or false"
_COUNT = f"a number from 0 to {INT32_MAX}; 0 is no limit"
_SECONDS = f"a number of seconds from 0 to {INT32_MAX}"
_UNSET_COUNT: tuple[object, ...] = (-1,)

RETENTION = PolicyKind(
    "retention",
    "retention_policies",
    _is_retention,
    f"retentionTimeInMinutes and retentionSizeInMB, each from -1 to {INT32_MAX}",
    "retention",
)
DEDUPLICATION = PolicyKind(
    "deduplication", "deduplicationEnabled", _is_flag, _FLAG, "deduplicationEnabled"
)
AUTO_TOPIC_CREATION = PolicyKind(
    "autoTopicCreation",
    "autoTopicCreationOverride",
    _is_auto_creation,
    "an object with allowAutoTopicCreation true or false, topicType partitioned or "
    f"non-partitioned, and defaultNumPartitions of 1 to {MAX_PARTITIONS} if it is partitioned",
)
AUTO_SUBSCRIPTION_CREATION = PolicyKind(
    "autoSubscriptionCreation",
    "autoSubscriptionCreationOverride",
    _is_auto_subscription_creation,
    "an object with allowAutoSubscriptionCreation true or false",
    "autoSubscriptionCreation",
)
OFFLOAD_DELETION_LAG = PolicyKind(
    "offloadDeletionLagMs", "offload_deletion_lag_ms", _is_long, "a number of milliseconds, or -1"
)
OFFLOAD_THRESHOLD = PolicyKind(
    "offloadThreshold",
    "offload_threshold",
    _is_long,
    "a number of bytes, or -1",
    unset=(-1,),
    shown_unset=-1,
)
CONSUMER_GRACE = PolicyKind(
    "scalableTopicConsumerSessionGracePeriod",
    "scalableTopicConsumerSessionGracePeriodSeconds",
    _is_count,
    _SECONDS,
)
SCHEMA_COMPATIBILITY = PolicyKind(
    "schemaCompatibilityStrategy",
    "schema_compatibility_strategy",
    _is_strategy,
    "one of " + ", ".join(CompatibilityStrategy.__members__),
    unset=("", UNDEFINED),
)
MAX_PRODUCERS = PolicyKind(
    "maxProducersPerTopic",
    "max_producers_per_topic",
    _is_count,
    _COUNT,
    "maxProducers",
    _UNSET_COUNT,
)
MAX_CONSUMERS = PolicyKind(
    "maxConsumersPerTopic",
    "max_consumers_per_topic",
    _is_count,
    _COUNT,
    "maxConsumers",
    _UNSET_COUNT,
)
MAX_CONSUMERS_PER_SUBSCRIPTION = PolicyKind(
    "maxConsumersPerSubscription",
    "max_consumers_per_subscription",
    _is_count,
    _COUNT,
    "maxConsumersPerSubscription",
    _UNSET_COUNT,
)
MAX_SUBSCRIPTIONS = PolicyKind(
    "maxSubscriptionsPerTopic",
    "max_subscriptions_per_topic",
    _is_count,
    _COUNT,
    "maxSubscriptionsPerTopic",
    _UNSET_COUNT,
)
MAX_UNACKED_PER_CONSUMER = PolicyKind(
    "maxUnackedMessagesPerConsumer",
    "max_unacked_messages_per_consumer",
    _is_count,
    _COUNT,
    "maxUnackedMessagesOnConsumer",
    _UNSET_COUNT,
)
MAX_UNACKED_PER_SUBSCRIPTION = PolicyKind(
    "maxUnackedMessagesPerSubscription",
    "max_unacked_messages_per_subscription",
    _is_count,
    _COUNT,
    "maxUnackedMessagesOnSubscription",
    _UNSET_COUNT,
)
COMPACTION_THRESHOLD = PolicyKind(
    "compactionThreshold",
    "compaction_threshold",
    _is_size,
    "a number of bytes; 0 is never",
    "compactionThreshold",
    of_segments=False,
)
MAX_MESSAGE_SIZE = PolicyKind(
    None, "maxMessageSize", _is_count, f"a number of bytes up to {INT32_MAX}", "maxMessageSize"
)
SUBSCRIPTION_TYPES_ENABLED = PolicyKind(
    "subscriptionTypesEnabled",
    "subscription_types_enabled",
    _are_types,
    f"a list of {', '.join(SUBSCRIPTION_TYPES)}; an empty one enables all types",
    "subscriptionTypesEnabled",
    ([],),
)
MESSAGE_TTL = PolicyKind(
    "messageTTL",
    "message_ttl_in_seconds",
    _is_count,
    f"{_SECONDS}; 0 is for ever",
    "messageTTL",
    is_query=True,
)
SUBSCRIPTION_EXPIRATION = PolicyKind(
    "subscriptionExpirationTime",
    "subscription_expiration_time_minutes",
    _is_count,
    f"a number of minutes from 0 to {INT32_MAX}; 0 is never",
)
INACTIVE_TOPICS = PolicyKind(
    "inactiveTopicPolicies",
    "inactive_topic_policies",
    _is_inactive_topics,
    f"an object with inactiveTopicDeleteMode {' or '.join(_DELETE_MODES)}, "
    f"maxInactiveDurationSeconds of 1 to {INT32_MAX}, and deleteWhileInactive true or false",
    "inactiveTopicPolicies",
    of_segments=False,
)
DELAYED_DELIVERY = PolicyKind(
    "delayedDelivery",
    "delayed_delivery_policies",
    _is_delayed_delivery,
    "an object with active true or false, tickTime in milliseconds, and "
    "maxDeliveryDelayInMillis; 0 is no maximum",
    "delayedDelivery",
)
POLICIES = (
    SUBSCRIPTION_EXPIRATION,
    INACTIVE_TOPICS,
    DELAYED_DELIVERY,
    RETENTION,
    DEDUPLICATION,
    AUTO_TOPIC_CREATION,
    AUTO_SUBSCRIPTION_CREATION,
    COMPACTION_THRESHOLD,
    OFFLOAD_DELETION_LAG,
    OFFLOAD_THRESHOLD,
    CONSUMER_GRACE,
    SCHEMA_COMPATIBILITY,
    MAX_PRODUCERS,
    MAX_CONSUMERS,
    MAX_CONSUMERS_PER_SUBSCRIPTION,
    MAX_SUBSCRIPTIONS,
    MAX_UNACKED_PER_CONSUMER,
    MAX_UNACKED_PER_SUBSCRIPTION,
    MAX_MESSAGE_SIZE,
    SUBSCRIPTION_TYPES_ENABLED,
    MESSAGE_TTL,
)
OF_NAMESPACES: Mapping[str, PolicyKind] = {
    kind.path: kind for kind in POLICIES if kind.path is not None
}
"""The policies that a namespace may have, by path."""
OF_TOPICS: Mapping[str, PolicyKind] = {
    kind.topic_path: kind for kind in POLICIES if kind.topic_path is not None
}
"""The policies that a topic may have, by path."""
