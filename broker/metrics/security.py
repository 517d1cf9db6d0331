"""Metrics of TLS, and of the files with certificates and keys."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from broker.app.service import Broker


def security_metrics(broker: Broker) -> Iterator[Metric]:
    """The handshakes of clients, the expiry of the certificate, and reloads that failed.

    There are none of a single broker without TLS.
    """
    cluster = broker.settings.cluster_name
    if broker.reloader.parts:
        failures = CounterMetricFamily(
            "magnetar_security_reload_failures_total",
            "Files with certificates, keys or passwords that could not be loaded again",
            labels=("cluster", "part"),
        )
        for part, count in broker.reloader.failures.items():
            failures.add_metric((cluster, part), count)
        yield failures
    if broker.server_tls is None:
        return
    expiry = GaugeMetricFamily(
        "magnetar_tls_certificate_expiry_timestamp_seconds",
        "When the first certificate of the broker's chain expires",
        labels=("cluster",),
    )
    expiry.add_metric((cluster,), broker.server_tls.expires_at_s)
    yield expiry
    completed = CounterMetricFamily(
        "magnetar_tls_handshakes_total", "TLS handshakes that succeeded", labels=("cluster", "port")
    )
    failed = CounterMetricFamily(
        "magnetar_tls_handshakes_failed_total",
        "TLS handshakes that failed, took too long or were refused",
        labels=("cluster", "port"),
    )
    in_progress = GaugeMetricFamily(
        "magnetar_tls_handshakes_in_progress",
        "TLS handshakes that have begun and are not done",
        labels=("cluster", "port"),
    )
    for port, handshakes in broker.handshakes.items():
        completed.add_metric((cluster, port.setting), handshakes.completed)
        failed.add_metric((cluster, port.setting), handshakes.failed)
        in_progress.add_metric((cluster, port.setting), len(handshakes))
    yield completed
    yield failed
    yield in_progress
