"""The statistics of a scalable topic, as REST shows them."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from broker.placement import Placement
from broker.scalable.controller import TopicController
from broker.scalable.group import SessionState
from broker.scalable.group_controller import GroupController
from broker.scalable.layout import Segment
from broker.scalable.live_topics import LiveTopic
from broker.scalable.records import SubscriptionKind, segment_of
from broker.scalable.segment_stats import instant
from broker.scalable.segment_view import Members
from broker.topics.topic_stats import OLDEST_AGE, QUOTA_LIMITS, replication_of_all
from broker.topics.traffic import incoming_members
from magnetar.protocol.names import segment_suffix

_RATES_IN = ("msgRateIn", "msgThroughputIn", "byteRateIn")
_RATES_OUT = ("msgRateOut", "msgThroughputOut", "byteRateOut")
_SUBSCRIPTION_RATES = (*_RATES_OUT, "msgRateRedeliver", "messageAckRate")
_CONSUMER_COUNTS = ("unackedMessages", "availablePermits")
_STORED = ("storageSize", "offloadedStorageSize", "backlogSize")
_BACKLOG_SIZES = ("messagesInBacklog", "backlogSize")
_EARLIEST = "earliestMsgPublishTimeInBacklog"


class TopicStats:
    """The statistics of one topic at one moment.

    `counted` has the statistics from each segment's owner, by segment id (see
    `segment_stats.stats_of`); `kinds` the types of the subscriptions.
    """

    def __init__(
        self,
        live: LiveTopic,
        counted: Mapping[int, Members],
        kinds: Mapping[str, SubscriptionKind | None],
        controller: TopicController | None,
        placement: Placement,
        key_hash: str,
    ) -> None:
        """`key_hash` is the `replication_key_hash` of the topic's policies."""
        self._live = live
        self._counted = counted
        self._kinds = kinds
        self._groups = {} if controller is None else controller.groups
        self._placement = placement
        self._key_hash = key_hash

    def to_json(self) -> Members:
        """The statistics as JSON, in Pulsar's form.

        The members of 5.0.0-M1 (`epoch`, `segments`, counts) and of later versions (`layout`,
        sizes, producers, consumers) are side by side, as clients ignore members that they do not
        know.  Rates are those of the segments, added.
        """
        layout = self._live.layout
        segments = layout.segments.values()
        names = {name for each in self._counted.values() for name in _object(each, "subscriptions")}
        subscriptions = sorted(names | self._kinds.keys() | self._groups.keys())
        return {
            "epoch": layout.epoch,
            "totalSegments": len(layout.segments),
            "activeSegments": len(layout.active),
            "sealedSegments": len(layout.sealed),
            "segments": {str(s.segment_id): self._segment(s) for s in segments},
            "layout": {
                "epoch": layout.epoch,
                "segments": {str(s.segment_id): self._node(s) for s in segments},
            },
            **_incoming(self._counted.values()),
            **_rates(self._counted.values(), _RATES_OUT),
            **{
                name: sum(_count(each, name) for each in self._counted.values()) for name in _STORED
            },
            **{
                name: max((_count(each, name) for each in self._counted.values()), default=-1)
                for name in (*QUOTA_LIMITS, OLDEST_AGE)
            },
            "producers": _producers(self._counted),
            "subscriptions": {name: self._subscription(name) for name in subscriptions},
            "replication": _replication(self._counted),
            "replicationKeyHash": self._key_hash,
        }

    def _segment(self, segment: Segment) -> Members:
        name = str(segment_of(self._live.name, segment))  # of a legacy one that of its topic
        return {"name": name, "state": segment.state.value}

    def _node(self, segment: Segment) -> Members:
        owner = self._placement.owner_of(segment_of(self._live.name, segment).topic_name)
        members: Members = {
            **self._segment(segment),
            "entryBuckets": segment.entry_buckets,
            "ownerBroker": owner.broker_id,
        }
        if segment.parent_ids:
            members["parentIds"] = list(segment.parent_ids)
        if segment.child_ids:
            members["childIds"] = list(segment.child_ids)
        return members

    def _subscription(self, name: str) -> Members:
        per_segment: dict[str, Members] = {}
        each: list[Members] = []
        attached: dict[int, Sequence[object]] = {}
        for segment_id, counted in self._counted.items():
            found = _object(counted, "subscriptions").get(name)
            if isinstance(found, dict):
                each.append(found)
                attached[segment_id] = _list(found, "consumers")
                per_segment[str(segment_id)] = {
                    **_rates((found,), _RATES_OUT),
                    "msgBacklog": _count(found, "msgBacklog"),
                    "backlogSize": _count(found, "backlogSize"),
                    "msgDelayed": _count(found, "msgDelayed"),
                    "unackedMessages": _count(found, "unackedMessages"),
                    "consumerCount": len(attached[segment_id]),
                }
        consumers = _consumers(attached)
        group = self._groups.get(name)
        kind = self._kinds.get(name) or SubscriptionKind.QUEUE
        most = max((_count(s, "consumerCount") for s in per_segment.values()), default=0)
        earliest = [value for one in each if (value := _count(one, _EARLIEST))]
        return {
            **_rates(each, _SUBSCRIPTION_RATES),
            **({_EARLIEST: min(earliest)} if earliest else {}),
            **{
                size: sum(_count(one, size) for one in each)
                for size in _BACKLOG_SIZES
                if each and all(size in one for one in each)
            },
            "type": kind.value,
            "isReplicated": any(one.get("isReplicated") for one in each),
            "consumerCount": most if group is None else len(group.group.registered()),
            "msgBacklog": sum(_count(s, "msgBacklog") for s in per_segment.values()),
            "msgDelayed": sum(_count(s, "msgDelayed") for s in per_segment.values()),
            "unackedMessages": sum(_count(s, "unackedMessages") for s in per_segment.values()),
            "segments": per_segment,
            "consumers": [*consumers.values()] if group is None else _registered(group, consumers),
        }


def _rates(each: Iterable[Members], names: Sequence[str]) -> Members:
    """Rates of several segments, added."""
    sums = dict.fromkeys(names, 0.0)
    for one in each:
        for name in names:
            value = one.get(name)
            sums[name] += value if isinstance(value, int | float) else 0
    return {**sums}


def _incoming(each: Iterable[Members]) -> Members:
    """Rates in of several segments, added, and the average size of their messages."""
    rates = _rates(each, _RATES_IN)
    sizes = incoming_members(_rate(rates, "msgRateIn"), _rate(rates, "byteRateIn"))
    return {**rates, "averageMsgSize": sizes["averageMsgSize"]}


def _replication(counted: Mapping[int, Members]) -> Members:
    """ReplicatorStats by cluster: of all segments together, and of each."""
    by_cluster: dict[str, dict[str, Members]] = {}
    for segment_id, segment in counted.items():
        for cluster, one in _object(segment, "replication").items():
            if isinstance(one, dict):
                by_cluster.setdefault(str(cluster), {})[str(segment_id)] = one
    return {
        cluster: {**replication_of_all([*each.values()]), "segments": each}
        for cluster, each in by_cluster.items()
    }


def _producers(counted: Mapping[int, Members]) -> list[Members]:
    """The producers of all segments by name, each with the sum of its rates."""
    by_name: dict[str, list[Members]] = {}
    for segment in counted.values():
        for producer in _list(segment, "producers"):
            if isinstance(producer, dict):
                by_name.setdefault(str(producer.get("producerName")), []).append(producer)
    return [{**same[0], **_incoming(same)} for same in by_name.values()]


def _consumers(attached: Mapping[int, Sequence[object]]) -> dict[str, Members]:
    """The consumers of a subscription by name, over all segments where they are attached."""
    by_name: dict[str, dict[int, Members]] = {}
    for segment_id, consumers in attached.items():
        for consumer in consumers:
            if isinstance(consumer, dict):
                # Ordered consumers attach to each segment under a name of its own.
                name = str(consumer.get("consumerName")).removesuffix(segment_suffix(segment_id))
                by_name.setdefault(name, {})[segment_id] = consumer
    return {
        name: {
            **next(iter(same.values())),
            **_sums_of_consumer(same.values()),
            "consumerName": name,
            "segmentIds": sorted(same),
        }
        for name, same in by_name.items()
    }


def _sums_of_consumer(each: Collection[Members]) -> Members:
    counts = {name: sum(_count(one, name) for one in each) for name in _CONSUMER_COUNTS}
    return {**_rates(each, _SUBSCRIPTION_RATES), **counts}


def _registered(group: GroupController, attached: Mapping[str, Members]) -> list[Members]:
    """The ordered consumers that are registered, `attached` or not yet, or not any more."""
    found: list[Members] = []
    for name in group.group.registered():
        session = group.group.sessions[name]
        members: Members = {
            **attached.get(name, _sums_of_consumer(())),
            "consumerName": name,
            "connected": session.state is SessionState.CONNECTED,
            "segmentIds": sorted(session.assigned),
        }
        member = group.members.get(name)
        if member is not None:
            members["address"] = member.connection.remote
            members["connectedSince"] = instant(member.connection.connected_ms)
            members["clientVersion"] = member.connection.client_version
        found.append(members)
    return found


def _rate(members: Members, key: str) -> float:
    value = members.get(key)
    return value if isinstance(value, int | float) else 0.0


def _count(members: Mapping[str, object], key: str) -> int:
    value = members.get(key)
    return value if isinstance(value, int) else 0


def _object(members: Mapping[str, object], key: str) -> Members:
    value = members.get(key)
    return value if isinstance(value, dict) else {}


def _list(members: Mapping[str, object], key: str) -> Sequence[object]:
    value = members.get(key)
    return value if isinstance(value, list) else []
