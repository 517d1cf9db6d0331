"""What a segment takes of senders in other clusters, how it hands that on, and what it forgets."""

import pytest

from broker.topics.replicated_ranges import (
    EVERYTHING,
    LAST_HASH,
    NOTHING,
    Mark,
    PartRecord,
    PartState,
    SourceSegment,
)
from broker.topics.segment_sources import (
    PartRefused,
    SegmentSources,
    Session,
    SessionEnded,
    SourceState,
    StaleSender,
    TooManyRanges,
)
from config.bounds import SOURCE_CLUSTERS, SOURCE_INCARNATIONS
from magnetar.protocol.ids import EARLIEST, Position

SOURCE = SourceSegment("east", 7, 3)
STATE = SourceState(SOURCE, 1, 1, frozenset({3, 4}), frozenset(), EARLIEST)


def record(entry: int, start: int = 0, end: int = LAST_HASH) -> PartRecord:
    return PartRecord(Position(1, entry), start, end)


def opened(state: SourceState = STATE) -> tuple[SegmentSources, Session]:
    sources = SegmentSources(0, LAST_HASH)
    session = sources.attach(state)
    sources.saved(sources.changes)
    return sources, session


def marks(sources: SegmentSources, source: SourceSegment = SOURCE) -> list[Mark]:
    return [run.mark for run in sources.durable()[source].runs]


def test_a_part_that_is_stored_is_answered_and_not_appended_again() -> None:
    sources, session = opened()
    assert sources.publish(session, 0, record(0)) is PartState.NEW
    sources.stored()
    assert sources.publish(session, 1, record(0)) is PartState.STORED
    assert marks(sources) == [Mark(1, 0)]


def test_the_last_entry_that_was_received_is_known_of_each_source_segment() -> None:
    sources, session = opened(STATE._replace(drained=frozenset({4})))
    drained = {SOURCE._replace(segment_id=4): EVERYTHING.position}
    assert sources.last_received() == drained
    sources.publish(session, 0, record(2, 0, 99))
    # On its way to the ledger.
    assert sources.last_received() == {SOURCE: Position(1, 2), **drained}


def test_the_incarnation_that_attached_last_is_the_newest() -> None:
    sources, _ = opened()
    sources.attach(STATE._replace(source=SOURCE._replace(incarnation=8)))
    assert not sources.is_newest("east", 7)
    assert sources.is_newest("east", 8)
    # Nothing is known of the others.
    assert not sources.is_newest("east", 9)
    assert sources.is_newest("west", 9)


def test_a_sender_is_told_what_is_stored_when_earlier_sends_are_decided() -> None:
    sources, session = opened()
    sources.publish(session, 0, record(0))
    sources.publish(session, 1, record(1))
    later = sources.attach(STATE)
    assert sources.stored_of(later) is None
    sources.stored()
    assert sources.stored_of(later) is None
    sources.stored()
    told = sources.stored_of(later)
    assert told is not None
    assert told.at(0) == Mark(1, 1)


def test_a_newer_session_ends_the_earlier_one() -> None:
    sources, session = opened()
    sources.attach(STATE)
    with pytest.raises(SessionEnded, match="has ended"):
        sources.publish(session, 0, record(0))


def test_a_sender_of_an_older_owner_is_refused() -> None:
    sources, session = opened(STATE._replace(owner_epoch=2))
    with pytest.raises(StaleSender, match="newer owner"):
        sources.attach(STATE)
    assert sources.publish(session, 0, record(0)) is PartState.NEW


def test_a_sender_of_an_older_layout_is_refused() -> None:
    sources, _ = opened(STATE._replace(layout_epoch=2))
    with pytest.raises(StaleSender, match="newer layout"):
        sources.attach(STATE._replace(source=SOURCE._replace(segment_id=4)))


@pytest.mark.parametrize(
    ("sequence", "part"),
    [(1, record(1)), (0, record(0, 0, 99))],
    ids=["a part before it is missing", "some of it is stored"],
)
def test_a_part_out_of_order_ends_the_session(sequence: int, part: PartRecord) -> None:
    sources = SegmentSources(0, LAST_HASH)
    sources.replay(SOURCE, record(0, 50, 99))
    session = sources.attach(STATE)
    with pytest.raises(PartRefused, match="attach again"):
        sources.publish(session, sequence, part)
    with pytest.raises(SessionEnded):
        sources.publish(session, 0, record(2))


def test_a_part_that_is_sent_again_before_it_is_durable_is_not_answered() -> None:
    sources, session = opened()
    sources.publish(session, 0, record(0))
    with pytest.raises(PartRefused):
        sources.publish(session, 1, record(0))


def test_a_chunk_without_record_is_stored_and_says_nothing() -> None:
    sources, session = opened()
    assert sources.publish(session, 0, None) is PartState.NEW
    assert sources.publish(session, 1, record(4)) is PartState.NEW
    sources.stored()
    assert marks(sources) == [NOTHING]
    sources.stored()
    assert marks(sources) == [Mark(1, 4)]


def test_parts_that_a_ledger_lost_are_taken_from_a_new_session() -> None:
    sources, session = opened()
    sources.publish(session, 0, record(0))
    sources.publish(session, 1, record(1))
    sources.stored()
    sources.failed()
    with pytest.raises(SessionEnded):
        sources.publish(session, 2, record(2))
    again = sources.attach(STATE)
    assert marks(sources) == [Mark(1, 0)]
    assert sources.publish(again, 0, record(1)) is PartState.NEW


def test_what_a_sender_has_acknowledged_counts_as_stored_and_is_one_range() -> None:
    sources = SegmentSources(0, LAST_HASH)
    for entry in range(8):
        sources.replay(SOURCE, record(entry, 100 * entry, 100 * entry + 99))
    assert sources.ranges == 9
    sources.attach(STATE._replace(acknowledged=Position(1, 6)))
    assert sources.ranges == 3
    sources.attach(STATE._replace(acknowledged=Position(1, 7)))
    assert marks(sources) == [Mark(1, 7)]


def test_a_pruned_source_segment_is_forgotten() -> None:
    sources, session = opened()
    pruned = STATE._replace(
        source=SOURCE._replace(segment_id=4), layout_epoch=2, segments=frozenset({4})
    )
    sources.attach(pruned)
    assert SOURCE not in sources.durable()
    with pytest.raises(SessionEnded):
        sources.publish(session, 0, record(0))
    with pytest.raises(StaleSender, match="newer layout"):
        sources.attach(STATE)


def test_nothing_is_taken_of_a_segment_whose_child_is_sent() -> None:
    sources, session = opened()
    sources.publish(session, 0, record(0))
    child = sources.attach(
        STATE._replace(source=SOURCE._replace(segment_id=4), drained=frozenset({3}))
    )
    with pytest.raises(SessionEnded):
        sources.publish(session, 1, record(1))
    sources.stored()
    assert sources.publish(child, 0, record(0)) is PartState.NEW
    late = sources.attach(STATE)
    sources.saved(sources.changes)
    told = sources.stored_of(late)
    assert told is not None
    assert record(1).state(told) is PartState.STORED
    loaded = SegmentSources.from_json(sources.to_json(), 0, LAST_HASH)
    assert loaded.durable() == sources.durable()


def test_a_sender_is_told_nothing_before_what_it_said_is_saved() -> None:
    sources = SegmentSources(0, LAST_HASH)
    child = STATE._replace(source=SOURCE._replace(segment_id=4), drained=frozenset({3}))
    for state in (STATE, child):
        session = sources.attach(state)
        before = sources.changes
        assert sources.stored_of(session) is None
        sources.saved(before - 1)
        assert sources.stored_of(session) is None
        sources.saved(before)
        assert sources.stored_of(session) is not None
        assert sources.stored_of(sources.attach(state)) is not None


def test_what_a_refused_sender_said_is_saved_before_the_next_one_is_told_anything() -> None:
    sources = SegmentSources(0, LAST_HASH, limit=1)
    sources.attach(STATE)
    sources.saved(sources.changes)
    with pytest.raises(TooManyRanges):
        sources.attach(STATE._replace(source=SOURCE._replace(segment_id=4), layout_epoch=2))
    assert sources.stored_of(sources.attach(STATE._replace(layout_epoch=2))) is None


def test_another_incarnation_of_the_topic_begins_anew() -> None:
    sources, session = opened()
    sources.publish(session, 0, record(5))
    sources.stored()
    later = sources.attach(STATE._replace(source=SOURCE._replace(incarnation=8)))
    assert sources.publish(later, 0, record(0)) is PartState.NEW


def test_the_oldest_incarnations_of_a_topic_are_forgotten() -> None:
    sources = SegmentSources(0, LAST_HASH)
    other = SourceSegment("west", 0, 3)
    sources.attach(STATE._replace(source=other))
    for incarnation in range(SOURCE_INCARNATIONS + 2):
        sources.attach(STATE._replace(source=SOURCE._replace(incarnation=incarnation)))
    known = {source.incarnation for source in sources.durable() if source.cluster == "east"}
    assert known == set(range(2, SOURCE_INCARNATIONS + 2))
    assert other in sources.durable()


def test_no_further_source_segment_is_taken_above_the_bound() -> None:
    sources = SegmentSources(0, LAST_HASH, limit=1)
    sources.attach(STATE)
    further = STATE._replace(source=SOURCE._replace(segment_id=4))
    with pytest.raises(TooManyRanges, match="drain and prune"):
        sources.attach(further)
    sources.attach(STATE)
    sources.attach(further._replace(layout_epoch=2, segments=frozenset({4})))
    assert sources.ranges == 1


def test_refused_senders_leave_nothing_behind() -> None:
    sources = SegmentSources(0, LAST_HASH, limit=1)
    sources.attach(STATE)
    for incarnation in range(20):
        with pytest.raises(TooManyRanges):
            sources.attach(STATE._replace(source=SourceSegment("west", incarnation, 3)))
    assert len(sources.to_json()) == 1 + SOURCE_INCARNATIONS


def test_ancestors_that_a_sender_names_are_counted_by_the_bound() -> None:
    sources = SegmentSources(0, LAST_HASH, limit=10)
    sources.attach(STATE._replace(segments=frozenset(range(9)), drained=frozenset({1, 2})))
    for incarnation in range(SOURCE_INCARNATIONS):
        state = STATE._replace(
            source=SourceSegment("west", incarnation, 3),
            segments=frozenset(range(100)),
            drained=frozenset(range(50, 100)),
        )
        with pytest.raises(TooManyRanges):
            sources.attach(state)
    assert sources.ranges == 3
    with pytest.raises(TooManyRanges):
        sources.attach(
            STATE._replace(segments=frozenset(range(99)), drained=frozenset(range(4, 99)))
        )
    sources.attach(STATE._replace(layout_epoch=2, segments=frozenset({3}), drained=frozenset()))
    assert sources.ranges == 1


def test_stored_records_that_no_sender_wrote_do_not_fill_the_memory() -> None:
    sources = SegmentSources(0, LAST_HASH, limit=2000)
    sources.attach(STATE)
    for number in range(1000):
        sources.replay(SourceSegment(f"c{number}", 1, 1), record(0))
        sources.replay(SourceSegment("west", number, 1), record(0))
        sources.replay(SourceSegment("n" * 1000, number, 1), record(0))
        sources.replay(SOURCE._replace(segment_id=number), record(0))
        sources.replay(SOURCE, record(number, number, number))
    assert sources.ranges <= 2 * 2000 + 1
    names = [name for name, *_ in sources.to_json()]
    assert len(set(names)) == SOURCE_CLUSTERS
    assert max(map(names.count, names)) == SOURCE_INCARNATIONS
    assert max(map(len, map(str, names))) <= 255
    assert marks(sources)[0] == Mark(1, 0)


def test_a_merged_segment_knows_what_its_parents_know() -> None:
    low, high = SegmentSources(0, 99), SegmentSources(100, LAST_HASH)
    low.attach(STATE._replace(owner_epoch=4))
    high.attach(STATE._replace(layout_epoch=5))
    low.replay(SOURCE, record(1, 0, 99))
    high.replay(SOURCE, record(2, 100))
    merged = SegmentSources.inherited(0, LAST_HASH, [low, high])
    assert marks(merged) == [Mark(1, 1), Mark(1, 2)]
    for stale in (STATE._replace(layout_epoch=5), STATE._replace(owner_epoch=4)):
        with pytest.raises(StaleSender):
            merged.attach(stale)


def test_a_snapshot_and_the_entries_after_it_give_what_was_durable() -> None:
    sources, session = opened(STATE._replace(owner_epoch=2, layout_epoch=6))
    sources.publish(session, 0, record(0, 0, 99))
    sources.stored()
    snapshot = sources.to_json()
    sources.publish(session, 1, record(1))
    sources.stored()
    loaded = SegmentSources.from_json(snapshot, 0, LAST_HASH)
    assert loaded.to_json() == snapshot
    loaded.replay(SOURCE, record(0, 0, 99))
    loaded.replay(SOURCE, record(1))
    assert loaded.durable() == sources.durable()
    with pytest.raises(StaleSender):
        loaded.attach(STATE)


@pytest.mark.parametrize("members", [None, [1], [["east", "7", 0, [[3]]]], [["east", "x", 0, []]]])
def test_a_snapshot_that_nobody_wrote_is_refused(members: object) -> None:
    with pytest.raises(ValueError, match="no snapshot of replicated ranges"):
        SegmentSources.from_json(members, 0, LAST_HASH)


def test_a_segment_takes_senders_of_a_bounded_number_of_clusters() -> None:
    sources = SegmentSources(0, LAST_HASH)
    for number in range(SOURCE_CLUSTERS):
        sources.attach(STATE._replace(source=SOURCE._replace(cluster=f"c{number}")))
    with pytest.raises(TooManyRanges, match="fewer clusters"):
        sources.attach(STATE)
    sources.attach(STATE._replace(source=SOURCE._replace(cluster="c0")))


def test_parts_for_single_hashes_do_not_fill_the_memory() -> None:
    sources = SegmentSources(0, LAST_HASH, limit=2)
    session = sources.attach(STATE)
    taken = [sources.publish(session, entry, record(entry, entry, entry)) for entry in range(3)]
    assert taken == [PartState.NEW] * 3
    with pytest.raises(PartRefused, match="send parts for all of its hashes"):
        sources.publish(session, 3, record(3, 3, 3))
    later = sources.attach(STATE)
    assert sources.publish(later, 0, record(4)) is PartState.NEW
