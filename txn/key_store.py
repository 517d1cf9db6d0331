"""All access of transaction keys to the metadata store.

Rules (K, G: `docs/transactions.md`):

- K1, K3: a key is changed on the version read.
- K7: it is deleted on the version read, and the floor (`txn.epoch_floor`) only rises.
- K8, G5: the end of a key's last transaction, and what it committed, are noted in the key.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import structlog

from config.bounds import TXN_PAGE, TXN_PAGE_BYTES
from magnetar.protocol.txn_id import CoordinatorId, TxnId
from storage.metadata.keys import LAST
from storage.metadata.store import ABSENT, MetadataStore, Version, is_cut
from txn import key_records
from txn.epoch_floor import raise_floor, read_floor
from txn.errors import CorruptTransactionRecord
from txn.key_groups import note_and_fold
from txn.records import Header
from txn.transaction_key import NO_EPOCH, KeyName, KeyRecord

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A key and the version that a conditional write names."""

    name: KeyName
    record: KeyRecord
    version: Version


class TransactionKeyStore:
    """Keys of one coordinator.  All methods raise `MetadataError` when the store fails."""

    def __init__(
        self,
        metadata: MetadataStore,
        coordinator: CoordinatorId,
        *,
        page_bytes: int = TXN_PAGE_BYTES,
    ) -> None:
        self._metadata = metadata
        self._page_bytes = page_bytes
        self._coordinator = coordinator
        self._partition = key_records.partition_of(coordinator)

    async def read(self, name: KeyName) -> StoredKey | None:
        """Read a key; None if there is none."""
        path = key_records.key_path(name)
        found = await self._metadata.get(path, partition=self._partition)
        if found is None:
            return None
        return StoredKey(name, key_records.decode_key(path, found.value), found.version)

    async def create(self, name: KeyName, record: KeyRecord) -> StoredKey:
        """Store a new key.  Raises `VersionConflict` if there is one of that name."""
        return await self._put(name, record, ABSENT)

    async def change(self, stored: StoredKey, record: KeyRecord) -> StoredKey:
        """Replace a key's record on the version read (K1, K3).  Raises `VersionConflict`."""
        # K1, K3: of two requests at once one fails, and decides anew.
        return await self._put(stored.name, record, stored.version)

    async def delete(self, stored: StoredKey) -> None:
        """Delete a key on the version read (K7).  Raises `VersionConflict`."""
        # K7: a key that was opened since the read stays.
        path = key_records.key_path(stored.name)
        await self._metadata.delete(path, partition=self._partition, expect=stored.version)

    async def note_end(self, txn: TxnId, header: Header) -> None:
        """Note in the key how its last transaction ended (K8), and what it committed (G5).

        Raises `VersionConflict`.
        """
        if header.key_epoch is None:
            return
        # K8, G5: the caller deletes the header, which nobody can read then.
        stored = await self.read(KeyName(header.owner or "", header.key_epoch.key))
        record = None if stored is None else note_and_fold(stored.record, txn, header)
        if stored is not None and record is not None:
            await self.change(stored, record)

    async def _put(self, name: KeyName, record: KeyRecord, expect: Version) -> StoredKey:
        result = await self._metadata.put(
            key_records.key_path(name),
            key_records.encode_key(record),
            partition=self._partition,
            expect=expect,
            indexes=key_records.key_indexes(self._coordinator, name),
        )
        return StoredKey(name, record, result.version)

    async def read_floor(self) -> int:
        """The highest epoch that a deleted key had; NO_EPOCH if none was deleted."""
        path = key_records.floor_path(self._coordinator)
        floor = await read_floor(self._metadata, path, partition=self._partition)
        return NO_EPOCH if floor is None else floor

    async def raise_floor(self, epoch: int) -> None:
        """Raise the floor to an epoch, unless it is as high already (K7)."""
        # K7: the caller deletes the key after that, so its epochs are never given again.
        path = key_records.floor_path(self._coordinator)
        await raise_floor(self._metadata, path, epoch, partition=self._partition)

    async def page(
        self, after: str, limit: int, *, owner: str | None = None
    ) -> tuple[Sequence[StoredKey], str]:
        """Keys whose encoded name is above `after`; and `after` for the next page, "" if none.

        With an `owner` only its keys are read, whatever `after` is.  There are fewer than `limit`
        where these have TXN_PAGE_BYTES.  A corrupt one is logged and left out.
        """
        # Names are escaped, so "!" is below every character that can follow in one.
        prefix = "" if owner is None else key_records.encoded_name(KeyName(owner, ""))
        first = max(prefix, f"{after}!" if after else "")
        lo = key_records.index_key(self._coordinator, first)
        hi = key_records.index_key(self._coordinator, prefix + LAST)
        if lo >= hi:
            return [], ""  # `after` is behind the last key that this owner can have
        # No partition is named, though all keys are in one: a store that is given one reads the
        # whole range to check it.
        hits = await self._metadata.scan_index(
            key_records.KEY_INDEX, lo, hi, limit=limit, max_bytes=self._page_bytes
        )
        found = []
        for hit in hits:
            path, value = hit.record.key, hit.record.value
            try:
                record = key_records.decode_key(path, value)
                found.append(StoredKey(key_records.name_at(path), record, hit.record.version))
            except CorruptTransactionRecord as error:
                log.error("transaction_key_corrupt", error=str(error))
        more = is_cut(hits, limit, self._page_bytes)
        return found, hits[-1].record.key.removeprefix(key_records.KEYS) if more else ""

    async def pages(self) -> AsyncIterator[Sequence[StoredKey]]:
        """All keys, in pages."""
        after = ""
        while True:
            found, after = await self.page(after, TXN_PAGE)
            yield found
            if not after:
                return
