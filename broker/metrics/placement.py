"""Metrics of placement: Pulsar's of its load balancer where it has them.

Rules: as in `metrics`: values are read at scrape time.  A single broker tells them too, so that
dashboards find them.
"""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from broker.app.service import Broker

_LABELS = ("cluster", "broker")


def placement_metrics(broker: Broker) -> Iterator[Metric]:
    """All families with their samples of this moment."""
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
        ("pulsar_lb_leader", "1 on the broker that looks after balance", int(leads)),
    ):
        gauge = GaugeMetricFamily(name, text, labels=_LABELS)
        gauge.add_metric(labels, value)
        yield gauge
    for name, text, count in (
        ("pulsar_lb_acquired", "Taken, for whatever reason", counters.acquired),
        ("pulsar_lb_taken_over", "Of those, what a broker that ended had", counters.taken_over),
        ("pulsar_lb_released", "Let go of", counters.released),
        ("pulsar_lb_lost", "Lost with a session, or to another broker", counters.lost),
        ("pulsar_lb_unload_bundle", "Moved for balance, by the leader", counters.moves),
        ("pulsar_lb_sessions_lost", "Sessions with the metadata store", counters.sessions_lost),
        ("pulsar_broker_lookup_redirects", "Lookups sent on", counters.redirects),
    ):
        family = CounterMetricFamily(name, text, labels=_LABELS)
        family.add_metric(labels, count)
        yield family
