"""TLS between a socket and a protocol, over sockets of this machine and on both event loops."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import cast

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.wire.peer_memory import PeerMemory
from broker.wire.tls_handshakes import Handshakes
from broker.wire.tls_stream import StreamState, TlsStream, new_read_buffer
from tests.support.authority import HOST, Authority
from tests.support.waiting import TIMEOUT_S, until

MEMORY_BYTES = 1 << 20


class Echo(asyncio.Protocol):
    """Sends back what it gets, and notes what happens to it."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.lost: list[Exception | None] = []
        self.calls: list[str] = []
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.received += data
        self.transport.write(data)

    def eof_received(self) -> bool:
        self.calls.append("eof")
        return False

    def pause_writing(self) -> None:
        self.calls.append("pause")

    def resume_writing(self) -> None:
        self.calls.append("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.append(exc)


class Listening:
    """A port with TLS."""

    def __init__(self, context: ssl.SSLContext, handshake_s: float) -> None:
        self.handshakes = Handshakes(lambda _: True)
        self.memory = PeerMemory(MEMORY_BYTES, 100, asyncio.get_running_loop().time)
        self.streams: list[TlsStream] = []
        self.echoes: list[Echo] = []
        self.port = 0
        self._read_buffer = new_read_buffer()
        self._context = context
        self._handshake_s = handshake_s

    def accept(self) -> TlsStream:
        stream = TlsStream(
            self._context,
            self._make_echo,
            self.handshakes,
            self.memory,
            self._read_buffer,
            handshake_s=self._handshake_s,
        )
        self.streams.append(stream)
        return stream

    def _make_echo(self) -> Echo:
        self.echoes.append(Echo())
        return self.echoes[-1]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def server(authority: Authority) -> ssl.SSLContext:
    made = authority.issue("broker")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.chain, made.key)
    context.load_verify_locations(authority.chain)
    context.verify_mode = ssl.CERT_OPTIONAL
    return context


@asynccontextmanager
async def listening(
    context: ssl.SSLContext, *, handshake_s: float = TIMEOUT_S
) -> AsyncIterator[Listening]:
    made = Listening(context, handshake_s)
    port = await asyncio.get_running_loop().create_server(made.accept, HOST, 0)
    made.port = port.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        port.close()
        for each in made.streams:
            each.abort()
        await until(lambda: all(each.state is StreamState.CLOSED for each in made.streams))


def on_both_loops(
    test: Callable[[ssl.SSLContext, Authority], Awaitable[None]],
) -> Callable[..., None]:
    """Run a test on asyncio's loop and on uvloop's."""

    @pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
    def run(
        server: ssl.SSLContext,
        authority: Authority,
        factory: Callable[[], asyncio.AbstractEventLoop],
    ) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(asyncio.wait_for(test(server, authority), 60))

    run.__name__ = test.__name__
    return run


async def open_to(
    port: int, client: ssl.SSLContext
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(HOST, port, ssl=client)


@on_both_loops
async def test_bytes_come_back(server: ssl.SSLContext, authority: Authority) -> None:
    async with listening(server) as port:
        reader, writer = await open_to(port.port, authority.client_context())
        for size in (1, 100, 16 * 1024, 16 * 1024 + 1, 3_000_000):
            data = bytes(range(256)) * (size // 256 + 1)
            sending = asyncio.create_task(drained(writer, data))
            assert await reader.readexactly(len(data)) == data
            await sending
        writer.close()
        await until(lambda: port.echoes[0].lost == [None])
        assert "eof" in port.echoes[0].calls
        assert (port.handshakes.completed, port.handshakes.failed) == (1, 0)
        assert port.memory.total == 0


async def drained(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()


@on_both_loops
async def test_transport_tells_of_tls_and_of_the_socket(
    server: ssl.SSLContext, authority: Authority
) -> None:
    async with listening(server) as port:
        own = authority.issue("alice")
        _, writer = await open_to(port.port, authority.client_context(own))
        await until(lambda: port.echoes)
        transport = port.echoes[0].transport
        assert transport.get_extra_info("peername") == writer.get_extra_info("sockname")
        established = transport.get_extra_info("ssl_object")
        assert ssl.DER_cert_to_PEM_cert(established.getpeercert(True)) == own.chain.read_text()
        assert transport.get_extra_info("peercert")["subject"] == ((("commonName", "alice"),),)
        assert transport.get_extra_info("sslcontext") is server
        assert transport.get_extra_info("socket") is not None
        assert transport.get_extra_info("none such", 7) == 7
        assert transport.get_protocol() is port.echoes[0]
        assert not transport.can_write_eof()
        assert not transport.is_closing()
        writer.close()


@on_both_loops
async def test_close_sends_what_is_queued_and_the_end(
    server: ssl.SSLContext, authority: Authority
) -> None:
    async with listening(server) as port:
        reader, writer = await open_to(port.port, authority.client_context())
        await until(lambda: port.echoes)
        transport = port.echoes[0].transport
        # No more than a client of uvloop takes at once: above that it loses the last bytes.
        transport.writelines([b"a" * 50_000, b"", b"b" * 10])
        transport.close()
        transport.close()
        transport.write(b"after the end")
        assert await reader.read() == b"a" * 50_000 + b"b" * 10
        await until(lambda: port.echoes[0].lost == [None])
        writer.close()


@on_both_loops
async def test_peer_that_does_not_read_stops_the_protocol(
    server: ssl.SSLContext, authority: Authority
) -> None:
    async with listening(server) as port:
        reader, writer = await open_to(port.port, authority.client_context())
        await until(lambda: port.echoes)
        echo = port.echoes[0]
        echo.transport.set_write_buffer_limits(high=100_000)
        data, size = b"x" * 100_000, 0
        while "pause" not in echo.calls:
            echo.transport.write(data)
            size += len(data)
            await asyncio.sleep(0)
        # All output that the peer has not taken is known here: nothing is hidden below.
        assert echo.transport.get_write_buffer_size() > 100_000
        assert len(await reader.readexactly(size)) == size
        await until(lambda: "resume" in echo.calls)
        assert echo.transport.get_write_buffer_size() == 0
        writer.close()


@on_both_loops
async def test_reading_can_be_paused(server: ssl.SSLContext, authority: Authority) -> None:
    async with listening(server) as port:
        reader, writer = await open_to(port.port, authority.client_context())
        await until(lambda: port.echoes)
        echo = port.echoes[0]
        echo.transport.pause_reading()
        assert not echo.transport.is_reading()
        writer.write(b"hello")
        await asyncio.sleep(0.05)
        assert not echo.received
        echo.transport.resume_reading()
        assert await reader.readexactly(5) == b"hello"
        writer.close()


@on_both_loops
async def test_silent_peer_is_closed(server: ssl.SSLContext, authority: Authority) -> None:
    async with listening(server, handshake_s=0.1) as port:
        reader, writer = await asyncio.open_connection(HOST, port.port)
        with suppress(ConnectionResetError):  # One of the two loops tells it so.
            assert await reader.read() == b""
        assert port.handshakes.failed == 1
        assert len(port.handshakes) == 0
        writer.close()


@on_both_loops
async def test_slow_handshake_is_closed_in_the_same_time(
    server: ssl.SSLContext, authority: Authority
) -> None:
    async with listening(server, handshake_s=0.2) as port:
        reader, writer = await asyncio.open_connection(HOST, port.port)
        hello = client_hello(authority)
        for byte in hello[:-1]:
            if reader.at_eof() or writer.is_closing():
                break
            writer.write(bytes([byte]))
            await asyncio.sleep(0.01)
        await until(lambda: port.handshakes.failed == 1)
        assert not port.echoes
        writer.close()


def client_hello(authority: Authority) -> bytes:
    outgoing = ssl.MemoryBIO()
    client = authority.client_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=HOST)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


@pytest.mark.parametrize(
    "garbage",
    [
        b"\0\0\0\x0d\0\0\0\x09\x08\x02\x12\x05hello",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\xff\xff" + b"\0" * 70_000,
        b"\x16\x03\x01\x00\x04\x01\xff\xff\xff",
        b"\x17\x03\x03\x00\x01x",
        b"\x80" * 100,
    ],
)
async def test_garbage_instead_of_a_handshake_closes(
    server: ssl.SSLContext, garbage: bytes
) -> None:
    async with listening(server, handshake_s=0.5) as port:
        _, writer = await asyncio.open_connection(HOST, port.port)
        writer.write(garbage)
        await until(lambda: port.handshakes.failed == 1)
        await until(lambda: port.streams[0].state is StreamState.CLOSED)
        assert not port.echoes
        assert port.memory.total == 0
        writer.close()


async def shake_hands(
    port: int, authority: Authority
) -> tuple[asyncio.StreamWriter, ssl.SSLObject, ssl.MemoryBIO]:
    """Open a connection, of which the test sees each encrypted byte before it is sent."""
    reader, writer = await asyncio.open_connection(HOST, port)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = authority.client_context().wrap_bio(incoming, outgoing, server_hostname=HOST)
    while True:
        try:
            client.do_handshake()
        except ssl.SSLWantReadError:
            writer.write(outgoing.read())
            incoming.write(await reader.read(65536))
        else:
            return writer, client, outgoing


async def test_garbage_after_the_handshake_closes(
    server: ssl.SSLContext, authority: Authority
) -> None:
    async with listening(server) as port:
        writer, client, outgoing = await shake_hands(port.port, authority)
        client.write(b"hello")
        writer.write(outgoing.read())
        await until(lambda: port.echoes and port.echoes[0].received == b"hello")
        writer.write(b"\x17\x03\x03\x00\x20" + b"not encrypted by anybody at all!")
        await until(lambda: port.echoes[0].lost)
        (error,) = port.echoes[0].lost
        assert isinstance(error, ConnectionResetError)
        assert "TLS failed" in str(error)
        writer.close()


async def test_incomplete_record_is_accounted_and_forgotten(
    server: ssl.SSLContext, authority: Authority
) -> None:
    async with listening(server) as port:
        writer, client, outgoing = await shake_hands(port.port, authority)
        writer.write(outgoing.read())
        await until(lambda: port.echoes)
        client.write(b"x" * 16_000)
        record = outgoing.read()
        writer.write(record[:-1])
        await until(lambda: port.memory.total > 15_000)
        assert not port.echoes[0].received
        writer.write(record[-1:])
        await until(lambda: len(port.echoes[0].received) == 16_000)
        await until(lambda: port.memory.total == 0)
        writer.close()


class FakeRaw:
    """The transport of a socket, in memory."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.largest_write = 0
        self.closed = False
        self.paused = False

    def get_extra_info(self, name: str, default: object = None) -> object:
        return (HOST, 1) if name == "peername" else default

    def write(self, data: bytes) -> None:
        self.written += data
        self.largest_write = max(self.largest_write, len(data))

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def close(self) -> None:
        self.closed = True

    abort = close

    def get_write_buffer_size(self) -> int:
        return 0


@given(
    messages=st.lists(st.binary(min_size=1, max_size=40_000), min_size=1, max_size=4),
    cuts=st.lists(st.integers(1, 20_000), min_size=1, max_size=8),
    spoiled=st.none() | st.tuples(st.integers(0, 5_000), st.integers(1, 255)),
)
@settings(max_examples=60, deadline=None)
def test_any_pieces_give_the_messages_or_an_end(
    server: ssl.SSLContext,
    authority: Authority,
    messages: list[bytes],
    cuts: list[int],
    spoiled: tuple[int, int] | None,
) -> None:
    async def run() -> None:
        raw, echoes = FakeRaw(), list[Echo]()
        memory = PeerMemory(MEMORY_BYTES, 100, asyncio.get_running_loop().time)

        def make() -> Echo:
            echoes.append(Echo())
            return echoes[-1]

        stream = TlsStream(server, make, Handshakes(lambda _: True), memory, new_read_buffer())
        stream.connection_made(cast("asyncio.Transport", raw))
        client, _, outgoing = await shake_hands_in_memory(stream, raw, authority, cuts)
        for each in messages:
            client.write(each) if len(each) <= 16_384 else write_all(client, each)
        data = bytearray(outgoing.read())
        if spoiled is not None:
            data[spoiled[0] % len(data)] ^= spoiled[1]
        await feed(stream, raw, bytes(data), cuts)
        whole = b"".join(messages)
        received = bytes(echoes[0].received)
        if spoiled is None:
            assert received == whole
        else:
            assert whole.startswith(received)
            assert raw.closed or len(received) < len(whole)
        stream.connection_lost(None)
        assert memory.total == 0

    asyncio.run(run())


@given(
    sizes=st.lists(
        st.one_of(st.integers(0, 2_000), st.integers(16_000, 17_000), st.integers(60_000, 200_000)),
        max_size=40,
    )
)
@settings(max_examples=30, deadline=None)
def test_buffers_share_records_and_leave_in_small_pieces(
    server: ssl.SSLContext, authority: Authority, sizes: list[int]
) -> None:
    async def run() -> None:
        raw, echo = FakeRaw(), Echo()
        memory = PeerMemory(MEMORY_BYTES, 100, asyncio.get_running_loop().time)
        stream = TlsStream(
            server, lambda: echo, Handshakes(lambda _: True), memory, new_read_buffer()
        )
        stream.connection_made(cast("asyncio.Transport", raw))
        client, incoming, _ = await shake_hands_in_memory(stream, raw, authority, [20_000])
        incoming.write(bytes(raw.written))
        raw.written.clear()
        raw.largest_write = 0
        buffers = [bytes([at]) * size for at, size in enumerate(sizes)]
        echo.transport.writelines(buffers)
        assert raw.largest_write <= 64 * 1024 + 4 * 22
        whole = b"".join(buffers)
        # Each write has full records and one more; small buffers before a large one are a write.
        writes = 2 * sum(size >= 16_384 for size in sizes) + len(whole) // (64 * 1024) + 1
        most_records = len(whole) // 16_384 + 2 * writes
        assert len(raw.written) <= len(whole) + 22 * most_records
        incoming.write(bytes(raw.written))
        received = bytearray()
        with suppress(ssl.SSLWantReadError):
            while True:
                received += client.read(16_384)
        assert bytes(received) == whole
        stream.connection_lost(None)

    asyncio.run(run())


async def shake_hands_in_memory(
    stream: TlsStream, raw: FakeRaw, authority: Authority, cuts: list[int]
) -> tuple[ssl.SSLObject, ssl.MemoryBIO, ssl.MemoryBIO]:
    """Open TLS to a stream; returns the client's TLS, its input and its output."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = authority.client_context().wrap_bio(incoming, outgoing, server_hostname=HOST)
    for _ in range(3):
        try:
            client.do_handshake()
            break
        except ssl.SSLWantReadError:
            await feed(stream, raw, outgoing.read(), cuts)
            incoming.write(bytes(raw.written))
            raw.written.clear()
    await feed(stream, raw, outgoing.read(), cuts)
    return client, incoming, outgoing


def write_all(client: ssl.SSLObject, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[client.write(rest) :]


async def feed(stream: TlsStream, raw: FakeRaw, data: bytes, cuts: list[int]) -> None:
    """Pass bytes on in pieces; nothing comes while reading is paused, or after the end."""
    at = number = 0
    while at < len(data) and not raw.closed:
        size = cuts[number % len(cuts)]
        piece = data[at : at + size]
        stream.get_buffer(size)[: len(piece)] = piece
        stream.buffer_updated(len(piece))
        at, number = at + size, number + 1
        while raw.paused:
            await asyncio.sleep(0)
