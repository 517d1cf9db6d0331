"""Bookies that die, only read or hang; ledgers of both clients, and what Java tools do to ours."""

import asyncio
from collections.abc import Iterator

import pytest

from magnetar.protocol.ids import LedgerId
from storage.ledger.bookkeeper.bookie_client import ReplyCode
from storage.ledger.bookkeeper.ensemble_choice import NotEnoughBookies
from storage.ledger.bookkeeper.ledger_metadata import BookieId, DigestType, LedgerState
from storage.ledger.store import LedgerFenced
from tests.cluster.bookkeeper.interop import (
    both_agree,
    java_ledger,
    java_open,
    java_reads,
    python_reads,
)
from tests.cluster.bookkeeper.ledger_access import (
    Quorums,
    Seal,
    append,
    ends,
    members,
    raw_bookies,
    read_all,
    record_of,
    store_at,
    written,
)
from tests.servers.bookie_cluster import BookieCluster, OnZooKeeper
from tests.servers.bookie_part import BookieServer
from tests.servers.bookkeeper_peer.peer import (
    BookKeeperPeer,
    PeerClient,
)
from tests.servers.fixtures import StartBookies
from tests.servers.ground import Ground
from tests.servers.zookeeper_part import ZooKeeperServer
from tests.support.child_process import once_it_is
from tests.support.waiting import until

pytestmark = pytest.mark.cluster

PARTS = tuple(
    tuple(b"%d-%d:" % (part, number) + b"x" * (number * 37) for number in range(7))
    for part in range(3)
)
ENTRIES = PARTS[0]
PAIRS: Quorums = (2, 2, 2)
CLOSED_OR_OPEN = pytest.mark.parametrize("closed", [True, False], ids=["closed", "open"])


@pytest.fixture
def mended(ground: Ground) -> Iterator[Ground]:
    """Whatever the test did to the bookies is undone before the next one."""
    yield ground
    ground.mend()


@pytest.fixture
def java(ground: Ground, bookkeeper_peer: BookKeeperPeer) -> Iterator[PeerClient]:
    client = asyncio.run(bookkeeper_peer.connect(ground.bookies.uri))
    yield client
    asyncio.run(client.close())


def server(cluster: BookieCluster, bookie: BookieId | str) -> BookieServer:
    (found,) = (each for each in cluster.bookies if each.bookie_id == bookie)
    return found


# Ensemble changes that the other client reads


@CLOSED_OR_OPEN
async def test_java_reads_a_ledger_whose_bookies_python_replaced(
    mended: Ground, java: PeerClient, closed: bool
) -> None:
    """While the bookie that died is down."""
    entries = [*PARTS[0], *PARTS[1]]
    async with store_at(mended.bookies.uri, PAIRS) as store:
        ledger = await written(store, *PARTS[0])
        dead = (await members(store, ledger.ledger_id))[0]
        server(mended.bookies, dead).kill()
        await append(ledger, *PARTS[1])
        if closed:
            await ledger.close()
        await java_reads(await java_open(java, ledger.ledger_id, recover=True), entries)
        ensembles = (await record_of(store, ledger.ledger_id)).ensembles
        assert [each.first_entry_id for each in ensembles] == [0, len(PARTS[0])]
        assert [dead in each.bookies for each in ensembles] == [True, False]
        await both_agree(store, java, ledger.ledger_id, len(entries) - 1, ends(entries)[-1])


@CLOSED_OR_OPEN
async def test_python_reads_a_ledger_whose_bookies_java_replaced(
    mended: Ground, java: PeerClient, closed: bool
) -> None:
    entries = [*PARTS[0], *PARTS[1]]
    writer = await java_ledger(java, *PARTS[0], quorums=PAIRS)
    async with store_at(mended.bookies.uri) as store:
        dead = (await members(store, writer.ledger_id))[0]
        server(mended.bookies, dead).kill()
        await writer.add(*PARTS[1])
        if closed:
            await writer.close()
        await store.open(LedgerId(writer.ledger_id))
        await python_reads(store, writer.ledger_id, entries)
        ensembles = (await record_of(store, writer.ledger_id)).ensembles
        assert [each.first_entry_id for each in ensembles] == [0, len(PARTS[0])]
        assert [dead in each.bookies for each in ensembles] == [True, False]
        await both_agree(store, java, writer.ledger_id, len(entries) - 1, ends(entries)[-1])


@pytest.mark.parametrize("writer_is", ["python", "java"])
async def test_a_ledger_with_three_ensembles(
    mended: Ground, java: PeerClient, writer_is: str
) -> None:
    """Of one bookie each, two of which die one after the other and come back."""
    entries = [entry for part in PARTS for entry in part]
    async with store_at(mended.bookies.uri, (1, 1, 1)) as store:
        if writer_is == "python":
            ledger = await store.create(custom={})
            ledger_id = int(ledger.ledger_id)
        else:
            writer = await java_ledger(java, quorums=(1, 1, 1))
            ledger_id = writer.ledger_id
        for part in PARTS:
            if part is not PARTS[0]:
                (bookie,) = await members(store, ledger_id)
                server(mended.bookies, bookie).kill()
            await (append(ledger, *part) if writer_is == "python" else writer.add(*part))
        await mended.bookies.mend()
        if writer_is == "python":
            await java_reads(await java_open(java, ledger_id, recover=True), entries)
        await store.open(LedgerId(ledger_id))
        await python_reads(store, ledger_id, entries)
        ensembles = (await record_of(store, ledger_id)).ensembles
        assert [each.first_entry_id for each in ensembles] == [0, 7, 14]
        assert len({each.bookies for each in ensembles}) == 3
        await both_agree(store, java, ledger_id, len(entries) - 1, ends(entries)[-1])


@pytest.mark.parametrize("recoverer", ["python", "java"])
async def test_a_recovery_replaces_a_bookie_that_died(
    mended: Ground, java: PeerClient, recoverer: str
) -> None:
    """What it writes back goes to another one, as the record says when it is closed."""
    async with store_at(mended.bookies.uri, PAIRS) as store:
        if recoverer == "java":
            ledger_id = (await written(store, *ENTRIES)).ledger_id
        else:
            ledger_id = LedgerId((await java_ledger(java, *ENTRIES, quorums=PAIRS)).ledger_id)
        dead, _ = await members(store, ledger_id)
        server(mended.bookies, dead).kill()
        if recoverer == "java":
            await java_open(java, ledger_id, recover=True)
        else:
            await store.open(ledger_id)
        replaced = await members(store, ledger_id)
        assert dead not in replaced
        await java_reads(await java_open(java, ledger_id, recover=False), ENTRIES)
        await python_reads(store, ledger_id, ENTRIES)
        await both_agree(store, java, ledger_id, len(ENTRIES) - 1, ends(ENTRIES)[-1])
        last = len(ENTRIES) - 1
        async with raw_bookies() as raw:
            for bookie in replaced:
                assert (await raw.opened(bookie, ledger_id, last)).data == ENTRIES[last]


# BookKeeper's shell, and recovery of bookies


async def test_the_shell_understands_our_ledgers(ground: Ground) -> None:
    shell = ground.bookies.shell
    async with store_at(ground.bookies.uri, PAIRS, Seal(DigestType.MAC, b"secret")) as store:
        closed, idle = await store.create(custom={"application": b"pulsar"}), await written(store)
        await append(closed, *ENTRIES)
        await closed.close()
        told, listed, read = await asyncio.gather(
            shell("ledgermetadata", "-l", str(closed.ledger_id)),
            shell("listledgers", "-m"),
            shell("readledger", "-l", str(closed.ledger_id), "-m"),
        )
        ensemble = ", ".join(await members(store, closed.ledger_id))
        as_java_says_it = (
            "LedgerMetadata{formatVersion=3, ensembleSize=2, writeQuorumSize=2, ackQuorumSize=2, "
            f"state=CLOSED, length={ends(ENTRIES)[-1]}, lastEntryId={len(ENTRIES) - 1}, "
            f"digestType=MAC, password=base64:c2VjcmV0, ensembles={{0=[{ensemble}]}}, "
            "customMetadata={application=base64:cHVsc2Fy}"
        )
        assert as_java_says_it in told
        assert f"ledgerId={closed.ledger_id}, metadata={as_java_says_it}" in listed
        (line,) = (each for each in listed.splitlines() if f"ledgerId={idle.ledger_id}," in each)
        assert "state=OPEN" in line
        for entry_id, (entry, end) in enumerate(zip(ENTRIES, ends(ENTRIES), strict=True)):
            facts = f"entryId={entry_id}, entrySize={end}, ledgerId={closed.ledger_id}"
            assert f"{{{facts}}}\n{entry.decode()}\n" in read
        assert await append(idle, b"undisturbed") == [0]


async def test_entries_that_were_copied_to_other_bookies_are_found(
    mended: Ground, java: PeerClient
) -> None:
    """A reader whose record is old reads it again when none of its bookies gives an entry."""
    bookies = mended.bookies
    async with store_at(bookies.uri, PAIRS) as store:
        ledger = await written(store, *ENTRIES)
        await ledger.close()
        reader = await store.open(ledger.ledger_id)
        lost, other = await members(store, ledger.ledger_id)
        server(bookies, lost).kill()
        await server(bookies, lost).until_unregistered()
        await bookies.shell("recover", "-f", "-l", str(ledger.ledger_id), lost)
        copied = await members(store, ledger.ledger_id)
        assert lost not in copied
        assert other in copied
        assert reader.metadata.last_ensemble.bookies == (lost, other)  # type: ignore[attr-defined]
        server(bookies, other).kill()
        assert await read_all(reader) == list(ENTRIES)
        assert reader.metadata.last_ensemble.bookies == copied  # type: ignore[attr-defined]
        await bookies.mend()
        await both_agree(store, java, ledger.ledger_id, len(ENTRIES) - 1, ends(ENTRIES)[-1])


async def test_recovery_of_a_bookie_ends_its_open_ledgers(mended: Ground, java: PeerClient) -> None:
    """The tool takes an idle ledger over; its writer finds out, and nothing is lost."""
    bookies = mended.bookies
    async with store_at(bookies.uri, PAIRS) as store:
        ledger = await written(store, *ENTRIES)
        lost = (await members(store, ledger.ledger_id))[0]
        server(bookies, lost).kill()
        await server(bookies, lost).until_unregistered()
        await bookies.shell("recover", "-f", "-l", str(ledger.ledger_id), lost)
        with pytest.raises(LedgerFenced):
            await append(ledger, b"too late")
        await python_reads(store, ledger.ledger_id, ENTRIES)
        record = await record_of(store, ledger.ledger_id)
        assert not any(lost in each.bookies for each in record.ensembles)
        await java_reads(await java_open(java, ledger.ledger_id, recover=False), ENTRIES)


async def test_auto_recovery_copies_and_fences(
    zookeeper: ZooKeeperServer, zookeeper_chroot: str, start_bookies: StartBookies
) -> None:
    """Of a dead bookie: a closed ledger is copied, an idle open one is taken over as well."""
    settings = {
        "autoRecoveryDaemonEnabled": "true",
        "openLedgerRereplicationGracePeriod": 1000,
        "rwRereplicateBackoffMs": 500,
        "lostBookieRecoveryDelay": 0,
    }
    cluster = await start_bookies(OnZooKeeper(zookeeper, zookeeper_chroot), 3, settings)
    async with store_at(cluster.uri, PAIRS) as store:
        closed, idle = await written(store, *ENTRIES), await written(store, *ENTRIES)
        await closed.close()
        lost = (await members(store, idle.ledger_id))[0]
        while lost not in await members(store, closed.ledger_id):
            closed = await written(store, *ENTRIES)
            await closed.close()
        server(cluster, lost).kill()

        async def copied() -> bool:
            for each in (closed, idle):
                record = await record_of(store, each.ledger_id)
                if any(lost in ensemble.bookies for ensemble in record.ensembles):
                    return False
            return (await record_of(store, idle.ledger_id)).state is LedgerState.CLOSED

        await once_it_is(copied, "the end of auto-recovery", timeout_s=180)
        with pytest.raises(LedgerFenced):
            await append(idle, b"too late")
        for each in (closed, idle):
            await python_reads(store, each.ledger_id, ENTRIES)


# Bookies that only read


async def restarted(bookie: BookieServer, *, read_only: bool) -> None:
    """The bookie comes back as asked, on its data."""
    bookie.settings.pop("forceReadOnlyBookie", None)
    if read_only:
        bookie.settings["forceReadOnlyBookie"] = "true"
    await bookie.restart()


async def test_a_bookie_that_only_reads_is_replaced_and_read(
    mended: Ground, bookkeeper_peer: BookKeeperPeer
) -> None:
    bookies = mended.bookies
    async with store_at(bookies.uri, PAIRS) as store, store_at(bookies.uri, PAIRS) as other:
        ledger, idle = await written(store, *PARTS[0]), None
        first, second = await members(store, ledger.ledger_id)
        while idle is None or await members(store, idle.ledger_id) != (first, second):
            idle = await written(store, *ENTRIES)
        try:
            await restarted(server(bookies, first), read_only=True)
            known = store._services.metadata
            await until(lambda: first in known.bookies.read_only)
            await append(ledger, *PARTS[1])
            refusals = store._services.bookies.counters.refusals
            assert refusals[ReplyCode.READ_ONLY] > 0
            ensembles = (await record_of(store, ledger.ledger_id)).ensembles
            assert [each.first_entry_id for each in ensembles] == [0, len(PARTS[0])]
            assert [first in each.bookies for each in ensembles] == [True, False]
            for _ in range(5):
                assert first not in await members(store, (await store.create(custom={})).ledger_id)
            with pytest.raises(NotEnoughBookies):
                async with store_at(bookies.uri, (3, 2, 2)) as greedy:
                    await greedy.create(custom={})

            # Fenced there, read, and written back: it keeps its place.
            reader = await other.open(idle.ledger_id)
            record = await record_of(store, idle.ledger_id)
            assert [each.bookies for each in record.ensembles] == [(first, second)]
            with pytest.raises(LedgerFenced):
                await append(idle, b"too late")
            await ledger.close()
            server(bookies, second).kill()
            assert await read_all(reader) == list(ENTRIES)
            reader = await other.open(ledger.ledger_id)
            assert await reader.read(0, 6, max_bytes=1 << 20) == list(PARTS[0])
            # One that knew the bookie before may forget for good where it is: it hears of the
            # place that has gone after that of the place that has come.
            java = await bookkeeper_peer.connect(bookies.uri)
            await java_reads(await java_open(java, idle.ledger_id, recover=False), ENTRIES)
            await java.close()
        finally:
            await restarted(server(bookies, first), read_only=False)


# Bookies that hang


async def test_a_read_does_not_wait_for_a_bookie_that_hangs_longer_than_its_timeout(
    mended: Ground,
) -> None:
    uri = mended.bookies.uri
    async with store_at(uri, PAIRS) as writer, store_at(uri, request_timeout_s=4) as store:
        ledger = await written(writer, *ENTRIES)
        await ledger.close()
        first = server(mended.bookies, (await members(store, ledger.ledger_id))[0])
        first.pause()
        try:
            reader = await store.open(ledger.ledger_id)
            assert await read_all(reader) == list(ENTRIES)
            assert store.counters.read_retries > 0
        finally:
            first.resume()
