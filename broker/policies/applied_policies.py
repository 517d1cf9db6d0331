"""The policies in force for a topic: its own, its namespace's, or the broker's settings.  Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from broker.policies.backlog_quotas import BacklogQuota, QuotaType, quota_in, quota_json
from broker.policies.message_rate import (
    BYTES_DISPATCHED,
    BYTES_PUBLISHED,
    IS_RELATIVE,
    MESSAGES_DISPATCHED,
    MESSAGES_PUBLISHED,
    PERIOD,
    SUBSCRIBES,
    MessageRate,
    SubscribeRate,
    dispatch_rate_of,
    is_dispatch_rate,
    publish_rate_of,
    subscribe_rate_of,
)
from broker.policies.namespaces import Policies
from broker.policies.persistence import persistence_of_broker
from broker.policies.policy_kinds import (
    AUTO_SUBSCRIPTION_CREATION,
    AUTO_TOPIC_CREATION,
    BACKLOG_QUOTAS,
    COMPACTION_THRESHOLD,
    CONSUMER_GRACE,
    DEDUPLICATION,
    DELAYED_DELIVERY,
    DISPATCH_RATE,
    ENCRYPTION_REQUIRED,
    INACTIVE_TOPICS,
    KEY_HASHES,
    MAX_CONSUMERS,
    MAX_CONSUMERS_PER_SUBSCRIPTION,
    MAX_MESSAGE_SIZE,
    MAX_PRODUCERS,
    MAX_SUBSCRIPTIONS,
    MAX_TOPICS,
    MAX_UNACKED_PER_CONSUMER,
    MAX_UNACKED_PER_SUBSCRIPTION,
    MESSAGE_TTL,
    OLD_STRATEGIES,
    PERSISTENCE,
    POLICIES,
    PUBLISH_RATE,
    REPLICATED_SCHEMAS,
    REPLICATION,
    REPLICATION_KEY_HASH,
    REPLICATOR_DISPATCH_RATE,
    RETENTION,
    SCHEMA_AUTO_UPDATE,
    SCHEMA_AUTO_UPDATE_STRATEGY,
    SCHEMA_COMPATIBILITY,
    SCHEMA_VALIDATION,
    SUBSCRIBE_RATE,
    SUBSCRIPTION_DISPATCH_RATE,
    SUBSCRIPTION_EXPIRATION,
    SUBSCRIPTION_RATE_SUFFIX,
    SUBSCRIPTION_TYPES,
    SUBSCRIPTION_TYPES_ENABLED,
    SUBSCRIPTIONS_CAUGHT_UP,
    TRANSACTION_COORDINATOR,
    WITHOUT_SUBSCRIPTIONS,
    PolicyKind,
)
from broker.policies.schema_compatibility import CompatibilityStrategy
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
    size_quota: BacklogQuota | None
    """The limit of the backlog in bytes; None: no limit."""
    age_quota: BacklogQuota | None
    """The limit of the age of the backlog; None: no limit."""
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
    requires_encryption: bool
    """Whether producers must encrypt their messages."""
    schema_compatibility: CompatibilityStrategy
    """How a new schema of clients is compared with those of the topic."""
    adds_schemas: bool
    """Whether producers and consumers may add a schema to those of the topic."""
    adds_replicated_schemas: bool
    """Whether replicators of other clusters may, even where `adds_schemas` is False."""
    requires_schema: bool
    """Whether producers without schema are refused on a topic with one."""
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
    publish_rate: MessageRate | None
    dispatch_rate: MessageRate | None
    """The rate of sending to all subscriptions together."""
    subscription_dispatch_rate: MessageRate | None
    """The rate of sending to each subscription that has none of its own."""
    dispatch_rates: Mapping[str, MessageRate | None]
    """The rates of single subscriptions, by name."""
    subscribe_rate: SubscribeRate | None
    """How often each consumer may subscribe."""
    replication_clusters: frozenset[str]
    """The clusters among which a topic is replicated, the local one included; empty: it is not
    replicated."""
    replication_key_hash: str
    """By which half of a key's hash clients choose the segments of a scalable topic, here and in
    the clusters among which it is replicated: one of `KEY_HASHES`."""
    replicator_dispatch_rate: MessageRate | None
    """The rate of sending to each other cluster."""

    def dispatch_rate_of(self, subscription: str) -> MessageRate | None:
        """The rate of sending to one subscription."""
        return self.dispatch_rates.get(subscription, self.subscription_dispatch_rate)


def values_of_broker(settings: Settings) -> Mapping[PolicyKind, object]:
    """The broker's values, as REST shows them."""
    return {
        RETENTION: {
            "retentionTimeInMinutes": settings.retention_time_minutes,
            "retentionSizeInMB": settings.retention_size_mb,
        },
        PERSISTENCE: persistence_of_broker(settings),
        BACKLOG_QUOTAS: {
            kind.value: quota_json(
                settings.backlog_quota_default_limit_bytes,
                settings.backlog_quota_default_limit_s,
                settings.backlog_quota_default_retention_policy,
            )
            for kind in QuotaType
        },
        DEDUPLICATION: settings.deduplication,
        ENCRYPTION_REQUIRED: settings.encryption_required,
        TRANSACTION_COORDINATOR: settings.coordinators_of_v4_clients > 0,
        AUTO_SUBSCRIPTION_CREATION: {
            "allowAutoSubscriptionCreation": settings.auto_subscription_creation
        },
        COMPACTION_THRESHOLD: settings.broker_service_compaction_threshold_bytes,
        CONSUMER_GRACE: settings.scalable_consumer_grace_period_s,
        MAX_PRODUCERS: settings.max_producers_per_topic,
        MAX_CONSUMERS: settings.max_consumers_per_topic,
        MAX_CONSUMERS_PER_SUBSCRIPTION: settings.max_consumers_per_subscription,
        MAX_SUBSCRIPTIONS: settings.max_subscriptions_per_topic,
        MAX_TOPICS: settings.max_topics_per_namespace,
        MAX_UNACKED_PER_CONSUMER: settings.max_unacked_messages_per_consumer,
        MAX_UNACKED_PER_SUBSCRIPTION: settings.max_unacked_messages_per_subscription,
        MAX_MESSAGE_SIZE: LARGEST_MESSAGE,
        SUBSCRIPTION_TYPES_ENABLED: list(SUBSCRIPTION_TYPES),
        MESSAGE_TTL: settings.ttl_duration_default_s,
        SCHEMA_COMPATIBILITY: settings.schema_compatibility_strategy,
        SCHEMA_AUTO_UPDATE: settings.schema_auto_update,
        SCHEMA_VALIDATION: settings.schema_validation_enforced,
        REPLICATION: [settings.cluster_name],
        REPLICATION_KEY_HASH: KEY_HASHES[0],
        **_lifecycle_of_broker(settings),
        **_rates_of_broker(settings),
    }


def _rates_of_broker(settings: Settings) -> Mapping[PolicyKind, object]:
    """The broker's rates of each topic, and of each subscription and consumer."""
    relative = {
        IS_RELATIVE: settings.dispatch_throttling_rate_relative_to_publish_rate,
        PERIOD: 1,
    }
    return {
        PUBLISH_RATE: {
            MESSAGES_PUBLISHED: settings.max_publish_rate_per_topic_in_messages,
            BYTES_PUBLISHED: settings.max_publish_rate_per_topic_in_bytes,
        },
        DISPATCH_RATE: {
            MESSAGES_DISPATCHED: settings.dispatch_throttling_rate_per_topic_in_msg,
            BYTES_DISPATCHED: settings.dispatch_throttling_rate_per_topic_in_byte,
            **relative,
        },
        SUBSCRIPTION_DISPATCH_RATE: {
            MESSAGES_DISPATCHED: settings.dispatch_throttling_rate_per_subscription_in_msg,
            BYTES_DISPATCHED: settings.dispatch_throttling_rate_per_subscription_in_byte,
            **relative,
        },
        REPLICATOR_DISPATCH_RATE: {
            MESSAGES_DISPATCHED: settings.dispatch_throttling_rate_per_replicator_in_msg,
            BYTES_DISPATCHED: settings.dispatch_throttling_rate_per_replicator_in_byte,
            IS_RELATIVE: False,
            PERIOD: 1,
        },
        SUBSCRIBE_RATE: {
            SUBSCRIBES: settings.subscribe_throttling_rate_per_consumer,
            PERIOD: settings.subscribe_rate_period_per_consumer_s,
        },
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
    if kind.by_member:
        return _members_in_force(kind, of_broker, namespace, topic)
    found = None if kind.topic_path is None else topic.get(kind.topic_path)
    if found is None and kind.path is not None:
        found = kind.of_namespace(namespace.raw)
    if kind is SCHEMA_COMPATIBILITY and (found is None or not kind.valid(found)):
        older = namespace.raw.get(SCHEMA_AUTO_UPDATE_STRATEGY.member)
        if isinstance(older, str) and older in OLD_STRATEGIES:
            found = OLD_STRATEGIES[older].name
    if found is None or not kind.valid(found):
        found = of_broker.get(kind)
    if kind is REPLICATION and not _names(of_broker.get(kind)) <= _names(found):
        # It is from a time when the cluster had another name, and was alone.
        found = of_broker.get(kind)
    return found


def _members_in_force(
    kind: PolicyKind,
    of_broker: Mapping[PolicyKind, object],
    namespace: Policies,
    topic: PoliciesOfTopic,
) -> Mapping[str, object]:
    """Each member of a value, from the first level that has it."""
    found: dict[str, object] = {}
    for level in (
        of_broker.get(kind),
        namespace.raw.get(kind.member),
        topic.global_.get(kind.topic_path or ""),
        topic.local.get(kind.topic_path or ""),
    ):
        if isinstance(level, dict) and kind.valid(level):
            found |= level
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
        size_quota=quota_in(values[BACKLOG_QUOTAS], QuotaType.SIZE),
        age_quota=quota_in(values[BACKLOG_QUOTAS], QuotaType.AGE),
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
        # Nobody can switch off what the broker requires, as in Pulsar.
        requires_encryption=True in (values[ENCRYPTION_REQUIRED], of_broker[ENCRYPTION_REQUIRED]),
        schema_compatibility=CompatibilityStrategy[str(values[SCHEMA_COMPATIBILITY])],
        adds_schemas=values[SCHEMA_AUTO_UPDATE] is True,
        adds_replicated_schemas=namespace.raw.get(REPLICATED_SCHEMAS) is not False,
        requires_schema=True in (values[SCHEMA_VALIDATION], of_broker[SCHEMA_VALIDATION]),
        subscription_types=frozenset(enabled),
        message_ttl_s=count(MESSAGE_TTL),
        compaction_threshold_bytes=count(COMPACTION_THRESHOLD),
        subscription_expiration_s=60 * count(SUBSCRIPTION_EXPIRATION),
        inactive_topics=_inactive_topics(section(INACTIVE_TOPICS)),
        delays_delivery=delayed["active"] is True,
        delayed_tick_ms=_number(delayed.get("tickTime")),
        max_delivery_delay_ms=_number(delayed.get("maxDeliveryDelayInMillis")),
        publish_rate=publish_rate_of(section(PUBLISH_RATE)),
        dispatch_rate=dispatch_rate_of(section(DISPATCH_RATE)),
        subscription_dispatch_rate=dispatch_rate_of(section(SUBSCRIPTION_DISPATCH_RATE)),
        dispatch_rates=_rates_of_subscriptions(topic),
        subscribe_rate=subscribe_rate_of(section(SUBSCRIBE_RATE)),
        replication_clusters=_replication_clusters(_names(values[REPLICATION])),
        replication_key_hash=str(values[REPLICATION_KEY_HASH]),
        replicator_dispatch_rate=dispatch_rate_of(section(REPLICATOR_DISPATCH_RATE)),
    )


def _names(value: object) -> frozenset[str]:
    return frozenset(value) if isinstance(value, list) else frozenset()


def _replication_clusters(names: frozenset[str]) -> frozenset[str]:
    return names if len(names) > 1 else frozenset()


def _rates_of_subscriptions(topic: PoliciesOfTopic) -> Mapping[str, MessageRate | None]:
    rates: dict[str, MessageRate | None] = {}
    for path in (*topic.global_, *topic.local):
        value = topic.get(path) if path.endswith(SUBSCRIPTION_RATE_SUFFIX) else None
        if isinstance(value, dict) and is_dispatch_rate(value):
            rates[path.removesuffix(SUBSCRIPTION_RATE_SUFFIX)] = dispatch_rate_of(value)
    return rates


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
