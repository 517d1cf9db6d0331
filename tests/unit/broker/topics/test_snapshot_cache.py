"""The snapshots that a subscription remembers until it has passed them."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from broker.topics.snapshot_cache import SnapshotCache
from broker.topics.subscription_markers import Snapshot
from magnetar.protocol.ids import Position


def at(entry: int) -> Snapshot:
    """A snapshot at an entry."""
    return Snapshot(str(entry), Position(1, entry), {"west": Position(7, entry)})


def test_newest_snapshot_at_or_below_the_mark_delete_position_is_taken_once() -> None:
    cache = SnapshotCache(30)
    for entry in (10, 20, 30):
        cache.add(at(entry))
    assert cache.take_up_to(Position(1, 9)) is None
    assert cache.take_up_to(Position(1, 20)) == at(20)
    assert cache.take_up_to(Position(1, 29)) is None
    assert cache.take_up_to(Position(1, 30)) == at(30)
    assert len(cache) == 0


def test_snapshot_that_is_read_again_is_not_taken_again() -> None:
    cache = SnapshotCache(30)
    for _ in range(2):
        cache.add(at(10))
        cache.add(at(20))
    assert len(cache) == 2
    cache.take_up_to(Position(1, 10))
    cache.add(at(10))
    assert cache.take_up_to(Position(1, 19)) is None


def test_snapshots_of_a_subscription_far_behind_are_spread() -> None:
    cache = SnapshotCache(10)
    for entry in range(1000):
        cache.add(at(entry))
    assert len(cache) == 10
    passed = [0]
    for mark in range(1000):
        taken = cache.take_up_to(Position(1, mark))
        if taken is not None:
            passed.append(taken.position.entry_id)
    # The oldest and the newest, and no gap of more than four times an even one.
    assert passed[:2] == [0, 0]
    assert passed[-1] == 999
    assert max(after - before for before, after in pairwise(passed)) <= 444


def test_one_snapshot_is_kept_where_one_is_the_most() -> None:
    cache = SnapshotCache(1)
    cache.add(at(10))
    cache.add(at(20))
    assert len(cache) == 1


@given(
    most=st.integers(1, 5),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=60),
)
def test_taken_snapshot_is_never_ahead_of_the_mark_delete_position(
    most: int, steps: list[tuple[bool, int]]
) -> None:
    cache, mark, last = SnapshotCache(most), 0, -1
    for is_read, entry in steps:
        if is_read:
            cache.add(at(entry))
            assert len(cache) <= most
            continue
        mark = max(mark, entry)
        taken = cache.take_up_to(Position(1, mark))
        if taken is not None:
            assert last < taken.position.entry_id <= mark
            last = taken.position.entry_id
