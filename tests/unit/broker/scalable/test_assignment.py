"""Assignment: balanced, ordered, never two owners, few moves."""

from hypothesis import given
from hypothesis import strategies as st

from broker.scalable.assignment import Holdings, assignable, rebalance, release
from broker.scalable.layout import Layout, initial, merge, split
from tests.unit.broker.scalable.holdings import alone, settle

NAMES = st.sets(st.sampled_from("abcdefg"))
SEGMENTS = st.lists(st.integers(0, 12), unique=True, max_size=12)


def counts(holdings: Holdings, consumers: set[str]) -> list[int]:
    return [len(holdings.of(name)) for name in sorted(consumers)]


@given(SEGMENTS, NAMES.filter(bool))
def test_from_nothing_it_is_pulsars_round_robin(segments: list[int], consumers: set[str]) -> None:
    names = sorted(consumers)
    holdings = rebalance(Holdings(), segments, consumers)
    assert alone(holdings.granted) == {s: names[i % len(names)] for i, s in enumerate(segments)}
    assert not holdings.releasing


@given(st.lists(st.tuples(SEGMENTS, NAMES, st.integers(0, 3)), max_size=12))
def test_segment_is_granted_after_its_former_consumer_released_it(
    steps: list[tuple[list[int], set[str], int]],
) -> None:
    holdings = Holdings()
    on_segment: dict[int, str] = {}
    for segments, consumers, releases in steps:
        holdings = rebalance(holdings, segments, consumers)
        assert not holdings.granted.keys() & holdings.releasing.keys()
        assert set(holdings.granted) <= set(segments)
        assert set(alone(holdings.granted).values()) <= consumers
        for segment_id, owner in alone(holdings.granted).items():
            assert on_segment.get(segment_id, owner) == owner
            on_segment[segment_id] = owner
        for segment_id in list(holdings.releasing)[:releases]:
            former = alone(holdings.releasing)[segment_id]
            assert on_segment.pop(segment_id) == former
            holdings = release(holdings, segment_id, former)
        assert on_segment == {**alone(holdings.granted), **alone(holdings.releasing)}


@given(st.lists(st.tuples(SEGMENTS, NAMES), min_size=1, max_size=8))
def test_everything_is_granted_once_all_have_let_go(
    steps: list[tuple[list[int], set[str]]],
) -> None:
    holdings = Holdings()
    for segments, consumers in steps:
        holdings = rebalance(holdings, segments, consumers)
    segments, consumers = steps[-1]
    holdings = settle(holdings, segments, consumers)
    assert set(holdings.granted) == (set(segments) if consumers else set())
    if consumers:
        assert max(counts(holdings, consumers)) - min(counts(holdings, consumers)) <= 1


@given(st.lists(st.tuples(SEGMENTS, NAMES), min_size=1, max_size=8))
def test_the_same_question_again_changes_nothing(steps: list[tuple[list[int], set[str]]]) -> None:
    holdings = Holdings()
    for segments, consumers in steps:
        holdings = rebalance(holdings, segments, consumers)
        assert rebalance(holdings, segments, consumers) == holdings


@given(SEGMENTS, NAMES.filter(bool), NAMES)
def test_only_what_balance_demands_is_moved(
    segments: list[int], before: set[str], after: set[str]
) -> None:
    start = rebalance(Holdings(), segments, before)
    moved = rebalance(start, segments, after)
    base = len(segments) // len(after) if after else 0
    for name in before & after:
        given_up = [s for s, owner in alone(moved.releasing).items() if owner == name]
        assert not given_up or len(moved.of(name)) >= base
        assert moved.of(name) <= start.of(name) or not given_up


def test_a_newcomer_takes_half_and_gives_it_back() -> None:
    first = rebalance(Holdings(), [0, 1, 2, 3], {"a"})
    joined = rebalance(first, [0, 1, 2, 3], {"a", "b"})
    assert alone(joined.granted) == {0: "a", 2: "a"}
    assert alone(joined.releasing) == {1: "a", 3: "a"}
    first = rebalance(release(joined, 1, "a"), [0, 1, 2, 3], {"a", "b"})
    assert alone(first.granted) == {0: "a", 2: "a", 1: "b"}
    both = rebalance(release(first, 3, "a"), [0, 1, 2, 3], {"a", "b"})
    assert both.of("b") == {1, 3}
    gone = rebalance(both, [0, 1, 2, 3], {"a"})
    assert alone(gone.releasing) == {1: "b", 3: "b"}
    assert settle(gone, [0, 1, 2, 3], {"a"}).of("a") == {0, 1, 2, 3}


def ids(layout: Layout, drained: set[int], *, ordered: bool = True) -> list[int]:
    return [s.segment_id for s in assignable(layout, drained, ordered=ordered)]


def test_children_wait_for_every_segment_above_them() -> None:
    layout = split(initial(1, now_ms=1), 0, now_ms=2).layout  # 0 -> 1, 2
    layout = split(layout, 1, now_ms=3).layout  # 1 -> 3, 4
    assert ids(layout, set()) == [0]
    assert ids(layout, {1}) == [0], "an empty intermediate does not let its children pass"
    assert ids(layout, {0}) == [1, 2]
    assert ids(layout, {0, 1}) == [3, 4, 2]


def test_a_merged_child_waits_for_both_parents() -> None:
    layout = merge(initial(2, now_ms=1), (0, 1), now_ms=2).layout
    assert ids(layout, {0}) == [1]
    assert ids(layout, {1}) == [0]
    assert ids(layout, {0, 1}) == [2]


def test_a_checkpoint_group_reads_everything_at_once() -> None:
    layout = split(initial(1, now_ms=1), 0, now_ms=2).layout
    assert ids(layout, {0}, ordered=False) == [1, 0, 2]


def test_active_segments_are_never_taken_for_drained() -> None:
    assert ids(initial(2, now_ms=1), {0, 1}) == [0, 1]
