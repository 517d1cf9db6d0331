"""Opens the ledger store on the bookies that a metadata service URI names.

- `metadata-store:oxia://HOST:PORT/NAMESPACE`: bookies with Pulsar's driver on Oxia
- `metadata-store:zk:HOST:PORT/CHROOT`: the same on ZooKeeper
- `zk+hierarchical://HOST:PORT/ledgers`, `zk+null://HOST:PORT/ledgers`: BookKeeper's own driver
"""

import random
from functools import partial
from typing import Final

from storage.clock import Clock
from storage.ledger.bookkeeper.bookie_options import BookieOptions
from storage.ledger.bookkeeper.bookies import BookiePool
from storage.ledger.bookkeeper.ledger_metadata import BookieId
from storage.ledger.bookkeeper.metadata_store import BookieAddress, LedgerMetadataStore
from storage.ledger.bookkeeper.store import BookKeeperLedgerStore, BookKeeperOptions
from storage.metadata.access import StoreAccess
from storage.metadata.store import MetadataStore

OXIA_SCHEME: Final = "metadata-store:oxia:"


async def open_bookkeeper(
    uri: str,
    clock: Clock,
    rng: random.Random,
    *,
    ledgers: BookKeeperOptions,
    bookies: BookieOptions,
    access: StoreAccess,
    beside: MetadataStore | None = None,
) -> BookKeeperLedgerStore:
    """Open a store in the running loop.  Raises `LedgerError`, `MetadataError`.

    `beside` is a metadata store of this process that stays open longer.  It is used if it is on the
    same namespace of the same Oxia server: servers before 0.14.4 support one writer only.
    """
    metadata = await _ledger_metadata(uri, clock, rng, access, beside)
    pool = BookiePool(partial(address_of, metadata), bookies)
    store = BookKeeperLedgerStore(metadata, pool, clock, rng, ledgers)
    try:
        await store.start()
    except BaseException:
        await store.close()
        raise
    return store


def address_of(metadata: LedgerMetadataStore, bookie: BookieId) -> BookieAddress | None:
    """The address of a registered bookie."""
    known = metadata.bookies
    return known.writable.get(bookie) or known.read_only.get(bookie)


async def _ledger_metadata(
    uri: str,
    clock: Clock,
    rng: random.Random,
    access: StoreAccess,
    beside: MetadataStore | None,
) -> LedgerMetadataStore:
    # The clients of either service are imported only when they are used.
    if uri.startswith(OXIA_SCHEME):
        from storage.ledger.bookkeeper.metadata_oxia import OxiaLedgerMetadata  # noqa: PLC0415
        from storage.metadata.oxia.address import parse_address  # noqa: PLC0415
        from storage.metadata.oxia.store import OxiaMetadataStore  # noqa: PLC0415

        url = uri.removeprefix("metadata-store:")
        if isinstance(beside, OxiaMetadataStore) and beside.address == parse_address(url):
            return OxiaLedgerMetadata(beside, close_store=False)
        return OxiaLedgerMetadata(await OxiaMetadataStore.open(url, clock, rng, access))
    from storage.ledger.bookkeeper.metadata_zookeeper import (  # noqa: PLC0415
        ZooKeeperLedgerMetadata,
        parse_metadata_service_uri,
    )

    return ZooKeeperLedgerMetadata(parse_metadata_service_uri(uri), rng, access)
