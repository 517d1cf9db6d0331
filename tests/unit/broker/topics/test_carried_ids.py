"""Which messages the ids of a segment's parents cover, and how long they are kept."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from broker.metrics.topics import LEFT_OUT, TopicFamilies
from broker.topics.carried_ids import (
    CarriedId,
    FinalIds,
    FinalSequences,
    LiveWriter,
    are_stored,
    base_name,
    first_sequence,
    last_carried,
    name_on,
    routing_key,
    within,
)
from broker.topics.deduplication import SNAPSHOT_BYTES, Deduplication
from broker.topics.name_writer import NameWriter
from config.bounds import CARRIED_RANGES
from magnetar.protocol.ids import Position, to_wire
from magnetar.protocol.key_hash import segment_hash, segment_hash_m1
from magnetar.protocol.names import SegmentName, parse_topic_name
from magnetar.protocol.pulsar_pb2 import MessageMetadata
from storage.clock import SystemClock
from tests.support.bounds import set_bound
from tests.support.lone_topics import lone_topics

TOPIC = parse_topic_name("topic://public/default/t")
END = 0xFFFF
WHOLE = SegmentName(TOPIC, 0, END, 9)
KEYS = [b"k%d" % number for number in range(12)]


def remembering(limit: int = 10, keep_ms: int = 1000) -> Deduplication:
    return Deduplication(limit=limit, keep_ms=keep_ms)


def stored(known: Deduplication, name: str, *numbers: int, at: int = 0) -> None:
    for number in numbers:
        metadata = MessageMetadata(producer_name=name, sequence_id=number, publish_time=1)
        known.replay(metadata, Position(1, number), at)


def segment(start: int, end: int, segment_id: int) -> SegmentName:
    return SegmentName(TOPIC, start, end, segment_id)


def below(known: Deduplication, parent: SegmentName, child: SegmentName) -> Deduplication:
    """What a child knows that has one parent."""
    made = remembering()
    made.inherit(child, known.final(parent, changed_ms=0, now_ms=0), 0)
    return made


def test_names_keep_their_base_on_every_segment() -> None:
    assert base_name("p-seg-9", WHOLE) == ("p", True)
    assert base_name("p-seg-8", WHOLE) == ("p-seg-8", False)
    assert base_name("-seg-9", WHOLE) == ("-seg-9", False)
    assert name_on("p", WHOLE, numbered=True) == "p-seg-9"
    assert name_on("p", WHOLE, numbered=False) == "p"


def test_first_id_of_a_bucket_batch_is_not_known() -> None:
    assert first_sequence(5, 0, 1) == 5
    assert first_sequence(5, 9, 5) == 5
    assert first_sequence(9, 0, 5) is None
    assert first_sequence(to_wire(-1), 0, 1) == -1


def test_key_of_a_batch_is_not_known() -> None:
    alone = MessageMetadata(partition_key="k", ordering_key=b"o")
    assert routing_key(alone) == b"k"
    assert (
        routing_key(MessageMetadata(partition_key="aw==", partition_key_b64_encoded=True)) == b"k"
    )
    assert routing_key(MessageMetadata(partition_key="k", num_messages_in_batch=1)) is None
    assert routing_key(MessageMetadata(ordering_key=b"o")) is None


@given(
    st.lists(st.integers(1, END), min_size=1, max_size=30, unique=True),
    st.data(),
    st.sampled_from([True, False, None]),
)
def test_nothing_is_taken_for_stored_that_is_on_no_parent(
    bounds: list[int], data: st.DataObject, m1_hashes: bool | None
) -> None:
    """Parents of any ranges, clients of either hash, keys that are known or not."""
    starts = [0, *sorted(bounds)]
    ends = [start - 1 for start in starts[1:]] + [END]
    lasts = data.draw(st.lists(st.integers(-1, 9), min_size=len(starts), max_size=len(starts)))
    rows = [
        CarriedId(start, end, last, m1_hashes, None)
        for start, end, last in zip(starts, ends, lasts, strict=True)
        if last >= 0
    ]
    carried = within(WHOLE, rows)
    assert len(carried) <= CARRIED_RANGES
    assert last_carried(carried) == max(*lasts, -1)
    hash_of = segment_hash_m1 if data.draw(st.booleans()) else segment_hash
    if m1_hashes is not None:
        hash_of = segment_hash_m1 if m1_hashes else segment_hash
    for key in KEYS:
        place = hash_of(key)
        (last,) = [
            last
            for start, end, last in zip(starts, ends, lasts, strict=True)
            if start <= place <= end
        ]
        for number in range(10):
            assert not are_stored(carried, number, key, WHOLE) or number <= last
    for number in range(10):
        assert not are_stored(carried, number, None, WHOLE) or number <= min(lasts)


def test_own_ids_count_beside_carried_ones() -> None:
    """302 is new on a segment whose lower half has 500; both halves go on from what they have."""
    low, high = segment(0, 99, 1), segment(100, END, 2)
    merged = remembering()
    finals = [
        FinalIds("p", True, 0, (CarriedId(0, 99, 500, None, None),)),
        FinalIds("p", True, 0, (CarriedId(100, END, 300, None, None),)),
    ]
    merged.inherit(WHOLE, finals, 0)
    stored(merged, "p-seg-9", 302)
    for child, last in ((low, 500), (high, 302)):
        known = below(merged, WHOLE, child).get(name_on("p", child, numbered=True))
        assert known is not None
        assert last_carried(known.carried) == last


def test_ids_survive_a_snapshot_and_a_name_that_is_in_use_goes_without() -> None:
    parent = remembering()
    stored(parent, "p-seg-9", 7)
    stored(parent, "q-seg-9", 8)
    child = segment(0, 99, 1)
    known = remembering()
    stored(known, "q-seg-1", 0)
    known.inherit(child, parent.final(WHOLE, changed_ms=0, now_ms=0), 0)
    again = remembering()
    again.load(known.snapshot(Position(1, 0), 0))
    found, other = again.get("p-seg-1"), again.get("q-seg-1")
    assert found is not None
    assert found.carried == (CarriedId(0, 99, 7, None, None),)
    assert other is not None
    assert not other.carried


def test_carried_names_are_bounded_and_expire() -> None:
    parent = remembering(limit=5)
    for number in range(8):
        stored(parent, f"p{number}-seg-9", number, at=number)
    child = segment(0, 99, 1)
    known = remembering(limit=5, keep_ms=1000)
    known.inherit(child, parent.final(WHOLE, changed_ms=0, now_ms=10), 10)
    assert [number for number in range(8) if known.get(f"p{number}-seg-1")] == [3, 4, 5, 6, 7]
    assert len(known.final(child, changed_ms=0, now_ms=1005)) == 3
    assert not known.final(child, changed_ms=0, now_ms=5000)


def test_snapshot_of_carried_names_is_bounded_in_bytes() -> None:
    finals = [
        FinalIds(f"{'n' * 1000}{number}", False, number, (CarriedId(0, END, 1, None, None),))
        for number in range(500)
    ]
    known = remembering(limit=1000)
    known.inherit(WHOLE, finals, 0)
    text = known.snapshot(Position(1, 0), 0)
    assert len(text) <= SNAPSHOT_BYTES + 200
    again = remembering(limit=1000)
    again.load(text)
    assert again.get(finals[-1].name) is not None
    assert again.get(finals[0].name) is None


def carried_by(
    names: int, ranges: int, *, long_name: str = ""
) -> tuple[Deduplication, list[FinalIds]]:
    """A segment made by a merge, with the ids of clients that wrote to each of its parents."""
    width = (END + 1) // ranges
    finals = [
        FinalIds(
            f"{long_name}producer-{number:04}",
            False,
            number,
            tuple(
                CarriedId(
                    part * width,
                    part * width + width - 1,
                    100_000 + 17 * number + part,
                    False,
                    LiveWriter(2**61 + number * 2**40 + part, 0),
                )
                for part in range(ranges)
            ),
        )
        for number in range(names)
    ]
    known = remembering(limit=1000)
    known.inherit(WHOLE, finals, 0)
    return known, finals


def test_most_names_of_a_large_merge_fit_a_snapshot() -> None:
    """As many as a topic remembers, with as many ranges as a segment has."""
    known, finals = carried_by(1000, CARRIED_RANGES)
    text = known.snapshot(Position(1, 0), 0)
    assert len(text) <= SNAPSHOT_BYTES + 200
    assert known.left_out <= 250
    again = remembering(limit=1000)
    again.load(text)
    assert len(again) == 1000 - known.left_out
    newest = again.get(finals[-1].name)
    assert newest is not None
    assert newest.carried == finals[-1].ids


def test_names_left_out_of_a_snapshot_are_counted() -> None:
    known, _ = carried_by(500, 1, long_name="n" * 1000)
    known.snapshot(Position(1, 0), 0)
    again = remembering(limit=1000)
    again.load(known.snapshot(Position(1, 0), 0))
    assert 0 < known.left_out == 500 - len(again)


async def test_names_left_out_of_a_stored_snapshot_are_logged_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ms = SystemClock().now_ms()
    finals = [
        FinalIds(f"p{n}", False, now_ms, (CarriedId(0, END, n, None, None),)) for n in range(100)
    ]
    async with lone_topics(tmp_path) as topics:
        topic = await topics.open("persistent://public/default/plain")
        topic.sequences.inherit(WHOLE, finals, now_ms)
        with capture_logs() as logs:
            set_bound(monkeypatch, "SNAPSHOT_BYTES", 2000)
            await topic.sequence_store.save()
            await topic.sequence_store.save()
            families = TopicFamilies("c", topic_level=True)
            assert not list(families.collect([topic], (), {}))
            set_bound(monkeypatch, "SNAPSHOT_BYTES", 20_000)
            await topic.sequence_store.save()
        events = [each for each in logs if each["event"].startswith("sequence_ids_")]
        left_out, complete = events
        assert (left_out["event"], left_out["of"]) == ("sequence_ids_left_out", 100)
        assert complete["event"] == "sequence_ids_complete"
        (sample,) = [
            line
            for line in "".join(families.text()).splitlines()
            if line.startswith(f"{LEFT_OUT}{{")
        ]
        assert sample.endswith(f"}} {float(left_out['names'])}")
        await topic.close()


def test_ranges_of_names_left_out_take_no_bytes() -> None:
    known = remembering(limit=1000)
    finals = [
        FinalIds(f"{'n' * 1000}{n}", False, n, (CarriedId(n, END - n, 1, None, None),))
        for n in range(500)
    ]
    known.inherit(WHOLE, finals, 0)
    content = json.loads(known.snapshot(Position(1, 0), 0))
    assert len(content["ranges"]) == len(content["carried"])


def test_malformed_final_sequences_are_refused() -> None:
    for members in (None, {}, {"producers": [["p", True, 5, [[0, "x", 1, None, None]]]]}):
        try:
            FinalSequences.from_json(members)
        except ValueError:
            continue
        raise AssertionError(members)


def writer(request_id: int, *, first: int | None = 100) -> NameWriter:
    made = NameWriter(request_id, "Pulsar-Java-v5.0.0-M1", fresh=first is not None)
    made.note_sent(first)
    return made


def test_client_is_recognised_by_its_request_ids() -> None:
    live = LiveWriter(2**50, 100)
    assert live.is_client(2**50 + 1000)
    assert not live.is_client(2**51)
    assert not live.is_client(5)
    assert not live.is_client(None)
    assert LiveWriter(5, 100).is_client(7), "they count from 1, so nobody can tell"


def test_writer_that_closed_before_the_layout_change_is_not_passed_on() -> None:
    closed = writer(2**50)
    closed.closed_ms = 10
    assert closed.live(changed_ms=10) is None
    assert closed.live(changed_ms=9) == LiveWriter(2**50, 100)
    assert NameWriter(2**50, "", fresh=True).live(changed_ms=0) is None, "it has sent nothing"
    small = writer(5)
    assert small.live(changed_ms=0) is None
    small.at_seal = True
    assert small.live(changed_ms=0) == LiveWriter(5, 100)
    assert NameWriter.from_row(small.to_row(attached=False)).live(changed_ms=0) == small.live(0)


def test_stored_message_of_a_writer_ends_its_carried_ids_after_a_crash_too() -> None:
    known = remembering()
    ids = (
        CarriedId(0, 99, 500, None, LiveWriter(2**50, 100)),
        CarriedId(100, END, 300, None, None),
    )
    known.inherit(WHOLE, [FinalIds("p", True, 0, ids)], 0)
    text = known.snapshot(Position(1, 0), 0)
    for number, left in ((302, 2), (100, 1)):
        again = remembering()
        again.load(text)
        stored(again, "p-seg-9", number)
        found = again.get("p-seg-9")
        assert found is not None
        assert len(found.carried) == left
