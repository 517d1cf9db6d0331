"""Partition keys that this process has seen: a hint, so that a wrong one is noticed.  Pure."""

from collections.abc import Iterator

from config import bounds
from storage.metadata.keys import level_of

UNKNOWN = ""
"""No partition key is empty."""


class PartitionHints:
    """The partition keys of the records that this process wrote or read last.

    Servers do not check routing: a record that is asked for with another partition key is simply
    absent, and a put with another one makes a second record.  So a call that disagrees with a hint
    is checked before it is sent.  Bounded: the keys that were seen longest ago go first.
    """

    __slots__ = ("_by_key", "_by_level", "_max_keys")

    def __init__(self, *, max_keys: int = bounds.OXIA_KNOWN_RECORDS) -> None:
        self._by_key: dict[str, str | None] = {}
        self._by_level: dict[str, dict[str, None]] = {}
        self._max_keys = max_keys

    def get(self, key: str) -> str | None:
        """The partition key, None for none, or `UNKNOWN`."""
        return self._by_key.get(key, UNKNOWN)

    def disagrees(self, key: str, partition: str | None) -> bool:
        """Whether the record was seen in another partition."""
        return self._by_key.get(key, partition) != partition

    def others(
        self, level: str, partition: str, lo: str, hi: str
    ) -> Iterator[tuple[str, str | None]]:
        """Keys of a level between bounds that were seen in other partitions, and these."""
        end = f"{level}/"
        for key in self._by_level.get(level, ()):
            seen = self._by_key[key]
            if seen != partition and lo <= key and (hi == end or key < hi):
                yield key, seen

    def note(self, key: str, partition: str | None) -> None:
        """Note that the record is in this partition."""
        hints = self._by_key
        if key in hints:
            del hints[key]
        else:
            self._by_level.setdefault(level_of(key), {})[key] = None
        hints[key] = partition
        if len(hints) > self._max_keys:
            self.forget(next(iter(hints)))

    def forget(self, key: str) -> None:
        """Drop the hint: the record may be gone."""
        if key not in self._by_key:
            return
        del self._by_key[key]
        level = level_of(key)
        keys = self._by_level[level]
        del keys[key]
        if not keys:
            del self._by_level[level]
