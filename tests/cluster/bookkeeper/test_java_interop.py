"""Ledgers that Python and Java share: written by one, read and recovered by the other."""

import asyncio
import itertools
from functools import partial

import pytest

from config import bounds
from magnetar.protocol.ids import LedgerId
from storage.ledger.bookkeeper.bookie_client import ReplyCode
from storage.ledger.bookkeeper.digest import Digest
from storage.ledger.bookkeeper.ledger_metadata import DigestType
from storage.ledger.bookkeeper.store import BookKeeperLedgerStore
from storage.ledger.store import LedgerFenced
from tests.cluster.bookkeeper.interop import (
    CUSTOM,
    ENTRIES,
    LAST,
    LENGTH,
    both_agree,
    java_ledger,
    java_open,
    java_reads,
    python_reads,
)
from tests.cluster.bookkeeper.ledger_access import (
    USUAL,
    Quorums,
    Seal,
    append,
    ends,
    raw_bookies,
    read_all,
    record_of,
    store_at,
    written,
)
from tests.servers.bookie_cluster import BookieCluster
from tests.servers.bookkeeper_peer.peer import LEDGER_FENCED, PeerClient, PeerError
from tests.support.child_process import once_it_is

pytestmark = pytest.mark.cluster

QUICK: Quorums = (3, 2, 1)
EACH_SEAL = pytest.mark.parametrize(
    "seal",
    [Seal(*each) for each in itertools.product(DigestType, (b"", b"secret"))],
    ids=lambda seal: seal.name,
)
EACH_QUORUM = pytest.mark.parametrize(
    "quorums",
    [(1, 1, 1), (2, 2, 2), (3, 2, 1), (3, 3, 2)],
    ids=lambda quorums: "/".join(map(str, quorums)),
)


# Closed ledgers


@EACH_SEAL
async def test_java_reads_what_python_closed(
    bookies: BookieCluster, java: PeerClient, seal: Seal
) -> None:
    async with store_at(bookies.uri, seal=seal) as store:
        ledger = await store.create(custom=CUSTOM)
        assert await append(ledger, *ENTRIES) == [0, 1, 2, 3, 4]
        await ledger.close()
        for recover in (False, True):
            reader = await java_open(java, ledger.ledger_id, seal, recover=recover)
            await java_reads(reader, ENTRIES)
        await both_agree(store, java, ledger.ledger_id, LAST, LENGTH)
        assert (await record_of(store, ledger.ledger_id)).custom == CUSTOM


@EACH_SEAL
async def test_python_reads_what_java_closed(
    bookies: BookieCluster, java: PeerClient, seal: Seal
) -> None:
    writer = await java_ledger(java, *ENTRIES, seal=seal)
    await writer.close()
    async with store_at(bookies.uri) as store:
        await python_reads(store, writer.ledger_id, ENTRIES)
        await both_agree(store, java, writer.ledger_id, LAST, LENGTH)
        assert (await record_of(store, writer.ledger_id)).custom == CUSTOM


@EACH_QUORUM
async def test_closed_ledgers_of_other_quorums(
    bookies: BookieCluster, java_v2: PeerClient, quorums: Quorums
) -> None:
    entries = [b"%d:" % number + b"x" * (number * 37 % 1000) for number in range(300)]
    async with store_at(bookies.uri, quorums) as store:
        ledger = await written(store, *entries)
        await ledger.close()
        await java_reads(await java_open(java_v2, ledger.ledger_id, recover=False), entries)
        writer = await java_ledger(java_v2, *entries, quorums=quorums)
        await writer.close()
        await python_reads(store, writer.ledger_id, entries)
        for ledger_id in (ledger.ledger_id, writer.ledger_id):
            await both_agree(store, java_v2, ledger_id, 299, sum(map(len, entries)))


async def test_closed_ledgers_without_entries(bookies: BookieCluster, java: PeerClient) -> None:
    async with store_at(bookies.uri) as store:
        ledger = await written(store)
        await ledger.close()
        await java_reads(await java_open(java, ledger.ledger_id, recover=True), ())
        writer = await java_ledger(java)
        await writer.close()
        await python_reads(store, writer.ledger_id, ())
        for ledger_id in (ledger.ledger_id, writer.ledger_id):
            await both_agree(store, java, ledger_id, -1, 0)


async def test_both_stripe_alike(bookies: BookieCluster, java_v2: PeerClient) -> None:
    """An entry is on the bookies where the other client looks for it, and nowhere else."""
    async with store_at(bookies.uri) as store, raw_bookies() as raw:
        ledger = await written(store, *ENTRIES)
        writer = await java_ledger(java_v2, *ENTRIES)
        for ledger_id in (ledger.ledger_id, writer.ledger_id):
            record = await record_of(store, ledger_id)
            for entry_id in range(len(ENTRIES)):
                codes = [
                    await raw.read(bookie, ledger_id, entry_id)
                    for bookie in record.last_ensemble.bookies
                ]
                held = {place for place, code in enumerate(codes) if code is ReplyCode.OK}
                assert held == {entry_id % 3, (entry_id + 1) % 3} == {*record.write_set(entry_id)}
        await ledger.close()
        await writer.close()
        for ledger_id in (ledger.ledger_id, writer.ledger_id):
            await python_reads(store, ledger_id, ENTRIES)
        assert store.counters.read_retries == 0, "the first bookie that is asked has the entry"


@pytest.mark.parametrize(
    ("count", "size"),
    [(70, 150_000), (bounds.LEDGER_BATCH_READ_ENTRIES * 2 + 1000, 8)],
    ids=["bytes", "entries"],
)
async def test_a_ledger_larger_than_a_batch(
    bookies: BookieCluster, java_v2: PeerClient, count: int, size: int
) -> None:
    entries = [b"%08d" % number + bytes(size - 8) for number in range(count)]
    assert count * size > 2 * bounds.LEDGER_BATCH_READ_BYTES or (
        count > 2 * bounds.LEDGER_BATCH_READ_ENTRIES
    )
    part = max(2_000_000 // size, 1)
    async with store_at(bookies.uri, (2, 2, 2)) as store:
        writer = await java_ledger(java_v2, quorums=(2, 2, 2))
        for first in range(0, count, part):
            await writer.add(*entries[first : first + part])
        await writer.close()
        reader = await store.open(LedgerId(writer.ledger_id))
        before = store._services.bookies.counters.requests
        assert await reader.read(0, count - 1, max_bytes=64 << 20) == entries
        requests = store._services.bookies.counters.requests - before
        assert 3 <= requests < 10, "batches, and several"

        ledger = await written(store, *entries)
        await ledger.close()
        other = await java_open(java_v2, ledger.ledger_id, recover=False)
        found: list[bytes] = []
        while len(found) < count:
            batch = await other.batch_read(len(found), part, 2_000_000)
            found += [each.data for each in batch]
        assert found == entries


# Open ledgers


@EACH_SEAL
async def test_java_recovers_what_python_writes(
    bookies: BookieCluster, java: PeerClient, seal: Seal
) -> None:
    async with store_at(bookies.uri, seal=seal) as store, store_at(bookies.uri) as other:
        ledger = await written(store, *ENTRIES)
        reader = await java_open(java, ledger.ledger_id, seal, recover=True)
        await java_reads(reader, ENTRIES)
        with pytest.raises(LedgerFenced):
            await append(ledger, b"too late")
        with pytest.raises(LedgerFenced):
            ledger.append(b"later still", lambda *_: None)
        assert store.counters.fenced == 1
        await both_agree(other, java, ledger.ledger_id, LAST, LENGTH)
        await python_reads(other, ledger.ledger_id, ENTRIES)
        await python_reads(store, ledger.ledger_id, ENTRIES)


@EACH_SEAL
async def test_python_recovers_what_java_writes(
    bookies: BookieCluster, java: PeerClient, seal: Seal
) -> None:
    writer = await java_ledger(java, *ENTRIES, seal=seal)
    async with store_at(bookies.uri) as store:
        reader = await store.open(LedgerId(writer.ledger_id))
        assert (reader.last_add_confirmed, reader.length) == (LAST, LENGTH)
        assert await read_all(reader) == list(ENTRIES)
        with pytest.raises(PeerError) as refused:
            await writer.add(b"too late")
        assert refused.value.code == LEDGER_FENCED
        assert refused.value.facts["acknowledged"] == []
        await both_agree(store, java, writer.ledger_id, LAST, LENGTH)
        other = await java_open(java, writer.ledger_id, seal, recover=False)
        await java_reads(other, ENTRIES)


@EACH_QUORUM
async def test_open_ledgers_of_other_quorums(
    bookies: BookieCluster, java_v2: PeerClient, quorums: Quorums
) -> None:
    async with store_at(bookies.uri, quorums) as store:
        ledger = await written(store, *ENTRIES)
        await until_everywhere(store, ledger.ledger_id)
        await java_reads(await java_open(java_v2, ledger.ledger_id, recover=True), ENTRIES)
        with pytest.raises(LedgerFenced):
            await append(ledger, b"too late")
        writer = await java_ledger(java_v2, *ENTRIES, quorums=quorums)
        await until_everywhere(store, writer.ledger_id)
        await store.open(LedgerId(writer.ledger_id))
        with pytest.raises(PeerError) as refused:
            await writer.add(b"too late")
        assert refused.value.code == LEDGER_FENCED
        await python_reads(store, writer.ledger_id, ENTRIES)
        for ledger_id in (ledger.ledger_id, writer.ledger_id):
            await both_agree(store, java_v2, ledger_id, LAST, LENGTH)


async def until_everywhere(store: BookKeeperLedgerStore, ledger_id: int) -> None:
    """No copy is on its way: a late one that is refused looks like a bookie that failed."""
    record = await record_of(store, ledger_id)
    async with raw_bookies() as raw:
        for entry_id in range(len(ENTRIES)):
            for place in record.write_set(entry_id):
                bookie = record.last_ensemble.bookies[place]
                held = partial(raw.holds, bookie, ledger_id, entry_id)
                await once_it_is(held, f"entry {entry_id} on {bookie}", timeout_s=30)


async def test_open_ledgers_without_entries(bookies: BookieCluster, java: PeerClient) -> None:
    async with store_at(bookies.uri) as store:
        ledger = await written(store)
        await java_reads(await java_open(java, ledger.ledger_id, recover=True), ())
        with pytest.raises(LedgerFenced):
            await append(ledger, b"too late")
        writer = await java_ledger(java)
        await python_reads(store, await recovered(store, writer.ledger_id), ())
        with pytest.raises(PeerError) as refused:
            await writer.add(b"too late")
        assert refused.value.code == LEDGER_FENCED
        for ledger_id in (ledger.ledger_id, writer.ledger_id):
            await both_agree(store, java, ledger_id, -1, 0)


async def recovered(store: BookKeeperLedgerStore, ledger_id: int) -> LedgerId:
    await store.open(LedgerId(ledger_id))
    return LedgerId(ledger_id)


async def test_a_close_after_a_recovery_that_found_the_same_end(
    bookies: BookieCluster, java: PeerClient
) -> None:
    async with store_at(bookies.uri) as store:
        ledger = await written(store, *ENTRIES)
        await java_open(java, ledger.ledger_id, recover=True)
        await ledger.close()
        writer = await java_ledger(java, *ENTRIES)
        await store.open(LedgerId(writer.ledger_id))
        await writer.close()
        for ledger_id in (ledger.ledger_id, writer.ledger_id):
            await both_agree(store, java, ledger_id, LAST, LENGTH)


async def test_java_looks_without_disturbing(bookies: BookieCluster, java: PeerClient) -> None:
    """What is confirmed is known to others with the next add only."""
    async with store_at(bookies.uri) as store:
        ledger = await store.create(custom={})
        for entry in ENTRIES:
            await append(ledger, entry)
        reader = await java_open(java, ledger.ledger_id, recover=False)
        assert (reader.closed, reader.last_add_confirmed) == (False, LAST - 1)
        assert [each.data for each in await reader.read(0, LAST - 1)] == list(ENTRIES[:-1])
        assert await append(ledger, b"undisturbed") == [LAST + 1]
        assert await reader.read_last_add_confirmed() == LAST
        assert [each.data for each in await reader.read(LAST, LAST)] == [ENTRIES[-1]]
        await ledger.close()


async def test_python_looks_without_disturbing(bookies: BookieCluster, java: PeerClient) -> None:
    async with store_at(bookies.uri) as store:
        writer = await java_ledger(java)
        looked = await store.open_no_recovery(LedgerId(writer.ledger_id))
        assert (looked.last_add_confirmed, looked.length) == (-1, 0)
        for entry in ENTRIES:
            await writer.add(entry)
        reader = await store.open_no_recovery(LedgerId(writer.ledger_id))
        assert (reader.last_add_confirmed, reader.length) == (LAST - 1, ends(ENTRIES)[-2])
        assert await read_all(reader) == list(ENTRIES[:-1])
        assert await writer.add(b"undisturbed") == [LAST + 1]
        again = await store.open_no_recovery(LedgerId(writer.ledger_id))
        assert (again.last_add_confirmed, again.length) == (LAST, LENGTH)
        await writer.close()


# With an ack quorum of one such an entry may be acknowledged: recoveries must find it.


async def test_java_finds_an_entry_that_only_one_bookie_has(
    bookies: BookieCluster, java: PeerClient
) -> None:
    async with store_at(bookies.uri, QUICK) as store:
        ledger = await written(store, *ENTRIES)
        await send_to_one(store, ledger.ledger_id, b"torn")
        reader = await java_open(java, ledger.ledger_id, recover=True)
        await java_reads(reader, [*ENTRIES, b"torn"])
        await both_agree(store, java, ledger.ledger_id, LAST + 1, LENGTH + 4)
        await python_reads(store, ledger.ledger_id, [*ENTRIES, b"torn"])
        await until_copied(store, ledger.ledger_id, b"torn")


async def test_python_finds_an_entry_that_only_one_bookie_has(
    bookies: BookieCluster, java: PeerClient
) -> None:
    writer = await java_ledger(java, *ENTRIES, quorums=QUICK)
    async with store_at(bookies.uri) as store:
        await send_to_one(store, writer.ledger_id, b"torn")
        await store.open(LedgerId(writer.ledger_id))
        await python_reads(store, writer.ledger_id, [*ENTRIES, b"torn"])
        await both_agree(store, java, writer.ledger_id, LAST + 1, LENGTH + 4)
        await until_copied(store, writer.ledger_id, b"torn")
    await java_reads(await java_open(java, writer.ledger_id, recover=False), [*ENTRIES, b"torn"])


async def send_to_one(store: BookKeeperLedgerStore, ledger_id: int, data: bytes) -> None:
    """One more entry, on the second bookie of its write set alone."""
    record = await record_of(store, ledger_id)
    bookie = record.last_ensemble.bookies[record.write_set(LAST + 1)[1]]
    body = Digest(*USUAL).seal(ledger_id, LAST + 1, LAST, LENGTH + len(data), data)
    async with raw_bookies() as raw:
        await raw.put(bookie, ledger_id, LAST + 1, body)


async def until_copied(store: BookKeeperLedgerStore, ledger_id: int, data: bytes) -> None:
    """The entry is on its whole write set."""
    record = await record_of(store, ledger_id)
    async with raw_bookies() as raw:
        for place in record.write_set(LAST + 1):
            bookie = record.last_ensemble.bookies[place]
            held = partial(raw.holds, bookie, ledger_id, LAST + 1)
            await once_it_is(held, f"a copy on {bookie}", timeout_s=30)
            assert (await raw.opened(bookie, ledger_id, LAST + 1)).data == data


@pytest.mark.parametrize("writer_is", ["python", "java"])
async def test_both_recover_at_once_what_is_being_written(
    bookies: BookieCluster, java: PeerClient, java_v2: PeerClient, writer_is: str
) -> None:
    entries = [b"%d:" % number + b"x" * (number * 37 % 1000) for number in range(3000)]
    async with store_at(bookies.uri) as one, store_at(bookies.uri) as store:
        fenced: list[type[Exception] | int] = []
        acknowledged: list[int] = []
        if writer_is == "python":
            ledger = await written(one, *entries[:100])
            ledger_id = ledger.ledger_id

            async def go_on() -> None:
                for number in range(100, len(entries)):
                    try:
                        acknowledged.extend(await append(ledger, entries[number]))
                    except LedgerFenced:
                        fenced.append(LEDGER_FENCED)
                        return
        else:
            writer = await java_ledger(java_v2, *entries[:100])
            ledger_id = LedgerId(writer.ledger_id)

            async def go_on() -> None:
                for number in range(100, len(entries)):
                    try:
                        acknowledged.extend(await writer.add(entries[number]))
                    except PeerError as error:
                        fenced.append(error.code)
                        return

        writing = asyncio.create_task(go_on())
        while not acknowledged:
            await asyncio.sleep(0.01)
        theirs, ours = await asyncio.gather(
            java_open(java, ledger_id, recover=True), store.open(ledger_id)
        )
        await writing
        assert fenced == [LEDGER_FENCED]
        last = ours.last_add_confirmed
        assert theirs.last_add_confirmed == last >= acknowledged[-1]
        # Java takes the length from the entry that told it the last add confirmed, the one after.
        # When it closes, and enough bookies do not have that entry, its length stays in the record.
        lengths = ends(entries)[last : last + 2]
        assert ours.length in lengths
        await java_reads(theirs, entries[: last + 1], length=ours.length)
        await python_reads(store, ledger_id, entries[: last + 1], length=ours.length)
        await both_agree(store, java, ledger_id, last, ours.length)
