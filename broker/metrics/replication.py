"""Metrics of replicated subscriptions, under Apache Pulsar's names, and of lists of clusters."""

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from broker.app.service import Broker

_PREFIX: Final = "pulsar_replicated_subscriptions_"


def replication_metrics(broker: Broker) -> Iterator[Metric]:
    """All families with their present samples."""
    replications, labels = broker.replications, ("cluster",)
    cluster, counts = (broker.settings.cluster_name,), replications.snapshots
    pending = GaugeMetricFamily(
        _PREFIX + "pending_snapshots", "Snapshots that other clusters have to answer", labels=labels
    )
    pending.add_metric(cluster, replications.pending_snapshots)
    yield pending
    late = CounterMetricFamily(
        _PREFIX + "timedout_snapshots",
        "Snapshots that other clusters did not answer in time",
        labels=labels,
    )
    late.add_metric(cluster, counts.timed_out)
    yield late
    took = SummaryMetricFamily(
        _PREFIX + "snapshot_ms", "Time that complete snapshots took, in ms", labels=labels
    )
    took.add_metric(cluster, counts.completed, 1000 * counts.took_s)
    yield took
    exchange = broker.scalable.subscription_exchange
    for name, about, value in (
        ("answered", "Answers of other clusters to questions", exchange.questions),
        ("failed", "Questions that other clusters did not answer,", exchange.failures),
    ):
        asked = CounterMetricFamily(
            f"magnetar_replicated_subscription_questions_{name}",
            f"{about} about subscriptions of scalable topics",
            labels=labels,
        )
        asked.add_metric(cluster, value)
        yield asked
    entries = GaugeMetricFamily(
        "magnetar_replicated_subscription_entries",
        "Entries of segments whose origin is known, as replicated subscriptions have to"
        " acknowledge them",
        labels=labels,
    )
    entries.add_metric(cluster, replications.subscription_entries.held)
    yield entries
    incomplete = GaugeMetricFamily(
        "magnetar_replication_incomplete_lists",
        "Lists of clusters in another cluster that lack one of the list here",
        labels=("cluster", "namespace", "remote_cluster"),
    )
    for (namespace, remote), count in replications.lists.counts.items():
        incomplete.add_metric((*cluster, str(namespace), remote), count)
    yield incomplete
