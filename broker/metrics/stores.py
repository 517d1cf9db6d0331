"""Metrics of the two stores: requests to the metadata store, and the BookKeeper client's counters.

Names are Pulsar's where it has the same metric.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from storage.damage import DamageKind, DamageReport
from storage.metadata.counted_metadata import CountedMetadata

if TYPE_CHECKING:
    from storage.ledger.bookkeeper.bookie_client import BookieCounters
    from storage.ledger.bookkeeper.ledger_services import LedgerCounters

_CLIENT = "magnetar_bookkeeper"


def metadata_metrics(metadata: "CountedMetadata", cluster: str) -> Iterator[Metric]:
    """Writes to the metadata store, with the time of those that ended, and reads."""
    writes = CounterMetricFamily(
        "magnetar_metadata_writes",
        "Puts and deletes asked of the metadata store, records of ledgers left out",
        labels=("cluster", "operation"),
    )
    latency = HistogramMetricFamily(
        "pulsar_metadata_store_ops_latency_ms",
        "Time of writes to the metadata store",
        labels=("cluster", "name", "type", "status"),
    )
    for operation, kind, counters in (
        ("put", "put", metadata.puts),
        ("delete", "del", metadata.deletes),
    ):
        writes.add_metric((cluster, operation), counters.asked)
        for status, times in (("success", counters.succeeded), ("fail", counters.failed)):
            latency.add_metric(
                (cluster, "metadata-store", kind, status),
                buckets=times.cumulative(),
                sum_value=times.total,
            )
    reads = CounterMetricFamily(
        "magnetar_metadata_reads",
        "Reads of the metadata store: keys and scans that were asked for, events of watches",
        labels=("cluster", "operation"),
    )
    counted = metadata.reads
    for operation, count in (
        ("get", counted.gets),
        ("scan", counted.scans),
        ("event", counted.events),
    ):
        reads.add_metric((cluster, operation), count)
    yield writes
    yield reads
    yield latency


def damage_metrics(damage: DamageReport, cluster: str) -> Iterator[Metric]:
    """What was found to be damaged in the data directory."""
    things = GaugeMetricFamily(
        "magnetar_damaged",
        "Damaged things in the data directory, also those that could be rebuilt, by kind",
        labels=("cluster", "kind"),
    )
    counts = damage.counts
    for kind in DamageKind:
        things.add_metric((cluster, str(kind)), counts.get(kind, 0))
    entries = GaugeMetricFamily(
        "magnetar_damaged_entries",
        "Entries of ledgers that are known to be lost",
        labels=("cluster",),
    )
    entries.add_metric((cluster,), damage.entries_missing)
    yield things
    yield entries


def disk_metrics(data_dir: Path, cluster: str) -> Iterator[Metric]:
    """Space of the file system of the data directory."""
    try:
        usage = shutil.disk_usage(data_dir)
    except OSError:
        return
    for name, text, value in (
        ("free", "Bytes that the broker may still write there", usage.free),
        ("size", "Size of the file system in bytes", usage.total),
    ):
        family = GaugeMetricFamily(f"magnetar_data_dir_{name}_bytes", text, labels=("cluster",))
        family.add_metric((cluster,), value)
        yield family


def bookkeeper_metrics(
    ledgers: "LedgerCounters", bookies: "BookieCounters", cluster: str, *, ensemble_size: int
) -> Iterator[Metric]:
    """All metrics of the BookKeeper client, which exists only where ledgers are on bookies."""
    size = GaugeMetricFamily(
        f"{_CLIENT}_ensemble_size",
        "Bookies that a new ledger needs: ledger_ensemble_size",
        labels=("cluster",),
    )
    size.add_metric((cluster,), ensemble_size)
    yield size
    for name, text, count in (
        ("adds", "Entries that a quorum of bookies has", ledgers.adds),
        ("add_bytes", "Bytes of those entries", ledgers.add_bytes),
        ("failed_adds", "Entries that were not stored, as far as is known", ledgers.failed_adds),
        ("ensemble_changes", "Ensembles that got other bookies", ledgers.ensemble_changes),
        ("fenced", "Writers that found another owner", ledgers.fenced),
        ("recoveries", "Ledgers recovered and closed", ledgers.recoveries),
        ("failed_recoveries", "Recoveries that failed", ledgers.failed_recoveries),
        ("read_retries", "Reads that went on to another replica", ledgers.read_retries),
        ("bookie_failures", "Places of ensembles whose bookie failed", ledgers.bookie_failures),
        ("requests", "Requests to bookies", bookies.requests),
        ("timeouts", "Requests that were not answered in time", bookies.timeouts),
        ("sent_bytes", "Bytes of requests", bookies.bytes_sent),
        ("received_bytes", "Bytes of answers", bookies.bytes_received),
        ("connects", "Connections made", bookies.connects),
        ("failed_connects", "Connections that could not be made", bookies.failed_connects),
    ):
        yield _counter(f"{_CLIENT}_{name}", text, cluster, count)
    yield _counter(
        "pulsar_managedLedger_client_bookkeeper_client_BOOKIE_QUARANTINE",
        "Bookies that were left out for a while because they failed",
        cluster,
        ledgers.quarantines,
    )
    refusals = CounterMetricFamily(
        f"{_CLIENT}_refusals",
        "Answers of bookies other than OK, and requests that got none, by code",
        labels=("cluster", "code"),
    )
    for code, count in bookies.refusals.items():
        if code.name != "OK":
            refusals.add_metric((cluster, code.name.lower()), count)
    yield refusals


def _counter(name: str, text: str, cluster: str, count: int) -> Metric:
    family = CounterMetricFamily(name, text, labels=("cluster",))
    family.add_metric((cluster,), count)
    return family
