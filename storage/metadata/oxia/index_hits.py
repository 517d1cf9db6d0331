"""From records that a shard found by an index to hits.  Pure.

Rules:
- A hit's secondary key comes from the record itself (its note, or its key family): servers do not
  name it, and find the key first and the record later.  So a record that has left the range since
  is no hit, and one with several keys in it is one hit for each.
- A record of somebody else that no key family explains cannot be told as a hit: that is an error,
  not a hit less.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import nsmallest

from storage.metadata.keys import exact_range
from storage.metadata.oxia.records import Found
from storage.metadata.store import IndexHit, InvalidMetadataRequest


@dataclass(frozen=True, slots=True)
class IndexRange:
    """lo <= secondary key < hi."""

    index: str
    lo: str
    hi: str


def keys_in(found: Found, watched: IndexRange) -> list[str]:
    """A record's secondary keys in a range, in order.  Raises `InvalidMetadataRequest`."""
    keys = [
        entry.key
        for entry in found.indexes
        if entry.index == watched.index and watched.lo <= entry.key < watched.hi
    ]
    if keys or found.put_id is not None or found.indexes:
        return sorted(keys)
    if (watched.lo, watched.hi) == exact_range(watched.lo):
        return [watched.lo]
    raise InvalidMetadataRequest(
        f"The record {found.record.key!r} was put by another program, and nothing tells its keys "
        f"in index {watched.index!r}: declare its key family."
    )


def hits(
    records: Iterable[Found], watched: IndexRange, partition: str | None, limit: int | None
) -> list[IndexHit]:
    """Hits of one partition or all, in order of secondary key, then key."""
    found = [
        IndexHit(key, each.record)
        for each in records
        if partition is None or each.record.partition == partition
        for key in keys_in(each, watched)
    ]
    found.sort(key=lambda hit: (hit.index_key, hit.record.key))
    return found if limit is None else found[:limit]


def is_enough(
    limit: int, records: Sequence[Found], last: Sequence[Found], watched: IndexRange
) -> bool:
    """Whether a shard's first records of a range hold its first `limit` hits.

    Shards go in order of secondary keys, but order records of the same key in their own way.
    """
    distinct = {found.record.key: found for found in records}.values()
    keys = [key for found in distinct for key in keys_in(found, watched)]
    if len(keys) < limit or not last:
        return False
    if limit == 0:
        return True
    reached = keys_in(last[0], watched)
    return bool(reached) and reached[0] > nsmallest(limit, keys)[-1]
