"""What tells one metadata store from every other: an id that it holds since its first use."""

from uuid import uuid4

from storage.metadata.store import ABSENT, MetadataError, MetadataStore, VersionConflict

INSTANCE_KEY = "/magnetar/instance"


async def instance_of(metadata: MetadataStore) -> bytes:
    """The id of that store, the same for all who use it.  Raises `MetadataError`."""
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
