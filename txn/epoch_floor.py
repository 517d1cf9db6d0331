"""Floors of epochs: the highest epoch that a deleted thing had, so that later ones are above it.

Owners of segments have one floor (W3, W6), and each coordinator's transaction keys have one (K7).
"""

from storage.metadata.store import ABSENT, MetadataStore, VersionConflict
from txn.record_json import decode_members, decode_or_raise, integer, json_bytes


async def read_floor(
    metadata: MetadataStore, key: str, *, partition: str | None = None, fresh: bool = False
) -> int | None:
    """The floor stored at `key`; None: there is none.  Raises `CorruptTransactionRecord`."""
    found = await metadata.get(key, partition=partition, fresh=fresh)
    return None if found is None else decode_floor(key, found.value)


async def raise_floor(
    metadata: MetadataStore, key: str, epoch: int, *, partition: str | None = None
) -> None:
    """Return when the floor is that epoch or above.  Raises `CorruptTransactionRecord`."""
    while True:
        found = await metadata.get(key, partition=partition)
        # W3, W6, K7: a floor only rises, by a write on the version read.
        if found is not None and decode_floor(key, found.value) >= epoch:
            return
        try:
            await metadata.put(
                key,
                json_bytes({"epoch": epoch}),
                partition=partition,
                expect=ABSENT if found is None else found.version,
            )
        except VersionConflict:
            continue
        return


def decode_floor(key: str, value: bytes) -> int:
    """Decode the floor stored at `key`.  Raises `CorruptTransactionRecord`."""
    return decode_or_raise(key, lambda: integer(decode_members(value)["epoch"]))
