"""Statistics of a topic, under the member names that Pulsar's tools read."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from broker.consumer import Consumer
    from broker.producer import Producer
    from broker.subscription import Subscription
    from broker.topic import Topic


def topic_stats(topic: "Topic") -> dict[str, object]:
    """TopicStats."""
    held = topic.subscriptions
    return {
        "msgInCounter": topic.messages_in_total,
        "bytesInCounter": topic.bytes_in_total,
        "msgOutCounter": topic.messages_out_total,
        "bytesOutCounter": topic.bytes_out_total,
        "storageSize": topic.ledger.total_size_bytes,
        "publishers": [_publisher(producer) for producer in topic.producers.values()],
        "subscriptions": {name: _subscription(one) for name, one in held.items()},
        "ownerBroker": topic.broker.placement.broker_id,
    }


def _since(timestamp_ms: int) -> str:
    return datetime.fromtimestamp(timestamp_ms / 1000, UTC).isoformat(timespec="milliseconds")


def _publisher(producer: "Producer") -> dict[str, object]:
    return {
        "producerName": producer.name,
        "producerId": producer.producer_id,
        "accessMode": producer.request.access_mode.name.title().replace("_", ""),
        "address": producer.connection.remote,
        "clientVersion": producer.connection.client_version,
        "connectedSince": _since(producer.connected_ms),
        "msgInCounter": producer.messages_in,
        "bytesInCounter": producer.bytes_in,
    }


def _subscription(subscription: "Subscription") -> dict[str, object]:
    kind = subscription.type
    active = subscription.active_consumer
    return {
        "type": kind.label if kind is not None else "None",
        "msgBacklog": subscription.backlog,
        "msgBacklogNoDelayed": max(0, subscription.backlog - subscription.delayed),
        "msgDelayed": subscription.delayed,
        "unackedMessages": subscription.unacked,
        "msgOutCounter": subscription.messages_out_total,
        "bytesOutCounter": subscription.bytes_out_total,
        "isDurable": subscription.durable,
        "activeConsumerName": active.name if active is not None else None,
        "consumers": [_consumer(consumer) for consumer in subscription.consumers],
    }


def _consumer(consumer: "Consumer") -> dict[str, object]:
    return {
        "consumerName": consumer.name,
        "availablePermits": consumer.permits,
        "unackedMessages": consumer.unacked,
        "msgOutCounter": consumer.messages_out_total,
        "bytesOutCounter": consumer.bytes_out_total,
        "address": consumer.connection.remote,
        "clientVersion": consumer.connection.client_version,
        "connectedSince": _since(consumer.connected_ms),
    }


def internal_stats(topic: "Topic") -> dict[str, object]:
    """PersistentTopicInternalStats, as far as it is known."""
    ledger = topic.ledger
    return {
        "numberOfEntries": ledger.entry_count,
        "totalSize": ledger.total_size_bytes,
        "lastConfirmedEntry": ledger.last_confirmed.text,
        "state": ledger.state.name.title(),
        "ledgers": [
            {
                "ledgerId": info.ledger_id,
                "entries": info.entries,
                "size": info.size_bytes,
                "timestamp": info.closed_ms,
                "offloaded": info.offload is not None and info.offload.complete,
            }
            for info in ledger.ledgers
        ],
        "cursors": {
            name: {
                "markDeletePosition": cursor.mark_delete.text,
                "messagesConsumedCounter": ledger.entry_count - cursor.backlog,
                "properties": dict(cursor.properties),
            }
            for name, cursor in ledger.cursors.items()
        },
    }
