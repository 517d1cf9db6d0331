"""Copies of entries that are not what was written: bookies take anything, readers judge."""

from collections.abc import Sequence

import pytest

from magnetar.protocol.ids import LedgerId
from storage.ledger.bookkeeper.digest import Digest
from storage.ledger.bookkeeper.ledger_metadata import BookieId, DigestType, LedgerState
from storage.ledger.store import CorruptEntry, LedgerError
from tests.cluster.bookkeeper.interop import java_ledger, java_open, java_reads, python_reads
from tests.cluster.bookkeeper.ledger_access import (
    USUAL,
    Quorums,
    RawBookies,
    Seal,
    ends,
    members,
    raw_bookies,
    read_all,
    record_of,
    store_at,
    written,
)
from tests.servers.bookie_cluster import BookieCluster
from tests.servers.bookkeeper_peer.peer import DIGEST_MATCH, PeerClient, PeerError

pytestmark = pytest.mark.cluster

ENTRIES = tuple(b"%d:" % number + b"x" * (number * 37) for number in range(7))
PAIRS: Quorums = (2, 2, 2)


async def damage(
    raw: RawBookies, bookie: BookieId, ledger_id: int, entry_id: int, seal: Seal
) -> None:
    """The bookie's copy is not what its writer made: bookies take anything."""
    data = b"not what was written"
    length = ends(ENTRIES)[entry_id]
    if seal.digest_type is DigestType.DUMMY:
        # Nothing but the header protects such an entry: it is cut off within it.
        head, _ = Digest(*seal).seal(ledger_id, entry_id, entry_id - 1, length, b"")
        body: Sequence[bytes] = (head[:24],)
    else:
        head, _ = Digest(*seal).seal(ledger_id, entry_id, entry_id - 1, length, ENTRIES[entry_id])
        body = (head, data)
    await raw.put(bookie, ledger_id, entry_id, body, seal.password)


@pytest.mark.parametrize("quorums", [PAIRS, (3, 2, 2)], ids=["batches", "striped"])
@pytest.mark.parametrize("digest_type", DigestType)
async def test_a_damaged_copy_is_passed_over(
    bookies: BookieCluster, java_v2: PeerClient, digest_type: DigestType, quorums: Quorums
) -> None:
    seal = Seal(digest_type, b"secret")
    async with store_at(bookies.uri, quorums, seal) as store, raw_bookies() as raw:
        ledger = await written(store, *ENTRIES)
        await ledger.close()
        record = await record_of(store, ledger.ledger_id)
        for entry_id in (0, 3, 4):
            bookie = record.last_ensemble.bookies[record.write_set(entry_id)[0]]
            await damage(raw, bookie, ledger.ledger_id, entry_id, seal)
        reader = await store.open(ledger.ledger_id)
        assert await read_all(reader) == list(ENTRIES)
        assert store.counters.read_retries > 0
        await java_reads(await java_open(java_v2, ledger.ledger_id, seal, recover=False), ENTRIES)


@pytest.mark.parametrize("quorums", [PAIRS, (3, 2, 2)], ids=["batches", "striped"])
@pytest.mark.parametrize("digest_type", DigestType)
async def test_an_entry_with_nothing_but_damaged_copies(
    bookies: BookieCluster, java_v2: PeerClient, digest_type: DigestType, quorums: Quorums
) -> None:
    """Those before and after it can be read."""
    seal = Seal(digest_type, b"")
    async with store_at(bookies.uri, quorums, seal) as store, raw_bookies() as raw:
        ledger = await written(store, *ENTRIES)
        await ledger.close()
        record = await record_of(store, ledger.ledger_id)
        for place in record.write_set(3):
            bookie = record.last_ensemble.bookies[place]
            await damage(raw, bookie, ledger.ledger_id, 3, seal)
        reader = await store.open(ledger.ledger_id)
        assert await reader.read(0, 6, max_bytes=1 << 20) == list(ENTRIES[:3])
        for last in (3, 6):
            with pytest.raises(CorruptEntry):
                await reader.read(3, last, max_bytes=1 << 20)
        assert await reader.read(4, 6, max_bytes=1 << 20) == list(ENTRIES[4:])
        theirs = await java_open(java_v2, ledger.ledger_id, seal, recover=False)
        with pytest.raises(PeerError) as refused:
            await theirs.read(3, 3)
        assert refused.value.code == DIGEST_MATCH


async def test_a_recovery_repairs_a_damaged_copy(
    bookies: BookieCluster, java_v2: PeerClient
) -> None:
    last = len(ENTRIES) - 1
    async with store_at(bookies.uri, PAIRS) as store, raw_bookies() as raw:
        writer = await java_ledger(java_v2, *ENTRIES, quorums=PAIRS)
        first, second = await members(store, writer.ledger_id)
        await damage(raw, first, writer.ledger_id, last, USUAL)
        await store.open(LedgerId(writer.ledger_id))
        await python_reads(store, writer.ledger_id, ENTRIES)
        for bookie in (first, second):
            assert (await raw.opened(bookie, writer.ledger_id, last)).data == ENTRIES[last]
    await java_reads(await java_open(java_v2, writer.ledger_id, recover=False), ENTRIES)


@pytest.mark.parametrize("writer_is", ["python", "java"])
async def test_a_recovery_does_not_end_a_ledger_before_an_entry_that_is_only_damaged(
    bookies: BookieCluster, java_v2: PeerClient, writer_is: str
) -> None:
    """It may have been acknowledged: not known is not absent.  The other client ends it later."""
    last = len(ENTRIES) - 1
    async with (
        store_at(bookies.uri, PAIRS) as store,
        store_at(bookies.uri) as other,
        raw_bookies() as raw,
    ):
        if writer_is == "python":
            ledger_id = (await written(store, *ENTRIES)).ledger_id
        else:
            ledger_id = LedgerId((await java_ledger(java_v2, *ENTRIES, quorums=PAIRS)).ledger_id)
        first, second = await members(store, ledger_id)
        for bookie in (first, second):
            await damage(raw, bookie, ledger_id, last, USUAL)
        with pytest.raises(LedgerError):
            await other.open(ledger_id)
        assert (await record_of(store, ledger_id)).state is LedgerState.IN_RECOVERY
        await put_whole(raw, second, ledger_id, last)
        if writer_is == "python":
            await java_reads(await java_open(java_v2, ledger_id, recover=True), ENTRIES)
            await python_reads(other, ledger_id, ENTRIES)
        else:
            await other.open(ledger_id)
            await python_reads(other, ledger_id, ENTRIES)
            await java_reads(await java_open(java_v2, ledger_id, recover=False), ENTRIES)


async def put_whole(raw: RawBookies, bookie: BookieId, ledger_id: int, entry_id: int) -> None:
    """The bookie's copy is as its writer made it, again."""
    length = ends(ENTRIES)[entry_id]
    body = Digest(*USUAL).seal(ledger_id, entry_id, entry_id - 1, length, ENTRIES[entry_id])
    await raw.put(bookie, ledger_id, entry_id, body)
