"""The manifests of a table: one of each segment, and one of the topic that lists them.

    TENANT/NAMESPACE/NAME/topic.json
    TENANT/NAMESPACE/NAME/segments/3.json
    TENANT/NAMESPACE/NAME/rows/3/17-0_18-0.parquet

Pure.  Equal manifests have equal bytes.  A file that no manifest names is left of a job that was
broken off.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Final

from pydantic import TypeAdapter, ValidationError

from magnetar.protocol.ids import Position
from magnetar.spark.admin import topic_path
from magnetar.spark.errors import PipelineError
from magnetar.spark.range_facts import NO_ROWS, Tally
from magnetar.spark.tasks import SegmentRange

__all__ = [
    "InvalidManifest",
    "LedgerCopy",
    "SegmentManifest",
    "TableFile",
    "file_name",
    "segment_name_of",
    "segment_of",
    "segment_text",
    "topic_name_of",
    "topic_segments",
    "topic_text",
]

VERSION: Final = 1


class InvalidManifest(PipelineError):
    """A manifest cannot be read, or is another topic's."""


@dataclass(frozen=True, slots=True)
class TableFile:
    """One Parquet file, with the facts that reading it again gave."""

    name: str
    bytes: int
    sha256: str
    rows: int
    hash_sum: int
    first_order_key: str
    last_order_key: str
    """Both order keys are in hex."""
    first_publish_time_ms: int | None
    last_publish_time_ms: int | None
    """The lowest and the highest publish time; None if no row has one."""
    schema_versions: tuple[str, ...] = ()
    """In hex, sorted."""


@dataclass(frozen=True, slots=True)
class LedgerCopy:
    """One ledger whose raw entries the broker has copied, and that was read again."""

    ledger_id: int
    entries: int
    entries_sha256: str
    url: str
    objects: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SegmentManifest:
    """The manifest of one segment; `rows` and `hash_sum` are of its readable raw entries."""

    topic: str
    segment_id: int
    segment_topic: str
    created_at_ms: int
    """Tells it from a segment of an earlier topic of the same name."""
    hash_start: int
    hash_end: int
    parent_ids: tuple[int, ...]
    start: Position
    end: Position
    rows: int
    hash_sum: int
    ledgers: tuple[LedgerCopy, ...]
    files: tuple[TableFile, ...]

    @property
    def tally(self) -> Tally:
        """Rows of all files together."""
        total = NO_ROWS
        for each in self.files:
            total = total.plus(Tally(each.rows, each.hash_sum))
        return total


_SEGMENTS: Final = TypeAdapter(SegmentManifest)


def segment_text(manifest: SegmentManifest) -> str:
    """The one text of a manifest."""
    document = asdict(manifest)
    times = [
        time
        for each in manifest.files
        for time in (each.first_publish_time_ms, each.last_publish_time_ms)
        if time is not None
    ]
    document["first_publish_time_ms"] = min(times, default=None)
    document["last_publish_time_ms"] = max(times, default=None)
    document["schema_versions"] = sorted(
        {v for each in manifest.files for v in each.schema_versions}
    )
    # As text: many readers of JSON lose digits of unsigned 64-bit numbers.
    document["hash_sum"] = str(manifest.hash_sum)
    for each in document["files"]:
        each["hash_sum"] = str(each["hash_sum"])
    return _text({**document, "v": VERSION})


def segment_of(text: str) -> SegmentManifest:
    """Read the manifest of a segment.  Raises `InvalidManifest`."""
    try:
        return _SEGMENTS.validate_python(_object(text))
    except ValidationError as error:
        first = error.errors()[0]
        raise _invalid(f"{first['loc']}: {first['msg']}") from error


def topic_text(topic: str, segments: Iterable[int]) -> str:
    """The manifest of a topic: it lists the segments that are in the table."""
    listed = {str(each): f"segments/{each}.json" for each in segments}
    return _text({"topic": topic, "segments": listed, "v": VERSION})


def topic_segments(text: str, topic: str) -> list[int]:
    """The segments that it lists.  Raises `InvalidManifest`."""
    document = _object(text)
    listed = document.get("segments")
    if document.get("topic") != topic or not isinstance(listed, dict):
        raise _invalid(f"it is of {document.get('topic')!r}, not of {topic!r}")
    return sorted(int(each) for each in listed)


def topic_name_of(topic: str) -> str:
    """The object that is a topic's manifest."""
    return f"{_base(topic)}/topic.json"


def segment_name_of(topic: str, segment_id: int) -> str:
    """The object that is a segment's manifest."""
    return f"{_base(topic)}/segments/{segment_id}.json"


def file_name(topic: str, part: SegmentRange) -> str:
    """The object that has the rows of a range."""
    # Named after the range, so that a later run finds the files of one that was broken off.
    start, end = part.start.position, part.end.position
    return (
        f"{_base(topic)}/rows/{part.segment_id}/"
        f"{start.ledger_id}-{start.entry_id}_{end.ledger_id}-{end.entry_id}.parquet"
    )


def _base(topic: str) -> str:
    return topic_path(topic).partition("/")[2]


def _text(document: Mapping[str, object]) -> str:
    return json.dumps(document, sort_keys=True, separators=(",", ":")) + "\n"


def _object(text: str) -> dict[str, object]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise _invalid(str(error)) from error
    if not isinstance(document, dict) or document.get("v") != VERSION:
        raise _invalid(f"it is not of version {VERSION}")
    return document


def _invalid(why: str) -> InvalidManifest:
    return InvalidManifest(
        f"The manifest cannot be read: {why}. Give the place that the offload wrote to, or offload "
        "to an empty one."
    )
