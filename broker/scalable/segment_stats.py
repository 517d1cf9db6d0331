"""The statistics of one segment, as its owner counts them and REST shows them."""

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from broker.scalable.segment_view import Members
from broker.topics.backlog_sizes import BacklogSize, backlog_sizes
from broker.topics.consumer import Consumer
from broker.topics.producer import Producer
from broker.topics.subscription import Subscription
from broker.topics.topic import Topic
from broker.topics.topic_stats import (
    OPENED_BATCHES,
    backlog_members,
    consumer_rates,
    producer_rates,
    replication_stats,
    subscription_rates,
    topic_rates,
)

_BYTE_RATES: Final = {"msgThroughputIn": "byteRateIn", "msgThroughputOut": "byteRateOut"}
"""Names of topics' statistics to those of scalable topics', for the same rates."""


async def stats_of(topic: Topic) -> Members:
    """Return the statistics of a loaded segment.

    Senders of other clusters are in `replication`, and not among the producers.

    Rates of bytes are there under both of Pulsar's names: `msgThroughputIn` of topics, `byteRateIn`
    of segments.  Subscriptions that are not durable, of readers, are left out.
    """
    sizes = await backlog_sizes(topic)
    now_s = asyncio.get_running_loop().time()
    offloaded = sum(info.size_bytes for info in topic.ledger.offload.copied())
    return {
        **with_byte_rates(topic_rates(topic, now_s).as_members()),
        "storageSize": topic.ledger.total_size_bytes,
        "offloadedStorageSize": offloaded,
        "backlogSize": max((each.size_bytes for each in sizes.values()), default=0),
        **await backlog_members(topic),
        "waitingPublishers": sum(not each.attached for each in topic.producers.values()),
        "producers": [
            _producer(producer, now_s)
            for producer in topic.producers.values()
            if producer.attached and producer.source_cluster is None
        ],
        "replication": _replication(topic, now_s),
        "subscriptions": {
            name: _subscription(subscription, sizes.get(name), now_s)
            for name, subscription in topic.subscriptions.items()
            if subscription.durable
        },
    }


def with_byte_rates(rates: Mapping[str, float]) -> Members:
    """The rates, and those of bytes under their other names too."""
    return {**rates, **{_BYTE_RATES[name]: rates[name] for name in rates if name in _BYTE_RATES}}


def instant(time_ms: int) -> str:
    """Return a time as REST shows it."""
    moment = datetime.fromtimestamp(time_ms / 1000, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _replication(topic: Topic, now_s: float) -> Members:
    """ReplicatorStats by cluster, and how many batches were divided for it."""
    sent = topic.replication.outbound_stats(now_s)
    found = replication_stats(topic.producers.values(), now_s, sent)
    for cluster, each in sent.items():
        found[cluster][OPENED_BATCHES] = each.opened_batches
    return {**found}


def _producer(producer: Producer, now_s: float) -> Members:
    return {
        **with_byte_rates(producer_rates(producer, now_s).as_members()),
        "producerName": producer.name,
        "accessMode": producer.request.access_mode.name.title().replace("_", ""),
        "address": producer.connection.remote,
        "connectedSince": instant(producer.connected_ms),
        "clientVersion": producer.connection.client_version,
    }


def _subscription(subscription: Subscription, size: BacklogSize | None, now_s: float) -> Members:
    kind = subscription.type
    return {
        **with_byte_rates(subscription_rates(subscription, now_s).as_members()),
        **({} if size is None else size.as_members()),
        "type": kind.label if kind is not None else "None",
        "isReplicated": subscription.cursor.replicated,
        "msgBacklog": subscription.backlog,
        "msgDelayed": subscription.delayed,
        "unackedMessages": subscription.unacked,
        "consumers": [_consumer(consumer, now_s) for consumer in subscription.consumers],
    }


def _consumer(consumer: Consumer, now_s: float) -> Members:
    return {
        **with_byte_rates(consumer_rates(consumer, now_s).as_members()),
        "consumerName": consumer.name,
        "connected": True,
        "unackedMessages": consumer.unacked,
        "availablePermits": consumer.permits,
        "address": consumer.connection.remote,
        "connectedSince": instant(consumer.connected_ms),
        "clientVersion": consumer.connection.client_version,
    }
