"""Ledger records and bookies on a real Oxia server."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from magnetar.protocol.ids import LedgerId
from storage.ledger.bookkeeper.ledger_metadata import (
    BookieId,
    DigestType,
    Ensemble,
    LedgerMetadata,
    LedgerState,
)
from storage.ledger.bookkeeper.metadata_format import UnreadableRecord
from storage.ledger.bookkeeper.metadata_oxia import OxiaLedgerMetadata
from storage.ledger.bookkeeper.metadata_store import LedgerMetadataConflict
from storage.ledger.store import NoSuchLedger
from storage.metadata.oxia.store import OxiaMetadataStore
from tests.servers.bookie_cluster import OnOxia
from tests.servers.fixtures import StartBookies
from tests.servers.oxia_part import OxiaServer
from tests.support.waiting import until

pytestmark = pytest.mark.cluster

RECORD = LedgerMetadata(
    ensemble_size=1,
    write_quorum=1,
    ack_quorum=1,
    ensembles=(Ensemble(0, (BookieId("b1:3181"),)),),
    digest_type=DigestType.CRC32C,
    password=b"secret",
    custom={"application": b"pulsar"},
)


@pytest.fixture
async def ledgers(store: OxiaMetadataStore) -> AsyncIterator[OxiaLedgerMetadata]:
    made = OxiaLedgerMetadata(store, close_store=False)
    await made.start()
    yield made
    await made.close()


async def test_a_ledger_from_its_making_to_its_end(ledgers: OxiaLedgerMetadata) -> None:
    ledger_id = await ledgers.next_ledger_id()
    assert ledger_id == 1
    made = await ledgers.create(ledger_id, RECORD)
    assert made.metadata == RECORD
    assert made == await ledgers.read(ledger_id)
    closed = replace(RECORD, state=LedgerState.CLOSED, last_entry_id=7, length=70)
    written = await ledgers.write(ledger_id, closed, expect=made.version)
    assert await ledgers.read(ledger_id) == written
    for expect in (made.version, -1):
        with pytest.raises(LedgerMetadataConflict):
            await ledgers.write(ledger_id, RECORD, expect=expect)
    with pytest.raises(LedgerMetadataConflict):
        await ledgers.create(ledger_id, RECORD)
    assert await ledgers.list_ledgers() == [ledger_id]
    await ledgers.delete(ledger_id)
    await ledgers.delete(ledger_id)
    with pytest.raises(NoSuchLedger):
        await ledgers.read(ledger_id)
    with pytest.raises(NoSuchLedger):
        await ledgers.write(ledger_id, RECORD, expect=written.version)
    assert await ledgers.list_ledgers() == []


async def test_every_parent_is_a_record(
    ledgers: OxiaLedgerMetadata, store: OxiaMetadataStore
) -> None:
    ids = [LedgerId(5), LedgerId(123_456_789), LedgerId(2**31 + 5)]
    await asyncio.gather(*(ledgers.create(each, RECORD) for each in ids))
    assert await ledgers.list_ledgers() == ids
    for parent in ("/ledgers", "/ledgers/00", "/ledgers/00/0000", "/ledgers/000/0000/0021"):
        record = await store.get(parent)
        assert record is not None, parent
        assert (record.value, record.partition) == (b"", None)


async def test_ids_are_given_once(ledgers: OxiaLedgerMetadata, store: OxiaMetadataStore) -> None:
    ids = await asyncio.gather(*(ledgers.next_ledger_id() for _ in range(40)))
    assert len(set(ids)) == 40
    assert min(ids) >= 1
    assert await store.get("/ledgers") is not None
    await store.put("/ledgers/idgen-long", b"")
    assert await ledgers.next_ledger_id() == 1 << 32 | 1
    await store.put("/ledgers/idgen-long/HOB-0000000007", b"")
    assert [await ledgers.next_ledger_id() for _ in range(2)] == [7 << 32 | 1, 7 << 32 | 2]


async def test_another_layout_is_refused(store: OxiaMetadataStore) -> None:
    await store.put("/ledgers/LAYOUT", b"2\norg.apache.bookkeeper.meta.LongHierarchical:1")
    with pytest.raises(UnreadableRecord):
        await OxiaLedgerMetadata(store, close_store=False).start()


async def test_bookies_and_racks_are_followed(
    ledgers: OxiaLedgerMetadata, store: OxiaMetadataStore
) -> None:
    await store.put("/ledgers/available/b1:3181", b"")
    await until(lambda: set(ledgers.bookies.writable) == {"b1:3181"})
    assert ledgers.bookies.writable[BookieId("b1:3181")].port == 3181
    await store.put("/ledgers/available/readonly", b"")
    await store.put("/ledgers/available/readonly/b2:3181", b"")
    await until(lambda: set(ledgers.bookies.read_only) == {"b2:3181"})
    await store.put("/bookies", b'{"default":{"b1:3181":{"rack":"/r1","hostname":"h"}}}')
    await until(lambda: dict(ledgers.bookies.racks) == {"b1:3181": "/r1"})
    await store.put("/bookies", b"{broken")
    await store.delete("/ledgers/available/b1:3181")
    await until(lambda: not ledgers.bookies.writable)
    assert dict(ledgers.bookies.racks) == {"b1:3181": "/r1"}
    await store.put("/ledgers/available/b3:3181", b"")
    await until(lambda: set(ledgers.bookies.writable) == {"b3:3181"})


async def test_a_real_bookie_is_found(
    fresh_oxia: OxiaServer, store: OxiaMetadataStore, start_bookies: StartBookies
) -> None:
    """By the name and place that Pulsar's driver registers; nothing of ours writes meanwhile."""
    cluster = await start_bookies(OnOxia(fresh_oxia), 1)
    ledgers = OxiaLedgerMetadata(store, close_store=False)
    await ledgers.start()
    assert [each.port for each in ledgers.bookies.writable.values()] == [
        bookie.port for bookie in cluster.bookies
    ]
    await cluster.bookies[0].stop()
    await until(lambda: not ledgers.bookies.writable)
    await ledgers.close()
