"""Manifests: one text for equal ones, read back as they were, refused when they are others'."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.protocol.ids import Position
from magnetar.spark.cut import Place
from magnetar.spark.offload.manifest import (
    InvalidManifest,
    LedgerCopy,
    SegmentManifest,
    TableFile,
    file_name,
    segment_name_of,
    segment_of,
    segment_text,
    topic_name_of,
    topic_segments,
    topic_text,
)
from magnetar.spark.tasks import SegmentRange

TOPIC = "topic://public/default/bills"
IDS = st.integers(0, 2**63 - 1)
HASHES = st.integers(0, 2**64 - 1)
TEXTS = st.text(max_size=8)
POSITIONS = st.builds(Position, IDS, st.integers(-1, 2**63 - 1))
FILES = st.builds(
    TableFile,
    TEXTS,
    IDS,
    TEXTS,
    IDS,
    HASHES,
    TEXTS,
    TEXTS,
    st.none() | IDS,
    st.none() | IDS,
    st.lists(TEXTS, max_size=2).map(tuple),
)
COPIES = st.builds(LedgerCopy, IDS, IDS, TEXTS, TEXTS, st.lists(TEXTS, max_size=2).map(tuple))
MANIFESTS = st.builds(
    SegmentManifest,
    TEXTS,
    IDS,
    TEXTS,
    IDS,
    IDS,
    IDS,
    st.lists(IDS, max_size=2).map(tuple),
    POSITIONS,
    POSITIONS,
    IDS,
    HASHES,
    st.lists(COPIES, max_size=2).map(tuple),
    st.lists(FILES, max_size=2).map(tuple),
)
FILE = TableFile("a.parquet", 1, "00", 2, 2**64 - 1, "aa", "ab", 5, 9, ("00",))
MANIFEST = SegmentManifest(
    TOPIC,
    3,
    f"segment://public/default/bills/{3:04x}",
    7,
    0,
    65535,
    (1, 2),
    Position(4, 0),
    Position(5, 6),
    4,
    2**64 - 2,
    (LedgerCopy(4, 6, "ff", "s3://b", ("o",)),),
    (FILE, replace(FILE, name="b.parquet", first_publish_time_ms=3, schema_versions=("01",))),
)


@given(MANIFESTS)
def test_manifest_survives_serialization(manifest: SegmentManifest) -> None:
    text = segment_text(manifest)
    assert segment_of(text) == manifest
    assert segment_text(segment_of(text)) == text


def test_manifest_has_documented_fields() -> None:
    text = segment_text(MANIFEST)
    assert '"hash_sum":"18446744073709551614"' in text
    assert '"first_publish_time_ms":3' in text
    assert '"schema_versions":["00","01"],"segment_id":3' in text
    assert '"start":[4,0]' in text
    assert text.endswith(',"v":1}\n')
    assert MANIFEST.tally == (4, 2**64 - 2)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"v":1}', '{"v":2}', "{"])
def test_invalid_manifest_is_refused(text: str) -> None:
    with pytest.raises(InvalidManifest):
        segment_of(text)


def test_the_topics_manifest_lists_its_segments() -> None:
    text = topic_text(TOPIC, [2, 10, 1])
    assert topic_segments(text, TOPIC) == [1, 2, 10]
    with pytest.raises(InvalidManifest, match="is of"):
        topic_segments(text, TOPIC + "2")


def test_names_follow_from_topic_segment_and_range() -> None:
    part = SegmentRange(3, "segment://...", Place(4, 0), Place(5, 6))
    assert topic_name_of(TOPIC) == "public/default/bills/topic.json"
    assert segment_name_of(TOPIC, 3) == "public/default/bills/segments/3.json"
    assert file_name(TOPIC, part) == "public/default/bills/rows/3/4-0_5-6.parquet"
    assert segment_name_of("topic://public/default/a/..", 3) == (
        "public/default/a%2F../segments/3.json"
    )
