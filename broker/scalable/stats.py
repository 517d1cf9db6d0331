"""The statistics of a scalable topic, as REST shows them.

Rules: the members of 5.0.0-M1 (`epoch`, `segments`, counts) and of later versions (`layout`, sizes,
producers, consumers) side by side, as clients ignore what they do not know; what is not measured is
left out.  Rates are the metrics endpoint's business.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from broker.placement import Placement
from broker.scalable.controller import TopicController
from broker.scalable.group import SessionState
from broker.scalable.group_controller import GroupController
from broker.scalable.layout import Segment
from broker.scalable.live_topics import LiveTopic
from broker.scalable.records import SubscriptionKind, segment_of
from broker.topic import Topic

if TYPE_CHECKING:
    from broker.consumer import Consumer

Members = dict[str, object]


class TopicStats:
    """One topic at one moment: its segments' topics, its subscriptions' kinds, its controller."""

    def __init__(
        self,
        live: LiveTopic,
        topics: Mapping[int, Topic],
        kinds: Mapping[str, SubscriptionKind | None],
        controller: TopicController | None,
        placement: Placement,
    ) -> None:
        self._live = live
        self._topics = topics
        self._kinds = kinds
        self._groups = {} if controller is None else controller.groups
        self._owner = placement.broker_id

    def to_json(self) -> Members:
        """All members."""
        layout = self._live.layout
        segments = layout.segments.values()
        names = {name for topic in self._topics.values() for name in _durable(topic)}
        subscriptions = sorted(names | self._kinds.keys() | self._groups.keys())
        size = sum(topic.ledger.total_size_bytes for topic in self._topics.values())
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
            "storageSize": size,
            "producers": self._producers(),
            "subscriptions": {name: self._subscription(name) for name in subscriptions},
        }

    def _segment(self, segment: Segment) -> Members:
        name = str(segment_of(self._live.name, segment))
        return {"name": name, "state": segment.state.value}

    def _node(self, segment: Segment) -> Members:
        members: Members = {
            **self._segment(segment),
            "entryBuckets": 1,
            "ownerBroker": self._owner,
        }
        if segment.parent_ids:
            members["parentIds"] = list(segment.parent_ids)
        if segment.child_ids:
            members["childIds"] = list(segment.child_ids)
        return members

    def _producers(self) -> list[Members]:
        return [
            {
                "producerName": producer.name,
                "address": producer.connection.remote,
                "connectedSince": _instant(producer.connection.connected_ms),
                "clientVersion": producer.connection.client_version,
            }
            for topic in self._topics.values()
            for producer in topic.producers.values()
            if producer.attached
        ]

    def _subscription(self, name: str) -> Members:
        per_segment: dict[str, Members] = {}
        consumers: list[Consumer] = []
        for segment_id, topic in self._topics.items():
            subscription = topic.subscriptions.get(name)
            if subscription is not None and subscription.durable:
                consumers.extend(subscription.consumers)
                per_segment[str(segment_id)] = {
                    "msgBacklog": subscription.backlog,
                    "unackedMessages": subscription.unacked,
                    "consumerCount": len(subscription.consumers),
                }
        group = self._groups.get(name)
        kind = self._kinds.get(name) or SubscriptionKind.QUEUE
        attached = max((_count(s, "consumerCount") for s in per_segment.values()), default=0)
        return {
            "type": kind.value,
            "consumerCount": attached if group is None else len(group.group.registered()),
            "msgBacklog": sum(_count(s, "msgBacklog") for s in per_segment.values()),
            "unackedMessages": sum(_count(s, "unackedMessages") for s in per_segment.values()),
            "segments": per_segment,
            "consumers": _attached(consumers) if group is None else _registered(group),
        }


def _durable(topic: Topic) -> list[str]:
    return [name for name, subscription in topic.subscriptions.items() if subscription.durable]


def _attached(consumers: "list[Consumer]") -> list[Members]:
    return [
        {
            "consumerName": consumer.name,
            "connected": True,
            "unackedMessages": consumer.unacked,
            "availablePermits": consumer.permits,
            "address": consumer.connection.remote,
            "connectedSince": _instant(consumer.connected_ms),
            "clientVersion": consumer.connection.client_version,
        }
        for consumer in consumers
    ]


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
            members["connectedSince"] = _instant(member.connection.connected_ms)
            members["clientVersion"] = member.connection.client_version
        found.append(members)
    return found


def _count(members: Members, key: str) -> int:
    value = members[key]
    return value if isinstance(value, int) else 0


def _instant(time_ms: int) -> str:
    moment = datetime.fromtimestamp(time_ms / 1000, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
