"""Which messages of an entry go to which segment of another cluster."""

from hypothesis import given
from hypothesis import strategies as st

from broker.replication.segment_plan import (
    MessageHashes,
    Part,
    RemoteLayout,
    RemoteSegment,
    SourceEntry,
    Unattached,
    Unplanned,
    hash_without_key,
    plan,
)
from broker.topics.replicated_ranges import LAST_HASH, Mark, PartRecord, PartState, ReplicatedRanges
from magnetar.protocol.ids import Position

HERE = Position(1, 5)
WHOLE = RemoteLayout(0, (RemoteSegment(0, 0, LAST_HASH),))
HALVES = RemoteLayout(1, (RemoteSegment(1, 0, 32767), RemoteSegment(2, 32768, LAST_HASH)))
BUCKETS = RemoteLayout(2, (RemoteSegment(3, 0, LAST_HASH, (32768,)),))
LOW, HIGH = MessageHashes(100, 7), MessageHashes(40000, 7)


def nothing(layout: RemoteLayout) -> dict[int, ReplicatedRanges]:
    return {
        each.segment_id: ReplicatedRanges.nothing(each.hash_start, each.hash_end)
        for each in layout.segments
    }


def parts_of(
    entry: SourceEntry,
    layout: RemoteLayout,
    stored: dict[int, ReplicatedRanges] | None = None,
    own_range: tuple[int, int] | None = (0, LAST_HASH),
) -> list[Part]:
    parts = plan(entry, own_range, layout, nothing(layout) if stored is None else stored)
    assert isinstance(parts, list)
    return parts


def test_an_entry_for_one_segment_goes_as_it_is_and_unopened() -> None:
    assert parts_of(SourceEntry(HERE, None), WHOLE) == [
        Part(0, PartRecord(HERE, 0, LAST_HASH), None)
    ]


def test_an_entry_for_two_segments_is_opened_and_keeps_its_order() -> None:
    entry = SourceEntry(HERE, None)
    assert plan(entry, (0, LAST_HASH), HALVES, nothing(HALVES)) is Unplanned.OPEN
    opened = entry._replace(hashes=[LOW, HIGH, LOW, HIGH, LOW])
    assert [(part.segment_id, part.indexes) for part in parts_of(opened, HALVES)] == [
        (1, (0, 2, 4)),
        (2, (1, 3)),
    ]


def test_an_opened_entry_that_is_for_one_segment_goes_as_it_is() -> None:
    assert parts_of(SourceEntry(HERE, [HIGH, HIGH]), HALVES) == [
        Part(2, PartRecord(HERE, 32768, LAST_HASH), None)
    ]


def test_an_entry_is_opened_if_clients_there_choose_segments_by_another_hash() -> None:
    assert plan(SourceEntry(HERE, None), None, WHOLE, nothing(WHOLE)) is Unplanned.OPEN


def test_a_batch_of_one_bucket_goes_as_it_is() -> None:
    entry = SourceEntry(HERE, None, (100, 200))
    assert parts_of(entry, BUCKETS) == [Part(3, PartRecord(HERE, 0, LAST_HASH), None)]


def test_a_batch_without_stamp_or_of_several_buckets_is_opened() -> None:
    for buckets in (None, (100, 40000)):
        entry = SourceEntry(HERE, None, buckets)
        assert plan(entry, (0, LAST_HASH), BUCKETS, nothing(BUCKETS)) is Unplanned.OPEN


def test_parts_of_several_buckets_tile_the_segment() -> None:
    messages = [MessageHashes(1, 40000), MessageHashes(2, 7), MessageHashes(3, 65000)]
    assert parts_of(SourceEntry(HERE, messages), BUCKETS) == [
        Part(3, PartRecord(HERE, 0, LAST_HASH, 0, 32767), (1,)),
        Part(3, PartRecord(HERE, 0, LAST_HASH, 32768), (0, 2)),
    ]


def test_the_rest_of_an_entry_goes_where_the_buckets_are_others_by_now() -> None:
    # The first of two buckets is stored, and the segment was given three.
    layout = RemoteLayout(3, (RemoteSegment(4, 0, LAST_HASH, (21845, 43690)),))
    stored = {4: ReplicatedRanges.nothing(0, LAST_HASH).all_raised(Mark(*HERE, 32767))}
    messages = [MessageHashes(1, each) for each in (7, 30000, 40000, 50000)]
    assert parts_of(SourceEntry(HERE, messages), layout, stored) == [
        Part(4, PartRecord(HERE, 0, LAST_HASH, 32768, 43689), (2,)),
        Part(4, PartRecord(HERE, 0, LAST_HASH, 43690), (3,)),
    ]


def test_nothing_is_planned_before_it_is_known_what_is_stored() -> None:
    assert plan(SourceEntry(HERE, [LOW, HIGH]), (0, LAST_HASH), HALVES, {}) == Unattached(
        frozenset({1, 2})
    )
    assert plan(SourceEntry(HERE, None), (0, LAST_HASH), WHOLE, {}) == Unattached(frozenset({0}))


def test_of_a_half_stored_entry_only_the_other_half_goes() -> None:
    half = ReplicatedRanges.nothing(0, LAST_HASH).raised(0, 32767, Mark(*HERE))
    entry = SourceEntry(HERE, None)
    assert plan(entry, (0, LAST_HASH), WHOLE, {0: half}) is Unplanned.OPEN
    opened = entry._replace(hashes=[HIGH, LOW])
    assert parts_of(opened, WHOLE, {0: half}) == [Part(0, PartRecord(HERE, 32768, LAST_HASH), (0,))]


def test_an_entry_that_is_stored_is_not_opened() -> None:
    stored = {0: ReplicatedRanges.nothing(0, LAST_HASH).raised(0, 99, Mark(*HERE))}
    assert parts_of(SourceEntry(HERE, None), WHOLE, stored, (0, 99)) == []


def test_a_message_without_key_has_the_same_hashes_again_within_its_segment() -> None:
    found = {hash_without_key(f"1:{entry}".encode(), 100, 199) for entry in range(50)}
    assert found == {hash_without_key(f"1:{entry}".encode(), 100, 199) for entry in range(50)}
    assert all(100 <= each <= 199 for each in found)
    assert len(found) > 10


hashes = st.builds(MessageHashes, st.integers(0, LAST_HASH), st.integers(0, LAST_HASH))
borders = st.lists(st.integers(1, LAST_HASH), max_size=3, unique=True).map(sorted)
some_marks = st.builds(
    Mark, st.just(1), st.integers(3, 6), st.sampled_from((20000, 45000, LAST_HASH))
)


@st.composite
def layouts(draw: st.DrawFn) -> RemoteLayout:
    starts = [0, *draw(borders)]
    ends = [start - 1 for start in starts[1:]] + [LAST_HASH]
    return RemoteLayout(
        0,
        tuple(
            RemoteSegment(number, start, end, tuple(draw(borders)))
            for number, (start, end) in enumerate(zip(starts, ends, strict=True))
        ),
    )


@st.composite
def worlds(draw: st.DrawFn) -> tuple[SourceEntry, RemoteLayout, dict[int, ReplicatedRanges]]:
    layout = draw(layouts())
    stored = nothing(layout)
    for segment in layout.segments:
        for _ in range(draw(st.integers(0, 3))):
            start = draw(st.integers(segment.hash_start, segment.hash_end))
            raised = stored[segment.segment_id].raised(start, segment.hash_end, draw(some_marks))
            stored[segment.segment_id] = raised
    messages = draw(st.lists(hashes, min_size=1, max_size=6))
    return SourceEntry(HERE, messages), layout, stored


@given(worlds())
def test_each_message_that_is_not_stored_goes_once_to_its_segment_and_bucket(
    world: tuple[SourceEntry, RemoteLayout, dict[int, ReplicatedRanges]],
) -> None:
    entry, layout, stored = world
    hashes = entry.hashes or []
    sent: list[int] = []
    for part in parts_of(entry, layout, stored):
        chosen = range(len(hashes)) if part.indexes is None else part.indexes
        assert list(chosen) == sorted(chosen)
        record = part.record
        target = next(each for each in layout.segments if each.segment_id == part.segment_id)
        assert len({target.bucket_end(hashes[each].bucket) for each in chosen}) == 1
        for each in chosen:
            assert layout.route(hashes[each].segment) is target
            assert record.hash_start <= hashes[each].segment <= record.hash_end
            assert record.bucket_start <= hashes[each].bucket <= record.bucket_end
        # The segment there takes the parts one after the other, each for new.
        assert record.state(stored[part.segment_id]) is PartState.NEW
        span = (record.hash_start, record.hash_end)
        stored[part.segment_id] = stored[part.segment_id].raised(*span, record.mark)
        sent += chosen
    assert len(sent) == len(set(sent))


@given(worlds())
def test_once_its_parts_are_stored_nothing_of_an_entry_is_left(
    world: tuple[SourceEntry, RemoteLayout, dict[int, ReplicatedRanges]],
) -> None:
    entry, layout, stored = world
    needed = {
        number
        for number, each in enumerate(entry.hashes or [])
        if Mark(*HERE, each.bucket) > stored[layout.route(each.segment).segment_id].at(each.segment)
    }
    parts = parts_of(entry, layout, stored)
    sent = [
        number
        for part in parts
        for number in (range(len(entry.hashes or [])) if part.indexes is None else part.indexes)
    ]
    assert sorted(sent) == sorted(needed)
    for part in parts:
        record = part.record
        raised = stored[part.segment_id].raised(record.hash_start, record.hash_end, record.mark)
        stored[part.segment_id] = raised
    assert parts_of(entry, layout, stored) == []
