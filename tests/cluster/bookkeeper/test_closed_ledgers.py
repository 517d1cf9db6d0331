"""A close is a line in the record and nothing else: bookies go on taking entries.

What keeps a closed ledger as it is: nobody adds to it who heeds the record, readers go no further
than the record says, and no id is given a second time.  Only a recovery fences.
"""

import pytest

from magnetar.protocol.ids import LedgerId
from storage.ledger.bookkeeper.bookie_client import ReplyCode
from storage.ledger.bookkeeper.digest import Digest
from storage.ledger.bookkeeper.ledger_metadata import BookieId, LedgerState
from storage.ledger.bookkeeper.store import BookKeeperLedgerStore
from storage.ledger.store import LedgerClosed, NoSuchEntry
from tests.cluster.bookkeeper.interop import java_ledger, java_open, java_reads
from tests.cluster.bookkeeper.ledger_access import (
    USUAL,
    Quorums,
    RawBookies,
    append,
    ends,
    members,
    raw_bookies,
    read_all,
    record_of,
    store_at,
    written,
)
from tests.servers.bookie_cluster import BookieCluster
from tests.servers.bookkeeper_peer.peer import PeerClient

pytestmark = pytest.mark.cluster

PAIRS: Quorums = (2, 2, 2)
ENTRIES = (b"entry-0", b"entry-1", b"entry-2")
OTHER = b"another"
"""As long as the first entry, in whose place it is put."""
CHANGED = (OTHER, *ENTRIES[1:])
LAST = len(ENTRIES) - 1


async def closed_ledger(store: BookKeeperLedgerStore, java: PeerClient, writer_is: str) -> LedgerId:
    """A ledger that its own writer closed."""
    if writer_is == "java":
        writer = await java_ledger(java, *ENTRIES, quorums=PAIRS)
        await writer.close()
        return LedgerId(writer.ledger_id)
    ledger = await written(store, *ENTRIES)
    await ledger.close()
    with pytest.raises(LedgerClosed):
        ledger.append(b"late", lambda *_: None)
    return ledger.ledger_id


async def add(
    raw: RawBookies, bookie: BookieId, ledger_id: int, entry_id: int, password: bytes = b""
) -> ReplyCode:
    """Send one copy as a writer would that does not know of the close."""
    length = ends([*ENTRIES, OTHER])[entry_id]
    body = Digest(*USUAL).seal(ledger_id, entry_id, entry_id - 1, length, OTHER)
    return await raw.add(bookie, ledger_id, entry_id, body, password)


@pytest.mark.parametrize("writer_is", ["python", "java"])
async def test_a_normal_close_does_not_fence(
    bookies: BookieCluster, java_v2: PeerClient, writer_is: str
) -> None:
    """Entries are taken behind the end, and in the place of others: the last one wins."""
    async with (
        store_at(bookies.uri, PAIRS) as store,
        store_at(bookies.uri) as other,
        raw_bookies() as raw,
    ):
        ledger_id = await closed_ledger(store, java_v2, writer_is)
        before = await record_of(store, ledger_id)
        assert (before.state, before.last_entry_id) == (LedgerState.CLOSED, LAST)
        # Nor does opening it, which finds the end in the record and asks no bookie.
        assert await read_all(await other.open(ledger_id)) == list(ENTRIES)
        for bookie in await members(store, ledger_id):
            assert await add(raw, bookie, ledger_id, LAST + 1) is ReplyCode.OK
            assert await add(raw, bookie, ledger_id, 0) is ReplyCode.OK
            assert (await raw.opened(bookie, ledger_id, 0)).data == OTHER
            assert (await raw.opened(bookie, ledger_id, LAST + 1)).data == OTHER
            code = await add(raw, bookie, ledger_id, LAST + 1, b"not its password")
            assert code is ReplyCode.UNAUTHORISED
        # What is behind the end is not read; what was overwritten is read as it is now.
        assert await record_of(store, ledger_id) == before
        reader = await other.open(ledger_id)
        assert reader.last_add_confirmed == LAST
        assert await read_all(reader) == list(CHANGED)
        with pytest.raises(NoSuchEntry):
            await reader.read(LAST + 1, LAST + 1, max_bytes=1000)
        await java_reads(await java_open(java_v2, ledger_id, recover=True), CHANGED)


async def test_a_recovery_does(bookies: BookieCluster) -> None:
    async with (
        store_at(bookies.uri, PAIRS) as store,
        store_at(bookies.uri) as other,
        raw_bookies() as raw,
    ):
        ledger = await written(store, *ENTRIES)
        assert await read_all(await other.open(ledger.ledger_id)) == list(ENTRIES)
        for bookie in await members(store, ledger.ledger_id):
            for entry_id in (0, LAST + 1):
                assert await add(raw, bookie, ledger.ledger_id, entry_id) is ReplyCode.FENCED
            assert (await raw.opened(bookie, ledger.ledger_id, 0)).data == ENTRIES[0]


async def test_no_id_is_given_a_second_time(bookies: BookieCluster, java_v2: PeerClient) -> None:
    """Which would put new entries among those of a ledger that is closed, or deleted."""
    async with store_at(bookies.uri, PAIRS) as store:
        given: list[int] = []
        for _ in range(3):
            ledger = await written(store, *ENTRIES)
            await ledger.close()
            await store.delete(ledger.ledger_id)
            theirs = await java_ledger(java_v2, *ENTRIES, quorums=PAIRS)
            await theirs.close()
            await java_v2.delete_ledger(theirs.ledger_id)
            given += (ledger.ledger_id, theirs.ledger_id)
        async with store_at(bookies.uri, PAIRS) as other:
            again = await written(other)
            await append(again, b"new")
            given.append(again.ledger_id)
        assert given == sorted(set(given))
