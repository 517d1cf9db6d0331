"""One record of the metadata store that this process owns: every write proves it.

Rules:

- Writes are conditional on the version last seen.  `VersionConflict` means another owner wrote,
  and the holder stops.
- After a write whose outcome is unknown the record is read before the next one: ours at the old
  version or with exactly what we wrote is still ours.
- One write at a time; the holder sees to that.
"""

import asyncio
from collections.abc import Sequence

from storage.metadata.store import (
    ABSENT,
    IndexEntry,
    MetadataError,
    MetadataStore,
    Version,
    VersionConflict,
)


class OwnedRecord:
    """See the module's rules."""

    __slots__ = ("_doubt", "_indexes", "_metadata", "_version", "key")

    def __init__(
        self, metadata: MetadataStore, key: str, indexes: Sequence[IndexEntry] = ()
    ) -> None:
        self.key = key
        self._metadata = metadata
        self._indexes = indexes
        self._version = ABSENT
        self._doubt: bytes | None = None

    async def load(self) -> bytes | None:
        """Read it and take its version; None if there is none."""
        record = await self._metadata.get(self.key)
        self.adopt(ABSENT if record is None else record.version)
        return None if record is None else record.value

    def adopt(self, version: Version) -> None:
        """Own the record at this version, read by other means."""
        self._version = version
        self._doubt = None

    async def put(self, value: bytes) -> None:
        """Write it.  Raises `VersionConflict`, or `MetadataError` (outcome unknown)."""
        await self._settle()
        try:
            result = await self._metadata.put(
                self.key, value, expect=self._version, indexes=self._indexes
            )
        except (MetadataError, asyncio.CancelledError):
            self._doubt = value
            raise
        self._version = result.version

    async def delete(self) -> None:
        """Remove it.  Raises `VersionConflict`, or `MetadataError` (outcome unknown)."""
        await self._settle()
        if self._version == ABSENT:
            return
        if await self._metadata.get(self.key) is not None:
            await self._metadata.delete(self.key, expect=self._version)
        self._version = ABSENT

    async def _settle(self) -> None:
        if self._doubt is None:
            return
        record = await self._metadata.get(self.key)
        version = ABSENT if record is None else record.version
        if version != self._version and (record is None or record.value != self._doubt):
            raise VersionConflict(f"Record {self.key} was written by another owner: open it anew.")
        self.adopt(version)
