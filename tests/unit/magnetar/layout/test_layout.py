"""Layouts: routes of keys, entry buckets, and what is refused."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.errors import BrokerFailed
from magnetar.layout import Layout, Segment, bucket_hash_of, layout_of
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.key_hash import KEY_SPACE, key_hash, segment_hash

TOPIC = "topic://public/default/orders"

CHECK_VALUES = [
    (b"a", 0x3C25, 0x69B2),
    (b"b", 0x95DE, 0x7E03),
    (b"k3", 0x751E, 0xB87D),
    (b"k6", 0x327A, 0x5AB5),
    (b"k11", 0x2E0C, 0x1F58),
    (b"", 0, 0),
]


def dag(*segments: pb.SegmentInfoProto, epoch: int = 0) -> pb.ScalableTopicDAG:
    return pb.ScalableTopicDAG(epoch=epoch, segments=segments)


def info(
    segment_id: int,
    start: int,
    end: int,
    *,
    active: bool = True,
    parents: tuple[int, ...] = (),
    legacy: str | None = None,
    splits: tuple[int, ...] = (),
    at_ms: int = 0,
) -> pb.SegmentInfoProto:
    return pb.SegmentInfoProto(
        segment_id=segment_id,
        hash_start=start,
        hash_end=end,
        state=pb.ACTIVE if active else pb.SEALED,
        parent_ids=parents,
        created_at_epoch=0,
        created_at_ms=at_ms,
        legacy_topic_name=legacy,
        entry_bucket_splits=splits,
    )


@pytest.mark.parametrize(("key", "segment", "bucket"), CHECK_VALUES)
def test_the_high_half_of_a_hash_chooses_the_segment_and_the_low_half_the_bucket(
    key: bytes, segment: int, bucket: int
) -> None:
    before = [info(1, 0, segment - 1)] if segment else []
    after = [info(3, segment + 1, 0xFFFF)]
    layout = layout_of(dag(*after, info(2, segment, segment), *before), TOPIC)
    assert layout.of_key(key).segment_id == 2
    assert bucket_hash_of(key) == bucket


def test_no_key_is_of_the_first_bucket() -> None:
    assert bucket_hash_of(None) == 0


@given(key=st.binary(max_size=8), cuts=st.sets(st.integers(1, KEY_SPACE - 1), max_size=5))
def test_every_key_belongs_to_the_segment_whose_range_holds_it(key: bytes, cuts: set[int]) -> None:
    bounds = [0, *sorted(cuts), KEY_SPACE]
    ranges = pairwise(bounds)
    layout = layout_of(dag(*(info(n, a, b - 1) for n, (a, b) in enumerate(ranges))), TOPIC)
    segment = layout.of_key(key)
    assert segment.hash_start <= segment_hash(key) <= segment.hash_end


@given(key=st.binary(max_size=8), count=st.integers(1, 9))
def test_partitions_are_chosen_as_they_always_were(key: bytes, count: int) -> None:
    width = KEY_SPACE // count
    partitions = [
        info(k, k * width, k * width + width - 1, legacy=f"persistent://t/n/x-partition-{k}")
        for k in range(count)
    ]
    segment = layout_of(dag(*reversed(partitions)), TOPIC).of_key(key)
    assert segment.segment_id == (key_hash(key) & 0x7FFFFFFF) % count
    assert segment.topic == f"persistent://t/n/x-partition-{segment.segment_id}"
    assert segment.legacy


def test_sealed_partitions_do_not_route() -> None:
    layout = layout_of(
        dag(
            info(0, 0, 0xFFFF, active=False, legacy="persistent://t/n/x"),
            info(1, 0, 0x7FFF, parents=(0,)),
            info(2, 0x8000, 0xFFFF, parents=(0,)),
        ),
        TOPIC,
    )
    assert layout.of_key(b"b").segment_id == 2


def test_a_segment_is_attached_to_by_its_own_name() -> None:
    layout = layout_of(
        dag(
            info(3, 0x4000, 0xFFFF, parents=(0,)),
            info(0, 0, 0xFFFF, active=False),
            info(2, 0, 0x3FFF, parents=(0,)),
            epoch=7,
        ),
        TOPIC,
    )
    assert layout.epoch == 7
    assert [segment.segment_id for segment in layout.active] == [2, 3]
    assert [segment.segment_id for segment in layout.sealed] == [0]
    assert layout.segments[3].topic == "segment://public/default/orders/4000-ffff-3"
    assert layout.segments[3].parent_ids == (0,)


def test_entry_buckets() -> None:
    segment = layout_of(dag(info(0, 0, 0xFFFF, splits=(16384, 32768, 49152))), TOPIC).active[0]
    hashes = (0, 16383, 16384, 32767, 49151, 49152, 65535)
    assert [segment.of_bucket(h) for h in hashes] == [0, 0, 1, 1, 2, 3, 3]
    ranges = [segment.bucket_range(index) for index in range(4)]
    assert ranges == [(0, 16383), (16384, 32767), (32768, 49151), (49152, 65535)]


def test_one_bucket_holds_everything() -> None:
    segment = layout_of(dag(info(0, 0, 0xFFFF)), TOPIC).active[0]
    assert segment.of_bucket(0xFFFF) == 0
    assert segment.bucket_range(0) == (0, 0xFFFF)


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        (dag(), "no active segment"),
        (dag(info(0, 0, 0xFFFF, active=False)), "no active segment"),
        (dag(info(0, 1, 0xFFFF)), "at hash 0"),
        (dag(info(0, 0, 0xFFFE)), "at hash 65535"),
        (dag(info(0, 0, 9), info(1, 11, 0xFFFF)), "at hash 10"),
        (dag(info(0, 0, 10), info(1, 10, 0xFFFF)), "at hash 10"),
        (dag(info(0, 0, 9), info(0, 10, 0xFFFF)), "one id"),
        (dag(info(0, 0, 0x10000)), "65536"),
        (dag(info(0, 9, 8)), "hashes 9 to 8"),
        (dag(info(0, 0, 0xFFFF, splits=(9, 9))), "entry buckets"),
        (dag(info(0, 0, 0xFFFF, splits=(0,))), "entry buckets"),
    ],
)
def test_a_layout_in_which_a_key_has_no_segment_or_two_is_refused(
    told: pb.ScalableTopicDAG, problem: str
) -> None:
    with pytest.raises(BrokerFailed, match=problem):
        layout_of(told, TOPIC)


def test_layouts_are_equal_by_what_they_say() -> None:
    segment = Segment(0, 0, 0xFFFF, True, (), (), "segment://t/n/x/0000-ffff-0")
    assert Layout(1, [segment]) == Layout(1, [segment])
    assert Layout(1, [segment]) != Layout(2, [segment])


def test_an_older_layout_does_not_follow_a_newer_one() -> None:
    parent, parent_sealed = info(0, 0, 0xFFFF, at_ms=5), info(0, 0, 0xFFFF, active=False, at_ms=5)
    children = (info(1, 0, 0x7FFF, at_ms=9), info(2, 0x8000, 0xFFFF, at_ms=9))
    before = layout_of(dag(parent, epoch=0), TOPIC)
    after = layout_of(dag(parent_sealed, *children, epoch=1), TOPIC)
    pruned = layout_of(dag(*children, epoch=2), TOPIC)
    assert after.may_follow(before)
    assert pruned.may_follow(pruned)
    assert not before.may_follow(after)
    assert not before.may_follow(pruned)


def test_a_topic_that_is_made_anew_begins_its_epochs_anew() -> None:
    last = layout_of(dag(info(4, 0, 0xFFFF, at_ms=20), epoch=6), TOPIC)
    anew = layout_of(dag(info(0, 0, 0xFFFF, at_ms=21), epoch=0), TOPIC)
    assert anew.may_follow(last)


def test_the_same_layout_of_a_topic_made_anew_is_another_and_never_goes_back() -> None:
    last = layout_of(dag(info(0, 0, 0xFFFF, at_ms=20), epoch=0), TOPIC)
    anew = layout_of(dag(info(0, 0, 0xFFFF, at_ms=21), epoch=0), TOPIC)
    assert anew != last
    assert anew.may_follow(last)
    assert anew.is_anew_after(last)
    assert not last.may_follow(anew)
    assert not last.is_anew_after(last)
    children = (info(1, 0, 0x7FFF, at_ms=22), info(2, 0x8000, 0xFFFF, at_ms=22))
    split = layout_of(dag(*children, epoch=1), TOPIC)
    assert split.may_follow(anew)
    assert not split.is_anew_after(anew)
