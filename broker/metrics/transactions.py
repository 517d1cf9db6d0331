"""Metrics of transactions: PIP-473's of the metadata store, and Pulsar's of coordinators.

Counters of coordinators are those of the ones that this process leads, since it leads them.
Those of topics and subscriptions are in `topics`.
"""

from collections.abc import Iterator, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from broker.app.service import Broker
from storage.histogram import Histogram
from txn.coordinator import Coordinator
from txn.counters import EXECUTION_BUCKETS_MS

_STORE = "pulsar_txn_metadata_store"
_LABELS = ("cluster", "coordinator_id")


def transaction_metrics(broker: Broker) -> Iterator[Metric]:
    """All families with their present samples."""
    cluster = broker.settings.cluster_name
    yield from _store_metrics(broker, cluster)
    led = broker.transactions.coordinators.led()
    yield from _coordinator_metrics(led, cluster)
    yield from _latency_metrics(led, cluster)
    yield from _key_metrics(led, cluster, broker.clock.now_ms())
    yield from _group_metrics(led, cluster)


def _store_metrics(broker: Broker, cluster: str) -> Iterator[Metric]:
    counters = broker.transactions.counters
    writes = CounterMetricFamily(
        f"{_STORE}_op_writes", "Claims and acknowledgement records written", labels=("cluster",)
    )
    writes.add_metric((cluster,), counters.op_writes)
    yield writes
    ends = CounterMetricFamily(
        f"{_STORE}_header_cas", "Ends of transactions by outcome", labels=("cluster", "result")
    )
    ends.add_metric((cluster, "ok"), counters.header_cas_ok)
    ends.add_metric((cluster, "conflict"), counters.header_cas_conflict)
    ends.add_metric((cluster, "reject"), counters.header_cas_reject)
    yield ends
    yield _histogram(
        f"{_STORE}_index_query_seconds", "Time of index scans", cluster, counters.index_query
    )
    lost = CounterMetricFamily(
        "magnetar_txn_coordinators_lost",
        "Coordinators that another broker leads since, or none",
        labels=("cluster",),
    )
    lost.add_metric((cluster,), counters.coordinators_lost)
    yield lost
    outstanding = GaugeMetricFamily(
        f"{_STORE}_outstanding_op_records",
        "Claims and acknowledgement records of transactions that are open or being cleaned up",
        labels=("cluster",),
    )
    outstanding.add_metric((cluster,), counters.op_records)
    yield outstanding
    yield _histogram(
        "pulsar_txn_end_seconds", "Time from END_TXN to its answer", cluster, counters.end
    )


def _coordinator_metrics(led: Sequence[Coordinator], cluster: str) -> Iterator[Metric]:
    active = GaugeMetricFamily("pulsar_txn_active_count", "Open transactions", labels=_LABELS)
    created = CounterMetricFamily("pulsar_txn_created", "Transactions begun", labels=_LABELS)
    committed = CounterMetricFamily("pulsar_txn_committed", "... committed", labels=_LABELS)
    aborted = CounterMetricFamily(
        "pulsar_txn_aborted", "... aborted, timed-out ones included", labels=_LABELS
    )
    timed_out = CounterMetricFamily(
        "pulsar_txn_timeout", "... aborted at their deadline", labels=_LABELS
    )
    written = CounterMetricFamily(
        "pulsar_txn_append_log",
        "Writes of headers, which are the coordinator's log",
        labels=_LABELS,
    )
    for one in led:
        labels, counters = (cluster, str(one.coordinator_id)), one.counters
        active.add_metric(labels, one.open_count)
        created.add_metric(labels, counters.created)
        committed.add_metric(labels, counters.committed)
        aborted.add_metric(labels, counters.aborted)
        timed_out.add_metric(labels, counters.timed_out)
        written.add_metric(labels, counters.header_writes)
    yield from (active, created, committed, aborted, timed_out, written)


def _latency_metrics(led: Sequence[Coordinator], cluster: str) -> Iterator[Metric]:
    """One family for each bucket, as in Pulsar; a bucket does not include smaller ones."""
    for place, name in enumerate((*map(str, EXECUTION_BUCKETS_MS), "overflow")):
        family = GaugeMetricFamily(
            f"pulsar_txn_execution_latency_le_{name}",
            "Committed transactions that were open so long, in ms",
            labels=_LABELS,
        )
        for one in led:
            labels = (cluster, str(one.coordinator_id))
            family.add_metric(labels, one.counters.open_ms.counts[place])
        yield family


def _key_metrics(led: Sequence[Coordinator], cluster: str, now_ms: int) -> Iterator[Metric]:
    """Metrics of all keys of a coordinator."""
    # Not of each key: there may be 100,000, and users name them.
    count = GaugeMetricFamily(
        "pulsar_txn_transaction_key_count", "Transaction keys", labels=_LABELS
    )
    epoch = GaugeMetricFamily(
        "pulsar_txn_transaction_key_epoch", "Highest epoch of any of them", labels=_LABELS
    )
    age = GaugeMetricFamily(
        "pulsar_txn_transaction_key_age", "Age of the oldest of them, in seconds", labels=_LABELS
    )
    for one in led:
        labels, tally = (cluster, str(one.coordinator_id)), one.keys.tally
        if tally is None:
            continue
        count.add_metric(labels, tally.count)
        epoch.add_metric(labels, tally.highest_epoch)
        made_ms = now_ms if tally.oldest_ms is None else tally.oldest_ms
        age.add_metric(labels, max(0, now_ms - made_ms) / 1000)
    yield from (count, epoch, age)


def _group_metrics(led: Sequence[Coordinator], cluster: str) -> Iterator[Metric]:
    attempts = CounterMetricFamily(
        "magnetar_txn_attempts", "Attempts begun in groups", labels=_LABELS
    )
    groups = CounterMetricFamily(
        "magnetar_txn_groups",
        "Groups by outcome; done: requests for a batch that had been committed before",
        labels=(*_LABELS, "result"),
    )
    for one in led:
        labels, counters = (cluster, str(one.coordinator_id)), one.counters
        attempts.add_metric(labels, counters.attempts)
        groups.add_metric((*labels, "committed"), counters.groups_committed)
        groups.add_metric((*labels, "aborted"), counters.groups_aborted)
        groups.add_metric((*labels, "done"), counters.groups_done)
    yield from (attempts, groups)


def _histogram(name: str, text: str, cluster: str, histogram: Histogram) -> Metric:
    family = HistogramMetricFamily(name, text, labels=("cluster",))
    family.add_metric((cluster,), buckets=histogram.cumulative(), sum_value=histogram.total)
    return family
