"""Statistics of one topic, under the member names that Pulsar's tools read."""

import asyncio
from datetime import UTC, datetime

from broker.topics.backlog_sizes import BacklogSize, backlog_sizes, earliest_of
from broker.topics.consumer import Consumer
from broker.topics.producer import Producer, ProducerState
from broker.topics.subscription import Subscription
from broker.topics.topic import Topic
from broker.topics.traffic import Delivered, Published, SubscriptionTraffic, Traffic

EARLIEST_OF_TOPIC = "earliestMsgPublishTimeInBacklogs"


async def topic_stats(topic: Topic, owner: str) -> dict[str, object]:
    """TopicStats of a loaded topic; `owner` is the id of this broker."""
    sizes = await backlog_sizes(topic)
    earliest_ms = earliest_of(sizes)
    now_s = asyncio.get_running_loop().time()
    return {
        **topic_rates(topic, now_s).as_members(),
        "backlogSize": max((each.size_bytes for each in sizes.values()), default=0),
        **({} if earliest_ms is None else {EARLIEST_OF_TOPIC: earliest_ms}),
        "msgInCounter": topic.messages_in_total,
        "bytesInCounter": topic.bytes_in_total,
        "msgOutCounter": topic.messages_out_total,
        "bytesOutCounter": topic.bytes_out_total,
        "storageSize": topic.ledger.total_size_bytes,
        "publishers": [
            publisher_stats(producer, now_s)
            for producer in topic.producers.values()
            if producer.state is not ProducerState.WAITING
        ],
        "waitingPublishers": sum(
            producer.state is ProducerState.WAITING for producer in topic.producers.values()
        ),
        "topicEpoch": topic.epoch,
        "deduplicationStatus": "Enabled" if topic.deduplicates else "Disabled",
        "subscriptions": {
            name: _subscription(subscription, sizes.get(name), now_s)
            for name, subscription in topic.subscriptions.items()
        },
        "compaction": topic.compaction.as_members(),
        "ownerBroker": owner,
    }


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
        "address": producer.connection.remote,
        "clientVersion": producer.connection.client_version,
        "connectedSince": _since(producer.connected_ms),
        "metadata": dict(producer.request.properties),
        "msgInCounter": producer.messages_in,
        "bytesInCounter": producer.bytes_in,
    }


def _subscription(
    subscription: Subscription, size: BacklogSize | None, now_s: float
) -> dict[str, object]:
    kind = subscription.type
    active = subscription.active_consumer
    return {
        **subscription_rates(subscription, now_s).as_members(),
        **({} if size is None else size.as_members()),
        "type": kind.label if kind is not None else "None",
        "msgBacklog": subscription.backlog,
        "msgBacklogNoDelayed": max(0, subscription.backlog - subscription.delayed),
        "msgDelayed": subscription.delayed,
        "unackedMessages": subscription.unacked,
        "totalMsgExpired": subscription.expired_total,
        "msgOutCounter": subscription.messages_out_total,
        "bytesOutCounter": subscription.bytes_out_total,
        "isDurable": subscription.durable,
        "subscriptionProperties": dict(subscription.cursor.properties),
        "activeConsumerName": active.name if active is not None else None,
        "consumers": [consumer_stats(consumer, now_s) for consumer in subscription.consumers],
    }


def consumer_stats(consumer: Consumer, now_s: float) -> dict[str, object]:
    """ConsumerStats of a consumer."""
    return {
        **consumer_rates(consumer, now_s).as_members(),
        "consumerName": consumer.name,
        "availablePermits": consumer.permits,
        "unackedMessages": consumer.unacked,
        "msgOutCounter": consumer.messages_out_total,
        "bytesOutCounter": consumer.bytes_out_total,
        "address": consumer.connection.remote,
        "clientVersion": consumer.connection.client_version,
        "connectedSince": _since(consumer.connected_ms),
        "metadata": dict(consumer.metadata),
    }
