"""The policies that are served: their names over REST, their members in records, their values.

Pure.  `POLICIES` is the table.  A policy of a namespace is a member of the namespace's record,
under Pulsar's own name.  A policy of a topic is a member of the topic's record (`topic_policies`),
under the name of its REST resource.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from broker.policies.backlog_quotas import QuotaPolicy, QuotaType, are_quotas
from broker.policies.json_numbers import INT32_MAX, is_number
from broker.policies.message_rate import is_dispatch_rate, is_publish_rate, is_subscribe_rate
from broker.policies.persistence import WANTED as PERSISTENCE_WANTED
from broker.policies.persistence import is_persistence
from broker.policies.schema_compatibility import CompatibilityStrategy
from config.bounds import MAX_PARTITIONS

UNDEFINED = "UNDEFINED"
"""Pulsar's name for a namespace without a strategy of its own."""
SUBSCRIPTION_TYPES = ("Exclusive", "Shared", "Failover", "Key_Shared")
"""Pulsar's names of the types of subscriptions, in policies and statistics."""
OLD_STRATEGIES: Mapping[str, CompatibilityStrategy] = {
    "AutoUpdateDisabled": CompatibilityStrategy.ALWAYS_INCOMPATIBLE,
    "Backward": CompatibilityStrategy.BACKWARD,
    "Forward": CompatibilityStrategy.FORWARD,
    "Full": CompatibilityStrategy.FULL,
    "AlwaysCompatible": CompatibilityStrategy.ALWAYS_COMPATIBLE,
    "BackwardTransitive": CompatibilityStrategy.BACKWARD_TRANSITIVE,
    "ForwardTransitive": CompatibilityStrategy.FORWARD_TRANSITIVE,
    "FullTransitive": CompatibilityStrategy.FULL_TRANSITIVE,
}
"""Pulsar's names of strategies before there was `schemaCompatibilityStrategy`."""
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
    """The value that GET shows where none is set, if Pulsar's tools need one."""
    shows_broker: bool = False
    """Whether GET shows the broker's value where none is set."""
    by_cluster: bool = False
    """Whether a namespace's record has the value under the name of the cluster, as in Pulsar."""
    of_segments: bool = True
    """Whether it holds for the segments of a scalable topic."""
    by_member: bool = False
    """Whether each member of the value is a policy of its own, with its own levels."""
    has_own_routes: bool = False
    """Whether a REST module of its own serves it, as values are not simply set."""

    def of_namespace(self, record: Mapping[str, object]) -> object:
        """The value in a namespace's record; None if it is not set."""
        value = record.get(self.member)
        if self.by_cluster and isinstance(value, dict):
            # A record has the values of this cluster alone, maybe under an earlier name.
            return next(iter(value.values()), None)
        return value


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_retention(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == _RETENTION_MEMBERS
        and all(is_number(limit, -1, INT32_MAX) for limit in value.values())
        # A limit of 0 alone would keep nothing, whatever the other one says.
        and len({limit == 0 for limit in value.values()}) == 1
    )


def _are_clusters(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, str) for each in value)


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
    f"retentionTimeInMinutes and retentionSizeInMB, each from -1 (no limit) to {INT32_MAX}, both 0 "
    "or neither",
    topic_path="retention",
)
PERSISTENCE = PolicyKind(
    "persistence", "persistence", is_persistence, PERSISTENCE_WANTED, "persistence"
)
DEDUPLICATION = PolicyKind(
    "deduplication", "deduplicationEnabled", _is_flag, _FLAG, topic_path="deduplicationEnabled"
)
TRANSACTION_COORDINATOR = PolicyKind(
    "transactionCoordinatorEnabled", "transaction_coordinator_enabled", _is_flag, _FLAG
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
    topic_path="autoSubscriptionCreation",
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
    topic_path="schemaCompatibilityStrategy",
    unset=("", UNDEFINED),
)
SCHEMA_AUTO_UPDATE_STRATEGY = PolicyKind(
    "schemaAutoUpdateCompatibilityStrategy",
    "schema_auto_update_compatibility_strategy",
    lambda value: isinstance(value, str) and value in OLD_STRATEGIES,
    "one of " + ", ".join(OLD_STRATEGIES),
    unset=("", "Full"),
)
"""The older name of `SCHEMA_COMPATIBILITY`, in force where that is not set."""
SCHEMA_AUTO_UPDATE = PolicyKind(
    "isAllowAutoUpdateSchema",
    "is_allow_auto_update_schema",
    _is_flag,
    _FLAG,
    unset=(True,),
    shows_broker=True,
)
REPLICATED_SCHEMAS = "is_allow_auto_update_schema_with_replicator"
"""The member by which replicators of other clusters may add schemas; without it they may."""
SCHEMA_VALIDATION = PolicyKind(
    "schemaValidationEnforced",
    "schema_validation_enforced",
    _is_flag,
    _FLAG,
    topic_path="schemaValidationEnforced",
    unset=(False,),
    shown_unset=False,
)
MAX_PRODUCERS = PolicyKind(
    "maxProducersPerTopic",
    "max_producers_per_topic",
    _is_count,
    _COUNT,
    topic_path="maxProducers",
    unset=_UNSET_COUNT,
)
MAX_CONSUMERS = PolicyKind(
    "maxConsumersPerTopic",
    "max_consumers_per_topic",
    _is_count,
    _COUNT,
    topic_path="maxConsumers",
    unset=_UNSET_COUNT,
)
MAX_CONSUMERS_PER_SUBSCRIPTION = PolicyKind(
    "maxConsumersPerSubscription",
    "max_consumers_per_subscription",
    _is_count,
    _COUNT,
    topic_path="maxConsumersPerSubscription",
    unset=_UNSET_COUNT,
)
MAX_SUBSCRIPTIONS = PolicyKind(
    "maxSubscriptionsPerTopic",
    "max_subscriptions_per_topic",
    _is_count,
    _COUNT,
    topic_path="maxSubscriptionsPerTopic",
    unset=_UNSET_COUNT,
)
MAX_TOPICS = PolicyKind(
    "maxTopicsPerNamespace",
    "max_topics_per_namespace",
    _is_count,
    _COUNT,
    unset=_UNSET_COUNT,
    shown_unset=0,
)
MAX_UNACKED_PER_CONSUMER = PolicyKind(
    "maxUnackedMessagesPerConsumer",
    "max_unacked_messages_per_consumer",
    _is_count,
    _COUNT,
    topic_path="maxUnackedMessagesOnConsumer",
    unset=_UNSET_COUNT,
)
MAX_UNACKED_PER_SUBSCRIPTION = PolicyKind(
    "maxUnackedMessagesPerSubscription",
    "max_unacked_messages_per_subscription",
    _is_count,
    _COUNT,
    topic_path="maxUnackedMessagesOnSubscription",
    unset=_UNSET_COUNT,
)
BACKLOG_QUOTAS = PolicyKind(
    "backlogQuotaMap",
    "backlog_quota_map",
    are_quotas,
    f"quotas by {' or '.join(QuotaType)}, each with limitSize in bytes, limitTime in seconds, and "
    f"policy {', '.join(QuotaPolicy)}",
    topic_path="backlogQuotaMap",
    unset=({},),
    by_member=True,
    has_own_routes=True,
)
COMPACTION_THRESHOLD = PolicyKind(
    "compactionThreshold",
    "compaction_threshold",
    _is_size,
    "a number of bytes; 0 is never",
    topic_path="compactionThreshold",
    of_segments=False,
)
MAX_MESSAGE_SIZE = PolicyKind(
    None,
    "maxMessageSize",
    _is_count,
    f"a number of bytes up to {INT32_MAX}",
    topic_path="maxMessageSize",
)
SUBSCRIPTION_TYPES_ENABLED = PolicyKind(
    "subscriptionTypesEnabled",
    "subscription_types_enabled",
    _are_types,
    f"a list of {', '.join(SUBSCRIPTION_TYPES)}; an empty one enables all types",
    topic_path="subscriptionTypesEnabled",
    unset=([],),
)
MESSAGE_TTL = PolicyKind(
    "messageTTL",
    "message_ttl_in_seconds",
    _is_count,
    f"{_SECONDS}; 0 is for ever",
    topic_path="messageTTL",
    is_query=True,
)
SUBSCRIPTION_EXPIRATION = PolicyKind(
    "subscriptionExpirationTime",
    "subscription_expiration_time_minutes",
    _is_count,
    f"a number of minutes from 0 to {INT32_MAX}; 0 is never",
    topic_path="subscriptionExpirationTime",
    is_query=True,
)
INACTIVE_TOPICS = PolicyKind(
    "inactiveTopicPolicies",
    "inactive_topic_policies",
    _is_inactive_topics,
    f"an object with inactiveTopicDeleteMode {' or '.join(_DELETE_MODES)}, "
    f"maxInactiveDurationSeconds of 1 to {INT32_MAX}, and deleteWhileInactive true or false",
    topic_path="inactiveTopicPolicies",
    of_segments=False,
)
DELAYED_DELIVERY = PolicyKind(
    "delayedDelivery",
    "delayed_delivery_policies",
    _is_delayed_delivery,
    "an object with active true or false, tickTime in milliseconds, and "
    "maxDeliveryDelayInMillis; 0 is no maximum",
    topic_path="delayedDelivery",
)
ENCRYPTION_REQUIRED = PolicyKind(
    "encryptionRequired",
    "encryption_required",
    _is_flag,
    _FLAG,
    unset=(False,),
    shown_unset=False,
)
_DISPATCH_RATE_WANTED = (
    "an object with dispatchThrottlingRateInMsg, dispatchThrottlingRateInByte, "
    "relativeToPublishRate true or false, and ratePeriodInSecond; rates of -1 are no limit"
)
PUBLISH_RATE = PolicyKind(
    "publishRate",
    "publishMaxMessageRate",
    is_publish_rate,
    "an object with publishThrottlingRateInMsg and publishThrottlingRateInByte; -1 is no limit",
    topic_path="publishRate",
    unset=({},),
    by_cluster=True,
)
DISPATCH_RATE = PolicyKind(
    "dispatchRate",
    "topicDispatchRate",
    is_dispatch_rate,
    _DISPATCH_RATE_WANTED,
    topic_path="dispatchRate",
    unset=({},),
    by_cluster=True,
)
SUBSCRIPTION_DISPATCH_RATE = PolicyKind(
    "subscriptionDispatchRate",
    "subscriptionDispatchRate",
    is_dispatch_rate,
    _DISPATCH_RATE_WANTED,
    topic_path="subscriptionDispatchRate",
    unset=({},),
    by_cluster=True,
)
SUBSCRIBE_RATE = PolicyKind(
    "subscribeRate",
    "clusterSubscribeRate",
    is_subscribe_rate,
    "an object with subscribeThrottlingRatePerConsumer and ratePeriodInSecond; a rate of -1 is "
    "no limit",
    topic_path="subscribeRate",
    unset=({},),
    by_cluster=True,
)
REPLICATOR_DISPATCH_RATE = PolicyKind(
    "replicatorDispatchRate",
    "replicatorDispatchRate",
    is_dispatch_rate,
    _DISPATCH_RATE_WANTED,
    "replicatorDispatchRate",
    ({},),
    by_cluster=True,
)
REPLICATION = PolicyKind(
    "replication",
    "replication_clusters",
    _are_clusters,
    "a list of names of clusters",
    "replication",
    has_own_routes=True,
)
KEY_HASHES = ("high", "low")
"""The halves of a key's hash by which clients may choose a segment, the usual one first."""
REPLICATION_KEY_HASH = PolicyKind(
    None,
    "replication_key_hash",
    lambda value: value in KEY_HASHES,
    " or ".join(KEY_HASHES),
    "replicationKeyHash",
    has_own_routes=True,
)
SUBSCRIPTION_RATE_SUFFIX = "/dispatchRate"
"""In a topic's record, what follows the name of a subscription that has its own dispatch rate."""
POLICIES = (
    REPLICATION,
    REPLICATION_KEY_HASH,
    REPLICATOR_DISPATCH_RATE,
    ENCRYPTION_REQUIRED,
    PUBLISH_RATE,
    DISPATCH_RATE,
    SUBSCRIPTION_DISPATCH_RATE,
    SUBSCRIBE_RATE,
    SUBSCRIPTION_EXPIRATION,
    INACTIVE_TOPICS,
    DELAYED_DELIVERY,
    RETENTION,
    PERSISTENCE,
    BACKLOG_QUOTAS,
    DEDUPLICATION,
    TRANSACTION_COORDINATOR,
    AUTO_TOPIC_CREATION,
    AUTO_SUBSCRIPTION_CREATION,
    COMPACTION_THRESHOLD,
    OFFLOAD_DELETION_LAG,
    OFFLOAD_THRESHOLD,
    CONSUMER_GRACE,
    SCHEMA_COMPATIBILITY,
    SCHEMA_AUTO_UPDATE_STRATEGY,
    SCHEMA_AUTO_UPDATE,
    SCHEMA_VALIDATION,
    MAX_PRODUCERS,
    MAX_CONSUMERS,
    MAX_CONSUMERS_PER_SUBSCRIPTION,
    MAX_SUBSCRIPTIONS,
    MAX_TOPICS,
    MAX_UNACKED_PER_CONSUMER,
    MAX_UNACKED_PER_SUBSCRIPTION,
    MAX_MESSAGE_SIZE,
    SUBSCRIPTION_TYPES_ENABLED,
    MESSAGE_TTL,
)
OF_NAMESPACES: Mapping[str, PolicyKind] = {
    kind.path: kind for kind in POLICIES if kind.path is not None and not kind.has_own_routes
}
"""The policies that a namespace may have and that requests set as a whole, by path."""
OF_TOPICS: Mapping[str, PolicyKind] = {
    kind.topic_path: kind
    for kind in POLICIES
    if kind.topic_path is not None and not kind.has_own_routes
}
"""The policies that a topic may have and that requests set as a whole, by path."""
