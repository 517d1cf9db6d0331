"""Makes the metadata store that a URL names.

- `memory:` lives and dies with the process
- `sqlite:PATH` is one file on a local disk
"""

from pathlib import Path
from typing import ClassVar

from protocol.server_error import OperatorError, ServerError
from storage.clock import Clock
from storage.metadata.memory import MemoryMetadataStore
from storage.metadata.sqlite import SqliteMetadataStore
from storage.metadata.store import MetadataStore


class UnknownMetadataUrl(OperatorError):
    """The URL of the metadata store names no backend."""

    code: ClassVar[ServerError] = ServerError.METADATA_ERROR


async def open_metadata_store(url: str, clock: Clock) -> MetadataStore:
    """Open the store, which belongs to the running loop from then on; close it when done.

    The caller of `sqlite:` holds the lock of the file's directory: sessions of earlier processes
    end here.  Raises `UnknownMetadataUrl`, `UnknownMetadataFile`, `MetadataError`.
    """
    if url == "memory:":
        return MemoryMetadataStore(clock)
    scheme, _, path = url.partition(":")
    if scheme == "sqlite" and path:
        return await SqliteMetadataStore.open(Path(path), clock)
    raise UnknownMetadataUrl(
        f"{url!r} names no metadata store: use memory: or sqlite:PATH, such as "
        "sqlite:/var/lib/magnetar/metadata.db."
    )
