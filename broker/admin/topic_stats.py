"""Statistics of partitioned topics, as Pulsar's tools read them."""

from collections.abc import Iterable, Mapping

from broker.topics.throttle import ThrottledCounts
from broker.topics.topic_stats import (
    ACKED_RUNS,
    CREATION,
    EARLIEST_OF_TOPIC,
    LAST_PUBLISH,
    OLDEST_AGE,
    OLDEST_SUBSCRIPTION,
    QUOTA_LIMITS,
    replication_of_all,
    throttled_members,
)
from broker.topics.traffic import incoming_members, outgoing_members

PUBLISHER_COUNTS = ("msgInCounter", "bytesInCounter")
TOPIC_COUNTS = (
    *PUBLISHER_COUNTS,
    "msgOutCounter",
    "bytesOutCounter",
    "storageSize",
    "backlogSize",
    "ongoingTxnCount",
    "abortedTxnCount",
    "committedTxnCount",
    "offloadedStorageSize",
    "waitingPublishers",
    ACKED_RUNS,
    "publishRateLimitedTimes",
)
SUBSCRIPTION_RATES = ("msgRateOut", "msgThroughputOut", "msgRateRedeliver", "messageAckRate")
NEWEST_TIMES = (
    "lastConsumedFlowTimestamp",
    "lastConsumedTimestamp",
    "lastAckedTimestamp",
    "lastExpireTimestamp",
    "lastMarkDeleteAdvancedTimestamp",
)
KEY_SHARING = ("keySharedMode", "allowOutOfOrderDelivery")
MESSAGES = "messagesInBacklog"
EARLIEST_OF_SUBSCRIPTION = "earliestMsgPublishTimeInBacklog"
SUBSCRIPTION_COUNTS = (
    "msgBacklog",
    "backlogSize",
    "msgBacklogNoDelayed",
    "msgDelayed",
    "msgInReplay",
    ACKED_RUNS,
    "unackedMessages",
    "msgOutCounter",
    "bytesOutCounter",
    *throttled_members(ThrottledCounts()),
)


def without(stats: Mapping[str, object], *, publishers: bool, consumers: bool) -> dict[str, object]:
    """TopicStats without `publishers`, or without the `consumers` of each subscription."""
    shown = dict(stats)
    if publishers and "publishers" in stats:
        shown["publishers"] = []
    found = stats.get("subscriptions")
    if consumers and isinstance(found, dict):
        shown["subscriptions"] = {name: {**one, "consumers": []} for name, one in found.items()}
    return shown


def stats_of_all(partitions: Iterable[Mapping[str, object]]) -> dict[str, object]:
    """TopicStats of a partitioned topic: numbers added, producers and subscriptions by name."""
    publishers: dict[str, list[Mapping[str, object]]] = {}
    subscriptions: dict[str, list[Mapping[str, object]]] = {}
    replicators: dict[str, list[Mapping[str, object]]] = {}
    each = list(partitions)
    for stats in each:
        found = stats.get("publishers")
        for publisher in found if isinstance(found, list) else []:
            publishers.setdefault(str(publisher.get("producerName")), []).append(publisher)
        by_name = stats.get("subscriptions")
        for name, one in by_name.items() if isinstance(by_name, dict) else ():
            subscriptions.setdefault(name, []).append(one)
        clusters = stats.get("replication")
        for name, one in clusters.items() if isinstance(clusters, dict) else ():
            replicators.setdefault(name, []).append(one)
    return {
        **_added(each, TOPIC_COUNTS),
        **_incoming(each),
        **outgoing_members(*_sums(each, "msgRateOut", "msgThroughputOut")),
        **_least(each, EARLIEST_OF_TOPIC),
        **_least(each, CREATION),
        **_newest(each, (LAST_PUBLISH,)),
        **_oldest(each),
        **_drop_rate(each),
        "publishers": [
            {**same[0], **_added(same, PUBLISHER_COUNTS), **_incoming(same), **_drop_rate(same)}
            for same in publishers.values()
        ],
        "subscriptions": {name: _subscription_of_all(same) for name, same in subscriptions.items()},
        "replication": {name: replication_of_all(same) for name, same in replicators.items()},
    }


def _least(each: Iterable[Mapping[str, object]], name: str) -> dict[str, int]:
    """The least value of a member, under its name; {} if none has it."""
    values = [value for one in each if isinstance(value := one.get(name), int)]
    return {name: min(values)} if values else {}


def _oldest(each: Iterable[Mapping[str, object]]) -> dict[str, object]:
    """The members about backlog quotas of the partition with the oldest message; {} if none has."""
    aged = [(age, one) for one in each if isinstance(age := one.get(OLDEST_AGE), int)]
    if not aged:
        return {}
    _, oldest = max(aged, key=lambda pair: pair[0])
    return {name: oldest.get(name) for name in (*QUOTA_LIMITS, OLDEST_AGE, OLDEST_SUBSCRIPTION)}


def _newest(each: list[Mapping[str, object]], names: Iterable[str]) -> dict[str, int]:
    """The greatest value of each member; {} for those that none has."""
    values = {
        name: [value for one in each if isinstance(value := one.get(name), int)] for name in names
    }
    return {name: max(some) for name, some in values.items() if some}


def _drop_rate(each: list[Mapping[str, object]]) -> dict[str, float]:
    """The added rate of dropped messages; {} for topics that store what they get."""
    has_any = any("msgDropRate" in one for one in each)
    return _added(each, ("msgDropRate",)) if has_any else {}


def _incoming(each: Iterable[Mapping[str, object]]) -> dict[str, float]:
    """Rates in, added, and the average size over all."""
    return incoming_members(*_sums(each, "msgRateIn", "msgThroughputIn"))


def _added(each: Iterable[Mapping[str, object]], names: Iterable[str]) -> dict[str, float]:
    counted = tuple(names)
    return dict(zip(counted, _sums(each, *counted), strict=True))


def _sums(each: Iterable[Mapping[str, object]], *names: str) -> list[float]:
    """The sum of each member; one that is missing counts as 0."""
    sums: list[float] = [0] * len(names)
    for one in each:
        for index, name in enumerate(names):
            value = one.get(name)
            sums[index] += value if isinstance(value, int | float) else 0
    return sums


def _subscription_of_all(each: list[Mapping[str, object]]) -> dict[str, object]:
    types = [one.get("type") for one in each if one.get("type") != "None"]
    consumers = [one.get("consumers") for one in each]
    return {
        **_added(each, (*SUBSCRIPTION_COUNTS, *SUBSCRIPTION_RATES)),
        **_messages(each),
        **_least(each, EARLIEST_OF_SUBSCRIPTION),
        **_newest(each, NEWEST_TIMES),
        **_drop_rate(each),
        "type": types[0] if types else "None",
        **_key_sharing(each),
        "isReplicated": any(one.get("isReplicated") for one in each),
        "isDurable": all(one.get("isDurable") for one in each),
        "blockedSubscriptionOnUnackedMsgs": any(
            one.get("blockedSubscriptionOnUnackedMsgs") for one in each
        ),
        "subscriptionProperties": each[0].get("subscriptionProperties", {}),
        "consumers": [one for some in consumers if isinstance(some, list) for one in some],
    }


def _messages(each: list[Mapping[str, object]]) -> dict[str, float]:
    """The added messages of the backlogs; {} if those of one are not known."""
    is_known = all(MESSAGES in one for one in each if one.get("msgBacklog"))
    return _added(each, (MESSAGES,)) if is_known else {}


def _key_sharing(each: Iterable[Mapping[str, object]]) -> dict[str, object]:
    """The members about Key_Shared of a partition that has them; {} if none has."""
    for one in each:
        if found := {name: one[name] for name in KEY_SHARING if name in one}:
            return found
    return {}
