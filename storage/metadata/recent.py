"""The newest committed state of the records that changed last: reads of these need no disk.

Rules:
- It is what watchers were told last, so it is as fresh as a read of the file that begins now: a
  write is acknowledged in the same call that tells it.
- Bounded in keys and bytes, the ones that changed longest ago go first.  What is not here may be
  anything; what was deleted is here as such.
"""

from collections.abc import Iterable

from config import bounds
from storage.metadata.group import Change

_KEY_BYTES = 512
"""What a key costs in memory beside its value, roughly."""


class RecentChanges:
    """The newest state of the records that changed last, so that reading them needs no disk.

    Belongs to the loop.
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
        """These became durable, and watchers are told now."""
        recent = self._changes
        for change in changes:
            before = recent.pop(change.key, None)
            if before is not None:
                self._bytes -= len(before.value) + _KEY_BYTES
            recent[change.key] = change
            self._bytes += len(change.value) + _KEY_BYTES
        while recent and (len(recent) > self._max_keys or self._bytes > self._max_bytes):
            oldest = recent.pop(next(iter(recent)))
            self._bytes -= len(oldest.value) + _KEY_BYTES

    def find(self, key: str) -> Change | None:
        """The last change of a key; None: look into the file."""
        return self._changes.get(key)
