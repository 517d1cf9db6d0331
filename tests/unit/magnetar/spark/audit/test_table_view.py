"""What of a table can be held against a topic, and what is said of the rest."""

from dataclasses import replace

from magnetar.protocol.ids import Position
from magnetar.protocol.message import build_entry
from magnetar.protocol.pulsar_pb2 import MessageMetadata
from magnetar.reads import StoredEntry
from magnetar.spark.audit.snapshot import SegmentState, Snapshot
from magnetar.spark.audit.table_view import is_comparable
from magnetar.spark.audit.violations import Findings
from magnetar.spark.offload.manifest import SegmentManifest
from magnetar.spark.range_facts import SeenRange, join_ranges
from magnetar.spark.range_observer import Observer

START, END = Position(4, 0), Position(5, 6)
SEGMENT = SegmentState(3, "segment://t/n/x/3", (), (4,), 0, 9, True, START, END, END)
MANIFEST = SegmentManifest("topic://t/n/x", 3, SEGMENT.topic, 7, 0, 9, (), START, END, 0, 0, (), ())
SEEN = SeenRange(3, START, END)


def told(segment: SegmentState | None, seen: SeenRange) -> tuple[bool, set[str]]:
    """Whether it is compared, and what is said to be unknown."""
    segments = {} if segment is None else {3: segment}
    findings = Findings()
    snapshot = Snapshot("topic://t/n/x", 0, segments, frozenset(), {})
    return is_comparable(MANIFEST, snapshot, {3: seen}, findings), set(findings.unchecked)


def test_complete_segment_is_compared_with_the_table() -> None:
    assert told(SEGMENT, SEEN) == (True, set())


def test_trimmed_segment_is_reported_as_not_compared() -> None:
    why = {"the table has rows that retention has taken from the topic"}
    assert told(replace(SEGMENT, earliest=Position(5, 0)), SEEN) == (False, why)
    assert told(None, SEEN) == (False, why)


def test_incomplete_rows_are_reported_as_not_compared() -> None:
    compared, why = told(SEGMENT, replace(SEEN, incomplete=1))
    assert not compared
    assert why == {"a message in pieces lies across ranges, so rows of it were not seen"}


def test_scan_counts_messages_without_their_first_chunks() -> None:
    piece = MessageMetadata(
        producer_name="p",
        sequence_id=1,
        publish_time=1,
        uuid="u",
        chunk_id=1,
        num_chunks_from_msg=2,
        total_chunk_msg_size=2,
    )
    observer = Observer(3, START, END)
    observer.take([StoredEntry(4, 1, build_entry(piece, b"b"))])
    assert join_ranges([observer.result(), SeenRange(3, END, END)]).incomplete == 1
