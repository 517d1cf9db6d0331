"""A bounded cache of the records that changed last."""

from collections.abc import Iterable
from typing import Final

from config import bounds
from storage.metadata.group import Change

_KEY_BYTES = 512
"""Memory that a key takes beside its value, roughly."""
_DELETED: Final = Change("", None, None, b"")
"""Stands for the change of each deleted key, without the record before it."""


class RecentChanges:
    """The newest committed state of the records that changed last: reading them needs no disk.

    Bounded in keys and bytes; the keys that changed longest ago go first.  A key that is not here
    may have any state; a deleted record is here as deleted.  Belongs to the loop.
    """

    __slots__ = ("_bytes", "_changes", "_max_bytes", "_max_keys")

    def __init__(
        self,
        *,
        max_keys: int = bounds.METADATA_RECENT_KEYS,
        max_bytes: int = bounds.METADATA_RECENT_BYTES,
    ) -> None:
        self._changes: dict[str, Change] = {}
        self._bytes = 0
        self._max_keys = max_keys
        self._max_bytes = max_bytes

    def __len__(self) -> int:
        return len(self._changes)

    def take(self, changes: Iterable[Change]) -> None:
        """Remember changes that became durable, in the call that publishes them to watchers."""
        # A write is acknowledged in this same call, so the cache is as fresh as a read of the
        # file that begins now.
        recent = self._changes
        for change in changes:
            before = recent.pop(change.key, None)
            if before is not None:
                self._bytes -= len(before.value) + _KEY_BYTES
            recent[change.key] = _DELETED if change.after is None else change
            self._bytes += len(change.value) + _KEY_BYTES
        while recent and (len(recent) > self._max_keys or self._bytes > self._max_bytes):
            oldest = recent.pop(next(iter(recent)))
            self._bytes -= len(oldest.value) + _KEY_BYTES

    def find(self, key: str) -> Change | None:
        """The last change of a key, for its `record`; None: read it from the file."""
        return self._changes.get(key)
