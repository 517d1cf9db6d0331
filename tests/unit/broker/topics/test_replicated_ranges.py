"""`ReplicatedRanges` does what a dictionary with a mark for each hash would do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.topics.replicated_ranges import (
    EVERYTHING,
    LAST_HASH,
    NOTHING,
    Mark,
    PartRecord,
    PartState,
    ReplicatedRanges,
    SourceSegment,
    record_of,
)
from magnetar.protocol.ids import EARLIEST, LONG_MAX, Position
from magnetar.protocol.pulsar_pb2 import MessageMetadata

END = 15
"""The last hash in these tests."""

marks = st.builds(Mark, st.integers(1, 3), st.integers(0, 3), st.sampled_from((9, LAST_HASH)))
spans = st.tuples(st.integers(0, END), st.integers(0, END)).map(lambda pair: tuple(sorted(pair)))
changes = st.lists(st.tuples(spans, marks), max_size=12)


def ranges_of(raised: list[tuple[tuple[int, int], Mark]]) -> ReplicatedRanges:
    ranges = ReplicatedRanges.nothing(0, END)
    for (start, end), mark in raised:
        ranges = ranges.raised(start, end, mark)
    return ranges


def marks_of(ranges: ReplicatedRanges) -> dict[int, Mark]:
    return {
        key_hash: ranges.at(key_hash) for key_hash in range(ranges.hash_start, ranges.hash_end + 1)
    }


@given(changes)
def test_a_hash_has_the_highest_mark_that_it_was_raised_to(
    raised: list[tuple[tuple[int, int], Mark]],
) -> None:
    expected = dict.fromkeys(range(END + 1), NOTHING)
    for (start, end), mark in raised:
        for key_hash in range(start, end + 1):
            expected[key_hash] = max(expected[key_hash], mark)
    assert marks_of(ranges_of(raised)) == expected


@given(changes, changes)
def test_ranges_are_equal_exactly_if_each_hash_has_the_same_mark(
    one: list[tuple[tuple[int, int], Mark]], other: list[tuple[tuple[int, int], Mark]]
) -> None:
    first, second = ranges_of(one), ranges_of(other)
    assert (first == second) == (marks_of(first) == marks_of(second))


@given(changes, st.lists(st.integers(1, END), max_size=4, unique=True))
def test_parts_that_are_cut_off_give_the_whole_side_by_side(
    raised: list[tuple[tuple[int, int], Mark]], borders: list[int]
) -> None:
    whole = ranges_of(raised)
    starts = [0, *sorted(borders)]
    ends = [start - 1 for start in starts[1:]] + [END]
    parts = [whole.cut(start, end) for start, end in zip(starts, ends, strict=True)]
    assert ReplicatedRanges.side_by_side(0, END, parts) == whole


@given(changes, spans)
def test_a_child_has_for_each_hash_what_its_parent_has(
    raised: list[tuple[tuple[int, int], Mark]], span: tuple[int, int]
) -> None:
    whole = ranges_of(raised)
    child = ReplicatedRanges.side_by_side(*span, [whole])
    assert marks_of(child) == {each: whole.at(each) for each in range(span[0], span[1] + 1)}


def test_a_merged_segment_keeps_the_marks_of_both_parents() -> None:
    slow = ReplicatedRanges.nothing(0, 7).all_raised(Mark(1, 2))
    fast = ReplicatedRanges.nothing(8, 15).all_raised(Mark(1, 9))
    merged = ReplicatedRanges.side_by_side(0, 15, [fast, slow])
    assert merged.at(7) == Mark(1, 2)
    assert merged.at(8) == Mark(1, 9)


def test_hashes_that_no_parent_has_are_before_the_first_message() -> None:
    parent = ReplicatedRanges.nothing(4, 7).all_raised(Mark(1, 2))
    child = ReplicatedRanges.side_by_side(0, 15, [parent])
    assert [run.mark for run in child.runs] == [NOTHING, Mark(1, 2), NOTHING]


def test_parents_that_overlap_are_refused() -> None:
    parents = [ReplicatedRanges.nothing(0, 8), ReplicatedRanges.nothing(8, 15)]
    with pytest.raises(ValueError, match="two parents have the hash 8"):
        ReplicatedRanges.side_by_side(0, 15, parents)


def test_a_position_that_a_log_never_had_is_noticed() -> None:
    ranges = ReplicatedRanges.nothing(0, END).raised(0, 3, Mark(2, 5)).raised(9, END, EVERYTHING)
    assert ranges.is_past(Position(2, 4))
    assert ranges.is_past(Position(1, 90))
    assert not ranges.is_past(Position(2, 5))
    assert not ReplicatedRanges.nothing(0, END).is_past(EARLIEST)


def test_the_next_entry_makes_one_range_of_those_of_a_merge() -> None:
    merged = ReplicatedRanges.nothing(0, 15).raised(0, 7, Mark(1, 2)).raised(8, 15, Mark(1, 9))
    assert len(merged.all_raised(Mark(1, 10)).runs) == 1


@given(changes)
def test_rows_are_decoded_to_what_was_encoded(
    raised: list[tuple[tuple[int, int], Mark]],
) -> None:
    ranges = ranges_of(raised)
    assert ReplicatedRanges.from_rows(ranges.to_rows(), 0, END) == ranges
    assert ReplicatedRanges.from_wire(ranges.to_wire(), 0, END) == ranges


@pytest.mark.parametrize(
    "rows",
    [
        None,
        [],
        [[0, 1]],
        [[0, 1, 2, 3, 4]],
        [[0, 1, "2"]],
        [[0, 1, True]],
        [[0, 1, -2]],
        [[0, 1, 2**63]],
        [[1, 1, 2]],
        [[0, 1, 2], [0, 1, 3]],
        [[0, 1, 2], [16, 1, 3]],
    ],
)
def test_rows_that_nobody_encoded_are_refused(rows: object) -> None:
    with pytest.raises(ValueError, match="range"):
        ReplicatedRanges.from_rows(rows, 0, END)


@given(changes, spans, marks)
def test_a_part_is_new_once_and_stored_from_then_on(
    raised: list[tuple[tuple[int, int], Mark]], span: tuple[int, int], mark: Mark
) -> None:
    ranges = ranges_of(raised)
    record = PartRecord(mark.position, *span)
    inside = [run.mark for run in ranges.within(*span)]
    state = record.state(ranges)
    assert (state is PartState.NEW) == all(each.position < mark.position for each in inside)
    assert (state is PartState.STORED) == all(each >= record.mark for each in inside)
    after = ranges.raised(*span, record.mark)
    assert record.state(after) is PartState.STORED


def test_a_part_of_a_later_bucket_follows_the_one_before_it() -> None:
    position = Position(1, 5)
    first, second = PartRecord(position, 0, END, 0, 99), PartRecord(position, 0, END, 100)
    ranges = ReplicatedRanges.nothing(0, END).all_raised(Mark(1, 4))
    assert second.state(ranges) is PartState.MIXED
    ranges = ranges.all_raised(first.mark)
    assert first.state(ranges) is PartState.STORED
    assert second.state(ranges) is PartState.NEW
    assert PartRecord(position, 0, END).state(ranges) is PartState.MIXED
    assert second.state(ranges.all_raised(second.mark)) is PartState.STORED


numbers = st.integers(0, LONG_MAX - 1)
hashes = st.tuples(st.integers(0, LAST_HASH), st.integers(0, LAST_HASH)).map(sorted)


@given(st.integers(0, 2**64 - 1), st.tuples(numbers, numbers, numbers), hashes, hashes)
def test_a_record_is_read_as_it_was_written(
    incarnation: int, ids: tuple[int, int, int], span: list[int], buckets: list[int]
) -> None:
    source = SourceSegment("east", incarnation, ids[0])
    record = PartRecord(Position(*ids[1:]), span[0], span[1], buckets[0], buckets[1])
    metadata = MessageMetadata(producer_name="p", sequence_id=1, publish_time=1)
    metadata.replicated_from = "east"
    metadata.replicated_part.CopyFrom(record.to_wire(source))
    read = MessageMetadata.FromString(metadata.SerializeToString())
    assert record_of(read) == (source, record)


def test_the_record_of_a_whole_entry_has_about_twenty_bytes() -> None:
    source = SourceSegment("east", 2**63, 700)
    whole = PartRecord(Position(90_000, 40_000), 0, LAST_HASH).to_wire(source)
    part = PartRecord(Position(90_000, 40_000), 100, 40_000, 7, 900).to_wire(source)
    assert len(whole.SerializeToString()) == 20
    assert len(part.SerializeToString()) == 31


def test_an_entry_without_source_cluster_or_record_has_none() -> None:
    record = PartRecord(Position(1, 2), 0, LAST_HASH).to_wire(SourceSegment("east", 1, 2))
    assert record_of(MessageMetadata(replicated_part=record)) is None
    assert record_of(MessageMetadata(replicated_from="east")) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("segment_id", 2**63),
        ("ledger_id", 2**63 - 1),
        ("ledger_id", 2**63),
        ("entry_id", 2**64 - 1),
        ("hash_end", 65536),
        ("hash_start", 65536),
        ("bucket_end", 65536),
    ],
)
def test_a_record_that_no_sender_makes_is_refused(field: str, value: int) -> None:
    record = PartRecord(Position(1, 2), 0, LAST_HASH).to_wire(SourceSegment("east", 1, 2))
    setattr(record, field, value)
    with pytest.raises(ValueError, match="no record of a replicated part"):
        record_of(MessageMetadata(replicated_from="east", replicated_part=record))
