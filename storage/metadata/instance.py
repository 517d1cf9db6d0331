"""The id of a metadata store, which it holds since its first use and no other store has."""

from uuid import uuid4

from storage.metadata.store import ABSENT, MetadataError, MetadataStore, VersionConflict

INSTANCE_KEY = "/magnetar/instance"


async def instance_of(metadata: MetadataStore) -> bytes:
    """The id of the store, made at its first use; the same for every client.

    Raises `MetadataError`.
    """
    record = await metadata.get(INSTANCE_KEY)
    if record is not None:
        return record.value
    made = uuid4().hex.encode()
    try:
        await metadata.put(INSTANCE_KEY, made, expect=ABSENT)
    except VersionConflict:
        record = await metadata.get(INSTANCE_KEY, fresh=True)
        if record is None:
            raise MetadataError(f"Record {INSTANCE_KEY} was removed just now: try again.") from None
        return record.value
    return made
