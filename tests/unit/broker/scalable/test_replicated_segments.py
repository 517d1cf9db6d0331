"""When segments of a replicated topic are sent, and how long sealed ones stay."""

from broker.scalable import layout as layouts
from broker.scalable.replicated_segments import is_needed, sending


def test_children_are_sent_when_their_parent_is_drained() -> None:
    after = layouts.split(layouts.initial(1, now_ms=0), 0, now_ms=0).layout
    assert sending(after, set()) == [0]
    assert sending(after, {0}) == [1, 2]


def test_a_merged_segment_is_sent_when_all_its_parents_are_drained() -> None:
    after = layouts.merge(layouts.initial(2, now_ms=0), [0, 1], now_ms=0).layout
    assert sending(after, {0}) == [1]
    assert sending(after, {0, 1}) == [2]


def test_an_empty_parent_does_not_hide_that_its_own_parent_is_not_drained() -> None:
    first = layouts.split(layouts.initial(1, now_ms=0), 0, now_ms=0).layout
    second = layouts.split(first, 1, now_ms=0).layout
    assert sending(second, {1}) == [0]
    assert sending(second, {0, 1}) == [2, 3, 4]


def test_an_ancestor_that_was_pruned_counts_as_drained() -> None:
    after = layouts.split(layouts.initial(1, now_ms=0), 0, now_ms=0).layout
    assert sending(layouts.prune(after, [0]), set()) == [1, 2]


def test_a_sealed_segment_stays_until_every_cluster_has_it() -> None:
    assert is_needed({"east": True, "west": False})
    assert not is_needed({"east": True, "west": True})
    assert not is_needed({})
