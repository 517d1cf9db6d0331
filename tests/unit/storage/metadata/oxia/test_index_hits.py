"""Hits: secondary keys come from the record, order, limits, records of others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.metadata.keys import exact_range
from storage.metadata.oxia.index_hits import HitLimit, IndexRange, hits, is_enough, keys_in
from storage.metadata.oxia.records import ShardRecord
from storage.metadata.store import IndexEntry, InvalidMetadataRequest, first_hits
from tests.unit.storage.metadata.oxia.writes_of import found

RANGE = IndexRange("i", "b", "e")


def indexed(key: str, *index_keys: str, partition: str | None = None, size: int = 1) -> ShardRecord:
    entries = tuple(IndexEntry("i", each) for each in index_keys)
    return found(1, key=key, indexes=entries, partition=partition, value=b"v" * size)


def told(
    records: list[ShardRecord], limit: int | None = None, max_bytes: int | None = None
) -> list[tuple[str, str]]:
    first = first_hits(hits(records, RANGE, None), limit, max_bytes)
    return [(hit.index_key, hit.record.key) for hit in first]


def test_a_record_is_hit_once_for_each_key_in_the_range() -> None:
    records = [indexed("/2", "c", "a", "d"), indexed("/1", "d", "e")]
    assert told(records) == [("c", "/2"), ("d", "/1"), ("d", "/2")]
    assert told(records, 2) == [("c", "/2"), ("d", "/1")]


def test_a_record_that_left_the_range_is_no_hit() -> None:
    assert told([indexed("/1", "x"), found(1, key="/2")]) == []


def test_only_hits_of_a_partition() -> None:
    records = [indexed("/1", "c", partition="p"), indexed("/2", "c")]
    assert [hit.record.key for hit in hits(records, RANGE, "p")] == ["/1"]


def test_a_record_of_others_is_an_error_unless_one_key_is_asked_for() -> None:
    other = found(1, None)
    with pytest.raises(InvalidMetadataRequest):
        keys_in(other, RANGE)
    assert keys_in(other, IndexRange("i", *exact_range("b"))) == ["b"]


def bounds_of(bound: HitLimit) -> tuple[int | None, int | None]:
    return bound.limit, bound.max_bytes


RECORDS = st.lists(
    st.lists(st.sampled_from("abcdef"), min_size=1, max_size=3, unique=True), max_size=12
)


@given(
    RECORDS,
    st.builds(HitLimit, st.none() | st.integers(0, 6), st.none() | st.integers(1, 20)),
    st.integers(0, 30),
)
def test_limited_scan_keeps_the_first_hits(
    lists: list[list[str]], bound: HitLimit, taken: int
) -> None:
    """A shard tells a record for each entry in the range, by secondary key."""
    records = [indexed(f"/{n}", *keys, size=n * 5 % 7) for n, keys in enumerate(lists)]
    told_by_shard = [
        record
        for _, record in sorted(
            ((key, record) for record in records for key in keys_in(record, RANGE)),
            key=lambda each: each[0],
        )
    ]
    part = told_by_shard[:taken]
    if is_enough(bound, part, part[-1:], RANGE):
        distinct = list({each.record.key: each for each in part}.values())
        assert told(distinct, *bounds_of(bound)) == told(records, *bounds_of(bound))
