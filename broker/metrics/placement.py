"""Metrics of placement, under the names of Pulsar's load balancer where it has them.

A single broker has them too, so that dashboards find them.
"""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from broker.app.service import Broker

_LABELS = ("cluster", "broker")


def placement_metrics(broker: Broker) -> Iterator[Metric]:
    """All families with their present samples."""
    placement, counters = broker.placement, broker.placement.counters
    labels = (broker.settings.cluster_name, placement.broker_id)
    leader = placement.leader
    leads = leader is not None and leader.broker_id == placement.broker_id
    for name, text, value in (
        ("pulsar_lb_cpu_usage", "Share of one core, in percent", placement.cpu_percent),
        ("pulsar_lb_brokers_count", "Live brokers", len(placement.brokers)),
        ("pulsar_lb_owned_count", "Topics, segments and controllers owned", len(placement.owned)),
        (
            "magnetar_clock_skew_ms",
            "By how much this clock is ahead of the metadata store's; negative: behind",
            broker.clock_check.skew_ms,
        ),
        ("pulsar_lb_leader", "1 on the broker that balances load", int(leads)),
    ):
        gauge = GaugeMetricFamily(name, text, labels=_LABELS)
        gauge.add_metric(labels, value)
        yield gauge
    for name, text, count in (
        ("pulsar_lb_acquired", "Acquired, for any reason", counters.acquired),
        ("pulsar_lb_taken_over", "Acquired after their broker ended", counters.taken_over),
        ("pulsar_lb_released", "Released", counters.released),
        ("pulsar_lb_lost", "Lost with a session, or to another broker", counters.lost),
        ("pulsar_lb_unload_bundle", "Moved for balance, by the leader", counters.moves),
        ("pulsar_lb_sessions_lost", "Lost metadata sessions", counters.sessions_lost),
        ("pulsar_broker_lookup_redirects", "Lookups redirected", counters.redirects),
    ):
        family = CounterMetricFamily(name, text, labels=_LABELS)
        family.add_metric(labels, count)
        yield family
