"""What BookKeeper's own client and bookies wrote, byte for byte: records and entries."""

import asyncio
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from kazoo.client import KazooClient

from magnetar.protocol.ids import LedgerId
from storage.ledger.bookkeeper.bookie_client import ReplyCode
from storage.ledger.bookkeeper.bookies import BookiePool
from storage.ledger.bookkeeper.digest import Digest
from storage.ledger.bookkeeper.ledger_metadata import BookieId, DigestType, LedgerState
from storage.ledger.bookkeeper.metadata_format import (
    LedgerPaths,
    check_layout,
    decode_bookie,
    decode_metadata,
    encode_metadata,
    parse_address,
)
from tests.servers.bookie_cluster import BookieCluster
from tests.servers.bookkeeper_peer.peer import BookKeeperPeer

pytestmark = pytest.mark.cluster

ENTRIES = tuple(f"entry-{number}".encode() for number in range(5))


class Tree:
    """The nodes of the bookies' ZooKeeper."""

    def __init__(self, uri: str) -> None:
        parts = urlsplit(uri)
        self.paths = LedgerPaths(parts.path)
        self.client = KazooClient(parts.netloc)
        self.client.start(timeout=15)

    def value(self, path: str) -> bytes:
        value: bytes = self.client.get(path)[0]
        return value


@pytest.fixture
def tree(bookies: BookieCluster) -> Iterator[Tree]:
    opened = Tree(bookies.uri)
    yield opened
    opened.client.stop()
    opened.client.close()


@pytest.mark.parametrize("digest_type", DigestType)
@pytest.mark.parametrize("v2", [True, False], ids=["v2", "v3"])
async def test_a_ledger_of_java(
    bookies: BookieCluster,
    bookkeeper_peer: BookKeeperPeer,
    tree: Tree,
    digest_type: DigestType,
    v2: bool,
) -> None:
    client = await bookkeeper_peer.connect(bookies.uri, v2=v2)
    writer = await client.create_ledger(
        digest_type=digest_type.name,
        password=b"secret",
        custom_metadata={"application": b"pulsar", "component": b"managed-ledger"},
    )
    path = tree.paths.ledger(writer.ledger_id)
    opened = tree.value(path)
    record = decode_metadata(opened, writer.ledger_id)
    assert encode_metadata(record) == opened
    assert (record.state, record.last_entry_id, record.length) == (LedgerState.OPEN, -1, 0)
    assert (record.ensemble_size, record.write_quorum, record.ack_quorum) == (3, 2, 2)
    assert (record.digest_type, record.password) == (digest_type, b"secret")
    assert record.custom == {"application": b"pulsar", "component": b"managed-ledger"}
    assert set(record.last_ensemble.bookies) == {each.bookie_id for each in bookies.bookies}
    assert record.creator_token is not None
    assert record.unknown == b""

    await writer.add(*ENTRIES)
    await writer.close()
    closed = tree.value(path)
    ended = decode_metadata(closed, writer.ledger_id)
    assert encode_metadata(ended) == closed
    assert (ended.state, ended.last_entry_id, ended.length) == (LedgerState.CLOSED, 4, 35)
    assert ended.creator_token == 0, "Java keeps the token only until it writes again"
    await client.close()

    pool = BookiePool(lambda _: None)
    digest = Digest(digest_type, b"secret")
    for entry, data in enumerate(ENTRIES):
        for place in ended.write_set(entry):
            bookie = ended.ensemble_of(entry).bookies[place]
            found = digest.open(
                await read(pool, bookie, writer.ledger_id, entry), writer.ledger_id, entry
            )
            assert found.data == data
            assert found.length == 7 * (entry + 1)
            assert -1 <= found.last_add_confirmed < entry
    await pool.close()


async def read(pool: BookiePool, bookie: BookieId, ledger: int, entry: int) -> bytes:
    told: asyncio.Future[tuple[ReplyCode, bytes]] = asyncio.get_running_loop().create_future()
    pool.read(bookie, LedgerId(ledger), entry, lambda code, body: told.set_result((code, body)))
    code, body = await told
    assert code is ReplyCode.OK
    return body


async def test_the_records_of_bookies_and_the_layout(bookies: BookieCluster, tree: Tree) -> None:
    check_layout(tree.value(tree.paths.layout))
    for bookie in bookies.bookies:
        name = BookieId(bookie.bookie_id)
        value = tree.value(f"{tree.paths.available}/{name}")
        assert value
        assert decode_bookie(BookieId("by another name"), value) == parse_address(name)
