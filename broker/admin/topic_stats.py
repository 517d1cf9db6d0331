"""Statistics of a topic, under the member names that Pulsar's tools read."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

from broker.topics.backlog_sizes import BacklogSize, backlog_sizes, earliest_of
from broker.topics.consumer import Consumer
from broker.topics.producer import Producer
from broker.topics.subscription import Subscription
from broker.topics.topic import Topic

PUBLISHER_COUNTS = ("msgInCounter", "bytesInCounter")
TOPIC_COUNTS = (*PUBLISHER_COUNTS, "msgOutCounter", "bytesOutCounter", "storageSize", "backlogSize")
TOPIC_RATES = ("msgRateIn", "msgThroughputIn", "msgRateOut", "msgThroughputOut")
SUBSCRIPTION_RATES = ("msgRateOut", "msgThroughputOut")
EARLIEST_OF_TOPIC = "earliestMsgPublishTimeInBacklogs"
EARLIEST_OF_SUBSCRIPTION = "earliestMsgPublishTimeInBacklog"
SUBSCRIPTION_COUNTS = (
    "msgBacklog",
    "messagesInBacklog",
    "backlogSize",
    "msgBacklogNoDelayed",
    "msgDelayed",
    "unackedMessages",
    "msgOutCounter",
    "bytesOutCounter",
)


async def topic_stats(topic: Topic, owner: str) -> dict[str, object]:
    """TopicStats of a loaded topic; `owner` is the id of this broker."""
    sizes = await backlog_sizes(topic)
    earliest_ms = earliest_of(sizes)
    return {
        **topic.rates.as_members(incoming=True),
        "backlogSize": max((each.size_bytes for each in sizes.values()), default=0),
        **({} if earliest_ms is None else {EARLIEST_OF_TOPIC: earliest_ms}),
        "msgInCounter": topic.messages_in_total,
        "bytesInCounter": topic.bytes_in_total,
        "msgOutCounter": topic.messages_out_total,
        "bytesOutCounter": topic.bytes_out_total,
        "storageSize": topic.ledger.total_size_bytes,
        "publishers": [_publisher(producer) for producer in topic.producers.values()],
        "subscriptions": {
            name: _subscription(subscription, sizes.get(name))
            for name, subscription in topic.subscriptions.items()
        },
        "ownerBroker": owner,
    }


def without(stats: Mapping[str, object], *, publishers: bool, consumers: bool) -> dict[str, object]:
    """TopicStats without `publishers`, or without the `consumers` of each subscription."""
    shown = dict(stats)
    if publishers and "publishers" in stats:
        shown["publishers"] = []
    found = stats.get("subscriptions")
    if consumers and isinstance(found, dict):
        shown["subscriptions"] = {name: {**one, "consumers": []} for name, one in found.items()}
    return shown


def _since(timestamp_ms: int) -> str:
    return datetime.fromtimestamp(timestamp_ms / 1000, UTC).isoformat(timespec="milliseconds")


def _publisher(producer: Producer) -> dict[str, object]:
    return {
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


def _subscription(subscription: Subscription, size: BacklogSize | None) -> dict[str, object]:
    kind = subscription.type
    active = subscription.active_consumer
    return {
        **subscription.rates.as_members(incoming=False),
        **({} if size is None else size.as_members()),
        "type": kind.label if kind is not None else "None",
        "msgBacklog": subscription.backlog,
        "msgBacklogNoDelayed": max(0, subscription.backlog - subscription.delayed),
        "msgDelayed": subscription.delayed,
        "unackedMessages": subscription.unacked,
        "msgOutCounter": subscription.messages_out_total,
        "bytesOutCounter": subscription.bytes_out_total,
        "isDurable": subscription.durable,
        "subscriptionProperties": dict(subscription.cursor.properties),
        "activeConsumerName": active.name if active is not None else None,
        "consumers": [_consumer(consumer) for consumer in subscription.consumers],
    }


def _consumer(consumer: Consumer) -> dict[str, object]:
    return {
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


def stats_of_all(partitions: Iterable[Mapping[str, object]]) -> dict[str, object]:
    """TopicStats of a partitioned topic: numbers added, producers and subscriptions by name."""
    publishers: dict[str, list[Mapping[str, object]]] = {}
    subscriptions: dict[str, list[Mapping[str, object]]] = {}
    each = list(partitions)
    for stats in each:
        found = stats.get("publishers")
        for publisher in found if isinstance(found, list) else []:
            publishers.setdefault(str(publisher.get("producerName")), []).append(publisher)
        by_name = stats.get("subscriptions")
        for name, one in by_name.items() if isinstance(by_name, dict) else ():
            subscriptions.setdefault(name, []).append(one)
    return {
        **_added(each, (*TOPIC_COUNTS, *TOPIC_RATES)),
        **_least(each, EARLIEST_OF_TOPIC),
        "publishers": [
            {**same[0], **_added(same, PUBLISHER_COUNTS)} for same in publishers.values()
        ],
        "subscriptions": {name: _subscription_of_all(same) for name, same in subscriptions.items()},
    }


def _least(each: Iterable[Mapping[str, object]], name: str) -> dict[str, int]:
    """The least value of a member, under its name; {} if none has it."""
    values = [value for one in each if isinstance(value := one.get(name), int)]
    return {name: min(values)} if values else {}


def _added(each: Iterable[Mapping[str, object]], names: Iterable[str]) -> dict[str, float]:
    counts: dict[str, float] = dict.fromkeys(names, 0)
    for one in each:
        for name in counts:
            value = one.get(name)
            counts[name] += value if isinstance(value, int | float) else 0
    return counts


def _subscription_of_all(each: list[Mapping[str, object]]) -> dict[str, object]:
    types = [one.get("type") for one in each if one.get("type") != "None"]
    consumers = [one.get("consumers") for one in each]
    return {
        **_added(each, (*SUBSCRIPTION_COUNTS, *SUBSCRIPTION_RATES)),
        **_least(each, EARLIEST_OF_SUBSCRIPTION),
        "type": types[0] if types else "None",
        "isDurable": all(one.get("isDurable") for one in each),
        "subscriptionProperties": each[0].get("subscriptionProperties", {}),
        "consumers": [one for some in consumers if isinstance(some, list) for one in some],
    }


def internal_stats(topic: Topic) -> dict[str, object]:
    """PersistentTopicInternalStats, with the members that are known here."""
    ledger = topic.ledger
    return {
        "numberOfEntries": ledger.entry_count,
        "entriesAddedCounter": ledger.entry_count,
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
