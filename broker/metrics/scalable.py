"""Metrics of scalable topics: their segments, and the work of this broker on them.

Every broker that has a topic in memory shows the segments of it, from the same record: take the
maximum over brokers, not the sum.
"""

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from prometheus_client.core import CounterMetricFamily, Metric

from broker.app.service import Broker
from broker.scalable.history import ChangeKind
from broker.scalable.live_topics import LiveTopic

SEGMENT_GAUGES: Final = {
    "magnetar_active_segments": "Segments of scalable topics that take messages",
    "magnetar_sealed_segments": "Segments of scalable topics that are only read",
    "magnetar_entry_buckets": "Entry buckets of the active segments",
}
ORDERED_CONSUMERS: Final = "magnetar_ordered_consumers"
ORDERED_CONSUMERS_TEXT: Final = "Ordered consumers that are registered, at the topic's leader"
_LAYOUT_CHANGES: Final = tuple(
    kind
    for kind in ChangeKind
    if kind not in (ChangeKind.CREATE, ChangeKind.MOVE, ChangeKind.REFUSAL)
)


class ScalableTopicValues(NamedTuple):
    """The numbers of one scalable topic; `consumers` by subscription, at its leader only."""

    namespace: str
    topic: str
    gauges: tuple[int, int, int]
    """In the order of SEGMENT_GAUGES."""
    consumers: dict[str, int]


def values_of(broker: Broker, topics: Iterable[LiveTopic]) -> Iterator[ScalableTopicValues]:
    """Read the numbers of scalable topics."""
    for live in topics:
        active = live.layout.active
        controller = broker.scalable.controllers.of(live.name)
        yield ScalableTopicValues(
            str(live.name.namespace_name),
            str(live.name),
            (
                len(active),
                len(live.layout.sealed),
                sum(each.entry_buckets for each in active),
            ),
            {}
            if controller is None
            else {name: len(group.group.registered()) for name, group in controller.groups.items()},
        )


def scalable_metrics(broker: Broker) -> Iterator[Metric]:
    """Counters of this broker's work, with bounded labels."""
    counters, cluster = broker.scalable.counters, broker.settings.cluster_name
    changes = CounterMetricFamily(
        "magnetar_layout_changes",
        "Layouts published after a split, merge, rebucket, migration or prune, by their leader",
        labels=("cluster", "kind"),
    )
    for kind in _LAYOUT_CHANGES:
        changes.add_metric((cluster, kind.value), counters.layout_changes[kind])
    yield changes
    for name, text, count in (
        ("magnetar_segments_sealed", "Segments sealed, by their owner", counters.segments_sealed),
        (
            "magnetar_rebalances",
            "Events after which ordered consumers had other segments",
            counters.rebalances,
        ),
        (
            "magnetar_assignments_sent",
            "Assignments sent to ordered consumers",
            counters.assignments_sent,
        ),
        (
            "magnetar_assignments_too_large",
            "Changes of assignments that were too large to be stored",
            counters.assignments_too_large,
        ),
        (
            "magnetar_controllers_taken_over",
            "Controllers begun with consumers that an earlier one had registered",
            counters.controllers_taken_over,
        ),
    ):
        family = CounterMetricFamily(name, text, labels=("cluster",))
        family.add_metric((cluster,), count)
        yield family
