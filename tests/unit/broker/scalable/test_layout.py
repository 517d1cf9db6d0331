"""Layouts: every reachable one keeps the rules; every refusal is typed."""

import dataclasses
import itertools
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.scalable.layout import (
    CorruptLayout,
    IllegalBucketCount,
    IllegalReshape,
    IllegalSegmentCount,
    Layout,
    ReshapeKind,
    SegmentNotActive,
    SegmentsNotAdjacent,
    SegmentState,
    SegmentTooNarrow,
    UnknownSegment,
    initial,
    merge,
    migrated,
    prune,
    rebucket,
    split,
    verify,
)
from config.bounds import MAX_ENTRY_BUCKETS
from magnetar.protocol.key_hash import KEY_SPACE

NOW_MS = 1_700_000_000_000


def prunable(layout: Layout) -> list[int]:
    return [s.segment_id for s in layout.sealed if not s.parent_ids]


@st.composite
def histories(draw: st.DrawFn) -> list[Layout]:
    """All layouts of a random life of a topic, oldest first."""
    layouts = [initial(draw(st.integers(1, 9)), now_ms=NOW_MS, bucket_budget=4)]
    kinds = st.sampled_from(["split", "merge", "rebucket", "prune"])
    for step in draw(st.lists(kinds, max_size=25)):
        layout = layouts[-1]
        now_ms = NOW_MS + len(layouts)
        wide = [s for s in layout.active if s.hash_end > s.hash_start]
        if step == "split" and wide:
            chosen = draw(st.sampled_from(wide))
            parts = draw(st.integers(2, min(5, chosen.hash_end - chosen.hash_start + 1)))
            change = split(layout, chosen.segment_id, now_ms=now_ms, parts=parts)
            layouts.append(change.layout)
        elif step == "merge" and len(layout.active) > 1:
            lower = draw(st.integers(0, len(layout.active) - 2))
            upper = draw(st.integers(lower + 2, len(layout.active)))
            ids = [segment.segment_id for segment in layout.active[lower:upper]]
            layouts.append(merge(layout, draw(st.permutations(ids)), now_ms=now_ms).layout)
        elif step == "rebucket":
            some = draw(st.sets(st.sampled_from(layout.active), min_size=1))
            count = draw(st.integers(1, MAX_ENTRY_BUCKETS))
            ids = [each.segment_id for each in some if each.entry_buckets != count]
            if ids:
                layouts.append(rebucket(layout, ids, count, now_ms=now_ms).layout)
        elif step == "prune" and prunable(layout):
            gone = draw(st.sets(st.sampled_from(prunable(layout)), min_size=1))
            layouts.append(prune(layout, gone))
    return layouts


@given(histories(), st.integers(0, KEY_SPACE - 1))
def test_every_hash_has_exactly_one_active_segment(history: list[Layout], key_hash: int) -> None:
    for layout in history:
        holders = [s for s in layout.segments.values() if s.active and s.covers(key_hash)]
        assert holders == [layout.route(key_hash)]
        assert sum(s.hash_end - s.hash_start + 1 for s in layout.active) == KEY_SPACE


@given(histories())
def test_epochs_rise_and_ids_are_never_used_again(history: list[Layout]) -> None:
    assert [layout.epoch for layout in history] == list(range(len(history)))
    born: dict[int, int] = {}
    for before, after in itertools.pairwise(history):
        new = after.segments.keys() - before.segments.keys()
        assert all(segment_id >= before.next_segment_id for segment_id in new)
        assert all(segment_id < after.next_segment_id for segment_id in new)
        assert not new & born.keys()
        born.update(dict.fromkeys(new, after.epoch))
        assert all(after.segments[n].created_at_epoch == after.epoch for n in new)


@given(histories())
def test_links_are_mutual_and_ranges_of_children_lie_within_their_parents(
    history: list[Layout],
) -> None:
    for layout in history:
        for segment in layout.segments.values():
            for child_id in segment.child_ids:
                child = layout.segments[child_id]
                assert segment.segment_id in child.parent_ids
                assert child.hash_start <= segment.hash_end
                assert segment.hash_start <= child.hash_end
            for parent_id in segment.parent_ids:
                assert segment.segment_id in layout.segments[parent_id].child_ids


@given(histories())
def test_ancestors_and_descendants_mirror_each_other(history: list[Layout]) -> None:
    layout = history[-1]
    for upper in layout.segments:
        for lower in layout.segments:
            assert (upper in layout.ancestors(lower)) == (lower in layout.descendants(upper))
        assert upper not in layout.ancestors(upper)


@given(histories())
def test_a_sealed_segment_never_opens_again(history: list[Layout]) -> None:
    sealed: set[int] = set()
    for layout in history:
        assert not sealed & {s.segment_id for s in layout.active}
        sealed |= {s.segment_id for s in layout.sealed}


@given(histories())
def test_everything_sealed_can_be_pruned_down_to_the_active_roots(history: list[Layout]) -> None:
    layout = history[-1]
    active = [(s.hash_start, s.hash_end, s.segment_id) for s in layout.active]
    while ready := prunable(layout):
        layout = prune(layout, ready)
    assert layout.sealed == ()
    assert [s.range_key for s in layout.active] == active
    assert all(s.parent_ids == () for s in layout.active)


@pytest.mark.parametrize(
    ("count", "ranges"),
    [
        (1, [(0, 0xFFFF)]),
        (3, [(0, 21844), (21845, 43689), (43690, 65535)]),
        (4, [(0, 0x3FFF), (0x4000, 0x7FFF), (0x8000, 0xBFFF), (0xC000, 0xFFFF)]),
    ],
)
def test_initial_widths(count: int, ranges: list[tuple[int, int]]) -> None:
    layout = initial(count, now_ms=NOW_MS)
    assert [(s.hash_start, s.hash_end) for s in layout.active] == ranges
    assert list(layout.segments) == list(range(count))
    assert (layout.epoch, layout.next_segment_id) == (0, count)


def test_split_gives_pulsars_ids_ranges_and_epochs() -> None:
    change = split(initial(1, now_ms=NOW_MS), 0, now_ms=NOW_MS + 5)
    parent = change.layout.segments[0]
    assert change.parents == (parent,)
    assert (parent.state, parent.sealed_at_epoch, parent.sealed_at_ms) == (
        SegmentState.SEALED,
        1,
        NOW_MS + 5,
    )
    assert parent.child_ids == (1, 2)
    assert [(c.hash_start, c.hash_end, c.parent_ids) for c in change.children] == [
        (0, 0x7FFF, (0,)),
        (0x8000, 0xFFFF, (0,)),
    ]
    assert all(c.created_at_epoch == 1 and c.sealed_at_epoch == -1 for c in change.children)


def test_merge_takes_neighbours_in_either_order() -> None:
    layout = initial(4, now_ms=NOW_MS)
    for first, second in ((1, 2), (2, 1)):
        (child,) = merge(layout, (first, second), now_ms=NOW_MS).children
        assert (child.segment_id, child.hash_start, child.hash_end) == (4, 0x4000, 0xBFFF)
        assert child.parent_ids == (1, 2)


def test_merge_takes_any_number_of_neighbours() -> None:
    layout = initial(4, now_ms=NOW_MS, bucket_budget=4)
    (child,) = merge(layout, (2, 0, 1), now_ms=NOW_MS).children
    assert (child.hash_start, child.hash_end, child.parent_ids) == (0, 0xBFFF, (0, 1, 2))
    assert child.entry_buckets == 3


def test_split_into_several_covers_the_range_evenly() -> None:
    change = split(initial(1, now_ms=NOW_MS, bucket_budget=4), 0, now_ms=NOW_MS, parts=3)
    assert [(c.hash_start, c.hash_end) for c in change.children] == [
        (0, 21845),
        (21846, 43690),
        (43691, 65535),
    ]
    assert [c.entry_buckets for c in change.children] == [2, 1, 1]


@given(st.integers(1, MAX_ENTRY_BUCKETS), st.integers(2, 16))
def test_split_shares_out_all_entry_buckets_evenly(buckets: int, parts: int) -> None:
    layout = initial(1, now_ms=NOW_MS, bucket_budget=buckets)
    change = split(layout, 0, now_ms=NOW_MS, parts=parts)
    counts = [child.entry_buckets for child in change.children]
    # Apache Pulsar's halves have N div 2 each.
    lost = buckets % 2 if parts == 2 and buckets > 1 else 0
    assert sum(counts) == max(buckets - lost, parts)
    assert max(counts) - min(counts) <= 1


def test_entry_buckets_of_new_split_and_merged_segments() -> None:
    whole = initial(1, now_ms=NOW_MS, bucket_budget=4)
    assert whole.segments[0].entry_bucket_splits == (16384, 32768, 49152)
    halves = split(whole, 0, now_ms=NOW_MS)
    assert [c.entry_bucket_splits for c in halves.children] == [(32768,), (32768,)]
    (merged,) = merge(halves.layout, (1, 2), now_ms=NOW_MS).children
    assert merged.entry_buckets == 4
    assert initial(8, now_ms=NOW_MS, bucket_budget=4).segments[0].entry_buckets == 1
    assert initial(8, now_ms=NOW_MS).segments[0].entry_bucket_splits == ()


def test_rebucket_of_several_segments_replaces_each_by_its_own() -> None:
    layout = initial(4, now_ms=NOW_MS)
    change = rebucket(layout, [3, 1, 0], 4, now_ms=NOW_MS)
    assert change.kind is ReshapeKind.REBUCKET
    assert change.layout.epoch == 1
    assert [parent.segment_id for parent in change.parents] == [0, 1, 3]
    made = [(c.segment_id, c.parent_ids, c.hash_start, c.entry_buckets) for c in change.children]
    assert made == [(4, (0,), 0, 4), (5, (1,), 0x4000, 4), (6, (3,), 0xC000, 4)]
    with pytest.raises(IllegalBucketCount, match="4 entry buckets already"):
        rebucket(change.layout, [2, 4], 4, now_ms=NOW_MS)


def test_rebucket_replaces_a_segment_by_one_of_the_same_range() -> None:
    change = rebucket(initial(2, now_ms=NOW_MS), [1], 3, now_ms=NOW_MS)
    (child,) = change.children
    assert (child.segment_id, child.hash_start, child.hash_end) == (2, 0x8000, 0xFFFF)
    assert child.entry_bucket_splits == (21845, 43690)
    assert (change.layout.epoch, change.layout.segments[1].child_ids) == (1, (2,))
    for count in (0, -1, MAX_ENTRY_BUCKETS + 1):
        with pytest.raises(IllegalBucketCount, match=f"{count} entry buckets"):
            rebucket(change.layout, [2], count, now_ms=NOW_MS)
    with pytest.raises(IllegalBucketCount, match="3 entry buckets already"):
        rebucket(change.layout, [2], 3, now_ms=NOW_MS)
    with pytest.raises(SegmentNotActive):
        rebucket(change.layout, [1], 4, now_ms=NOW_MS)


def test_refusals_are_typed_and_name_what_would_do() -> None:
    layout = split(initial(4, now_ms=NOW_MS), 0, now_ms=NOW_MS).layout
    with pytest.raises(UnknownSegment, match="no segment 17: it has 0, 1, 2, 3, 4, 5"):
        split(layout, 17, now_ms=NOW_MS)
    with pytest.raises(SegmentNotActive, match="sealed at epoch 1"):
        split(layout, 0, now_ms=NOW_MS)
    with pytest.raises(SegmentNotActive):
        merge(layout, (0, 1), now_ms=NOW_MS)
    with pytest.raises(SegmentsNotAdjacent, match="1 and 2"):
        merge(layout, (1, 3), now_ms=NOW_MS)
    for not_neighbours in ((1, 1), (1,), (), (1, 2, 4)):
        with pytest.raises(SegmentsNotAdjacent):
            merge(layout, not_neighbours, now_ms=NOW_MS)
    with pytest.raises(IllegalReshape, match="ACTIVE"):
        prune(layout, [1])
    with pytest.raises(UnknownSegment):
        prune(layout, [17])
    for count in (0, -1, 100_000):
        with pytest.raises(IllegalSegmentCount):
            initial(count, now_ms=NOW_MS)


def test_a_segment_of_one_hash_cannot_be_split() -> None:
    layout = initial(1, now_ms=NOW_MS)
    while (lowest := layout.active[0]).hash_end > 0:
        layout = split(layout, lowest.segment_id, now_ms=NOW_MS).layout
    with pytest.raises(SegmentTooNarrow, match="hashes 0 to 0"):
        split(layout, layout.active[0].segment_id, now_ms=NOW_MS)


def test_an_intermediate_is_not_pruned_before_its_parent() -> None:
    layout = split(initial(1, now_ms=NOW_MS), 0, now_ms=NOW_MS).layout
    layout = split(layout, 1, now_ms=NOW_MS).layout
    with pytest.raises(IllegalReshape, match="its parents 0 are there"):
        prune(layout, [1])
    assert list(prune(layout, [0, 1]).segments) == [2, 3, 4]


@given(histories(), st.data())
def test_verify_finds_damage(history: list[Layout], data: st.DataObject) -> None:
    layout = history[-1]
    victim = data.draw(st.sampled_from(sorted(layout.segments)))
    segment = layout.segments[victim]
    damage = data.draw(
        st.sampled_from(
            [
                {"hash_end": segment.hash_end + 1} if segment.active else {"child_ids": ()},
                {"parent_ids": (*segment.parent_ids, layout.next_segment_id)},
                {"child_ids": (*segment.child_ids, victim)},
                {"created_at_epoch": layout.epoch + 1},
                {"segment_id": layout.next_segment_id},
            ]
        )
    )
    segments = {**layout.segments, victim: dataclasses.replace(segment, **damage)}
    with pytest.raises(CorruptLayout):
        verify(Layout(layout.epoch, layout.next_segment_id, MappingProxyType(segments)))


class Unsearched(tuple[int, ...]):
    """Links that are not searched one after the other."""

    __slots__ = ()

    def __contains__(self, _: object) -> bool:
        raise AssertionError("a layout of n parents and n children would take n ** 3 steps")


def test_links_of_a_migrated_topic_are_verified_in_one_pass() -> None:
    layout = migrated([f"persistent://public/default/t-partition-{n}" for n in range(64)], now_ms=1)
    segments = {
        number: dataclasses.replace(
            each, parent_ids=Unsearched(each.parent_ids), child_ids=Unsearched(each.child_ids)
        )
        for number, each in layout.layout.segments.items()
    }
    verify(dataclasses.replace(layout.layout, segments=segments))
    lost = dataclasses.replace(segments[64], parent_ids=tuple(range(1, 64)))
    with pytest.raises(CorruptLayout, match="segment 64 and its parent 0 do not agree"):
        verify(dataclasses.replace(layout.layout, segments={**segments, 64: lost}))
