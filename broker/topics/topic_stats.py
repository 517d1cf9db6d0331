"""Statistics of one topic, under the member names that Pulsar's tools read."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from broker.policies.applied_policies import AppliedPolicies
from broker.policies.backlog_quotas import NO_LIMIT
from broker.topics.backlog_sizes import BacklogSize, backlog_sizes, earliest_of
from broker.topics.consumer import Consumer, SubscriptionType
from broker.topics.dispatch.entry_facts import publish_time_ms
from broker.topics.dispatch.key_shared import KeySharedDispatcher
from broker.topics.producer import Producer, ProducerState
from broker.topics.replication import OutboundStats
from broker.topics.subscription import Subscription
from broker.topics.throttle import Level, ThrottledCounts
from broker.topics.topic import Topic
from broker.topics.traffic import Delivered, Published, SubscriptionTraffic, Traffic
from config.bounds import SUBSCRIPTIONS_SHOWN_AT_ONCE
from magnetar.protocol.key_hash import HashRange
from magnetar.protocol.server_error import MagnetarError

ACKED_RUNS: Final = "nonContiguousDeletedMessagesRanges"
BYTES_OUT: Final = "bytesOutCounter"
EARLIEST_OF_TOPIC = "earliestMsgPublishTimeInBacklogs"
CREATION: Final = "topicCreationTimeStamp"
KEY_RANGES: Final = "keyHashRangeArrays"
LAST_PUBLISH: Final = "lastPublishTimeStamp"
MESSAGES_OUT: Final = "msgOutCounter"
NO_BACKLOG_AGE: Final = -1
"""`oldestBacklogMessageAgeSeconds` without a backlog, as in Pulsar."""
OLDEST_AGE = "oldestBacklogMessageAgeSeconds"
OLDEST_SUBSCRIPTION = "oldestBacklogMessageSubscriptionName"
LAST_FAILURE: Final = "lastFailure"
"""The member with the reason why a replicator stands, which Pulsar does not have."""
INCOMPLETE_LIST: Final = "incompleteList"
"""The member with the clusters that the other cluster's list lacks, which Pulsar does not have."""
OPENED_BATCHES: Final = "openedBatchCount"
"""The member with the batches of a segment that were divided, which Pulsar does not have."""
REPLICATION_DELAY: Final = "replicationDelayInSeconds"
DROPPED: Final = ("msgDropRate", "msgDropCount")
"""Of a replicator of a non-persistent topic: the messages that it did not send."""
NO_REPLICATION: Final[Mapping[str, object]] = {
    "msgRateIn": 0.0,
    "msgThroughputIn": 0.0,
    "msgInCount": 0,
    "bytesInCount": 0,
    "msgRateOut": 0.0,
    "msgThroughputOut": 0.0,
    "msgOutCount": 0,
    "bytesOutCount": 0,
    "msgRateExpired": 0.0,
    "msgExpiredCount": 0,
    "replicationBacklog": 0,
    REPLICATION_DELAY: 0,
    "connected": False,
}
"""ReplicatorStats of a cluster with which nothing is exchanged."""
QUOTA_LIMITS = ("backlogQuotaLimitSize", "backlogQuotaLimitTime")


async def topic_stats(topic: Topic, owner: str) -> dict[str, object]:
    """TopicStats of a loaded topic; `owner` is the id of this broker."""
    sizes = await backlog_sizes(topic)
    earliest_ms = earliest_of(sizes)
    return {
        "backlogSize": max((each.size_bytes for each in sizes.values()), default=0),
        **({} if earliest_ms is None else {EARLIEST_OF_TOPIC: earliest_ms}),
        **await backlog_members(topic),
        **await _last_publish(topic),
        **await _creation(topic),
        **await topic_stats_in_memory(topic, owner, sizes),
    }


async def _last_publish(topic: Topic) -> dict[str, object]:
    """The publish time of the newest message that readers get; 0 without one."""
    try:
        newest = await topic.last_message.entry()
    except MagnetarError:
        # Statistics are shown without what cannot be read now.
        return {}
    return {LAST_PUBLISH: 0 if newest is None else publish_time_ms(newest.data)}


async def _creation(topic: Topic) -> dict[str, object]:
    try:
        return {CREATION: await topic.ledger.created_ms()}
    except MagnetarError:
        # Statistics are shown without what cannot be read now.
        return {}


async def topic_stats_in_memory(
    topic: Topic, owner: str, sizes: Mapping[str, BacklogSize]
) -> dict[str, object]:
    """TopicStats without the topic's `backlogSize` and age; `sizes` are by subscription.

    Nothing is read for it.
    """
    now_s = asyncio.get_running_loop().time()
    # One that is deleted meanwhile counts among those that are shown.
    messages_out, bytes_out = topic.past_out
    subscriptions = await _subscriptions(topic, sizes, now_s)
    messages_out += _sum_of(subscriptions, MESSAGES_OUT)
    bytes_out += _sum_of(subscriptions, BYTES_OUT)
    counts = topic.messages_in_total, topic.bytes_in_total, messages_out, bytes_out
    return {
        **Traffic(*topic.rate_sampler.rates(now_s, counts)).as_members(),
        "msgInCounter": topic.messages_in_total,
        "bytesInCounter": topic.bytes_in_total,
        MESSAGES_OUT: messages_out,
        BYTES_OUT: bytes_out,
        "storageSize": topic.ledger.total_size_bytes,
        "offloadedStorageSize": sum(each.size_bytes for each in topic.ledger.offload.copied()),
        "publishRateLimitedTimes": topic.publish_rates.times_limited,
        "publishers": [
            publisher_stats(producer, now_s)
            for producer in topic.producers.values()
            if producer.state is not ProducerState.WAITING and producer.source_cluster is None
        ],
        "replication": replication_stats(
            topic.producers.values(), now_s, topic.replication.outbound_stats(now_s)
        ),
        "waitingPublishers": sum(
            producer.state is ProducerState.WAITING for producer in topic.producers.values()
        ),
        "topicEpoch": topic.epoch,
        "ongoingTxnCount": topic.buffer.open_count,
        "abortedTxnCount": topic.buffer.aborted_count,
        "committedTxnCount": topic.buffer.commits,
        ACKED_RUNS: _sum_of(subscriptions, ACKED_RUNS),
        "deduplicationStatus": "Enabled" if topic.deduplicates else "Disabled",
        "subscriptions": subscriptions,
        "compaction": topic.compaction.as_members(),
        "ownerBroker": owner,
    }


async def backlog_members(topic: Topic) -> dict[str, object]:
    """The limits of the backlog quotas, and the oldest message that counts for them."""
    try:
        oldest = await topic.backlog.oldest()
    except MagnetarError:
        # Statistics are shown without what cannot be read now.
        oldest = None
    found = None if oldest is None else (oldest.published_ms, oldest.subscription)
    now_ms = topic.context.clock.now_ms()
    return {**backlog_limits(topic.policies), **oldest_members(found, now_ms)}


def backlog_limits(policies: AppliedPolicies) -> dict[str, object]:
    """The limits of the backlog quotas."""
    limits = (policies.size_quota, policies.age_quota)
    return {
        name: NO_LIMIT if quota is None else quota.limit
        for name, quota in zip(QUOTA_LIMITS, limits, strict=True)
    }


def oldest_members(oldest: tuple[int, str] | None, now_ms: int) -> dict[str, object]:
    """The age of the oldest message, given by its publish time and its subscription."""
    if oldest is None:
        return {OLDEST_AGE: NO_BACKLOG_AGE, OLDEST_SUBSCRIPTION: None}
    published_ms, subscription = oldest
    age_s = max(0, now_ms - published_ms) // 1000
    return {OLDEST_AGE: age_s, OLDEST_SUBSCRIPTION: subscription}


def topic_rates(topic: Topic, now_s: float) -> Traffic:
    """The rates of a topic over the last RATE_WINDOW_S; `now_s` is the event loop's time."""
    return Traffic(*topic.rate_sampler.rates(now_s, topic.traffic))


def producer_rates(producer: Producer, now_s: float) -> Published:
    """The rates of a producer: see `topic_rates`."""
    return Published(*producer.rate_sampler.rates(now_s, producer.traffic))


def subscription_rates(subscription: Subscription, now_s: float) -> SubscriptionTraffic:
    """The rates of a subscription: see `topic_rates`."""
    return SubscriptionTraffic(*subscription.rate_sampler.rates(now_s, subscription.traffic))


def consumer_rates(consumer: Consumer, now_s: float) -> Delivered:
    """The rates of a consumer: see `topic_rates`."""
    return Delivered(*consumer.rate_sampler.rates(now_s, consumer.traffic))


def _since(timestamp_ms: int) -> str:
    return datetime.fromtimestamp(timestamp_ms / 1000, UTC).isoformat(timespec="milliseconds")


def publisher_stats(producer: Producer, now_s: float) -> dict[str, object]:
    """PublisherStats of a producer."""
    return {
        **producer_rates(producer, now_s).as_members(),
        "producerName": producer.name,
        "producerId": producer.producer_id,
        "accessMode": producer.request.access_mode.name.title().replace("_", ""),
        "supportsPartialProducer": producer.connection.features.supports_partial_producer,
        "address": producer.connection.remote,
        "clientVersion": producer.connection.client_version,
        "connectedSince": _since(producer.connected_ms),
        "metadata": dict(producer.request.properties),
        "msgInCounter": producer.messages_in,
        "bytesInCounter": producer.bytes_in,
    }


def replication_stats(
    producers: Iterable[Producer], now_s: float, sent: Mapping[str, OutboundStats] | None = None
) -> dict[str, dict[str, object]]:
    """ReplicatorStats by cluster: of the replicators among these producers, and of what is sent."""
    found: dict[str, dict[str, object]] = {}
    for cluster, each in _by_source_cluster(producers).items():
        # To a segment, each segment of the other cluster has a sender of its own.
        rates = [producer_rates(producer, now_s) for producer in each]
        first = min(each, key=lambda producer: producer.connected_ms)
        found[cluster] = {
            **NO_REPLICATION,
            "msgRateIn": sum(rate.messages for rate in rates),
            "msgThroughputIn": sum(rate.bytes for rate in rates),
            "msgInCount": sum(producer.messages_in for producer in each),
            "bytesInCount": sum(producer.bytes_in for producer in each),
            "inboundConnection": first.connection.remote,
            "inboundConnectedSince": _since(first.connected_ms),
        }
    for cluster, outbound in (sent or {}).items():
        found.setdefault(cluster, dict(NO_REPLICATION)).update(_sent_members(outbound))
    return found


def replication_of_all(each: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """ReplicatorStats of one cluster, of several partitions or segments together."""
    added = {
        name: sum(value for one in each if isinstance(value := one.get(name, 0), int | float))
        for name in (*NO_REPLICATION, OPENED_BATCHES, *DROPPED)
        if name in each[0] and name not in ("connected", REPLICATION_DELAY)
    }
    delays = [value for one in each if isinstance(value := one.get(REPLICATION_DELAY), int)]
    return {
        # The connections are those of one of them: each has its own.
        **each[0],
        **added,
        REPLICATION_DELAY: max(delays, default=0),
        "connected": any(one.get("connected") for one in each),
        **_first_of(LAST_FAILURE, each),
        **_first_of(INCOMPLETE_LIST, each),
    }


def _first_of(name: str, each: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """A member that only some have."""
    return next(({name: one[name]} for one in each if name in one), {})


def _by_source_cluster(producers: Iterable[Producer]) -> dict[str, list[Producer]]:
    """The replicators among these producers."""
    found: dict[str, list[Producer]] = {}
    for producer in producers:
        if producer.source_cluster is not None:
            found.setdefault(producer.source_cluster, []).append(producer)
    return found


def _sent_members(sent: OutboundStats) -> dict[str, object]:
    """The members of ReplicatorStats about what is sent; the last two are this broker's own."""
    members: dict[str, object] = {
        "msgRateOut": sent.messages_per_s,
        "msgThroughputOut": sent.bytes_per_s,
        "msgOutCount": sent.messages,
        "bytesOutCount": sent.bytes,
        "msgRateExpired": sent.expired_per_s,
        "msgExpiredCount": sent.expired,
        "replicationBacklog": sent.backlog,
        REPLICATION_DELAY: int(sent.delay_s),
        "connected": sent.connected,
    }
    if sent.connection is not None:
        members["outboundConnection"] = sent.connection
        members["outboundConnectedSince"] = _since(sent.connected_ms)
    if sent.failure is not None:
        members[LAST_FAILURE] = sent.failure
    if sent.incomplete_list is not None:
        members[INCOMPLETE_LIST] = sent.incomplete_list
    return members


async def _subscriptions(
    topic: Topic, sizes: Mapping[str, BacklogSize], now_s: float
) -> dict[str, dict[str, object]]:
    """SubscriptionStats by name; the loop goes on in between, as there may be 10,000."""
    shown: dict[str, dict[str, object]] = {}
    for number, (name, subscription) in enumerate(list(topic.subscriptions.items()), start=1):
        shown[name] = _subscription(subscription, sizes.get(name), now_s)
        if number % SUBSCRIPTIONS_SHOWN_AT_ONCE == 0:
            await asyncio.sleep(0)
    return shown


def _sum_of(subscriptions: Mapping[str, Mapping[str, object]], member: str) -> int:
    """What a member is for all subscriptions together."""
    shown = (each[member] for each in subscriptions.values())
    return sum(each for each in shown if isinstance(each, int))


def _subscription(
    subscription: Subscription, size: BacklogSize | None, now_s: float
) -> dict[str, object]:
    kind = subscription.type
    active, ranges = subscription.active_consumer, _ranges_by_consumer(subscription)
    return {
        **subscription_rates(subscription, now_s).as_members(),
        **({} if size is None else size.as_members()),
        "type": kind.label if kind is not None else "None",
        "msgBacklog": subscription.backlog,
        "msgBacklogNoDelayed": max(0, subscription.backlog - subscription.delayed),
        "msgDelayed": subscription.delayed,
        "msgInReplay": subscription.in_replay,
        ACKED_RUNS: subscription.cursor.acked_run_count,
        "unackedMessages": subscription.unacked,
        "blockedSubscriptionOnUnackedMsgs": subscription.blocked_on_unacked,
        "lastConsumedFlowTimestamp": subscription.last_flow_ms,
        "lastConsumedTimestamp": subscription.last_sent_ms,
        "lastAckedTimestamp": subscription.last_acked_ms,
        "lastExpireTimestamp": subscription.last_expired_ms,
        "lastMarkDeleteAdvancedTimestamp": subscription.last_advanced_ms,
        "totalMsgExpired": subscription.expired_total,
        **throttled_members(subscription.throttled),
        MESSAGES_OUT: subscription.messages_out_total,
        BYTES_OUT: subscription.bytes_out_total,
        "isDurable": subscription.durable,
        "isReplicated": subscription.cursor.replicated,
        "subscriptionProperties": dict(subscription.cursor.properties),
        **_key_sharing(subscription),
        "activeConsumerName": active.name if active is not None else None,
        "consumers": [
            {**consumer_stats(consumer, now_s), **_key_ranges(ranges.get(consumer, ()))}
            for consumer in subscription.consumers
        ],
    }


def _key_sharing(subscription: Subscription) -> dict[str, object]:
    """How a Key_Shared subscription shares out keys; {} for others."""
    if subscription.type is not SubscriptionType.KEY_SHARED:
        return {}
    policy = subscription.key_shared
    return {
        "keySharedMode": policy.mode.name,
        "allowOutOfOrderDelivery": policy.allow_out_of_order,
    }


def _ranges_by_consumer(subscription: Subscription) -> Mapping[Consumer, Sequence[HashRange]]:
    """The hashes that each consumer of a Key_Shared subscription has now; {} for others."""
    dispatcher = subscription.dispatcher
    return dispatcher.hash_ranges if isinstance(dispatcher, KeySharedDispatcher) else {}


def _key_ranges(ranges: Sequence[HashRange]) -> dict[str, object]:
    return {KEY_RANGES: [list(each) for each in ranges]} if ranges else {}


def throttled_members(counts: ThrottledCounts) -> dict[str, int]:
    """How often delivery had to wait for a rate: members of SubscriptionStats."""
    return {
        f"dispatchThrottled{unit}EventsBy{level.value.title()}Limit": counts[level, in_bytes]
        for level in Level
        for in_bytes, unit in ((False, "Msg"), (True, "Bytes"))
    }


def consumer_stats(consumer: Consumer, now_s: float) -> dict[str, object]:
    """ConsumerStats of a consumer."""
    return {
        **consumer_rates(consumer, now_s).as_members(),
        "consumerName": consumer.name,
        "availablePermits": consumer.permits,
        "unackedMessages": consumer.unacked,
        "blockedConsumerOnUnackedMsgs": consumer.blocked_on_unacked,
        "lastConsumedFlowTimestamp": consumer.last_flow_ms,
        "lastConsumedTimestamp": consumer.last_sent_ms,
        "lastAckedTimestamp": consumer.last_acked_ms,
        **_key_ranges(consumer.key_shared.ranges),
        MESSAGES_OUT: consumer.messages_out_total,
        BYTES_OUT: consumer.bytes_out_total,
        "address": consumer.connection.remote,
        "clientVersion": consumer.connection.client_version,
        "connectedSince": _since(consumer.connected_ms),
        "metadata": dict(consumer.metadata),
    }
