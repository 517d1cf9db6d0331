"""Opens the metadata store that a URL names."""

import random
from pathlib import Path
from typing import ClassVar

from magnetar.protocol.server_error import OperatorError, ServerError
from storage.clock import Clock
from storage.metadata.access import StoreAccess
from storage.metadata.memory import MemoryMetadataStore
from storage.metadata.sqlite import SqliteMetadataStore
from storage.metadata.store import MetadataStore


class UnknownMetadataUrl(OperatorError):
    """The URL of the metadata store names no backend."""

    code: ClassVar[ServerError] = ServerError.METADATA_ERROR


async def open_metadata_store(
    url: str,
    clock: Clock,
    rng: random.Random | None = None,
    access: StoreAccess | None = None,
) -> MetadataStore:
    """Open the store, which belongs to the running loop from then on; close it when done.

    - `memory:` lives and dies with the process
    - `sqlite:PATH` is one file on a local disk
    - `oxia://HOST:PORT,HOST:PORT/NAMESPACE` is an Oxia cluster (namespace `default` if left out)
    - `zk:HOST:PORT,HOST:PORT/CHROOT` is a ZooKeeper, as Pulsar writes it

    `rng` spreads attempts to connect over time; `access` is for stores of other machines.
    The caller of `sqlite:` holds the lock of the file's directory: sessions of earlier processes
    end here.  Raises `UnknownMetadataUrl`, `UnknownMetadataFile`, `MetadataError`.
    """
    # Clients of clusters are imported when their URL is used: an embedded broker starts faster
    # without them.
    if url == "memory:":
        return MemoryMetadataStore(clock)
    scheme, _, path = url.partition(":")
    if scheme == "sqlite" and path:
        return await SqliteMetadataStore.open(Path(path), clock)
    if scheme == "oxia" and path:
        from storage.metadata.oxia.store import OxiaMetadataStore  # noqa: PLC0415

        return await OxiaMetadataStore.open(
            url, clock, rng or random.SystemRandom(), access or StoreAccess()
        )
    if scheme == "zk" and path:
        from storage.metadata.zookeeper.address import parse_address  # noqa: PLC0415
        from storage.metadata.zookeeper.store import ZooKeeperMetadataStore  # noqa: PLC0415

        return await ZooKeeperMetadataStore.open(
            parse_address(url), clock, rng or random.SystemRandom(), access=access
        )
    raise UnknownMetadataUrl(
        f"{url!r} names no metadata store: use memory:, sqlite:PATH, "
        "oxia://HOST:PORT,HOST:PORT/NAMESPACE or zk:HOST:PORT,HOST:PORT/CHROOT, such as "
        "sqlite:/var/lib/magnetar/metadata.db."
    )
