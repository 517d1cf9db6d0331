"""One connection: who gets which answer, what is bounded, what happens when it ends."""

import asyncio
import ssl
import threading
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
import uvloop
from structlog.testing import capture_logs

from storage.ledger.bookkeeper.auth import BookieAuthenticationFailed
from storage.ledger.bookkeeper.bookie_client import BookieCounters, ReplyCode
from storage.ledger.bookkeeper.bookie_options import BookieOptions
from storage.ledger.bookkeeper.connection import (
    _MOVES,
    BookieConnection,
    BookieState,
    BookieUnusable,
)
from storage.ledger.bookkeeper.digest import Digest, master_key
from storage.ledger.bookkeeper.ledger_metadata import DigestType
from storage.ledger.store import LedgerAssertion, LedgerError
from tests.support.certificates import Certificate, make_certificate
from tests.support.waiting import until
from tests.unit.storage.ledger.bookkeeper.bookie_frames import (
    add_reply,
    auth_reply,
    read_reply,
    start_tls_reply,
)
from tests.unit.storage.ledger.bookkeeper.fake_bookie import HOST, FakeBookie

KEY = master_key(b"")
DIGEST = Digest(DigestType.CRC32C, b"")
BODY = DIGEST.seal(1, 0, -1, 1, b"x")
"""Of entry 0 of ledger 1."""
OK = ReplyCode.OK


class Peer:
    """A connection to a bookie, and what its callers were told."""

    def __init__(self, bookie: FakeBookie, options: BookieOptions | None = None) -> None:
        self.counters = BookieCounters()
        self.closed = 0
        self.connection = BookieConnection(
            options or BookieOptions(), self.counters, self.on_closed
        )
        self.bookie = bookie
        self.told: list[tuple[str, ReplyCode]] = []

    def on_closed(self, _connection: BookieConnection) -> None:
        self.closed += 1

    async def open(self) -> None:
        await self.connection.open(self.bookie.address)

    def add(self, ledger: int, entry: int, name: str = "", data: bytes = b"data") -> None:
        name = name or f"add {ledger}:{entry}"
        body = DIGEST.seal(ledger, entry, entry - 1, 10, data)
        self.connection.add(ledger, entry, KEY, body, lambda code: self.told.append((name, code)))

    def read(self, ledger: int, entry: int, name: str = "") -> None:
        name = name or f"read {ledger}:{entry}"
        self.connection.read(ledger, entry, lambda code, _body: self.told.append((name, code)))

    async def until_told(self, count: int) -> None:
        await until(lambda: len(self.told) >= count)


@pytest.fixture
async def peer(bookie: FakeBookie) -> AsyncIterator[Peer]:
    made = Peer(bookie)
    await made.open()
    yield made
    made.connection.close()
    await made.connection.wait_closed()


async def test_an_entry_comes_back_as_it_was_added(peer: Peer) -> None:
    peer.add(3, 0)
    await peer.until_told(1)
    found: list[tuple[ReplyCode, bytes]] = []
    peer.connection.read(3, 0, lambda code, body: found.append((code, body)))
    peer.connection.read(3, 1, lambda code, body: found.append((code, body)))
    await until(lambda: len(found) == 2)
    assert peer.told == [("add 3:0", OK)]
    assert (found[0][0], DIGEST.open(found[0][1], 3, 0).data) == (OK, b"data")
    assert found[1] == (ReplyCode.NO_SUCH_ENTRY, b"")
    assert peer.counters.refusals[ReplyCode.NO_SUCH_ENTRY] == 1
    assert peer.counters.requests == 3


async def test_recovery_and_fencing_say_so(peer: Peer, bookie: FakeBookie) -> None:
    codes: list[ReplyCode] = []
    peer.connection.add(1, 0, KEY, BODY, codes.append, recovery=True)
    peer.connection.read(1, 0, lambda code, _: codes.append(code), fence_with=KEY)
    await until(lambda: len(codes) == 2)
    assert [asked.flags for asked in bookie.asked] == [6, 5]
    assert [asked.master_key for asked in bookie.asked] == [KEY, KEY]


async def test_a_batch_comes_back(peer: Peer, bookie: FakeBookie) -> None:
    found: list[tuple[ReplyCode, list[bytes]]] = []
    bookie.entries = {(3, entry): b"%d" % entry for entry in range(5)}
    for first in (1, 9):
        peer.connection.read_batch(
            3, first, 3, 100, lambda code, bodies: found.append((code, list(bodies)))
        )
    await until(lambda: len(found) == 2)
    assert found == [(OK, [b"1", b"2", b"3"]), (ReplyCode.NO_SUCH_ENTRY, [])]


async def test_a_batch_never_asks_for_more_than_a_frame(bookie: FakeBookie) -> None:
    peer = Peer(bookie, BookieOptions(max_frame_bytes=1000))
    await peer.open()
    peer.connection.read_batch(3, 0, 3, 10**9, lambda *_: None)
    await until(lambda: bool(bookie.asked))
    assert bookie.asked[0].max_bytes == 1000
    peer.connection.close()


@pytest.mark.parametrize("code", [code for code in ReplyCode if code >= 0])
async def test_every_code_of_a_bookie_comes_through(
    peer: Peer, bookie: FakeBookie, code: ReplyCode
) -> None:
    bookie.answer = lambda asked: (add_reply if asked.operation == 1 else read_reply)(
        code, asked.ledger, asked.entry
    )
    peer.add(1, 1)
    peer.read(1, 1)
    await peer.until_told(2)
    assert peer.told == [("add 1:1", code), ("read 1:1", code)]


async def test_answers_in_another_order_find_their_requests(peer: Peer, bookie: FakeBookie) -> None:
    bookie.hold()
    for entry in range(5):
        peer.add(3, entry)
    await until(lambda: len(bookie.asked) == 5)
    bookie.release(reverse=True)
    await peer.until_told(5)
    assert peer.told == [(f"add 3:{entry}", OK) for entry in (4, 3, 2, 1, 0)]


async def test_the_same_request_twice_has_two_answers_in_order(
    peer: Peer, bookie: FakeBookie
) -> None:
    codes = iter([0, 2, 0])
    bookie.answer = lambda asked: read_reply(next(codes), asked.ledger, asked.entry, b"x")
    for name in ("first", "second", "third"):
        peer.read(3, 7, name)
    await peer.until_told(3)
    assert peer.told == [("first", OK), ("second", ReplyCode.NO_SUCH_ENTRY), ("third", OK)]


async def test_callbacks_run_from_the_loop_only(peer: Peer, bookie: FakeBookie) -> None:
    bookie.hold()
    peer.add(1, 0)
    peer.add(1, 1, data=bytes(6 * 1024 * 1024))
    peer.connection.close()
    peer.add(1, 2)
    assert peer.told == []
    await peer.until_told(3)
    assert sorted(peer.told) == [
        ("add 1:0", ReplyCode.DISCONNECTED),
        ("add 1:1", ReplyCode.TOO_LARGE),
        ("add 1:2", ReplyCode.DISCONNECTED),
    ]


async def test_a_callback_that_raises_harms_nobody_else(peer: Peer) -> None:
    def broken(_code: ReplyCode) -> None:
        raise ValueError("a caller's fault")

    with capture_logs() as logs:
        peer.connection.add(1, 0, KEY, BODY, broken)
        peer.add(1, 1)
        await peer.until_told(1)
    assert peer.told == [("add 1:1", OK)]
    assert [line["event"] for line in logs] == ["bookie_callback_failed"]


async def test_a_callback_may_ask_again(peer: Peer) -> None:
    peer.connection.add(1, 0, KEY, BODY, lambda _: peer.add(1, 1))
    await peer.until_told(1)
    assert peer.told == [("add 1:1", OK)]


async def test_a_callback_may_close(peer: Peer, bookie: FakeBookie) -> None:
    bookie.hold()
    peer.connection.add(1, 0, KEY, BODY, lambda _: peer.connection.close())
    peer.add(1, 1)
    peer.add(1, 2)
    await until(lambda: len(bookie.asked) == 3)
    bookie.release()
    await peer.until_told(2)
    assert [code for _, code in peer.told] == [ReplyCode.DISCONNECTED] * 2
    assert peer.closed == 1


# Limits


async def test_a_frame_at_the_limit_goes_and_one_above_stays(bookie: FakeBookie) -> None:
    limit = 1000
    peer = Peer(bookie, BookieOptions(max_frame_bytes=limit))
    await peer.open()
    peer.add(1, 0, data=bytes(limit - 60 - 4))
    peer.add(1, 1, data=bytes(limit - 60 - 4 + 1))
    await peer.until_told(2)
    assert dict(peer.told) == {"add 1:0": OK, "add 1:1": ReplyCode.TOO_LARGE}
    assert [asked.entry for asked in bookie.asked] == [0]
    peer.connection.close()


async def test_requests_beyond_the_window_wait_and_go_in_order(bookie: FakeBookie) -> None:
    peer = Peer(bookie, BookieOptions(inflight_requests=2, waiting_requests=3))
    await peer.open()
    bookie.hold()
    for entry in range(7):
        peer.add(1, entry)
    await until(lambda: len(bookie.asked) == 2 and len(peer.told) == 2)
    refused = ReplyCode.TOO_MANY_REQUESTS
    assert peer.told == [("add 1:5", refused), ("add 1:6", refused)]
    bookie.release()
    await peer.until_told(7)
    assert peer.told[2:] == [(f"add 1:{entry}", OK) for entry in range(5)]
    peer.connection.close()


async def test_bytes_in_flight_are_bounded_and_a_large_request_goes_alone(
    bookie: FakeBookie,
) -> None:
    peer = Peer(bookie, BookieOptions(inflight_bytes=1000, waiting_bytes=4000))
    await peer.open()
    bookie.hold()
    for entry in range(3):
        peer.add(1, entry, data=bytes(1500))
    peer.add(1, 3, data=bytes(1500))
    await until(lambda: len(bookie.asked) == 1 and len(peer.told) == 1)
    assert peer.told == [("add 1:3", ReplyCode.TOO_MANY_REQUESTS)]
    bookie.release()
    await peer.until_told(4)
    assert [asked.entry for asked in bookie.asked] == [0, 1, 2]
    peer.connection.close()


async def test_requests_before_the_connection_stands_wait_for_it(bookie: FakeBookie) -> None:
    peer = Peer(bookie)
    peer.add(1, 0)
    peer.add(1, 1)
    assert peer.connection.state is BookieState.CONNECTING
    await peer.open()
    await peer.until_told(2)
    assert peer.told == [("add 1:0", OK), ("add 1:1", OK)]
    peer.connection.close()


# Time


async def test_a_late_answer_meets_its_tombstone_and_not_a_newer_request(
    bookie: FakeBookie,
) -> None:
    peer = Peer(bookie, BookieOptions(request_timeout_s=0.5))
    await peer.open()
    bookie.hold()
    bookie.answer = lambda asked: add_reply(104, asked.ledger, asked.entry)
    peer.add(3, 0, "old")
    await peer.until_told(1)
    assert peer.told == [("old", ReplyCode.TIMED_OUT)]
    bookie.answer = bookie.stored
    peer.add(3, 0, "new")
    await until(lambda: len(bookie.asked) == 2)
    bookie.release()
    await peer.until_told(2)
    assert peer.told[1:] == [("new", OK)]
    assert peer.counters.timeouts == 1
    peer.connection.close()


async def test_a_bookie_that_never_answers_is_given_up(bookie: FakeBookie) -> None:
    peer = Peer(bookie, BookieOptions(request_timeout_s=0.02))
    await peer.open()
    bookie.hold()
    peer.add(1, 0)
    await until(lambda: peer.connection.state is BookieState.CLOSED)
    assert peer.told == [("add 1:0", ReplyCode.TIMED_OUT)]
    assert peer.closed == 1


async def test_waiting_request_times_out_and_is_never_sent(bookie: FakeBookie) -> None:
    peer = Peer(bookie, BookieOptions(request_timeout_s=0.5, inflight_requests=1))
    await peer.open()
    bookie.hold()
    peer.add(1, 0)
    peer.add(1, 1)
    await peer.until_told(2)
    assert {code for _, code in peer.told} == {ReplyCode.TIMED_OUT}
    bookie.release()
    peer.add(1, 2)
    await peer.until_told(3)
    assert peer.told[2] == ("add 1:2", OK)
    assert [asked.entry for asked in bookie.asked] == [0, 2]
    peer.connection.close()


# Ends


async def test_a_lost_connection_answers_everything(bookie: FakeBookie) -> None:
    peer = Peer(bookie, BookieOptions(inflight_requests=3))
    await peer.open()
    bookie.hold()
    for entry in (0, 1, 0, 2):
        peer.add(1, entry)
    await until(lambda: len(bookie.asked) == 3)
    bookie.drop()
    await peer.until_told(4)
    assert {code for _, code in peer.told} == {ReplyCode.DISCONNECTED}
    assert peer.closed == 1
    await peer.connection.wait_closed()


@pytest.mark.parametrize(
    "raw", [add_reply(0, 9, 9), b"HTTP/1.1 400 Bad Request\r\n\r\n", auth_reply("x", b"")]
)
async def test_an_answer_that_makes_no_sense_ends_it(
    peer: Peer, bookie: FakeBookie, raw: bytes
) -> None:
    peer.add(1, 0)
    await peer.until_told(1)
    bookie.hold()
    peer.add(1, 1)
    await until(lambda: len(bookie.asked) == 2)
    with capture_logs() as logs:
        bookie.say(raw)
        await peer.until_told(2)
    assert peer.told[1] == ("add 1:1", ReplyCode.DISCONNECTED)
    assert [line["event"] for line in logs] == ["bookie_misbehaved"]


async def test_refused_connect_answers_waiting_requests(bookie: FakeBookie) -> None:
    peer = Peer(bookie)
    peer.add(1, 0)
    await bookie.stop()
    with pytest.raises(ConnectionRefusedError):
        await peer.open()
    await peer.until_told(1)
    assert peer.told == [("add 1:0", ReplyCode.DISCONNECTED)]
    assert peer.connection.state is BookieState.CLOSED
    await peer.connection.wait_closed()
    await bookie.start()


def test_every_state_ends_and_nothing_leaves_the_end() -> None:
    assert set(_MOVES) == set(BookieState)
    for state, others in _MOVES.items():
        assert (BookieState.CLOSED in others) is (state is not BookieState.CLOSED)
    order = list(BookieState)
    assert all(
        order.index(state) < order.index(other) for state in _MOVES for other in _MOVES[state]
    )
    assert all(pair[0] is not pair[1] for pair in pairwise(order))


async def test_a_move_that_is_not_in_the_table_is_refused(peer: Peer) -> None:
    with pytest.raises(LedgerAssertion, match="from ready to authenticating"):
        peer.connection._move(BookieState.AUTHENTICATING)


# Authentication and TLS


class Token:
    """Answers each message of the bookie, `rounds` times."""

    plugin_name = "test-plugin"

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.heard: list[bytes] = []

    def first(self) -> bytes:
        return b"token"

    def answer(self, payload: bytes) -> bytes | None:
        self.heard.append(payload)
        return b"more" if len(self.heard) < self.rounds else None


async def authenticated(fake: FakeBookie, token: Token) -> None:
    """Open a connection, with a request that waits; the fake bookie is stopped then."""
    await fake.start()
    peer = Peer(fake, BookieOptions(auth=lambda: token))
    peer.add(1, 0)
    try:
        await peer.open()
        await peer.until_told(1)
        assert peer.told == [("add 1:0", OK)]
    finally:
        peer.connection.close()
        await peer.connection.wait_closed()
        await fake.stop()


async def test_authentication_goes_before_everything() -> None:
    token = Token(rounds=2)
    fake = FakeBookie(auth_rounds=2)
    await authenticated(fake, token)
    assert token.heard == [b"round 0", b"round 1"]
    assert [asked.operation for asked in fake.asked] == [3, 3, 1]


async def test_a_provider_that_is_long_in_the_making_keeps_nobody_else_waiting() -> None:
    """It may read a file, from a mount that hangs."""
    begun, released = threading.Event(), threading.Event()
    seen: list[bool] = []

    def provider() -> Token:
        begun.set()
        seen.append(released.wait(2))
        return Token(rounds=1)

    fake = FakeBookie(auth_rounds=1)
    await fake.start()
    peer = Peer(fake, BookieOptions(auth=provider))
    opening = asyncio.create_task(peer.open())
    await until(begun.is_set)
    released.set()
    await opening
    assert seen == [True]
    peer.connection.close()
    await peer.connection.wait_closed()
    await fake.stop()


async def test_a_bookie_without_authentication_is_fine() -> None:
    fake = FakeBookie(auth_rounds=1)
    fake.auth_plugin = "AuthDisabledPlugin"
    await authenticated(fake, Token(rounds=5))


async def test_another_plugin_is_refused() -> None:
    fake = FakeBookie(auth_rounds=1)
    fake.auth_plugin = "other"
    with pytest.raises(BookieAuthenticationFailed, match="same plugin"):
        await authenticated(fake, Token(rounds=1))


async def test_authentication_does_not_go_on_for_ever() -> None:
    with pytest.raises(BookieAuthenticationFailed, match="did not end"):
        await authenticated(FakeBookie(auth_rounds=100), Token(rounds=100))


async def test_a_bookie_that_answers_something_else_is_refused() -> None:
    fake = FakeBookie()
    fake.answer = lambda _asked: add_reply(102, 0, 0)
    with pytest.raises(BookieUnusable, match="did not answer a message of authentication"):
        await authenticated(fake, Token(rounds=1))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"), HOST)


def server_context(certificate: Certificate) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.chain, certificate.key)
    return context


async def use_tls(certificate: Certificate) -> None:
    """START_TLS, authentication, entries of many frames of TLS, a lost connection."""
    fake = FakeBookie(server_context(certificate), auth_rounds=1)
    await fake.start()
    trusting = ssl.create_default_context(cafile=str(certificate.chain))
    peer = Peer(fake, BookieOptions(tls=trusting, auth=lambda: Token(rounds=1)))
    peer.add(1, 0, data=bytes(300_000))
    await peer.open()
    await peer.until_told(1)
    peer.read(1, 0)
    await peer.until_told(2)
    assert [code for _, code in peer.told] == [OK, OK]
    assert fake.secure == [True]
    fake.hold()
    peer.add(1, 1)
    await until(lambda: len(fake.asked) == 4)
    fake.drop()
    await peer.until_told(3)
    assert peer.told[2] == ("add 1:1", ReplyCode.DISCONNECTED)
    await peer.connection.wait_closed()
    await fake.stop()


async def test_tls_starts_on_a_plain_connection(certificate: Certificate) -> None:
    await use_tls(certificate)


def test_the_same_on_the_loop_of_a_broker(certificate: Certificate) -> None:
    uvloop.run(use_tls(certificate))


async def test_an_unknown_certificate_is_refused(certificate: Certificate) -> None:
    fake = FakeBookie(server_context(certificate))
    await fake.start()
    peer = Peer(fake, BookieOptions(tls=ssl.create_default_context()))
    peer.add(1, 0)
    with pytest.raises(ssl.SSLError):
        await peer.open()
    await peer.until_told(1)
    assert peer.told == [("add 1:0", ReplyCode.DISCONNECTED)]
    await peer.connection.wait_closed()
    await fake.stop()


@pytest.mark.parametrize(
    "said", [start_tls_reply(1, 404), b"\x00\x00\x00\x02\xff\xff", b"\xff\xff\xff\xff"]
)
async def test_another_answer_to_start_tls_is_refused(said: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(4)
        writer.write(said)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, HOST, 0)
    fake = FakeBookie()
    fake.port = server.sockets[0].getsockname()[1]
    peer = Peer(fake, BookieOptions(tls=ssl.create_default_context()))
    with pytest.raises(LedgerError, match="START_TLS"):
        await peer.open()
    server.close()
    await server.wait_closed()
