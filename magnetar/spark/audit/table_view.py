"""The table that an offload wrote, as one more view of a topic."""

from collections.abc import Mapping
from functools import partial

from pyspark.sql import SparkSession

from magnetar.spark.audit.snapshot import Snapshot
from magnetar.spark.audit.violations import Findings, Rule, Violation
from magnetar.spark.offload.job import manifests_of
from magnetar.spark.offload.manifest import SegmentManifest, TableFile
from magnetar.spark.offload.place import TablePlace
from magnetar.spark.offload.table import read_file
from magnetar.spark.range_facts import NO_ROWS, SeenRange, Tally

__all__ = ["is_comparable", "table_view"]


def table_view(
    spark: SparkSession,
    place: TablePlace,
    snapshot: Snapshot,
    seen: Mapping[int, SeenRange],
    findings: Findings,
) -> dict[int, tuple[int, int]]:
    """Read the table again: messages and hash sum of each segment that can be compared.

    A file that is missing or damaged is a violation of V3, with its name.
    """
    manifests = manifests_of(place, snapshot.topic)
    comparable = {
        segment_id: manifest
        for segment_id, manifest in manifests.items()
        if is_comparable(manifest, snapshot, seen, findings)
    }
    for segment_id, segment in snapshot.segments.items():
        if segment.sealed and segment_id not in manifests:
            findings.cannot_tell("a sealed segment is not in the table yet")
    files = [
        (segment_id, file.name)
        for segment_id, manifest in comparable.items()
        for file in manifest.files
    ]
    found = (
        spark.sparkContext.parallelize(files, max(1, len(files)))
        .map(partial(_read, place))
        .collect()
        if files
        else []
    )
    totals = dict.fromkeys(comparable, NO_ROWS)
    for segment_id, name, file in found:
        if file is None:
            what = f"The file {name} of the table is missing, damaged, or not in order."
            findings.add(Violation(Rule.V3, what, segment_id))
        else:
            tally = Tally(file.rows, file.hash_sum)
            totals[segment_id] = totals[segment_id].plus(tally)
    return {each: (tally.messages, tally.hash_sum) for each, tally in totals.items()}


def _read(place: TablePlace, given: tuple[int, str]) -> tuple[int, str, TableFile | None]:
    segment_id, name = given
    return segment_id, name, read_file(place, name)


def is_comparable(
    manifest: SegmentManifest,
    snapshot: Snapshot,
    seen: Mapping[int, SeenRange],
    findings: Findings,
) -> bool:
    """Whether the scan has seen the entries that the table has; if not, the findings say why.

    Retention may have deleted entries that the table has, and chunked messages that lie across
    ranges are not counted.
    """
    segment = snapshot.segments.get(manifest.segment_id)
    if segment is None or segment.earliest != manifest.start:
        findings.cannot_tell("the table has rows that retention has taken from the topic")
        return False
    scanned = seen.get(manifest.segment_id)
    if scanned is not None and scanned.incomplete:
        findings.cannot_tell("a message in pieces lies across ranges, so rows of it were not seen")
        return False
    return True
