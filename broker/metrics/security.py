"""Metrics of TLS, authentication, authorization, and of the files with certificates and keys."""

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from broker.app.service import Broker
from broker.wire.handlers.guard import AccessGuard
from config.bounds import EXPIRING_TOKEN_MINUTES
from magnetar.protocol.pulsar_pb2 import BaseCommand
from security.authenticator import Authenticator

_CLASS_NAMES: Final[Mapping[str, str]] = {
    "token": "AuthenticationProviderToken",
    "oidc": "AuthenticationProviderOpenID",
    "basic": "AuthenticationProviderBasic",
    "tls": "AuthenticationProviderTls",
}
"""Pulsar's names of the providers, for its dashboards."""


def security_metrics(broker: Broker) -> Iterator[Metric]:
    """Logins, refusals, the handshakes of clients, certificates, and reloads that failed.

    There are none of a single broker without security.
    """
    cluster = broker.settings.cluster_name
    if broker.authenticator is not None:
        yield from _logins(broker.authenticator, cluster)
    if broker.access_guard is not None:
        yield from _access(broker.access_guard, cluster)
    if broker.authenticator is not None or broker.access_guard is not None:
        dropped = CounterMetricFamily(
            "magnetar_audit_lines_dropped",
            "Lines of the audit log that were left out above its bounds",
            labels=("cluster",),
        )
        dropped.add_metric((cluster,), broker.audit.dropped)
        yield dropped
    if broker.reloader.parts:
        failures = CounterMetricFamily(
            "magnetar_security_reload_failures_total",
            "Files with certificates, keys or passwords that could not be loaded again",
            labels=("cluster", "part"),
        )
        for part, count in broker.reloader.failures.items():
            failures.add_metric((cluster, part), count)
        yield failures
    if broker.server_tls is not None:
        yield from _tls(broker, broker.server_tls.expires_at_s, cluster)


def _tls(broker: Broker, expires_at_s: float, cluster: str) -> Iterator[Metric]:
    expiry = GaugeMetricFamily(
        "magnetar_tls_certificate_expiry_timestamp_seconds",
        "When the first certificate of the broker's chain expires",
        labels=("cluster",),
    )
    expiry.add_metric((cluster,), expires_at_s)
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


def _logins(authenticator: Authenticator, cluster: str) -> Iterator[Metric]:
    """Logins under Pulsar's names, with its names of providers."""
    counters = authenticator.counters
    succeeded = CounterMetricFamily(
        "pulsar_authentication_success",
        "Logins, and refreshes of credentials, that succeeded",
        labels=("cluster", "provider_name", "auth_method"),
    )
    for (provider, method), count in counters.successes.items():
        succeeded.add_metric((cluster, _class_name(provider), method), count)
    failed = CounterMetricFamily(
        "pulsar_authentication_failures",
        "Logins that failed",
        labels=("cluster", "provider_name", "auth_method", "reason"),
    )
    for (provider, method, reason), count in counters.failures.items():
        failed.add_metric((cluster, _class_name(provider), method, reason), count)
    expired = CounterMetricFamily(
        "pulsar_expired_token", "Logins with credentials that had expired", labels=("cluster",)
    )
    expired.add_metric((cluster,), counters.expired)
    left = HistogramMetricFamily(
        "pulsar_expiring_token_minutes",
        "Minutes for which the credentials of a login were valid",
        labels=("cluster",),
    )
    bounds = [f"{float(bound)}" for bound in EXPIRING_TOKEN_MINUTES]
    left.add_metric(
        (cluster,),
        buckets=list(zip((*bounds, "+Inf"), accumulate(counters.minutes_left), strict=True)),
        sum_value=counters.minutes_left_sum,
    )
    yield succeeded
    yield failed
    yield expired
    yield left


def _class_name(provider: str) -> str:
    return _CLASS_NAMES.get(provider, provider)


def _access(guard: AccessGuard, cluster: str) -> Iterator[Metric]:
    denied = CounterMetricFamily(
        "magnetar_access_denied",
        "Commands that a role may not send: refused, or with a dry run only logged",
        labels=("cluster", "operation"),
    )
    for operation, count in guard.refused.items():
        denied.add_metric((cluster, BaseCommand.Type.Name(operation)), count)
    withdrawn = CounterMetricFamily(
        "magnetar_access_withdrawn",
        "Connections that were closed because a grant was withdrawn",
        labels=("cluster",),
    )
    withdrawn.add_metric((cluster,), guard.withdrawn)
    yield denied
    yield withdrawn
