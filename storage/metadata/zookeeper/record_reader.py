"""Reads: records by key, levels, ranges of indexes."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import cast

from config import bounds
from storage.metadata.group import check_partition_of, record_of
from storage.metadata.keys import level_of
from storage.metadata.store import IndexHit, MetadataError, Record, first_hits, is_cut
from storage.metadata.zookeeper import requests
from storage.metadata.zookeeper.client import RequestFailed, ZooKeeperClient
from storage.metadata.zookeeper.layout import Layout, decode_record, entry_of, record_name
from storage.metadata.zookeeper.requests import Failure, Read, Request
from storage.metadata.zookeeper.watches import NodeRecord


class RecordReader:
    """Reads records by key, levels of keys and ranges of indexes.

    Ranges of more than `ZOOKEEPER_READ_NODES` records are read in pages, each as of one moment.
    With `fresh` the server catches up with the leader first.  Every method raises `MetadataError`.
    """

    def __init__(self, client: ZooKeeperClient, layout: Layout) -> None:
        self._client = client
        self._layout = layout

    async def find(self, key: str) -> NodeRecord | None:
        """The record of a key."""
        return (await self.find_many([key]))[0]

    async def find_many(self, keys: Sequence[str]) -> list[NodeRecord | None]:
        """The records of keys, in order."""
        reads = [requests.get_data(self._layout.record(key)) for key in keys]
        found = await self._read_pages(reads)
        return [_found(key, read) for key, read in zip(keys, found, strict=True)]

    async def get(self, key: str, partition: str | None, *, fresh: bool) -> Record | None:
        """The record.  Raises `PartitionMismatch`."""
        if fresh:
            await self._catch_up()
        return (await self.get_many([key], partition))[0]

    async def get_many(self, keys: Sequence[str], partition: str | None) -> list[Record | None]:
        """The records, in order.  Raises `PartitionMismatch`."""
        records: list[Record | None] = []
        for key, found in zip(keys, await self.find_many(keys), strict=True):
            if found is not None:
                check_partition_of(key, found.stored.partition, partition)
            records.append(found and record_of(key, found.stored, found.value))
        return records

    async def children(self, level: str) -> list[str]:
        """The last parts of the keys of a level, in order."""
        (listed,) = await self._read([requests.get_children(self._layout.directory(level))])
        return sorted(filter(None, map(record_name, _names(listed))))

    async def scan(self, lo: str, hi: str, *, fresh: bool) -> list[Record]:
        """The records of a range, in order."""
        level = level_of(lo)
        listing = [requests.get_children(self._layout.directory(level))]
        if fresh:
            await self._catch_up()
        # ZooKeeper reads many nodes as of one moment, but their paths must be known first.  So the
        # range is listed, and then read together with its list, until that list is the same.  After
        # the last try the records read are taken: others that came meanwhile may be missing.
        keys = _keys_in(await self._read(listing), level, lo, hi)
        for _ in range(bounds.ZOOKEEPER_SCAN_TRIES):
            reads = [requests.get_data(self._layout.record(key)) for key in keys]
            listed, found = await self._read_with(listing, reads)
            now = _keys_in(listed, level, lo, hi)
            if now == keys:
                break
            keys, read_keys = now, keys
        else:
            keys = read_keys
        return [
            record_of(key, each.stored, each.value)
            for key, read in zip(keys, found, strict=True)
            if (each := _found(key, read)) is not None
        ]

    async def scan_index(
        self,
        index: str,
        lo: str,
        hi: str,
        *,
        partition: str | None,
        fresh: bool,
        limit: int | None,
        max_bytes: int | None,
    ) -> list[IndexHit]:
        """The hits of a range, in order of secondary key and key.

        It returns fewer hits than the bounds allow only when nothing lies behind them, which W10 of
        transactions relies on.
        """
        # Without a partition each entry is a hit: no more of them are read than are asked for.
        most, size = (limit, max_bytes) if partition is None else (None, None)
        if fresh:
            await self._catch_up()
        while True:
            hits, whole = await self._first_entries(index, lo, hi, most, size)
            chosen = [hit for hit in hits if partition is None or hit.record.partition == partition]
            first = first_hits(chosen, limit, max_bytes)
            if whole or is_cut(first, limit, max_bytes):
                return first
            # Listed records have gone or shrunk since: that must not look like the end (W10).
            most = None if most is None else 2 * most
            size = None if size is None else 2 * size

    async def _first_entries(
        self, index: str, lo: str, hi: str, most: int | None, max_bytes: int | None
    ) -> tuple[list[IndexHit], bool]:
        """Hits of the first entries of a range, and whether the range ends there.

        Records that go while they are read make fewer hits than the bounds allow.
        """
        listing = [requests.get_children(node) for node in self._layout.buckets(index, lo, hi)]
        now = _entries_in(await self._read(listing), lo, hi)
        if max_bytes is not None:
            fitting = await self._fitting(now[:most], max_bytes)
            most = most if fitting is None else fitting
        for _ in range(bounds.ZOOKEEPER_SCAN_TRIES):
            entries, whole = now[:most], len(now[:most]) == len(now)
            keys = list(dict.fromkeys(key for _, key in entries))
            reads = [requests.get_data(self._layout.record(key)) for key in keys]
            listed, found = await self._read_with(listing, reads)
            now = _entries_in(listed, lo, hi)
            if now[:most] == entries:
                whole = len(entries) == len(now)
                break
        hits = _hits(index, lo, hi, map(_found, keys, found), keys)
        if not whole:  # a record may have a key further on, and entries between were not read
            hits = [hit for hit in hits if (hit.index_key, hit.record.key) <= entries[-1]]
        return hits, whole

    async def _fitting(self, entries: list[tuple[str, str]], max_bytes: int) -> int | None:
        """Number of first entries whose values have `max_bytes` together; None if all have less.

        The sizes are known only by reading the values.
        """
        size, step = 0, bounds.ZOOKEEPER_SIZED_NODES
        for start in range(0, len(entries), step):
            if size >= max_bytes:
                return start
            found = await self.find_many([key for _, key in entries[start : start + step]])
            size += sum(len(each.value) for each in found if each is not None)
        return None

    async def written_ms(self, key: str) -> int:
        """Time of the last write of a record, by the servers' clock, in Unix ms."""
        (read,) = await self._read([requests.get_data(self._layout.record(key))])
        if not isinstance(read, tuple):
            raise MetadataError(f"The record {key!r} is gone from ZooKeeper: put it again.")
        return read[1].mtime_ms

    async def _catch_up(self) -> None:
        """Make the server catch up with the leader: later reads are not older than now.

        So it is on later connections too: a client leaves a server that is behind the one before.
        """
        try:
            await self._client.call_again(requests.sync(self._layout.records))
        except RequestFailed as error:
            raise _refused(error) from error

    async def _read_with(
        self, listing: list[Request], reads: list[Request]
    ) -> tuple[list[Read], list[Read]]:
        """The lists as of the moment in which (the last page of) the others were read."""
        size = bounds.ZOOKEEPER_READ_NODES
        last = (len(reads) - 1) // size * size if reads else 0
        before = await self._read_pages(reads[:last])
        found = await self._read([*listing, *reads[last:]])
        return found[: len(listing)], [*before, *found[len(listing) :]]

    async def _read_pages(self, reads: list[Request]) -> list[Read]:
        size = bounds.ZOOKEEPER_READ_NODES
        if len(reads) <= size:
            return await self._read(reads)
        starts = range(0, len(reads), size)
        pages = await asyncio.gather(*(self._read(reads[start : start + size]) for start in starts))
        return [read for page in pages for read in page]

    async def _read(self, reads: list[Request]) -> list[Read]:
        if not reads:
            return []
        try:
            answer, _ = await self._client.call_again(requests.read_many(reads))
        except RequestFailed as error:
            raise _refused(error) from error
        return cast("list[Read]", answer)


def _refused(error: RequestFailed) -> MetadataError:
    return MetadataError(
        f"ZooKeeper refused a read ({error.failure.name}): it must be of version 3.6 or newer, "
        "look at its log."
    )


def _found(key: str, read: Read) -> NodeRecord | None:
    if isinstance(read, tuple):
        node, value = decode_record(key, *read)
        return NodeRecord(node.stored, value)
    _check_absent(read)
    return None


def _names(read: Read) -> list[str]:
    if isinstance(read, list):
        return read
    _check_absent(read)
    return []


def _check_absent(read: Read) -> None:
    if read is not Failure.NO_NODE:
        raise MetadataError(
            f"ZooKeeper refused to read a node ({read}): look at its access rights."
        )


def _keys_in(listed: list[Read], level: str, lo: str, hi: str) -> list[str]:
    names = filter(None, map(record_name, _names(listed[0])))
    whole = hi == f"{level}/"
    return sorted(key for name in names if (key := f"{level}{name}") >= lo and (whole or key < hi))


def _entries_in(listed: list[Read], lo: str, hi: str) -> list[tuple[str, str]]:
    entries = (entry_of(name) for read in listed for name in _names(read))
    return sorted(entry for entry in entries if entry is not None and lo <= entry[0] < hi)


def _hits(
    index: str, lo: str, hi: str, found: Iterable[NodeRecord | None], keys: Sequence[str]
) -> list[IndexHit]:
    hits = [
        IndexHit(entry.key, record_of(key, each.stored, each.value))
        for key, each in zip(keys, found, strict=True)
        if each is not None
        for entry in each.stored.indexes
        if entry.index == index and lo <= entry.key < hi
    ]
    return sorted(hits, key=lambda hit: (hit.index_key, hit.record.key))
