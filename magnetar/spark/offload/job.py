"""The offload as a job of Spark: raw copies, the table, everything read again, the manifests.

Rules:

- O1 A segment's manifest is written after its raw entries and its files were read again and
  match: each ledger has the hash of its copy, and the files have the rows of the raw entries.
- O2 The topic's manifest is written after those that it lists.
- O3 Only ledgers that a stored manifest names are dropped.
"""

import io
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from pyspark.sql import SparkSession

from magnetar.layout import Layout, Segment
from magnetar.protocol.ids import Position
from magnetar.spark.admin import AdminRest
from magnetar.spark.cut import Place
from magnetar.spark.offload.copies import OffloadFailed, await_copies, drop_hot
from magnetar.spark.offload.manifest import (
    InvalidManifest,
    LedgerCopy,
    SegmentManifest,
    TableFile,
    segment_name_of,
    segment_of,
    segment_text,
    topic_name_of,
    topic_segments,
    topic_text,
)
from magnetar.spark.offload.place import TablePlace
from magnetar.spark.offload.table import RawSegment, SeenRaw, read_file, read_raw, write_file
from magnetar.spark.options import Connection
from magnetar.spark.tasks import SegmentRange, split_large
from magnetar.spark.topic_reading import TopicReading

__all__ = ["OffloadResult", "SegmentPart", "manifests_of", "verified_manifest", "offload"]

FILE_BYTES: Final = 128 * 1024 * 1024
"""Bytes of stored entries whose rows make up one file."""
Progress = Callable[[str], None]


@dataclass(slots=True)
class OffloadResult:
    """The result of one run, by segment id."""

    before: dict[int, SegmentManifest] = field(default_factory=dict)
    """Manifests that earlier runs have written."""
    now: dict[int, SegmentManifest] = field(default_factory=dict)
    """Manifests that this run has written."""
    waiting: dict[int, str] = field(default_factory=dict)
    """Sentences about segments that cannot be offloaded yet."""
    dropped: dict[int, list[int]] = field(default_factory=dict)
    """Ledgers that were deleted."""


@dataclass(frozen=True, slots=True)
class SegmentPart:
    """A segment that is to be offloaded as a whole, with a range for each file."""

    segment: Segment
    start: Position
    end: Position
    ranges: Sequence[SegmentRange]


def offload(
    spark: SparkSession,
    connection: Connection,
    rest: AdminRest,
    topic: str,
    place: TablePlace,
    *,
    copies_url: str | None = None,
    drop: bool = False,
    file_bytes: int = FILE_BYTES,
    progress: Progress = lambda _: None,
) -> OffloadResult:
    """Offload the segments that are sealed and can be read to their ends (O1 to O3).

    Other segments wait for a later run.  A segment with a manifest is done; files that a broken-off
    run has left are used.  `copies_url` is the place for raw copies, if not the `offload_url` of
    brokers; `drop` deletes ledgers that have copies.

    Raises `OffloadFailed`, `InvalidManifest`, `PlaceFailed`, `AdminFailed`, and what the client
    does.
    """
    reading = TopicReading(connection, topic)
    layout = reading.layout()
    done = OffloadResult()
    parts: list[SegmentPart] = []
    for segment_id, segment in sorted(layout.segments.items()):
        known = _known(place, topic, segment)
        if known is not None:
            done.before[segment_id] = known
        elif (part := _part_of(reading, segment, file_bytes)) is not None:
            parts.append(part)
        else:
            done.waiting[segment_id] = (
                "is still written to" if segment.active else "has transactions that are open"
            )
    copies = await_copies(rest, [each.segment for each in parts], copies_url, progress)
    for manifest in _write(spark, connection, place, topic, parts, copies, progress):
        put_text(place, segment_name_of(topic, manifest.segment_id), segment_text(manifest))
        done.now[manifest.segment_id] = manifest
    _put_topic(place, topic, [*done.before, *done.now])
    if drop:
        _drop(rest, layout, done)
    return done


def manifests_of(place: TablePlace, topic: str) -> dict[int, SegmentManifest]:
    """The manifests of all segments in the table.  Raises `InvalidManifest`, `PlaceFailed`."""
    listed = get_text(place, topic_name_of(topic))
    if listed is None:
        raise InvalidManifest(
            f"{place.url} has no table of {topic}: give the place that the offload wrote to."
        )
    found = {}
    for segment_id in topic_segments(listed, topic):
        text = get_text(place, segment_name_of(topic, segment_id))
        if text is None:
            raise InvalidManifest(
                f"{segment_name_of(topic, segment_id)} is not in {place.url}, and the topic's "
                "manifest lists it: restore it."
            )
        found[segment_id] = segment_of(text)
    return found


def put_text(place: TablePlace, name: str, text: str) -> None:
    """Store a manifest, whole or not at all."""
    place.put(name, io.BytesIO(text.encode()))


def get_text(place: TablePlace, name: str) -> str | None:
    """A manifest; None if it is not there."""
    with tempfile.TemporaryFile() as file:
        if not place.get(name, file):
            return None
        file.seek(0)
        return file.read().decode()


def _known(place: TablePlace, topic: str, segment: Segment) -> SegmentManifest | None:
    text = None if segment.active else get_text(place, segment_name_of(topic, segment.segment_id))
    if text is None:
        return None
    manifest = segment_of(text)
    if (manifest.segment_topic, manifest.created_at_ms) != (segment.topic, segment.created_at_ms):
        raise InvalidManifest(
            f"{place.url} has the table of an earlier topic of the name {topic}: offload this one "
            "to another place."
        )
    return manifest


def _part_of(reading: TopicReading, segment: Segment, file_bytes: int) -> SegmentPart | None:
    """The whole of a sealed segment; None if a transaction is open in it, or it is active.

    Raises `OffloadFailed`.
    """
    if segment.active:
        return None
    plan = reading.plan(segment.topic, None)
    if plan.sealed is None:
        raise OffloadFailed(
            "The broker does not tell how far a segment may be read, so nothing can be offloaded; "
            "connect to a Magnetar broker."
        )
    if not plan.sealed or plan.horizon < plan.raw_end:
        return None
    start, end = Place.at(plan.earliest), Place.at(plan.raw_end)
    whole = SegmentRange(segment.segment_id, segment.topic, start, end)
    ranges = split_large(reading, [whole], file_bytes)
    return SegmentPart(segment, plan.earliest, plan.raw_end, ranges)


def _write(
    spark: SparkSession,
    connection: Connection,
    place: TablePlace,
    topic: str,
    parts: Sequence[SegmentPart],
    copies: Mapping[int, tuple[LedgerCopy, ...]],
    progress: Progress,
) -> list[SegmentManifest]:
    """Write all files, read files and raw entries again, and compare them (O1)."""
    if not parts:
        return []
    context = spark.sparkContext
    ranges = [(each.segment.created_at_ms, one) for each in parts for one in each.ranges]
    progress(f"Writing {len(ranges)} files of {len(parts)} segments")
    named: list[tuple[int, str | None]] = (
        context.parallelize(ranges, max(1, len(ranges)))
        .map(partial(_write_range, connection, place, topic))
        .collect()
    )
    names = [(segment_id, name) for segment_id, name in named if name is not None]
    progress(f"Reading {len(names)} files again")
    files: list[tuple[int, str, TableFile | None]] = (
        context.parallelize(names, max(1, len(names))).map(partial(_read_file, place)).collect()
    )
    raws = [
        RawSegment(
            each.segment.segment_id,
            each.segment.topic,
            tuple((c.ledger_id, c.entries) for c in copies[each.segment.segment_id]),
        )
        for each in parts
    ]
    progress(f"Reading the raw entries of {len(raws)} segments again")
    seen = context.parallelize(raws, len(raws)).map(partial(read_raw, connection)).collect()
    by_segment = {each.segment_id: each for each in seen}
    return [
        verified_manifest(
            topic,
            each,
            copies[each.segment.segment_id],
            [(name, file) for where, name, file in files if where == each.segment.segment_id],
            by_segment[each.segment.segment_id],
        )
        for each in parts
    ]


def _write_range(
    connection: Connection, place: TablePlace, topic: str, given: tuple[int, SegmentRange]
) -> tuple[int, str | None]:
    created_at_ms, part = given
    return part.segment_id, write_file(connection, place, topic, created_at_ms, part)


def _read_file(place: TablePlace, given: tuple[int, str]) -> tuple[int, str, TableFile | None]:
    segment_id, name = given
    return segment_id, name, read_file(place, name)


def verified_manifest(
    topic: str,
    part: SegmentPart,
    copies: tuple[LedgerCopy, ...],
    files: Sequence[tuple[str, TableFile | None]],
    raw: SeenRaw,
) -> SegmentManifest:
    """The manifest of a segment (O1).  Raises `OffloadFailed` if files or copies do not match."""
    segment = part.segment
    for copy in copies:
        if raw.entries_sha256[copy.ledger_id] != copy.entries_sha256:
            raise OffloadFailed(
                f"Ledger {copy.ledger_id} of segment {segment.segment_id} does not read as its "
                "copy says; nothing of it was dropped. Look into the broker's log, and keep both."
            )
    whole = [file for _, file in files if file is not None]
    if broken := [name for name, file in files if file is None]:
        raise OffloadFailed(
            f"{broken[0]} is damaged or gone since it was written: delete it, and run the same "
            "command again."
        )
    manifest = SegmentManifest(
        topic,
        segment.segment_id,
        segment.topic,
        segment.created_at_ms,
        segment.hash_start,
        segment.hash_end,
        segment.parent_ids,
        part.start,
        part.end,
        raw.readable.messages,
        raw.readable.hash_sum,
        copies,
        tuple(whole),
    )
    if manifest.tally != raw.readable:
        raise OffloadFailed(
            f"The files of segment {segment.segment_id} have {manifest.tally.messages} rows, and "
            f"the raw entries {raw.readable.messages}, or others; nothing of it was dropped. "
            "Delete its files, and run the same command again."
        )
    return manifest


def _put_topic(place: TablePlace, topic: str, segments: Sequence[int]) -> None:
    """Write the topic's manifest (O2)."""
    # It keeps segments of earlier runs, also those that retention has deleted from the topic since.
    before = get_text(place, topic_name_of(topic))
    listed = set(segments) | set(() if before is None else topic_segments(before, topic))
    text = topic_text(topic, sorted(listed))
    if text != before:
        put_text(place, topic_name_of(topic), text)


def _drop(rest: AdminRest, layout: Layout, done: OffloadResult) -> None:
    """Drop the ledgers that manifests name (O3)."""
    for segment_id, manifest in sorted({**done.before, **done.now}.items()):
        named = [each.ledger_id for each in manifest.ledgers]
        done.dropped[segment_id] = drop_hot(rest, layout.segments[segment_id], named)
