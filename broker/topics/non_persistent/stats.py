"""NonPersistentTopicStats: statistics under the member names that Pulsar's tools read."""

import asyncio

from broker.topics.non_persistent.subscription import NonPersistentSubscription
from broker.topics.non_persistent.topic import NonPersistentTopic
from broker.topics.producer import Producer
from broker.topics.topic_stats import (
    DROPPED,
    consumer_stats,
    producer_rates,
    publisher_stats,
    replication_stats,
)
from broker.topics.traffic import Traffic, outgoing_members


def non_persistent_topic_stats(topic: NonPersistentTopic, owner: str) -> dict[str, object]:
    """The statistics of a topic; `owner` is the id of this broker."""
    now_s = asyncio.get_running_loop().time()
    messages_in, bytes_in, messages_out, bytes_out = topic.traffic
    producers = list(topic.producers.values())
    dropped = sum(producer_rates(each, now_s).dropped for each in producers)
    return {
        **Traffic(*topic.rate_sampler.rates(now_s, topic.traffic)).as_members(),
        "msgDropRate": dropped,
        "msgInCounter": messages_in,
        "bytesInCounter": bytes_in,
        "msgOutCounter": messages_out,
        "bytesOutCounter": bytes_out,
        "storageSize": 0,
        "publishRateLimitedTimes": topic.publish_rates.times_limited,
        "backlogSize": 0,
        "publishers": [_publisher(each, now_s) for each in producers if not each.source_cluster],
        "subscriptions": {
            name: _subscription(subscription, now_s)
            for name, subscription in topic.subscriptions.items()
        },
        "replication": _replication(topic, now_s),
        "topicCreationTimeStamp": topic.created_ms,
        "ownerBroker": owner,
    }


def non_persistent_internal_stats(topic: NonPersistentTopic) -> dict[str, object]:
    """PersistentTopicInternalStats: how many entries came, and a cursor for each subscription."""
    return {
        "entriesAddedCounter": topic.entries_total,
        "ledgers": [],
        "cursors": {name: {} for name in topic.subscriptions},
    }


def drop_rate(subscription: NonPersistentSubscription, now_s: float) -> float:
    """Messages that a subscription could not deliver, per second."""
    return subscription.rate_sampler.rates(now_s, subscription.traffic)[-1]


def _replication(topic: NonPersistentTopic, now_s: float) -> dict[str, dict[str, object]]:
    """ReplicatorStats by cluster, and what was not sent to it."""
    sent = topic.replication.outbound_stats(now_s)
    found = replication_stats(topic.producers.values(), now_s, sent)
    for cluster, each in sent.items():
        found[cluster].update(zip(DROPPED, (each.dropped_per_s, each.dropped), strict=True))
    return found


def _publisher(producer: Producer, now_s: float) -> dict[str, object]:
    return {
        **publisher_stats(producer, now_s),
        "msgDropRate": producer_rates(producer, now_s).dropped,
    }


def _subscription(subscription: NonPersistentSubscription, now_s: float) -> dict[str, object]:
    messages, size_bytes, _ = subscription.traffic
    rates = subscription.rate_sampler.rates(now_s, subscription.traffic)
    active, kind = subscription.active_consumer, subscription.type
    return {
        **outgoing_members(rates[0], rates[1]),
        "msgDropRate": rates[2],
        "type": kind.label if kind is not None else "None",
        "msgBacklog": subscription.backlog,
        "msgOutCounter": messages,
        "bytesOutCounter": size_bytes,
        # Its messages are never kept, even if it outlives its consumers.
        "isDurable": False,
        "subscriptionProperties": dict(subscription.properties),
        "activeConsumerName": active.name if active is not None else None,
        "consumers": [consumer_stats(each, now_s) for each in subscription.consumers],
    }
