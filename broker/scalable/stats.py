"""The statistics of a scalable topic, as REST shows them."""

from collections.abc import Iterable, Mapping, Sequence

from broker.placement import Placement
from broker.scalable.controller import TopicController
from broker.scalable.group import SessionState
from broker.scalable.group_controller import GroupController
from broker.scalable.layout import Segment
from broker.scalable.live_topics import LiveTopic
from broker.scalable.local_segments import instant
from broker.scalable.records import SubscriptionKind, segment_of
from broker.scalable.segment_view import Members

_TOPIC_RATES = ("msgRateIn", "msgThroughputIn", "msgRateOut", "msgThroughputOut")
_SUBSCRIPTION_RATES = ("msgRateOut", "msgThroughputOut")
_BACKLOG_SIZES = ("messagesInBacklog", "backlogSize")
_EARLIEST = "earliestMsgPublishTimeInBacklog"


class TopicStats:
    """The statistics of one topic at one moment.

    `counted` has the statistics from each segment's owner, by segment id (see
    `local_segments.stats_of`); `kinds` the types of the subscriptions.
    """

    def __init__(
        self,
        live: LiveTopic,
        counted: Mapping[int, Members],
        kinds: Mapping[str, SubscriptionKind | None],
        controller: TopicController | None,
        placement: Placement,
    ) -> None:
        self._live = live
        self._counted = counted
        self._kinds = kinds
        self._groups = {} if controller is None else controller.groups
        self._placement = placement

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
            **_rates(self._counted.values(), _TOPIC_RATES),
            "storageSize": sum(_count(each, "storageSize") for each in self._counted.values()),
            "producers": [p for each in self._counted.values() for p in _list(each, "producers")],
            "subscriptions": {name: self._subscription(name) for name in subscriptions},
        }

    def _segment(self, segment: Segment) -> Members:
        name = str(segment_of(self._live.name, segment))
        return {"name": name, "state": segment.state.value}

    def _node(self, segment: Segment) -> Members:
        owner = self._placement.owner_of(segment_of(self._live.name, segment).topic_name)
        members: Members = {
            **self._segment(segment),
            "entryBuckets": 1,
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
        consumers: list[object] = []
        for segment_id, counted in self._counted.items():
            found = _object(counted, "subscriptions").get(name)
            if isinstance(found, dict):
                each.append(found)
                attached = _list(found, "consumers")
                consumers.extend(attached)
                per_segment[str(segment_id)] = {
                    "msgBacklog": _count(found, "msgBacklog"),
                    "msgDelayed": _count(found, "msgDelayed"),
                    "unackedMessages": _count(found, "unackedMessages"),
                    "consumerCount": len(attached),
                }
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
            "consumerCount": most if group is None else len(group.group.registered()),
            "msgBacklog": sum(_count(s, "msgBacklog") for s in per_segment.values()),
            "msgDelayed": sum(_count(s, "msgDelayed") for s in per_segment.values()),
            "unackedMessages": sum(_count(s, "unackedMessages") for s in per_segment.values()),
            "segments": per_segment,
            "consumers": consumers if group is None else _registered(group),
        }


def _rates(each: Iterable[Members], names: Sequence[str]) -> Members:
    """Rates of several segments, added."""
    sums = dict.fromkeys(names, 0.0)
    for one in each:
        for name in names:
            value = one.get(name)
            sums[name] += value if isinstance(value, int | float) else 0
    return {**sums}


def _registered(group: GroupController) -> list[Members]:
    found: list[Members] = []
    for name in group.group.registered():
        session = group.group.sessions[name]
        members: Members = {
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


def _count(members: Mapping[str, object], key: str) -> int:
    value = members.get(key)
    return value if isinstance(value, int) else 0


def _object(members: Mapping[str, object], key: str) -> Members:
    value = members.get(key)
    return value if isinstance(value, dict) else {}


def _list(members: Mapping[str, object], key: str) -> Sequence[object]:
    value = members.get(key)
    return value if isinstance(value, list) else []
