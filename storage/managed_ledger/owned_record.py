"""One record of the metadata store that this process owns: every write proves it."""

import asyncio
import hashlib
from collections.abc import Sequence

from storage.metadata.store import (
    ABSENT,
    IndexEntry,
    MetadataError,
    MetadataStore,
    Record,
    Version,
    VersionConflict,
)

_NEVER_WRITTEN = -1
"""Modification count of an absent record: its first write gets 0."""


class OwnedRecord:
    """A metadata record of one writer: each write is conditional on the one before.

    `VersionConflict` means that another owner wrote the record; the caller then stops.  Callers
    write one at a time.
    """

    __slots__ = (
        "_digest",
        "_doubt",
        "_indexes",
        "_metadata",
        "_modifications",
        "_version",
        "created_ms",
        "key",
    )

    def __init__(
        self, metadata: MetadataStore, key: str, indexes: Sequence[IndexEntry] = ()
    ) -> None:
        self.key = key
        self._metadata = metadata
        self._indexes = indexes
        self._doubt: bytes | None = None
        self.adopt(None)

    async def load(self) -> bytes | None:
        """Read it and take its version; None if there is none."""
        record = await self._metadata.get(self.key)
        self.adopt(record)
        return None if record is None else record.value

    def adopt(self, record: Record | None) -> None:
        """Own the record (None: there is none) as it was read by other means."""
        self.created_ms = None if record is None else record.created_ms
        """When it was made, in ms since 1970; None if it was not there when it was read."""
        self._version: Version = ABSENT if record is None else record.version
        self._modifications = _NEVER_WRITTEN if record is None else record.modifications
        self._digest = None if record is None else _digest(record.value)
        self._doubt = None

    async def put(self, value: bytes) -> None:
        """Write it.  Raises `VersionConflict`, or `MetadataError` (outcome unknown)."""
        if await self._settle() and _digest(value) == self._digest:
            # The write in doubt is stored.  Of a second, equal one nobody could tell whose it is.
            return
        try:
            result = await self._metadata.put(
                self.key, value, expect=self._version, indexes=self._indexes
            )
        except (MetadataError, asyncio.CancelledError):
            self._doubt = value
            raise
        self._version, self._modifications = result.version, result.modifications
        self._digest = _digest(value)

    async def creation_ms(self) -> int | None:
        """When it was made, in ms since 1970; None if there is none.  Raises `MetadataError`."""
        if self.created_ms is None:
            # We made it, and the store has the time.
            record = await self._metadata.get(self.key)
            self.created_ms = None if record is None else record.created_ms
        return self.created_ms

    async def require_owned(self) -> None:
        """Read it afresh; raises `VersionConflict` if another owner wrote it since."""
        record = await self._metadata.get(self.key, fresh=True)
        version = ABSENT if record is None else record.version
        if version != self._version and not self._is_doubted_write(record):
            raise _taken_over(self.key)

    async def delete(self) -> None:
        """Remove it.  Raises `VersionConflict`, or `MetadataError` (outcome unknown)."""
        await self._settle()
        if self._version == ABSENT:
            return
        if await self._metadata.get(self.key) is not None:
            await self._metadata.delete(self.key, expect=self._version)
        self.adopt(None)

    async def _settle(self) -> bool:
        """Find out whether a write of unknown outcome was stored; True if it was (A3).

        Raises `VersionConflict` if another owner wrote the record since.
        """
        if self._doubt is None:
            return False
        # A3: read before the next write, so that a new owner's claim is never overwritten.
        record = await self._metadata.get(self.key)
        version = ABSENT if record is None else record.version
        stored = version != self._version
        if stored and not self._is_doubted_write(record):
            raise _taken_over(self.key)
        self.adopt(record)
        return stored

    def _is_doubted_write(self, record: Record | None) -> bool:
        """Whether the record holds exactly our write of unknown outcome."""
        # The same bytes are no proof: a new owner may write them too.  So the record must have
        # been written once since, and to other bytes than before; else it counts as theirs.
        return (
            self._doubt is not None
            and record is not None
            and record.value == self._doubt
            and record.modifications == self._modifications + 1
            and _digest(record.value) != self._digest
        )


def _taken_over(key: str) -> VersionConflict:
    return VersionConflict(f"Record {key} was written by another owner: open it anew.")


def _digest(value: bytes) -> bytes:
    """A digest of the value, which may be large."""
    return hashlib.blake2b(value, digest_size=16).digest()
