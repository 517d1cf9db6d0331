"""Times of the last changes of a topic, over prunes of the segments that show them."""

import pytest

from broker.scalable import layout
from broker.scalable.last_changes import LastChanges, decode_last_changes, last_changes
from broker.scalable.layout import Layout
from broker.scalable.records import ScalableTopicRecord, decode_topic, encode_topic

NONE = LastChanges()


def merged_and_split() -> Layout:
    """Segments 0 and 1 became 4 at 100, and that 5 and 6 at 200; 2 and 3 are as made."""
    merged = layout.merge(layout.initial(4, now_ms=0), [0, 1], now_ms=100).layout
    return layout.split(merged, 4, now_ms=200).layout


def test_a_layout_with_all_parents_tells_each_change() -> None:
    assert last_changes(merged_and_split(), None) == LastChanges(200, 100, None)


def test_a_pruned_merge_is_not_forgotten() -> None:
    before = merged_and_split()
    kept = last_changes(before, None)
    after = layout.prune(before, {0, 1, 4})
    assert last_changes(after, kept) == LastChanges(200, 100, None)
    assert last_changes(after, None).merge_ms is None, "the layout alone has forgotten it"


def test_a_pruned_rebucket_counts_as_nothing_else() -> None:
    before = layout.rebucket(layout.initial(1, now_ms=0), [0], 4, now_ms=100).layout
    kept = last_changes(before, None)
    after = layout.prune(before, {0})
    assert last_changes(after, kept) == LastChanges(rebucket_ms=100)
    assert last_changes(after, None) == LastChanges(100, 100, 100), "of an earlier version"


def test_a_rebucket_of_several_segments_is_no_split() -> None:
    change = layout.rebucket(layout.initial(3, now_ms=0), [0, 1, 2], 4, now_ms=100)
    assert last_changes(change.layout, None) == LastChanges(rebucket_ms=100)
    for gone in ({0}, {0, 2}, {0, 1, 2}):
        kept = last_changes(change.layout, None)
        assert last_changes(layout.prune(change.layout, gone), kept) == LastChanges(None, None, 100)
    # A parent that is pruned before its brother leaves the time in the layout.
    assert last_changes(layout.prune(change.layout, {0}), None) == LastChanges(rebucket_ms=100)


def test_a_later_change_comes_before_a_kept_one() -> None:
    after = layout.split(layout.prune(merged_and_split(), {0, 1, 4}), 5, now_ms=900).layout
    assert last_changes(after, LastChanges(200, 100, 50)) == LastChanges(900, 100, 50)


@pytest.mark.parametrize("kept", [None, NONE, LastChanges(1, None, 3)])
def test_kept_times_are_in_the_record(kept: LastChanges | None) -> None:
    record = ScalableTopicRecord(layout.initial(1, now_ms=0), kept_changes=kept)
    assert decode_topic(encode_topic(record)).kept_changes == kept


def test_times_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="last changes"):
        decode_last_changes([1])
