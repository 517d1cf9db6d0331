"""The wire against real bookies: one as usual, one that only reads, has TLS and little patience."""

import asyncio
import random
import ssl
from collections.abc import AsyncIterator, Iterator, Sequence
from struct import Struct

import pytest

from magnetar.protocol.ids import LedgerId
from storage.ledger.bookkeeper import wire
from storage.ledger.bookkeeper.bookie_client import ReplyCode
from storage.ledger.bookkeeper.bookie_options import BookieOptions
from storage.ledger.bookkeeper.bookies import BookiePool
from storage.ledger.bookkeeper.digest import Digest, DigestMismatch, master_key
from storage.ledger.bookkeeper.ledger_metadata import BookieId, DigestType
from tests.servers.bookie_cluster import BookieCluster, OnZooKeeper
from tests.servers.bookie_part import MAX_FRAME_BYTES
from tests.servers.zookeeper_part import ZooKeeperServer
from tests.support.certificates import Certificate, make_certificate
from tests.support.child_process import HOST
from tests.support.waiting import until

pytestmark = pytest.mark.cluster

KEEP = {"gcWaitTime": 3_600_000, "minorCompactionThreshold": 0, "majorCompactionThreshold": 0}
"""Ledgers without a record, as these, stay."""
KEY = master_key(b"secret")
OTHER_KEY = master_key(b"other")
DIGEST = Digest(DigestType.CRC32C, b"secret")
OK = ReplyCode.OK
Bookies = tuple[BookieId, BookieId]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"), HOST)


@pytest.fixture(scope="module")
def cluster(
    zookeeper: ZooKeeperServer,
    certificate: Certificate,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[BookieCluster]:
    root = OnZooKeeper(zookeeper, zookeeper.fresh_chroot())
    started = BookieCluster(tmp_path_factory.mktemp("wire"), root, 1, KEEP)
    tls = {
        "tlsProvider": "JDK",
        "tlsProviderFactoryClass": "org.apache.bookkeeper.tls.TLSContextFactory",
        "tlsKeyStoreType": "PEM",
        "tlsKeyStore": certificate.key,
        "tlsCertificatePath": certificate.chain,
        "tlsClientAuthentication": "false",
    }
    other = {"forceReadOnlyBookie": "true", "maxPendingReadRequestsPerThread": 1, **tls, **KEEP}

    async def start() -> None:
        await started.start()
        await started.add_bookie(other)

    try:
        asyncio.run(start())
        yield started
    finally:
        started.kill()


@pytest.fixture(scope="module")
def bookies(cluster: BookieCluster) -> Bookies:
    """The usual one, and the one that only reads."""
    usual, only_reads = cluster.bookies
    return BookieId(usual.bookie_id), BookieId(only_reads.bookie_id)


class Client:
    """A pool whose answers can be awaited."""

    def __init__(self, options: BookieOptions | None = None) -> None:
        self.pool = BookiePool(
            lambda _: None, options or BookieOptions(max_frame_bytes=MAX_FRAME_BYTES)
        )

    async def add(
        self,
        bookie: BookieId,
        ledger: LedgerId,
        entry: int,
        data: bytes = b"data",
        *,
        key: bytes = KEY,
        recovery: bool = False,
    ) -> ReplyCode:
        told: asyncio.Future[ReplyCode] = asyncio.get_running_loop().create_future()
        body = DIGEST.seal(ledger, entry, entry - 1, 100, data)
        self.pool.add(bookie, ledger, entry, key, body, told.set_result, recovery=recovery)
        return await told

    async def read(
        self, bookie: BookieId, ledger: LedgerId, entry: int, *, fence_with: bytes | None = None
    ) -> tuple[ReplyCode, bytes]:
        told: asyncio.Future[tuple[ReplyCode, bytes]] = asyncio.get_running_loop().create_future()
        self.pool.read(
            bookie,
            ledger,
            entry,
            lambda code, body: told.set_result((code, body)),
            fence_with=fence_with,
        )
        return await told

    async def read_batch(
        self, bookie: BookieId, ledger: LedgerId, first: int, entries: int, size: int
    ) -> tuple[ReplyCode, Sequence[bytes]]:
        told: asyncio.Future[tuple[ReplyCode, Sequence[bytes]]]
        told = asyncio.get_running_loop().create_future()
        self.pool.read_batch(
            bookie,
            ledger,
            first,
            entries,
            size,
            lambda code, bodies: told.set_result((code, bodies)),
        )
        return await told


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    made = Client()
    yield made
    await made.pool.close()


@pytest.fixture
def ledger() -> LedgerId:
    """An id that no other test uses."""
    return LedgerId(random.SystemRandom().randrange(2**40))


async def test_entries_come_back(client: Client, bookies: Bookies, ledger: LedgerId) -> None:
    bookie, _ = bookies
    for entry in (0, 1, 3):
        assert await client.add(bookie, ledger, entry, b"entry %d" % entry) is OK
    for asked, entry in ((0, 0), (1, 1), (3, 3), (-1, 3)):
        code, body = await client.read(bookie, ledger, asked)
        assert code is OK
        assert DIGEST.open(body, ledger, entry).data == b"entry %d" % entry
    assert await client.read(bookie, ledger, 2) == (ReplyCode.NO_SUCH_ENTRY, b"")
    assert await client.read(bookie, LedgerId(ledger + 1), 0) == (ReplyCode.NO_SUCH_LEDGER, b"")
    assert client.pool.counters.connects == 1


async def test_all_digests(client: Client, bookies: Bookies, ledger: LedgerId) -> None:
    """Bookies keep what they get; only the reader judges."""
    for entry, digest_type in enumerate(DigestType):
        digest = Digest(digest_type, b"secret")
        told: asyncio.Future[ReplyCode] = asyncio.get_running_loop().create_future()
        body = digest.seal(ledger, entry, -1, 4, b"data")
        client.pool.add(bookies[0], ledger, entry, KEY, body, told.set_result)
        assert await told is OK
        _, found = await client.read(bookies[0], ledger, entry)
        assert digest.open(found, ledger, entry) == (entry, -1, 4, b"data")
        if digest_type is not DigestType.CRC32C:
            with pytest.raises(DigestMismatch):
                DIGEST.open(found, ledger, entry)


async def test_a_fence_stops_adds_but_not_those_of_a_recovery(
    client: Client, bookies: Bookies, ledger: LedgerId
) -> None:
    bookie, _ = bookies
    assert await client.add(bookie, ledger, 0) is OK
    code, body = await client.read(bookie, ledger, -1, fence_with=KEY)
    assert (code, DIGEST.open(body, ledger, None).entry_id) == (OK, 0)
    assert await client.add(bookie, ledger, 1) is ReplyCode.FENCED
    assert await client.add(bookie, ledger, 1, b"written back", recovery=True) is OK
    _, body = await client.read(bookie, ledger, 1)
    assert DIGEST.open(body, ledger, 1).data == b"written back"


async def test_a_ledger_is_fenced_where_it_never_was(
    client: Client, bookies: Bookies, ledger: LedgerId
) -> None:
    bookie, _ = bookies
    code, _ = await client.read(bookie, ledger, -1, fence_with=KEY)
    assert code is ReplyCode.NO_SUCH_ENTRY
    assert await client.add(bookie, ledger, 0) is ReplyCode.FENCED


async def test_the_master_key_of_the_first_counts(
    client: Client, bookies: Bookies, ledger: LedgerId
) -> None:
    bookie, _ = bookies
    assert await client.add(bookie, ledger, 0) is OK
    assert await client.add(bookie, ledger, 1, key=OTHER_KEY) is ReplyCode.UNAUTHORISED
    code, _ = await client.read(bookie, ledger, 0, fence_with=OTHER_KEY)
    assert code is ReplyCode.UNAUTHORISED
    assert await client.add(bookie, ledger, 1) is OK


async def test_batches(client: Client, bookies: Bookies, ledger: LedgerId) -> None:
    bookie, _ = bookies
    for entry in (0, 1, 2, 3, 5):
        assert await client.add(bookie, ledger, entry, bytes(1000)) is OK

    async def found(first: int, entries: int, size: int) -> list[int]:
        code, bodies = await client.read_batch(bookie, ledger, first, entries, size)
        assert code is (OK if bodies else ReplyCode.NO_SUCH_ENTRY)
        return [DIGEST.open(body, ledger, None).entry_id for body in bodies]

    assert await found(0, 10, 10**9) == [0, 1, 2, 3]
    assert await found(1, 2, 10**9) == [1, 2]
    assert await found(0, 0, 10**9) == [0, 1, 2, 3]
    assert await found(1, 10, 1) == [1]
    assert await found(0, 10, 2500) == [0, 1]
    assert await found(4, 10, 10**9) == []
    assert await found(5, 10, 10**9) == [5]
    unknown = await client.read_batch(bookie, LedgerId(ledger + 1), 0, 10, 100)
    assert unknown[0] is ReplyCode.NO_SUCH_LEDGER


async def test_a_batch_as_large_as_it_may_be(
    client: Client, bookies: Bookies, ledger: LedgerId
) -> None:
    bookie, _ = bookies
    for entry in range(12):
        assert await client.add(bookie, ledger, entry, bytes(1_000_000)) is OK
    code, bodies = await client.read_batch(bookie, ledger, 0, 100, 10**9)
    assert code is OK
    assert [DIGEST.open(body, ledger, n).entry_id for n, body in enumerate(bodies)] == [
        *range(len(bodies))
    ]
    assert 4 <= len(bodies) <= 6


async def test_a_frame_at_the_limit_passes_and_one_above_stays_here(
    client: Client, bookies: Bookies, ledger: LedgerId
) -> None:
    bookie, _ = bookies
    largest = MAX_FRAME_BYTES - wire.ADD_HEAD_BYTES - DIGEST.overhead_bytes
    assert await client.add(bookie, ledger, 0, bytes(largest)) is OK
    assert await client.add(bookie, ledger, 1, bytes(largest + 1)) is ReplyCode.TOO_LARGE
    code, body = await client.read(bookie, ledger, 0)
    assert (code, len(DIGEST.open(body, ledger, 0).data)) == (OK, largest)
    code, bodies = await client.read_batch(bookie, ledger, 0, 10, 1)
    assert (code, [len(body) for body in bodies]) == (OK, [largest + DIGEST.overhead_bytes])


async def test_one_byte_above_the_limit_resets_the_connection(
    bookies: Bookies, ledger: LedgerId
) -> None:
    """Why a frame is measured before it is sent."""
    careless = Client(BookieOptions(max_frame_bytes=2 * MAX_FRAME_BYTES))
    largest = MAX_FRAME_BYTES - wire.ADD_HEAD_BYTES - DIGEST.overhead_bytes
    told = await careless.add(bookies[0], ledger, 0, bytes(largest + 1))
    assert told is ReplyCode.DISCONNECTED
    await careless.pool.close()


async def test_the_same_requests_in_a_row_have_an_answer_each(
    client: Client, bookies: Bookies, ledger: LedgerId
) -> None:
    bookie, _ = bookies
    codes = await asyncio.gather(*(client.add(bookie, ledger, 0) for _ in range(50)))
    assert codes == [OK] * 50
    reads = await asyncio.gather(*(client.read(bookie, ledger, 0) for _ in range(50)))
    assert {code for code, _ in reads} == {OK}
    absent = await asyncio.gather(*(client.read(bookie, ledger, 1) for _ in range(50)))
    assert absent == [(ReplyCode.NO_SUCH_ENTRY, b"")] * 50
    assert client.pool.counters.connects == 1


async def test_many_adds_in_flight(client: Client, bookies: Bookies, ledger: LedgerId) -> None:
    told: list[ReplyCode] = []
    for entry in range(30_000):
        body = DIGEST.seal(ledger, entry, entry - 1, 100, b"data")
        client.pool.add(bookies[0], ledger, entry, KEY, body, told.append)
    await until(lambda: len(told) == 30_000)
    assert set(told) == {OK}


async def test_a_bookie_that_only_reads(client: Client, bookies: Bookies, ledger: LedgerId) -> None:
    _, only_reads = bookies
    assert await client.add(only_reads, ledger, 0) is ReplyCode.READ_ONLY
    assert await client.add(only_reads, ledger, 0, recovery=True) is OK
    code, _ = await client.read(only_reads, ledger, 0, fence_with=KEY)
    assert code is OK
    assert await client.add(only_reads, ledger, 1) is ReplyCode.READ_ONLY


async def test_a_bookie_with_too_much_to_do_says_so(
    client: Client, bookies: Bookies, ledger: LedgerId
) -> None:
    _, impatient = bookies
    assert await client.add(impatient, ledger, 0, bytes(100_000), recovery=True) is OK
    reads = await asyncio.gather(*(client.read(impatient, ledger, 0) for _ in range(2000)))
    assert {code for code, _ in reads} == {OK, ReplyCode.TOO_MANY_REQUESTS}


async def test_an_unknown_version_is_told(bookies: Bookies, ledger: LedgerId) -> None:
    """What a client of a newer protocol would get: the code is ours to read."""
    host, _, port = bookies[0].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    frame = bytearray(wire.encode_read(ledger, 0))
    frame[4] = 3
    writer.write(frame)
    async with asyncio.timeout(30):
        size, head, code, *_ = Struct(">IIiqq").unpack(await reader.readexactly(28))
    assert (size, head, code) == (24, 0x0302_0000, ReplyCode.BAD_VERSION)
    writer.close()
    await writer.wait_closed()


# TLS and authentication


class Token:
    plugin_name = "token"

    def __init__(self) -> None:
        self.heard = 0

    def first(self) -> bytes:
        return b"token"

    def answer(self, payload: bytes) -> bytes | None:
        self.heard += 1
        return None


async def test_a_bookie_without_authentication_goes_on(bookies: Bookies, ledger: LedgerId) -> None:
    token = Token()
    client = Client(BookieOptions(auth=lambda: token))
    assert await client.add(bookies[0], ledger, 0) is OK
    assert token.heard == 0
    await client.pool.close()


async def test_tls_on_the_port_for_everything(
    bookies: Bookies, ledger: LedgerId, certificate: Certificate
) -> None:
    context = ssl.create_default_context(cafile=str(certificate.chain))
    client = Client(BookieOptions(tls=context, auth=Token))
    assert await client.add(bookies[1], ledger, 0, bytes(1_000_000), recovery=True) is OK
    code, body = await client.read(bookies[1], ledger, 0)
    assert (code, len(DIGEST.open(body, ledger, 0).data)) == (OK, 1_000_000)
    assert client.pool.counters.connects == 2
    await client.pool.close()


async def test_a_bookie_without_tls_is_not_used_when_tls_is_asked_for(
    bookies: Bookies, ledger: LedgerId, certificate: Certificate
) -> None:
    context = ssl.create_default_context(cafile=str(certificate.chain))
    client = Client(BookieOptions(tls=context))
    assert await client.add(bookies[0], ledger, 0) is ReplyCode.DISCONNECTED
    assert client.pool.counters.failed_connects == 1
    await client.pool.close()


# Faults


async def test_a_paused_bookie_answers_late_and_nobody_mistakes_it(
    cluster: BookieCluster, bookies: Bookies, ledger: LedgerId
) -> None:
    """The old request gets NO_SUCH_ENTRY, late; the new one must see the entry all the same."""
    bookie, _ = bookies
    client = Client(BookieOptions(request_timeout_s=8))
    assert await client.add(bookie, ledger, 0) is OK
    usual = cluster.bookies[0]
    usual.pause()
    try:
        assert await client.read(bookie, ledger, 1) == (ReplyCode.TIMED_OUT, b"")
        adding = asyncio.create_task(client.add(bookie, ledger, 1))
        reading = asyncio.create_task(client.read(bookie, ledger, 0))
        await asyncio.sleep(0)
    finally:
        usual.resume()
    assert await adding is OK
    assert (await reading)[0] is OK
    code, body = await client.read(bookie, ledger, 1)
    assert (code, DIGEST.open(body, ledger, 1).data) == (OK, b"data")
    assert client.pool.counters.connects == 1
    await client.pool.close()


async def test_a_killed_bookie_is_seen_at_once_and_found_again(
    client: Client, cluster: BookieCluster, bookies: Bookies, ledger: LedgerId
) -> None:
    bookie, _ = bookies
    assert await client.add(bookie, ledger, 0) is OK
    usual = cluster.bookies[0]
    usual.pause()
    adding = [asyncio.create_task(client.add(bookie, ledger, entry)) for entry in range(1, 20)]
    await asyncio.sleep(0)
    usual.kill()
    async with asyncio.timeout(30):
        codes = await asyncio.gather(*adding)
    assert set(codes) == {ReplyCode.DISCONNECTED}
    assert await client.add(bookie, ledger, 1) is ReplyCode.DISCONNECTED
    await usual.restart()
    while (code := await client.add(bookie, ledger, 1)) is ReplyCode.DISCONNECTED:
        await asyncio.sleep(0.1)
    assert code is OK
    code, body = await client.read(bookie, ledger, 0)
    assert (code, DIGEST.open(body, ledger, 0).data) == (OK, b"data")
