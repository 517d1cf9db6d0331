"""The Java client of BookKeeper as a peer: writes, reads, recovers, refuses."""

import pytest

from tests.servers.bookie_cluster import BookieCluster, OnOxia, OnZooKeeperAsPulsar
from tests.servers.bookkeeper_peer.peer import (
    LEDGER_FENCED,
    NO_SUCH_LEDGER_METADATA,
    BookKeeperPeer,
    PeerError,
)
from tests.servers.fixtures import StartBookies
from tests.servers.oxia_part import OxiaServer
from tests.servers.zookeeper_part import ZooKeeperServer

pytestmark = pytest.mark.cluster

ENTRIES = tuple(f"entry-{number}".encode() for number in range(5))


@pytest.mark.parametrize("v2", [True, False], ids=["v2", "v3"])
@pytest.mark.parametrize("digest_type", ["CRC32", "MAC", "CRC32C", "DUMMY"])
async def test_java_peer_reads_what_it_wrote(
    bookies: BookieCluster, bookkeeper_peer: BookKeeperPeer, digest_type: str, v2: bool
) -> None:
    client = await bookkeeper_peer.connect(bookies.uri, v2=v2)
    writer = await client.create_ledger(
        digest_type=digest_type, password=b"secret", custom_metadata={"application": b"magnetar"}
    )
    assert await writer.add(*ENTRIES) == [0, 1, 2, 3, 4]
    await writer.close()
    reader = await client.open_ledger(
        writer.ledger_id, recover=False, digest_type=digest_type, password=b"secret"
    )
    assert (reader.closed, reader.last_add_confirmed, reader.length) == (True, 4, 35)
    read = await reader.read(0, 4)
    assert [each.data for each in read] == list(ENTRIES)
    assert [each.length for each in read] == [7, 14, 21, 28, 35]
    metadata = await client.ledger_metadata(writer.ledger_id)
    assert (metadata.state, metadata.last_entry_id) == ("CLOSED", 4)
    assert metadata.digest_type == digest_type
    assert metadata.password == b"secret"
    assert metadata.custom_metadata == {"application": b"magnetar"}
    assert {each.bookie_id for each in bookies.bookies} == set(metadata.ensembles[0])
    await client.close()


async def test_recovery_fences_the_writer(
    bookies: BookieCluster, bookkeeper_peer: BookKeeperPeer
) -> None:
    client = await bookkeeper_peer.connect(bookies.uri)
    other = await bookkeeper_peer.connect(bookies.uri, v2=False)
    writer = await client.create_ledger(ensemble_size=3, write_quorum_size=3)
    await writer.add(*ENTRIES)
    peeping = await other.open_ledger(writer.ledger_id, recover=False)
    assert not peeping.closed
    assert peeping.last_add_confirmed <= 4
    assert [each.data for each in await peeping.read(0, 4, unconfirmed=True)] == list(ENTRIES)
    recovered = await other.open_ledger(writer.ledger_id, recover=True)
    assert (recovered.closed, recovered.last_add_confirmed) == (True, 4)
    with pytest.raises(PeerError) as refused:
        await writer.add(b"too late")
    assert refused.value.code == LEDGER_FENCED
    assert refused.value.facts["acknowledged"] == []
    await client.close()
    await other.close()


async def test_a_deleted_ledger_is_gone(
    bookies: BookieCluster, bookkeeper_peer: BookKeeperPeer
) -> None:
    client = await bookkeeper_peer.connect(bookies.uri)
    writer = await client.create_ledger()
    assert writer.ledger_id in await client.list_ledgers()
    await writer.close()
    await client.delete_ledger(writer.ledger_id)
    assert writer.ledger_id not in await client.list_ledgers()
    with pytest.raises(PeerError) as refused:
        await client.open_ledger(writer.ledger_id, recover=False)
    assert refused.value.code == NO_SUCH_LEDGER_METADATA
    await client.close()


async def test_batches_and_the_last_confirmed_entry(
    bookies: BookieCluster, bookkeeper_peer: BookKeeperPeer
) -> None:
    client = await bookkeeper_peer.connect(bookies.uri, settings={"batchReadEnabled": True})
    writer = await client.create_ledger(ensemble_size=2)
    await writer.add(*ENTRIES)
    reader = await client.open_ledger(writer.ledger_id, recover=False)
    await writer.add(b"one more")
    assert await reader.read_last_add_confirmed() == 4
    batch = await reader.batch_read(1, 2, 1_000_000)
    assert [each.data for each in batch] == list(ENTRIES[1:3])
    await client.close()


async def test_clients_of_both_drivers_share_a_tree(
    zookeeper: ZooKeeperServer, bookies: BookieCluster, bookkeeper_peer: BookKeeperPeer
) -> None:
    chroot = bookies.uri.removeprefix(f"zk+hierarchical://{zookeeper.address}")
    as_pulsar = OnZooKeeperAsPulsar(zookeeper, chroot.removesuffix("/ledgers"))
    one = await bookkeeper_peer.connect(bookies.uri)
    other = await bookkeeper_peer.connect(as_pulsar.uri)
    writer = await other.create_ledger()
    await writer.add(*ENTRIES)
    reader = await one.open_ledger(writer.ledger_id, recover=True)
    assert [each.data for each in await reader.read(0, 4)] == list(ENTRIES)
    await one.close()
    await other.close()


async def test_ledgers_on_oxia(
    fresh_oxia: OxiaServer, start_bookies: StartBookies, bookkeeper_peer: BookKeeperPeer
) -> None:
    cluster = await start_bookies(OnOxia(fresh_oxia), 2)
    client = await bookkeeper_peer.connect(cluster.uri)
    writer = await client.create_ledger(ensemble_size=2)
    assert writer.ledger_id == 1
    await writer.add(*ENTRIES)
    await writer.close()
    reader = await client.open_ledger(writer.ledger_id, recover=False)
    assert [each.data for each in await reader.read(0, 4)] == list(ENTRIES)
    await client.close()
