"""Hits of an index, made from the records that shards found by it.  Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from storage.metadata.keys import exact_range
from storage.metadata.oxia.records import ShardRecord
from storage.metadata.store import IndexHit, InvalidMetadataRequest


@dataclass(frozen=True, slots=True)
class IndexRange:
    """The range lo <= secondary key < hi of an index."""

    index: str
    lo: str
    hi: str


def keys_in(found: ShardRecord, asked: IndexRange) -> list[str]:
    """A record's secondary keys in a range, in order.

    Raises `InvalidMetadataRequest` for a record of another program that no key family explains.
    """
    # Servers do not name the secondary key, and find the key first and the record later.  So the
    # keys come from the record itself, and a record that has left the range since is no hit.
    keys = [
        entry.key
        for entry in found.indexes
        if entry.index == asked.index and asked.lo <= entry.key < asked.hi
    ]
    if keys or found.put_id is not None or found.indexes:
        return sorted(keys)
    if (asked.lo, asked.hi) == exact_range(asked.lo):
        return [asked.lo]
    raise InvalidMetadataRequest(
        f"The record {found.record.key!r} was put by another program, and its keys are unknown "
        f"in index {asked.index!r}: declare its key family."
    )


def hits(
    records: Iterable[ShardRecord], asked: IndexRange, partition: str | None
) -> list[IndexHit]:
    """Hits of one partition or all, in order of secondary key, then key.

    A record with several secondary keys in the range is one hit for each.
    """
    found = [
        IndexHit(key, each.record)
        for each in records
        if partition is None or each.record.partition == partition
        for key in keys_in(each, asked)
    ]
    found.sort(key=lambda hit: (hit.index_key, hit.record.key))
    return found


@dataclass(frozen=True, slots=True)
class HitLimit:
    """Bounds of `MetadataStore.scan_index`."""

    limit: int | None = None
    max_bytes: int | None = None

    @property
    def is_any(self) -> bool:
        """Whether there is a bound."""
        return self.limit is not None or self.max_bytes is not None

    def reached(self, hits: Sequence[tuple[str, int]]) -> str | None:
        """The secondary key of the last hit within the bounds, of hits with sizes, in order.

        None if they do not reach a bound.
        """
        size = 0
        for number, (key, of_value) in enumerate(hits, start=1):
            size += of_value
            if number == self.limit or (self.max_bytes is not None and size >= self.max_bytes):
                return key
        return None


def is_enough(
    bound: HitLimit, records: Sequence[ShardRecord], last: Sequence[ShardRecord], asked: IndexRange
) -> bool:
    """Whether a shard's first records of a range contain its first hits within the bound.

    Shards return records in order of secondary keys, those of the same key in any order.
    """
    if not last:
        return False
    if bound.limit == 0:
        return True
    distinct = {found.record.key: found for found in records}.values()
    # Of the same key the smallest come first, so that no order of them reaches further.
    up_to = bound.reached(
        sorted(
            (key, len(found.record.value)) for found in distinct for key in keys_in(found, asked)
        )
    )
    reached = keys_in(last[0], asked)
    return up_to is not None and bool(reached) and reached[0] > up_to
