"""The audit as a job of Spark: a snapshot, a parallel scan, then the checks of rules V1 to V7."""

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Final

from pyspark import RDD, StorageLevel
from pyspark.sql import SparkSession

from magnetar import Client
from magnetar.errors import TopicNotFound
from magnetar.layout import Layout
from magnetar.protocol.ids import EARLIEST
from magnetar.spark.admin import AdminRest
from magnetar.spark.audit.audited import (
    AuditedSegment,
    AuditState,
    state_after_audit,
    unchanged_segments,
)
from magnetar.spark.audit.dag_picture import generations
from magnetar.spark.audit.group_checks import check_batches, check_positions
from magnetar.spark.audit.order_checks import check_entries, check_views
from magnetar.spark.audit.records import Plan, take_snapshot, trimmed_since
from magnetar.spark.audit.report import Report
from magnetar.spark.audit.scan import AuditedRange
from magnetar.spark.audit.scan_tasks import (
    ScannedRange,
    SegmentTally,
    count_readable,
    readable_of,
    scan_raw,
    transactions_of,
    without_transactions,
)
from magnetar.spark.audit.snapshot import SegmentState, Snapshot
from magnetar.spark.audit.suspect_job import check_order
from magnetar.spark.audit.table_view import table_view
from magnetar.spark.audit.transaction_checks import (
    check_claims,
    check_counts,
    check_seen,
    expected_of_groups,
)
from magnetar.spark.audit.violations import Findings
from magnetar.spark.connecting import ClientThread, process_client
from magnetar.spark.offload.place import TablePlace
from magnetar.spark.options import Connection
from magnetar.spark.range_facts import NO_ROWS, SeenRange, SeenTransaction, Tally, join_ranges

__all__ = ["audit"]

RANGE_BYTES: Final = 64 * 1024 * 1024
"""Stored bytes of one range, about: tasks are even, and one that fails repeats little."""


def audit(
    spark: SparkSession,
    connection: Connection,
    rest: AdminRest,
    topic: str,
    *,
    readers_view: bool = False,
    table: TablePlace | None = None,
    kept: AuditState | None = None,
) -> Report:
    """Audit one topic; `readers_view`: also read it as consumers do, and compare.

    `table` is the place that an offload wrote to, whose table is compared too.  `kept` are the
    segments that an earlier audit found right, which are not read again.  Raises `AdminFailed`,
    `InvalidManifest`, `InvalidState`, `PlaceFailed`, and what the client does.
    """
    began_s = time.monotonic()
    client = process_client(connection)
    planner = _Planner(client)
    snapshot = take_snapshot(topic, planner, rest)
    before = {} if kept is None else unchanged_segments(kept, snapshot)
    every = _parts(snapshot, client)
    parts = [part for part in every if part.segment_id not in before]
    findings = Findings()
    context = spark.sparkContext
    ranges = context.parallelize(parts, max(1, len(parts))).map(partial(scan_raw, connection))
    ranges.persist(StorageLevel.MEMORY_AND_DISK)
    try:
        scan_began_s = time.monotonic()
        ranges.count()  # Runs the scan once; everything below uses its persisted result.
        scan_s = time.monotonic() - scan_began_s
        snapshot = trimmed_since(snapshot, planner)
        # The driver keeps what grows with segments, ranges and headers, never with rows.
        _check_transactions(ranges, snapshot, before, findings)
        facts = ranges.map(without_transactions).collect()
        readable = _readable_before(before) | _by_segment(ranges.map(readable_of).collect())
    finally:
        ranges.unpersist()
    seen = _segments([each for _, each in facts])
    for each in seen.values():
        check_entries(each, snapshot, findings)
    producers = [one for each in seen.values() for one in each.producers.values()]
    producers += [one for number, each in before.items() for one in each.producers(number)]
    # It reads rows one by one, so only those of producers that are out of order as a whole.
    check_order(spark, connection, every, producers, snapshot, findings)
    check_claims(snapshot, findings)
    check_batches(snapshot, findings)
    check_positions(snapshot, findings)
    if readers_view:
        views = {"raw": readable, "readers": _readers_view(spark, connection, parts)}
        snapshot = trimmed_since(snapshot, planner)
        check_views(views, snapshot, findings)
    if table is not None:
        views = {"raw": readable, "table": table_view(spark, table, snapshot, seen, findings)}
        check_views(views, snapshot, findings)
    took_s = time.monotonic() - began_s
    now = state_after_audit(snapshot, before, seen, readable) if findings.is_clean else None
    return Report(snapshot, findings, seen, took_s, scan_s, before, now)


def _readable_before(before: Mapping[int, AuditedSegment]) -> dict[int, tuple[int, int]]:
    return {
        segment_id: (each.readable.messages, each.readable.hash_sum)
        for segment_id, each in before.items()
    }


def _readers_view(
    spark: SparkSession, connection: Connection, parts: Sequence[AuditedRange]
) -> dict[int, tuple[int, int]]:
    readable = [part for part in parts if part.readable]
    ranges = spark.sparkContext.parallelize(readable, max(1, len(readable)))
    return _by_segment(ranges.map(partial(count_readable, connection)).collect())


def _by_segment(rows: Iterable[SegmentTally]) -> dict[int, tuple[int, int]]:
    found: dict[int, Tally] = {}
    for segment_id, tally in rows:
        found[segment_id] = found.get(segment_id, NO_ROWS).plus(tally)
    return {segment_id: (tally.messages, tally.hash_sum) for segment_id, tally in found.items()}


def _segments(ranges: Iterable[SeenRange]) -> dict[int, SeenRange]:
    by_segment: dict[int, list[SeenRange]] = {}
    for each in ranges:
        by_segment.setdefault(each.segment_id, []).append(each)
    return {
        segment_id: join_ranges(sorted(found, key=attrgetter("start")))
        for segment_id, found in sorted(by_segment.items())
    }


def _check_transactions(
    ranges: RDD[ScannedRange], snapshot: Snapshot, before: Collection[int], findings: Findings
) -> None:
    """Check the facts of all ranges, combined by transaction and segment."""
    # Spark combines them, and the driver gets one partition at a time: they may be many.
    together = ranges.flatMap(transactions_of).reduceByKey(SeenTransaction.plus)

    def one_by_one() -> Iterator[SeenTransaction]:
        for _, seen in together.toLocalIterator():
            check_seen(seen, snapshot, findings)
            yield seen

    check_counts(expected_of_groups(snapshot), one_by_one(), snapshot, findings, before)


class _Planner:
    """The client, as a `Planner` of the snapshot."""

    def __init__(self, client: ClientThread) -> None:
        self._client = client

    def layout(self, topic: str) -> Layout:
        """The DAG now."""
        return self._client.run(Client.layout, topic)

    def plan_range(self, segment_topic: str) -> Plan:
        """Plan the whole of a segment, from its very first entry."""
        return self._client.run(Client.plan_range, segment_topic, EARLIEST)


def _parts(snapshot: Snapshot, client: ClientThread) -> list[AuditedRange]:
    """Ranges of all segments, split at the max read position."""
    depth = generations(snapshot)
    found: list[AuditedRange] = []
    for segment_id, segment in snapshot.segments.items():
        found += _parts_of(segment, depth[segment_id], client)
    return found


def _parts_of(segment: SegmentState, depth: int, client: ClientThread) -> Iterator[AuditedRange]:
    at = segment.earliest
    while at < segment.horizon:
        try:
            plan = client.run(
                Client.plan_range, segment.topic, at, end=segment.horizon, max_bytes=RANGE_BYTES
            )
        except TopicNotFound:
            return  # Retention took it meanwhile.
        if plan.end <= at:
            break
        yield AuditedRange(segment.segment_id, segment.topic, at, plan.end, depth)
        at = plan.end
    if at < segment.raw_end:
        yield AuditedRange(
            segment.segment_id, segment.topic, at, segment.raw_end, depth, readable=False
        )
