"""Scans over several shards as of one moment of this process's writes.  Pure.

Each shard answers for a moment of its own, and writes to different shards are acknowledged in any
order.  So a scan takes the answers of all shards, waits for the writes of this process that had
been issued when the last one came, and lays what they made over the answers: the result holds
every write of this process that was issued before that moment, and none issued later, whatever
shards they went to.  Of other processes' writes nothing like that is known.
"""

from collections.abc import Iterable

from storage.metadata.keys import level_of
from storage.metadata.oxia.records import Found


class Moment:
    """What this process wrote on one level while a scan of it runs."""

    __slots__ = ("_hi", "_lo", "_written")

    def __init__(self, lo: str, hi: str) -> None:
        self._lo = lo
        self._hi = None if hi == f"{level_of(lo)}/" else hi
        self._written: dict[str, Found | None] = {}

    def wrote(self, key: str, found: Found | None) -> None:
        """A put (or, without a record, a delete) was acknowledged."""
        if (
            level_of(key) == level_of(self._lo)
            and self._lo <= key
            and (self._hi is None or key < self._hi)
        ):
            self._written[key] = found

    def over(self, scanned: Iterable[Found]) -> list[Found]:
        """The records, in order of their keys."""
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
