"""Scans over several shards as of one moment of this process's writes.  Pure.

Each shard answers for a moment of its own, and writes to different shards are acknowledged in any
order.  So a scan takes the answers of all shards, waits for the writes of this process that had
been issued when the last one came, and lays their results over the answers.  The result has every
write of this process that was issued before that moment, and none issued later, whatever shards
they went to.  There is no such promise for writes of other processes.
"""

from collections.abc import Iterable

from storage.metadata.keys import level_of
from storage.metadata.oxia.records import ShardRecord


class ScanOverlay:
    """Writes of this process on one level while a scan of it runs, to lay over its result."""

    __slots__ = ("_hi", "_lo", "_written")

    def __init__(self, lo: str, hi: str) -> None:
        self._lo = lo
        self._hi = None if hi == f"{level_of(lo)}/" else hi
        self._written: dict[str, ShardRecord | None] = {}

    def add(self, key: str, found: ShardRecord | None) -> None:
        """Add an acknowledged put, or, without a record, a delete; ignored outside the range."""
        if (
            level_of(key) == level_of(self._lo)
            and self._lo <= key
            and (self._hi is None or key < self._hi)
        ):
            self._written[key] = found

    def apply(self, scanned: Iterable[ShardRecord]) -> list[ShardRecord]:
        """The scanned records with the writes laid over them, in order of their keys."""
        records = {found.record.key: found for found in scanned}
        for key, written in self._written.items():
            there = records.get(key)
            if written is None:
                records.pop(key, None)
            elif (
                there is None
                or there.shard_id != written.shard_id
                or there.version_id < written.version_id
            ):
                records[key] = written
        return [records[key] for key in sorted(records)]
