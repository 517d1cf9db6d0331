"""Records: Pulsar's paths and JSON, history, steps; what is damaged is refused."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.scalable import history, records, steps
from broker.scalable.history import ChangeKind, HistoryEntry
from broker.scalable.layout import CorruptLayout, Layout, initial, split
from broker.scalable.records import ScalableTopicRecord, decode_topic, encode_topic
from broker.scalable.steps import Step, StepKind
from config.bounds import (
    MAX_INITIAL_SEGMENTS,
    MAX_SEGMENTS,
    MAX_TOPIC_PROPERTIES_BYTES,
    METADATA_KEY_BYTES,
    METADATA_VALUE_BYTES,
)
from magnetar.protocol.names import parse_namespace_name, parse_topic_name
from storage.managed_ledger.records import NAMES_INDEX
from storage.metadata.operations import check_key
from tests.unit.broker.scalable.test_layout import histories

TOPIC = parse_topic_name("topic://public/default/a/b")


def test_the_json_is_pulsars() -> None:
    layout = split(initial(1, now_ms=100), 0, now_ms=200).layout
    stored = json.loads(encode_topic(ScalableTopicRecord(layout, {"k": "v"})))
    assert (stored["epoch"], stored["nextSegmentId"], stored["properties"]) == (1, 3, {"k": "v"})
    assert list(stored["segments"]) == ["0", "1", "2"]
    assert stored["segments"]["0"] == {
        "segmentId": 0,
        "hashRange": {"start": 0, "end": 65535},
        "state": "SEALED",
        "parentIds": [],
        "childIds": [1, 2],
        "createdAtEpoch": 0,
        "sealedAtEpoch": 1,
        "createdAtMs": 100,
        "sealedAtMs": 200,
        "sealed": True,
        "active": False,
        "root": True,
        "leaf": False,
        "legacy": False,
    }
    assert stored["segments"]["2"]["sealedAtEpoch"] == -1
    assert "autoScalePolicy" not in stored


@given(histories(), st.dictionaries(st.text(), st.text()))
def test_records_survive(lives: list[Layout], properties: dict[str, str]) -> None:
    for layout in lives:
        record = ScalableTopicRecord(layout, properties)
        found = decode_topic(encode_topic(record))
        assert found.layout == layout
        assert dict(found.properties) == properties


def test_a_policy_is_kept_as_it_is() -> None:
    record = ScalableTopicRecord(initial(1, now_ms=1), {}, {"enabled": True, "new": [1]})
    assert decode_topic(encode_topic(record)).auto_scale_policy == {"enabled": True, "new": [1]}


@pytest.mark.parametrize("incarnation", [None, 0, 2**64 - 1])
def test_the_incarnation_is_kept(incarnation: int | None) -> None:
    record = ScalableTopicRecord(initial(1, now_ms=1), incarnation=incarnation)
    assert decode_topic(encode_topic(record)).incarnation == incarnation


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"[]",
        b"{}",
        b'{"epoch":0,"nextSegmentId":0,"segments":{}}',
        b'{"epoch":0,"nextSegmentId":1,"segments":{"0":{}}}',
        encode_topic(ScalableTopicRecord(initial(2, now_ms=1))).replace(b"32767", b"32766"),
        encode_topic(ScalableTopicRecord(initial(1, now_ms=1))).replace(b'"ACTIVE"', b'"OPEN"'),
    ],
)
def test_corrupt_topic_record_is_refused(value: bytes) -> None:
    with pytest.raises(CorruptLayout):
        decode_topic(value)


def test_paths() -> None:
    assert records.topic_path(TOPIC) == "/topics/public/default/a%2Fb"
    assert records.controller_path(TOPIC) == "/topics/public/default/a%2Fb/controller"
    assert records.consumer_path(TOPIC, "s", "c") == (
        "/topics/public/default/a%2Fb/subscriptions/s/consumers/c"
    )


@given(st.text(min_size=1, max_size=20).filter(lambda text: text.isprintable()))
def test_any_name_makes_a_path_and_comes_back(text: str) -> None:
    path = records.consumer_path(TOPIC, text, text)
    check_key(path)
    assert records.decode_part(path.rsplit("/", 1)[1]) == text


def test_topics_of_paths() -> None:
    assert records.topic_at(records.topic_path(TOPIC)) == TOPIC
    for other in ("/topics/public/default", records.controller_path(TOPIC), "/elsewhere/a/b/c"):
        assert records.topic_at(other) is None
    namespace = parse_namespace_name("public/default")
    assert records.namespace_path(namespace) == "/topics/public/default"


def test_the_largest_layout_fits_beside_the_most_properties() -> None:
    largest = initial(MAX_INITIAL_SEGMENTS, now_ms=2**41)
    for segment_id in range((MAX_SEGMENTS - MAX_INITIAL_SEGMENTS) // 2):
        largest = split(largest, segment_id, now_ms=2**41).layout
    assert len(largest.segments) == MAX_SEGMENTS
    size = len(records.encode_topic(ScalableTopicRecord(largest)))
    assert size + MAX_TOPIC_PROPERTIES_BYTES + 100 * MAX_SEGMENTS <= METADATA_VALUE_BYTES


def test_index_entries() -> None:
    record = ScalableTopicRecord(
        initial(1, now_ms=1), {"a": "1", "b/c": "2", "d": "", "e": "x\x01"}
    )
    assert [(e.index, e.key) for e in records.indexes_of(record)] == [("a", "1")]
    long = "ä" * (METADATA_KEY_BYTES // 2)
    assert all(records.is_indexed(*pair) for pair in ((long, "k"), ("k", long)))
    unfit = {NAMES_INDEX: "x", records.SEALED.index: "x", f"{long}.": "k", "k": f"{long}."}
    assert records.indexes_of(ScalableTopicRecord(record.layout, unfit)) == ()
    reshaped = ScalableTopicRecord(split(record.layout, 0, now_ms=2).layout)
    assert records.indexes_of(reshaped) == (records.SEALED,)


@given(histories())
def test_history_is_rebuilt_from_the_layouts(lives: list[Layout]) -> None:
    """Completed after each change, as it happens when every record of it is lost."""
    told: list[HistoryEntry] = []
    for layout in lives:
        told += history.missing(layout, told, now_ms=7)
        assert history.missing(layout, told, now_ms=7) == []
    assert [entry.epoch for entry in told] == list(range(len(lives)))
    for before, after, entry in zip(lives, lives[1:], told[1:], strict=False):
        made = after.segments.keys() - before.segments.keys()
        assert set(entry.children) == made
        if entry.kind is ChangeKind.PRUNE:
            assert set(entry.parents) == before.segments.keys() - after.segments.keys()
        else:
            newly = {s.segment_id for s in after.sealed if before.segments[s.segment_id].active}
            assert set(entry.parents) == newly
            merged = ChangeKind.REBUCKET if len(newly) == len(made) else ChangeKind.MERGE
            assert entry.kind is (ChangeKind.SPLIT if len(made) > len(newly) else merged)


def test_an_entry_written_twice_is_shown_once() -> None:
    twice = HistoryEntry(1, ChangeKind.CREATE, 0, (), (0,))
    again = HistoryEntry(2, ChangeKind.CREATE, 0, (), (0, 1))
    move = HistoryEntry(3, ChangeKind.MOVE, 0)
    assert history.readable([twice, again, move, move]) == [again, move, move]
    assert history.decode(history.encode(again)) == again


def test_steps_survive_and_lie_beside_each_other() -> None:
    layout = split(initial(1, now_ms=1), 0, now_ms=2)
    step = Step(
        TOPIC,
        StepKind.SPLIT,
        1,
        tuple(records.segment_of(TOPIC, s) for s in layout.parents),
        tuple(records.segment_of(TOPIC, s) for s in layout.children),
    )
    assert steps.decode(steps.encode(step)) == step
    again = replace(step, attempt="7")
    assert steps.decode(steps.encode(again)) == again != step
    assert b"attempt" not in steps.encode(step), "as brokers without attempts wrote it"
    carrying = replace(again, carries_sequences=True)
    assert steps.decode(steps.encode(carrying)) == carrying
    assert b"carries" not in steps.encode(again), "as brokers that carry no ids wrote it"
    check_key(step.key)
    low, high = steps.range_of(TOPIC)
    assert low <= step.key < high
    other = Step(parse_topic_name("topic://public/default/a/b:split"), StepKind.DELETE, 0)
    assert not low <= other.key < high
