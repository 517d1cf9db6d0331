"""Many bookies: connections on demand, apart for recovery, and made again after a while."""

import asyncio
import ssl
import struct
from collections.abc import AsyncIterator, Callable

import pytest
import uvloop
from structlog.testing import capture_logs

from magnetar.protocol.ids import LedgerId
from storage.ledger.bookkeeper.bookie_client import ReplyCode
from storage.ledger.bookkeeper.bookie_options import BookieOptions
from storage.ledger.bookkeeper.bookies import BookiePool
from storage.ledger.bookkeeper.digest import Digest, master_key
from storage.ledger.bookkeeper.ledger_metadata import BookieId, DigestType
from storage.ledger.bookkeeper.metadata_store import BookieAddress
from tests.support.waiting import TIMEOUT_S, until
from tests.unit.storage.ledger.bookkeeper.bookie_frames import start_tls_reply
from tests.unit.storage.ledger.bookkeeper.fake_bookie import HOST, FakeBookie

KEY = master_key(b"")
DIGEST = Digest(DigestType.CRC32C, b"")
LEDGER = LedgerId(1)
OK = ReplyCode.OK
GONE = ReplyCode.DISCONNECTED


class Client:
    """A pool, and what its callers were told."""

    def __init__(self, options: BookieOptions | None = None) -> None:
        self.addresses: dict[BookieId, BookieAddress] = {}
        self.pool = BookiePool(self.addresses.get, options or BookieOptions(connect_timeout_s=10))
        self.told: list[ReplyCode] = []

    async def add(self, bookie: BookieId, entry: int = 0, *, recovery: bool = False) -> ReplyCode:
        body = DIGEST.seal(LEDGER, entry, -1, 1, b"x")
        told: list[ReplyCode] = []
        self.pool.add(bookie, LEDGER, entry, KEY, body, told.append, recovery=recovery)
        assert not told
        await until(lambda: bool(told))
        return told[0]

    async def read(
        self, bookie: BookieId, entry: int, *, fence_with: bytes | None = None
    ) -> tuple[ReplyCode, bytes]:
        told: list[tuple[ReplyCode, bytes]] = []
        self.pool.read(
            bookie,
            LEDGER,
            entry,
            lambda code, body: told.append((code, body)),
            fence_with=fence_with,
        )
        assert not told
        await until(lambda: bool(told))
        return told[0]

    async def read_batch(self, bookie: BookieId) -> tuple[ReplyCode, int]:
        told: list[tuple[ReplyCode, int]] = []
        self.pool.read_batch(
            bookie, LEDGER, 0, 10, 1000, lambda code, bodies: told.append((code, len(bodies)))
        )
        assert not told
        await until(lambda: bool(told))
        return told[0]


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    made = Client()
    yield made
    await made.pool.close()


async def test_one_connection_serves_all_requests(client: Client, bookie: FakeBookie) -> None:
    codes = await asyncio.gather(*(client.add(bookie.bookie_id, entry) for entry in range(5)))
    assert codes == [OK] * 5
    assert await client.read_batch(bookie.bookie_id) == (OK, 5)
    code, body = await client.read(bookie.bookie_id, -1)
    assert (code, DIGEST.open(body, LEDGER, 4).data) == (OK, b"x")
    assert bookie.connections == 1
    assert client.pool.counters.connects == 1
    assert client.pool.counters.requests == 7
    assert client.pool.counters.bytes_sent > 5 * 60
    assert client.pool.counters.bytes_received > 5 * 28


async def test_bookies_have_connections_of_their_own(client: Client, bookie: FakeBookie) -> None:
    other = FakeBookie()
    await other.start()
    assert await client.add(bookie.bookie_id, 0) is OK
    assert await client.add(other.bookie_id, 1) is OK
    assert [set(each.entries) for each in (bookie, other)] == [{(1, 0)}, {(1, 1)}]
    await other.stop()


async def test_a_recovery_is_never_answered_for_another_request(
    client: Client, bookie: FakeBookie
) -> None:
    """A plain read is answered late: the fencing one must not take that for its answer."""
    assert await client.add(bookie.bookie_id, 0) is OK
    bookie.hold()
    plain = asyncio.create_task(client.read(bookie.bookie_id, 0))
    fencing = asyncio.create_task(client.read(bookie.bookie_id, 0, fence_with=KEY))
    recovering = asyncio.create_task(client.add(bookie.bookie_id, 0, recovery=True))
    await until(lambda: len(bookie.asked) == 4)
    assert bookie.connections == 2
    assert sorted(asked.flags for asked in bookie.asked[1:]) == [0, 5, 6]
    bookie.release()
    assert (await plain)[0] is (await fencing)[0] is await recovering is OK


async def test_the_address_is_the_registered_one_and_else_in_the_id(
    client: Client, bookie: FakeBookie
) -> None:
    client.addresses[BookieId("left")] = bookie.address
    assert await client.add(BookieId("left")) is OK
    client.addresses[BookieId("127.0.0.1:1")] = bookie.address
    assert await client.add(BookieId("127.0.0.1:1")) is OK
    assert bookie.connections == 2
    assert await client.add(BookieId("unknown")) is GONE
    assert client.pool.counters.failed_connects == 1


async def test_a_lost_connection_is_made_again_by_the_next_request(
    client: Client, bookie: FakeBookie
) -> None:
    assert await client.add(bookie.bookie_id) is OK
    bookie.drop()
    await until(lambda: not client.pool._plain.connections)
    assert await client.add(bookie.bookie_id) is OK
    assert bookie.connections == 2


async def test_pool_pauses_after_a_failed_connect(bookie: FakeBookie) -> None:
    client = Client(BookieOptions(backoff_min_s=60, backoff_max_s=60))
    name = bookie.bookie_id
    await bookie.stop()
    assert await client.add(name) is GONE
    await bookie.start()
    assert await client.add(name) is GONE
    assert await client.read(name, 0) == (GONE, b"")
    assert await client.read_batch(name) == (GONE, 0)
    assert bookie.connections == 0
    assert client.pool.counters.failed_connects == 1
    assert client.pool.counters.refusals[GONE] == 4
    over = client.pool._plain.outages[name]._replace(until_s=asyncio.get_running_loop().time())
    client.pool._plain.outages[name] = over
    assert await client.add(name) is OK
    assert not client.pool._plain.outages
    await client.pool.close()


async def test_the_pause_doubles_up_to_its_bound() -> None:
    client = Client(BookieOptions(backoff_min_s=0.01, backoff_max_s=0.03))
    name = BookieId("unknown")
    loop = asyncio.get_running_loop()
    with capture_logs() as logs:
        for _ in range(4):
            assert await client.add(name) is GONE
            while loop.time() < client.pool._plain.outages[name].until_s:
                await asyncio.sleep(0)
    failures = [each for each in logs if each["event"] == "bookie_not_connected"]
    assert [each["pause_s"] for each in failures] == [0.01, 0.02, 0.03, 0.03]
    await client.pool.close()


async def test_a_bookie_that_takes_too_long_to_connect(bookie: FakeBookie) -> None:
    """It accepts, and never ends the authentication."""

    class Provider:
        plugin_name = "test-plugin"

        def first(self) -> bytes:
            return b""

        def answer(self, payload: bytes) -> bytes | None:
            raise AssertionError(payload)

    bookie.hold()
    client = Client()
    client.pool = BookiePool(
        client.addresses.get, BookieOptions(connect_timeout_s=0.05, auth=Provider)
    )
    with capture_logs() as logs:
        assert await client.add(bookie.bookie_id) is GONE
    (told,) = [each for each in logs if each["event"] == "bookie_not_connected"]
    assert told["reason"] == "no answer within 0.05 s (authenticating)"
    assert client.pool.counters.failed_connects == 1
    await client.pool.close()


async def test_a_provider_that_breaks_is_a_failure_to_connect(bookie: FakeBookie) -> None:
    def provider() -> None:
        raise ZeroDivisionError

    pool = BookiePool(lambda _: None, BookieOptions(auth=provider))  # type: ignore[arg-type]
    client = Client()
    client.pool = pool
    assert await client.add(bookie.bookie_id) is GONE
    await pool.close()


async def test_close_answers_what_is_in_flight_and_what_comes_after(
    client: Client, bookie: FakeBookie
) -> None:
    bookie.hold()
    told: list[ReplyCode] = []
    body = DIGEST.seal(LEDGER, 0, -1, 1, b"x")
    client.pool.add(bookie.bookie_id, LEDGER, 0, KEY, body, told.append)
    client.pool.add(bookie.bookie_id, LEDGER, 1, KEY, body, told.append, recovery=True)
    await until(lambda: len(bookie.asked) == 2)
    other = BookieId(f"{HOST}:1")
    client.pool.add(other, LEDGER, 0, KEY, body, told.append)
    await client.pool.close()
    assert told == [GONE] * 3
    assert await client.add(bookie.bookie_id) is GONE
    await client.pool.close()
    assert bookie.connections == 2


async def close_in_a_handshake() -> None:
    """The bookie agrees to TLS, and says nothing more."""
    hellos = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal hellos
        (size,) = struct.unpack(">I", await reader.readexactly(4))
        await reader.readexactly(size)
        writer.write(start_tls_reply(1, 0))
        hellos += len(await reader.read(1))
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, HOST, 0)
    port = server.sockets[0].getsockname()[1]
    told: list[ReplyCode] = []
    pool = BookiePool(lambda _: None, BookieOptions(tls=ssl.create_default_context()))
    body = DIGEST.seal(LEDGER, 0, -1, 1, b"x")
    pool.add(BookieId(f"{HOST}:{port}"), LEDGER, 0, KEY, body, told.append)
    await until(lambda: hellos == 1)
    async with asyncio.timeout(TIMEOUT_S):
        await pool.close()
    assert told == [GONE]
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_close_does_not_wait_for_a_handshake(
    factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(close_in_a_handshake())
