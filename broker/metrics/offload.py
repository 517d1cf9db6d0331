"""Metrics of offloading: copies, reads from copies, runs."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from broker.app.service import Broker


def offload_metrics(broker: Broker) -> Iterator[Metric]:
    """All metrics of copies of ledgers, but for the sizes of topics."""
    cluster = broker.settings.cluster_name
    cold = broker.managed_ledgers.cold
    counters = cold.counters
    for name, text, count in (
        ("ledgers", "Ledgers that were copied and verified", counters.ledgers),
        ("entries", "Entries of copied ledgers", counters.entries),
        ("bytes", "Bytes of entries of copied ledgers", counters.bytes),
        ("failures", "Copies that failed", counters.failures),
        ("ledgers_deleted", "Ledgers deleted because they have a copy", counters.hot_deleted),
        ("copies_deleted", "Copies deleted, complete or not", counters.deleted),
        ("copies_opened", "Copies opened to be read or checked", counters.opened),
        ("block_cache_hits", "Blocks of copies found in memory", cold.cache_hits),
        ("block_cache_misses", "Blocks of copies that were waited for", cold.cache_misses),
    ):
        counter = CounterMetricFamily(f"magnetar_offload_{name}", text, labels=("cluster",))
        counter.add_metric((cluster,), count)
        yield counter
    for name, text, value in (
        ("running", "Topics that are being offloaded, or wait for it", broker.offloads.running),
        ("block_cache_bytes", "Blocks of copies in memory", cold.cached_bytes),
    ):
        gauge = GaugeMetricFamily(f"magnetar_offload_{name}", text, labels=("cluster",))
        gauge.add_metric((cluster,), value)
        yield gauge
