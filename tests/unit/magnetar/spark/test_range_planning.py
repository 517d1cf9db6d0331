"""Batches over a topic that splits, merges and hides: every row once, keys in order."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.protocol.ids import LONG_MAX
from magnetar.spark.cut import BEGINNING, END, Place
from magnetar.spark.errors import DataLost, InvalidCut
from magnetar.spark.range_planning import (
    Budget,
    Ordering,
    Planner,
    current_limits,
    limits_of,
    raw_ends,
    shares,
)
from magnetar.spark.tasks import (
    SegmentRange,
    ranges_between,
    refuse_gone,
    segments_gone_between,
    split_large,
)
from tests.unit.magnetar.spark.fake_topic import FakeTopic, Row
from tests.unit.magnetar.spark.query import ACTIONS, UNBOUNDED, Query, change, check_cover, read

EVERY = [0, 17_000, 33_000, 50_000, 65_535]


@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize("ordering", list(Ordering))
@given(
    segments=st.integers(1, 3),
    actions=st.lists(ACTIONS, max_size=30),
    window=st.none() | st.integers(1, 100),
)
def test_batches_have_each_row_once_and_keys_in_order(
    ordering: Ordering,
    chain: bool,
    segments: int,
    actions: list[tuple[str, object]],
    window: int | None,
) -> None:
    topic = FakeTopic(segments)
    query = Query(topic, ordering, chain, window)
    sent: list[Row] = []
    for action, value in actions:
        sent += change(topic, action, value)
        if action == "step":
            assert isinstance(value, Budget)
            query.step(value)
        elif action == "restart":
            query.restart()
    change(topic, "show", 0)
    query.drain(Budget(rows=4))
    assert sorted(query.rows) == sorted(sent)
    if ordering is Ordering.KEY:
        query.check_order()
    assert not query.step(), "there was more"


@given(actions=st.lists(ACTIONS, max_size=25), later=st.lists(ACTIONS, max_size=10))
@pytest.mark.parametrize("ordering", list(Ordering))
def test_batch_read_again_has_the_same_rows(
    ordering: Ordering, actions: list[tuple[str, object]], later: list[tuple[str, object]]
) -> None:
    topic = FakeTopic(2)
    query = Query(topic, ordering, chain=True)
    steps = []
    for action, value in [*actions, ("step", UNBOUNDED)]:
        change(topic, action, value)
        start = query.cut
        if action == "step" and isinstance(value, Budget) and query.step(value):
            steps.append((start, query.cut, query.batches[-1]))
    for action, value in later:
        change(topic, action, value)
    for start, end, rows in steps:
        again = Query(topic, ordering, chain=True)
        again.run_batch(start, end, topic.layout())
        assert again.rows == [row for task in rows for row in task]


@given(actions=st.lists(ACTIONS, max_size=20), later=st.lists(ACTIONS, max_size=10))
@pytest.mark.parametrize("ordering", list(Ordering))
def test_available_now_reads_existing_rows_and_ends(
    ordering: Ordering, actions: list[tuple[str, object]], later: list[tuple[str, object]]
) -> None:
    topic = FakeTopic(2)
    for action, value in actions:
        change(topic, action, value)
    expected = Query(topic, ordering)
    expected.drain()
    query = Query(topic, ordering, limits=current_limits(topic, topic.layout()))
    for action, value in [*later, ("send", EVERY)]:
        change(topic, action, value)
        if action == "step" and isinstance(value, Budget):
            query.step(value)
    query.drain(Budget(rows=3))
    assert sorted(query.rows) == sorted(expected.rows)


@given(actions=st.lists(ACTIONS, max_size=20), later=st.lists(ACTIONS, max_size=10))
@pytest.mark.parametrize("chain", [False, True])
def test_a_stream_with_an_end_reads_up_to_that_cut(
    chain: bool, actions: list[tuple[str, object]], later: list[tuple[str, object]]
) -> None:
    topic = FakeTopic(2)
    for action, value in actions:
        change(topic, action, value)
    expected = Query(topic, Ordering.KEY, chain=chain)
    expected.drain()
    query = Query(topic, Ordering.KEY, chain=chain)
    for action, value in [*later, ("show", 0), ("send", EVERY), ("split", 0), ("send", EVERY)]:
        change(topic, action, value)
        if action == "step" and isinstance(value, Budget):
            query.limits = limits_of(expected.cut, topic.layout())
            query.step(value)
    query.limits = limits_of(expected.cut, topic.layout())
    query.drain(Budget(rows=3))
    assert sorted(query.rows) == sorted(expected.rows)
    left = ranges_between(query.cut, expected.cut, topic.layout())
    assert not any(read(topic, each) for each in left)


def generations(count: int) -> tuple[FakeTopic, list[Row]]:
    """A topic that was split and merged again so often, with rows in each generation."""
    topic = FakeTopic()
    sent = topic.send(EVERY)
    for _ in range(count):
        topic.split(topic.active[0])
        sent += topic.send(EVERY)
        topic.merge(*topic.active)
        sent += topic.send(EVERY)
    return topic, sent


def batches(query: Query) -> list[list[int]]:
    """How many rows each task of each batch has read, without those of no rows."""
    query.drain()
    return [[len(task) for task in batch if task] for batch in query.batches]


def test_batch_ends_at_a_split() -> None:
    topic, _ = generations(1)
    assert batches(Query(topic)) == [[5], [2, 3], [5]]


def test_chained_children_are_read_by_the_task_of_their_parent() -> None:
    topic, _ = generations(1)
    assert batches(Query(topic, chain=True)) == [[10], [5]]


def test_unordered_batch_spans_all_generations() -> None:
    topic, sent = generations(20)
    query = Query(topic, Ordering.NONE)
    query.drain()
    assert len(query.batches) == 1
    assert sorted(query.rows) == sorted(sent)


def test_unordered_large_ranges_are_divided() -> None:
    topic = FakeTopic()
    for _ in range(20):
        topic.send(EVERY)
    [tasks] = batches(Query(topic, Ordering.NONE))
    assert tasks == [5] * 20  # entries of 50 bytes


def test_empty_generations_are_skipped_in_one_batch() -> None:
    topic = FakeTopic()
    topic.split(topic.active[0])
    topic.merge(*topic.active)
    sent = topic.send([5])
    query = Query(topic)
    assert query.step()
    assert query.rows == sent


def test_empty_generation_after_read_rows_waits_for_the_next_batch() -> None:
    """The grandchild has rows of the keys that this batch reads from the grandparent."""
    topic = FakeTopic()
    topic.send([5])
    topic.split(topic.active[0])
    topic.split(topic.active[0])
    topic.send([5])
    assert batches(Query(topic)) == [[1], [1]]
    topic.merge(*topic.active[:2])
    topic.split(topic.active[0])
    topic.send([5])
    query = Query(topic, chain=True)
    assert batches(query) == [[2], [1]]
    query.check_order()


def test_finished_parent_of_a_merge_waits_for_the_other() -> None:
    topic = FakeTopic(2)
    topic.send([0, 65_535])
    topic.active[1].hidden_from = 0
    topic.merge(*topic.active)
    topic.send([0])
    query = Query(topic)
    query.drain()
    assert query.cut.pos == {0: END, 1: BEGINNING}
    topic.segments[1].hidden_from = None
    query.drain()
    assert query.cut.pos.keys() == {2}
    assert len(query.rows) == 3


def test_hidden_entries_are_waited_for_and_count_in_the_raw_end() -> None:
    topic = FakeTopic()
    topic.send([1])
    topic.segments[0].hidden_from = 0
    topic.send([2])
    query = Query(topic)
    assert not query.step()
    assert raw_ends(topic, topic.layout(), "t", "").pos == {0: Place(11, 2)}
    topic.segments[0].hidden_from = None
    assert query.step()
    assert len(query.rows) == 2


@given(
    sizes=st.lists(st.integers(0, 10), min_size=2, max_size=4),
    rows=st.integers(1, 20),
)
def test_budget_is_shared_and_no_segment_starves(sizes: list[int], rows: int) -> None:
    topic = FakeTopic(len(sizes))
    for number, size in enumerate(sizes):
        start = topic.active[number].hash_start
        for _ in range(size):
            topic.send([start, start + 1])  # two rows in each entry
    query = Query(topic)
    while query.step(Budget(rows=rows)):
        batch = query.batches[-1]
        assert sum(map(len, batch)) <= max(rows, 0) + 2 * len(batch)
        waiting = sum(1 for size in sizes if size) if len(query.batches) == 1 else 0
        assert sum(1 for task in batch if task) >= waiting
    assert len(query.rows) == 2 * sum(sizes)


@given(
    total=st.integers(1, 10**9),
    backlogs=st.lists(st.none() | st.integers(0, 10**12), min_size=1, max_size=50),
)
def test_shares_add_up_to_the_budget_and_follow_backlogs(
    total: int, backlogs: list[int | None]
) -> None:
    found = shares(total, backlogs)
    assert len(found) == len(backlogs)
    assert min(found) >= 1
    assert sum(found) <= max(total + len(found), len(found))
    assert sum(found) >= total
    if None not in backlogs:
        by_backlog = sorted(zip([each or 0 for each in backlogs], found, strict=True))
        assert all(a[1] <= b[1] for a, b in pairwise(by_backlog))


def test_window_keeps_segments_together() -> None:
    topic = FakeTopic(2)
    for _ in range(10):
        topic.send([0])
    for _ in range(10):
        topic.send([65_535])  # published later than all of the others
    query = Query(topic, window_ms=30)
    while query.step():
        times = [row.number for task in query.batches[-1] for row in task]
        assert len(times) <= 6
    assert [row.key for row in query.rows] == [0] * 10 + [65_535] * 10


@pytest.mark.parametrize("early_ms", [1, 500])
def test_window_ignores_an_early_time_further_on(early_ms: int) -> None:
    """Clocks of producers differ, by more than the window, too."""
    topic = FakeTopic(2)
    for _ in range(10):
        topic.send([0, 65_535])
    topic.segments[0].entries[7].publish_time_ms = early_ms
    topic.segments[1].entries[5].publish_time_ms = early_ms
    query = Query(topic, window_ms=30)
    query.drain()
    assert len(query.rows) == 20
    assert len(query.batches) > 2, "the window holds nothing"


@pytest.mark.parametrize("time_ms", [LONG_MAX - 30, LONG_MAX - 29, 2**64 - 1])
def test_window_continues_after_an_extreme_time(time_ms: int) -> None:
    """Brokers store what a producer says, and no bound is as late as that."""
    topic = FakeTopic(1)
    for _ in range(3):
        topic.send([0])
    topic.segments[0].entries[1].publish_time_ms = time_ms
    query = Query(topic, window_ms=30)
    query.drain()
    assert len(query.rows) == 3
    assert len(query.batches) > 1, "the window holds nothing"


def lose(topic: FakeTopic, query: Query) -> Planner:
    """Retention takes what the query has yet to read; a planner that goes on with the rest."""
    query.step()
    topic.send(EVERY)
    topic.split(topic.active[0])
    topic.send(EVERY)
    assert topic.prune_oldest() == [0]
    return Planner(topic, Ordering.KEY, fail_on_data_loss=False)


def test_deleted_segment_fails_the_query() -> None:
    topic, query = FakeTopic(), Query(FakeTopic())
    query = Query(topic)
    lose(topic, query)
    with pytest.raises(DataLost, match="failOnDataLoss"):
        query.step()


def test_deleted_segment_is_skipped_to_its_earliest_descendants() -> None:
    topic = FakeTopic()
    query = Query(topic)
    planner = lose(topic, query)
    layout = topic.layout()
    found = planner.next_cut(query.cut, layout, UNBOUNDED)
    assert planner.gaps == 1
    check_cover(found, layout)
    query.run_batch(found, found, layout)
    ranges = ranges_between(query.cut, found, layout)
    assert [each.segment_id for each in ranges] == [1, 2]


def test_child_of_a_lost_and_a_live_parent_waits_for_the_live_one() -> None:
    topic = FakeTopic(2)
    query = Query(topic)
    topic.send(EVERY)
    topic.send(EVERY)
    upper = topic.active[1]
    topic.merge(*topic.active)
    topic.send(EVERY)
    topic.pruned.add(0)
    planner = Planner(topic, Ordering.KEY, fail_on_data_loss=False)
    first = planner.next_cut(query.cut, topic.layout(), Budget(rows=1))
    assert first.pos == {1: Place.at(upper.at(1))}
    second = planner.next_cut(first, topic.layout(), UNBOUNDED)
    assert second.pos == {2: BEGINNING}
    third = planner.next_cut(second, topic.layout(), UNBOUNDED)
    assert third.pos[2] > BEGINNING


def test_trimmed_beginning_of_a_child_fails_the_query() -> None:
    topic, _ = generations(1)
    query = Query(topic)
    query.step()
    topic.segments[1].trimmed = 1
    with pytest.raises(DataLost, match="segment 1"):
        query.step()


def test_trimmed_beginning_fails_or_is_skipped() -> None:
    topic = FakeTopic()
    query = Query(topic)
    topic.send([1])
    query.step()
    topic.send([2])
    topic.send([3])
    topic.segments[0].trimmed = 2
    with pytest.raises(DataLost):
        query.step()
    planner = Planner(topic, Ordering.KEY, fail_on_data_loss=False)
    found = planner.next_cut(query.cut, topic.layout(), UNBOUNDED)
    assert planner.gaps == 1
    assert found.pos[0] == Place(11, 3)


def test_skipped_range_is_counted_once_even_if_empty() -> None:
    """A query asks ten times in a second whether there is something new."""
    topic = FakeTopic()
    query = Query(topic)
    topic.send([1])
    query.step()
    topic.send([2])
    topic.segments[0].trimmed = 2
    planner = Planner(topic, Ordering.KEY, fail_on_data_loss=False)
    found = planner.next_cut(query.cut, topic.layout(), UNBOUNDED)
    assert found.pos[0] == Place(11, 2)
    assert planner.next_cut(found, topic.layout(), UNBOUNDED) is found
    assert planner.gaps == 1
    with pytest.raises(DataLost):
        Planner(topic, Ordering.KEY).next_cut(query.cut, topic.layout(), UNBOUNDED)


@pytest.mark.parametrize("ordering", [Ordering.NONE, Ordering.KEY])
def test_segments_deleted_inside_a_batch_are_lost(ordering: Ordering) -> None:
    topic, _ = generations(2)
    query = Query(topic, ordering)
    start = query.cut
    steps = []
    while query.step():
        steps.append((start, query.cut))
        start = query.cut
    topic.prune_oldest()
    topic.prune_oldest()
    assert topic.pruned == {0, 1, 2}
    layout = topic.layout()
    first, last = steps[0], steps[-1]
    assert segments_gone_between(*first, layout)
    with pytest.raises(DataLost, match="not retained"):
        refuse_gone(*first, layout)
    if ordering is Ordering.KEY:
        refuse_gone(*last, layout)


def test_segments_deleted_after_an_ended_parent_are_lost() -> None:
    """The children of an end were not known when its batch was planned."""
    topic, _ = generations(2)
    query = Query(topic, Ordering.NONE)
    start = replace(query.cut, pos={0: END})
    query.cut = start
    assert query.step()
    topic.prune_oldest()
    topic.prune_oldest()
    assert segments_gone_between(start, query.cut, topic.layout()) == [1, 2]


def test_ended_segment_stays_in_the_cut_until_its_children_are_known() -> None:
    topic = FakeTopic()
    topic.send([1])
    before = topic.layout()
    topic.split(topic.active[0])
    query = Query(topic)
    planner = Planner(topic, Ordering.KEY)
    ended = planner.next_cut(query.cut, before, UNBOUNDED)
    assert ended.pos == {0: END}
    assert planner.next_cut(ended, before, UNBOUNDED) is ended
    assert planner.next_cut(ended, topic.layout(), UNBOUNDED).pos == {1: BEGINNING, 2: BEGINNING}


def test_fully_trimmed_large_range_ends() -> None:
    topic = FakeTopic()
    for _ in range(4):
        topic.send([1])
    topic.segments[0].trimmed = 4
    whole = SegmentRange(0, "segment://0", Place(11, 0), Place(11, 2))
    assert split_large(topic, [whole], 10) == [whole]


def test_recreated_topic_is_detected() -> None:
    topic, _ = generations(2)
    query = Query(topic)
    query.drain()
    with pytest.raises(InvalidCut, match="new checkpoint"):
        Planner(FakeTopic(), Ordering.KEY).next_cut(query.cut, FakeTopic().layout(), UNBOUNDED)
