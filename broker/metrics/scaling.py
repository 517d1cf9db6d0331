"""Metrics of automatic splits and merges of scalable topics, as their leader counts them.

Their labels are bounded: actions, rules and causes are those of `broker.scalable.scale_decision`.
"""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from broker.app.service import Broker


def scaling_metrics(broker: Broker) -> Iterator[Metric]:
    """All families with their present samples."""
    scaler, cluster = broker.scalable.scaler, broker.settings.cluster_name
    decisions = CounterMetricFamily(
        "magnetar_scaling_decisions",
        "Splits, merges and rebuckets that the policy made",
        labels=("cluster", "action", "rule"),
    )
    for labels, count in sorted(scaler.decisions.items()):
        decisions.add_metric((cluster, *labels), count)
    yield decisions
    refusals = CounterMetricFamily(
        "magnetar_scaling_refusals",
        "Changes that a rule of the policy wanted at an evaluation, and that were refused",
        labels=("cluster", "rule", "cause"),
    )
    for labels, count in sorted(scaler.refusals.items()):
        refusals.add_metric((cluster, *labels), count)
    yield refusals
    reporter = broker.scalable.load_reporter
    for name, text, count in (
        ("magnetar_scaling_evaluations", "Evaluations of topics", scaler.evaluations_total),
        ("magnetar_scaling_failures", "Evaluations that failed", scaler.failures_total),
        ("magnetar_load_reports_written", "Load reports written", reporter.written_total),
    ):
        family = CounterMetricFamily(name, text, labels=("cluster",))
        family.add_metric((cluster,), count)
        yield family
