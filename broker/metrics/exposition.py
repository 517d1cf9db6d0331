"""Prometheus metrics under Pulsar's names and labels.

Values are read at scrape time from counters that topics, subscriptions and connections keep anyway,
so metrics cost nothing while messages flow.  Segments appear as topics, `topic="segment://..."`, as
in Pulsar.
"""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from broker.app.service import Broker
from broker.metrics.offload import offload_metrics
from broker.metrics.placement import placement_metrics
from broker.metrics.stores import (
    bookkeeper_metrics,
    damage_metrics,
    disk_metrics,
    metadata_metrics,
)
from broker.metrics.transactions import (
    subscription_transaction_metrics,
    topic_transaction_metrics,
    transaction_metrics,
)
from broker.topics.topic import Topic

NAMESPACE_LABELS = ("cluster", "namespace")
TOPIC_LABELS = ("cluster", "namespace", "topic")
SUBSCRIPTION_LABELS = ("cluster", "namespace", "topic", "subscription")


class _Family:
    """One metric with its samples; a name that ends in `_total` is a counter's."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...]) -> None:
        # A counter's family drops `_total`, which the exposition adds again.
        counter = name.endswith("_total")
        self.metric: CounterMetricFamily | GaugeMetricFamily = (
            CounterMetricFamily(name, text, labels=labels)
            if counter
            else GaugeMetricFamily(name, text, labels=labels)
        )

    def add(self, labels: Iterable[str], value: float) -> None:
        """Add one sample."""
        self.metric.add_metric(list(labels), value)


class BrokerCollector(Collector):
    """Collects all metrics of one broker, at each scrape."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._cluster = broker.settings.cluster_name

    def collect(self) -> Iterator[Metric]:
        """All families with their present samples."""
        topics = list(self._broker.topics.loaded().values())
        yield InfoMetricFamily(
            "pulsar_version", "Version of the broker", {"version": self._broker.version}
        )
        yield from self._connections()
        yield from self._namespaces(topics)
        yield from self._topics(topics)
        yield from self._subscriptions(topics)
        yield from topic_transaction_metrics(topics, self._cluster)
        yield from subscription_transaction_metrics(topics, self._cluster)
        yield from transaction_metrics(self._broker)
        yield from placement_metrics(self._broker)
        yield from offload_metrics(self._broker, topics)
        yield from metadata_metrics(self._broker.metadata, self._cluster)
        if not self._broker.settings.in_cluster:
            yield from damage_metrics(self._broker.damage, self._cluster)
            yield from disk_metrics(self._broker.settings.data_dir, self._cluster)
        bookkeeper = self._broker.bookkeeper
        if bookkeeper is not None:
            yield from bookkeeper_metrics(
                bookkeeper.counters, bookkeeper.bookie_counters, self._cluster
            )

    def _connections(self) -> Iterator[Metric]:
        active = _Family("pulsar_active_connections", "Open client connections", ("cluster",))
        active.add((self._cluster,), len(self._broker.connections))
        yield active.metric
        memory = self._broker.peer_memory
        held = _Family(
            "magnetar_peer_memory_bytes",
            "Bytes held for clients: incomplete frames, waiting frames, queued output",
            ("cluster",),
        )
        held.add((self._cluster,), memory.refresh())
        yield held.metric
        ended = _Family(
            "magnetar_peer_memory_closed_connections_total",
            "Connections closed because too many bytes were held for all clients",
            ("cluster",),
        )
        ended.add((self._cluster,), memory.given_up)
        yield ended.metric

    def _namespaces(self, topics: list[Topic]) -> Iterator[Metric]:
        family = _Family("pulsar_topics_count", "Topics and segments loaded", NAMESPACE_LABELS)
        counts: dict[str, int] = {}
        for topic in topics:
            namespace = str(topic.name.namespace_name)
            counts[namespace] = counts.get(namespace, 0) + 1
        for namespace, count in counts.items():
            family.add((self._cluster, namespace), count)
        yield family.metric

    def _labels(self, topic: Topic) -> tuple[str, str, str]:
        return (self._cluster, str(topic.name.namespace_name), str(topic.name))

    def _topics(self, topics: list[Topic]) -> Iterator[Metric]:
        def family(name: str, text: str) -> _Family:
            return _Family(name, text, TOPIC_LABELS)

        producers = family("pulsar_producers_count", "Producers attached")
        consumers = family("pulsar_consumers_count", "Consumers attached")
        subscriptions = family("pulsar_subscriptions_count", "Subscriptions")
        in_messages = family("pulsar_in_messages_total", "Messages published")
        in_bytes = family("pulsar_in_bytes_total", "Bytes published")
        out_messages = family("pulsar_out_messages_total", "Messages delivered")
        out_bytes = family("pulsar_out_bytes_total", "Bytes delivered")
        read_entries = family(
            "magnetar_segment_read_entries_total", "Entries read in bulk, by no consumer"
        )
        read_bytes = family("magnetar_segment_read_bytes_total", "Bytes of entries read in bulk")
        backlog = family("pulsar_msg_backlog", "Entries not acknowledged, over all subscriptions")
        size = family("pulsar_storage_size", "Bytes stored")
        for topic in topics:
            labels = self._labels(topic)
            of_topic = list(topic.subscriptions.values())
            producers.add(labels, len(topic.producers))
            consumers.add(labels, sum(len(one.consumers) for one in of_topic))
            subscriptions.add(labels, len(of_topic))
            in_messages.add(labels, topic.messages_in_total)
            in_bytes.add(labels, topic.bytes_in_total)
            out_messages.add(labels, topic.messages_out_total)
            out_bytes.add(labels, topic.bytes_out_total)
            read_entries.add(labels, topic.entries_read_total)
            read_bytes.add(labels, topic.bytes_read_total)
            backlog.add(labels, sum(one.backlog for one in of_topic if one.durable))
            size.add(labels, topic.ledger.total_size_bytes)
        for filled in (producers, consumers, subscriptions, backlog, size):
            yield filled.metric
        for filled in (in_messages, in_bytes, out_messages, out_bytes, read_entries, read_bytes):
            yield filled.metric

    def _subscriptions(self, topics: list[Topic]) -> Iterator[Metric]:
        def family(name: str, text: str) -> _Family:
            return _Family(name, text, SUBSCRIPTION_LABELS)

        backlog = family("pulsar_subscription_back_log", "Entries not acknowledged")
        not_delayed = family(
            "pulsar_subscription_back_log_no_delayed",
            "Entries not acknowledged, without delayed ones",
        )
        delayed = family("pulsar_subscription_delayed", "Entries delayed until their time")
        unacked = family("pulsar_subscription_unacked_messages", "Delivered, not acknowledged")
        consumers = family("pulsar_subscription_consumers_count", "Consumers attached")
        delivered = family("pulsar_subscription_out_messages_total", "Messages delivered")
        redelivered = family("pulsar_subscription_redelivered_messages_total", "Redelivered")
        acknowledged = family("pulsar_subscription_acknowledged_messages_total", "Acknowledged")
        for topic in topics:
            for subscription in topic.subscriptions.values():
                labels = (*self._labels(topic), subscription.name)
                backlog.add(labels, subscription.backlog)
                not_delayed.add(labels, max(0, subscription.backlog - subscription.delayed))
                delayed.add(labels, subscription.delayed)
                unacked.add(labels, subscription.unacked)
                consumers.add(labels, len(subscription.consumers))
                delivered.add(labels, subscription.messages_out_total)
                redelivered.add(labels, subscription.redelivered_total)
                acknowledged.add(labels, subscription.acknowledged_total)
        for filled in (backlog, not_delayed, delayed, unacked, consumers):
            yield filled.metric
        for filled in (delivered, redelivered, acknowledged):
            yield filled.metric


def make_registry(broker: Broker) -> CollectorRegistry:
    """Make the registry of one broker and its process."""
    registry = CollectorRegistry()
    registry.register(BrokerCollector(broker))
    ProcessCollector(registry=registry)
    return registry


def metrics_text(registry: CollectorRegistry) -> bytes:
    """The present metrics as text."""
    return generate_latest(registry)
