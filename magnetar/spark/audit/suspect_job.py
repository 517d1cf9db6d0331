"""Rows of suspect producers, read and sorted by Spark: first by identity, then by place."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Final

from pyspark.sql import SparkSession

from magnetar.spark.audit.order_checks import suspects
from magnetar.spark.audit.row_checks import (
    KeyedRow,
    RowPlace,
    Sent,
    SuspectRow,
    check_key,
    mark_copies,
)
from magnetar.spark.audit.scan import AuditedRange, suspect_rows
from magnetar.spark.audit.snapshot import Snapshot
from magnetar.spark.audit.violations import Findings
from magnetar.spark.options import Connection
from magnetar.spark.range_facts import SeenProducer, Stamp
from magnetar.spark.row_hash import row_hash

__all__ = ["SuspectKey", "rows_by_place", "check_order", "check_keys"]

PARTITIONS: Final = 32

SuspectKey = tuple[str, bool, str]
"""Producer, whether there is a key, and the key: they compare with each other."""
PlacedRow = tuple[tuple[SuspectKey, RowPlace], tuple[Stamp, RowPlace | None]]
"""The sort key of a suspect row, then its stamp and, for a copy, the place of the original."""


def check_order(
    spark: SparkSession,
    connection: Connection,
    parts: Sequence[AuditedRange],
    producers: Iterable[SeenProducer],
    snapshot: Snapshot,
    findings: Findings,
) -> None:
    """Check the rows of suspect producers one by one (V3, V4)."""
    found = suspects(producers, snapshot, findings)
    if not found:
        return
    where = {segment_id for segments in found.values() for segment_id in segments}
    there = [part for part in parts if part.segment_id in where]
    # Spark sorts on disk what exceeds the memory of its workers (`spark.python.worker.memory`), and
    # the checks remember one row at a time.  So a key that has all rows needs no more memory.
    checked = (
        spark.sparkContext.parallelize(there, max(1, len(there)))
        .flatMap(partial(suspect_rows, connection, frozenset(found)))
        .repartitionAndSortWithinPartitions(PARTITIONS, _by_number)
        .mapPartitions(rows_by_place)
        .repartitionAndSortWithinPartitions(PARTITIONS, _by_key)
        .mapPartitions(check_keys)
    )
    for each in checked.collect():  # One of each partition, and bounded.
        findings.merge(each)


def rows_by_place(rows: Iterable[SuspectRow]) -> Iterator[PlacedRow]:
    """Find the copies in a partition sorted by identity; the rows to check by place."""
    for producer, key, (place, stamp, original) in mark_copies(rows):
        yield ((producer, key is not None, key or ""), place), (stamp, original)


def check_keys(rows: Iterable[PlacedRow]) -> Iterator[Findings]:
    """Check the rows of a partition sorted by producer, key and place."""
    findings = Findings()
    for (producer, has_key, key), of_key in groupby(rows, key=_suspect_key_of):
        keyed = (KeyedRow(place, stamp, first) for (_, place), (stamp, first) in of_key)
        check_key(producer, key if has_key else None, keyed, findings)
    yield findings


def _suspect_key_of(row: PlacedRow) -> SuspectKey:
    return row[0][0]


def _by_number(key: tuple[Sent, RowPlace]) -> int:
    """Partition rows by producer and sequence id, so that copies come together."""
    # Not by key: a hot key is spread over the partitions.
    sent, _ = key
    return row_hash(sent.producer.encode(), sent.stamp.sequence_id.to_bytes(8, "big", signed=True))


def _by_key(key: tuple[SuspectKey, RowPlace]) -> int:
    """Partition rows by producer and key."""
    (producer, has_key, name), _ = key
    return row_hash(producer.encode(), name.encode() if has_key else None)
