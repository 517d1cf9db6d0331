"""Prometheus metrics under Pulsar's names and labels.

Values are read at scrape time from counters that topics, subscriptions and connections keep anyway,
so metrics cost nothing while messages flow.  Segments appear as topics, `topic="segment://..."`, as
in Pulsar.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
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
from broker.metrics.replication import replication_metrics
from broker.metrics.scalable import scalable_metrics
from broker.metrics.scaling import scaling_metrics
from broker.metrics.security import security_metrics
from broker.metrics.stores import (
    bookkeeper_metrics,
    damage_metrics,
    disk_metrics,
    metadata_metrics,
)
from broker.metrics.topics import QUOTA_NAMES, TopicFamilies
from broker.metrics.transactions import transaction_metrics


class BrokerCollector(Collector):
    """Collects the metrics of one broker, but for those of its topics, at each scrape."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._cluster = broker.settings.cluster_name

    def collect(self) -> Iterator[Metric]:
        """All families with their present samples."""
        broker = self._broker
        yield InfoMetricFamily(
            "pulsar_version", "Version of the broker", {"version": broker.version}
        )
        yield from self._connections()
        yield self._evictions()
        yield from security_metrics(broker)
        yield from transaction_metrics(broker)
        yield from placement_metrics(broker)
        yield from offload_metrics(broker)
        yield from replication_metrics(broker)
        yield from scalable_metrics(broker)
        yield from scaling_metrics(broker)
        yield from metadata_metrics(broker.metadata, self._cluster)
        if not broker.settings.in_cluster:
            yield from damage_metrics(broker.damage, self._cluster)
            yield from disk_metrics(broker.settings.data_dir, self._cluster)
        bookkeeper = broker.bookkeeper
        if bookkeeper is not None:
            yield from bookkeeper_metrics(
                bookkeeper.counters,
                bookkeeper.bookie_counters,
                self._cluster,
                ensemble_size=broker.settings.ledger_ensemble_size,
            )

    def _connections(self) -> Iterator[Metric]:
        labels, memory = ("cluster",), self._broker.peer_memory
        active = GaugeMetricFamily(
            "pulsar_active_connections", "Open client connections", labels=labels
        )
        active.add_metric((self._cluster,), len(self._broker.connections))
        yield active
        held = GaugeMetricFamily(
            "magnetar_peer_memory_bytes",
            "Bytes held for clients: incomplete frames, waiting frames, queued output",
            labels=labels,
        )
        held.add_metric((self._cluster,), memory.refresh())
        yield held
        ended = CounterMetricFamily(
            "magnetar_peer_memory_closed_connections_total",
            "Connections closed because too many bytes were held for all clients",
            labels=labels,
        )
        ended.add_metric((self._cluster,), memory.given_up)
        yield ended

    def _evictions(self) -> Metric:
        family = CounterMetricFamily(
            "pulsar_broker_storage_backlog_quota_exceeded_evictions",
            "Times that a backlog quota had subscriptions of a topic lose messages",
            labels=("cluster", "quota_type"),
        )
        for quota, count in self._broker.backlog_quotas.evictions.items():
            family.add_metric((self._cluster, QUOTA_NAMES[quota]), count)
        return family


def topic_families(broker: Broker) -> TopicFamilies:
    """Empty families for the topics of a broker."""
    settings = broker.settings
    return TopicFamilies(settings.cluster_name, topic_level=settings.topic_level_metrics)


def make_broker_registry(broker: Broker) -> CollectorRegistry:
    """Make the registry of one broker and its process, without its topics."""
    registry = CollectorRegistry()
    registry.register(BrokerCollector(broker))
    ProcessCollector(registry=registry)
    return registry
