"""Channels between brokers over sockets: client and server, and peers that fail."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import ClassVar

import aiohttp
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from broker.placement.channel import (
    CHANNEL_PATH,
    CHANNEL_VERSION,
    FrameTooLarge,
    Goodbye,
    Hello,
    RequestFrame,
    read_frame,
    write_frame,
)
from broker.placement.channel_client import ChannelClient
from broker.placement.channel_server import ChannelServer
from broker.placement.peer_failed import PeerFailed
from broker.placement.placement import BrokerAddress, OwnedElsewhere
from broker.placement.typed_request import (
    EventSink,
    MalformedRequest,
    Request,
    request_handlers,
)
from magnetar.protocol.server_error import PeerError, ServerError
from tests.support.bounds import set_bound
from tests.support.waiting import until

HELLO = write_frame(Hello(CHANNEL_VERSION, "a:1"))


class NotThere(PeerError):
    """An error with a code of its own."""

    code: ClassVar[ServerError] = ServerError.TOPIC_NOT_FOUND


class Work:
    """Carries the requests of the tests out."""

    sink: EventSink
    """The connection of the newest request."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.running = 0
        self.most = 0
        self.done: list[str] = []
        self.error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Echo(Request[Work, str]):
    """Return the text, once the test lets it."""

    KIND: ClassVar[str] = "test.echo"
    text: str

    async def run(self, work: Work) -> str:
        work.running += 1
        work.most = max(work.most, work.running)
        try:
            await work.go_on.wait()
        finally:
            work.running -= 1
        if work.error is not None:
            raise work.error
        work.done.append(self.text)
        return self.text


@dataclass(frozen=True, slots=True)
class Unknown(Echo):
    """A request that the broker does not know."""

    KIND: ClassVar[str] = "test.unknown"


class Peer:
    """A broker that answers, on a port of its own."""

    def __init__(self) -> None:
        self.work = Work()
        self.work.go_on.set()
        self.server = self._make_server()
        self.connections = 0
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def address(self) -> BrokerAddress:
        return BrokerAddress("", web_url=f"http://127.0.0.1:{self.port}", broker_id="b:1")

    async def start(
        self, handler: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None
    ) -> "Peer":
        self.server = self._make_server()
        app = web.Application()
        app.router.add_get(CHANNEL_PATH, handler or self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def stop(self, timeout_s: float = 0) -> None:
        await self.server.stop(timeout_s)
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    def abort(self) -> None:
        """Lose every connection."""
        for session in self.server._sessions:
            session._abort("the test wants it")

    def _make_server(self) -> ChannelServer:
        async def carry_out(sink: EventSink, request: Echo) -> str:
            self.work.sink = sink
            return await request.run(self.work)

        return ChannelServer(lambda: "b:1", request_handlers({Echo.KIND: Echo}, carry_out))

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.connections += 1
        return await self.server.serve(request)


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
async def peer(stack: AsyncExitStack) -> Peer:
    peer = await Peer().start()
    stack.push_async_callback(peer.stop)
    return peer


@pytest.fixture
async def client(stack: AsyncExitStack) -> ChannelClient:
    client = ChannelClient(lambda: "a:1")
    stack.push_async_callback(client.close)
    return client


@pytest.fixture
async def raw(
    stack: AsyncExitStack, peer: Peer
) -> Callable[..., Awaitable[aiohttp.ClientWebSocketResponse]]:
    """Connect to the broker without a `ChannelClient`."""
    http = await stack.enter_async_context(aiohttp.ClientSession())

    async def connect(*, autoping: bool = True) -> aiohttp.ClientWebSocketResponse:
        return await http.ws_connect(peer.address.web_url + CHANNEL_PATH, autoping=autoping)

    return connect


def asks(
    client: ChannelClient, peer: Peer, text: str = "x", timeout_s: float = 10
) -> asyncio.Task[str]:
    return asyncio.create_task(client.ask(peer.address, Echo(text), timeout_s=timeout_s))


async def test_requests_to_one_broker_share_one_connection(
    client: ChannelClient, peer: Peer
) -> None:
    peer.work.go_on.clear()
    tasks = [asks(client, peer, str(number)) for number in range(20)]
    await until(lambda: peer.work.running == 20)
    peer.work.go_on.set()
    assert await asyncio.gather(*tasks) == [str(number) for number in range(20)]
    assert peer.connections == 1


async def test_error_crosses_by_its_code(client: ChannelClient, peer: Peer) -> None:
    peer.work.error = NotThere("The test has none.")
    with pytest.raises(PeerFailed, match=r"The test has none\.") as failed:
        await asks(client, peer)
    assert failed.value.error_code == ServerError.TOPIC_NOT_FOUND
    peer.work.error = OwnedElsewhere("Ask c.", "c:1")
    with pytest.raises(PeerFailed) as failed:
        await asks(client, peer)
    assert failed.value.error_code == ServerError.SERVICE_NOT_READY
    assert failed.value.owner_id == "c:1"


async def test_defect_is_logged_where_it_happens_and_has_no_code(
    client: ChannelClient, peer: Peer
) -> None:
    for error in (KeyError("a defect"), asyncio.CancelledError()):
        peer.work.error = error
        with (
            capture_logs() as logs,
            pytest.raises(PeerFailed, match=r"b:1 failed on test\.echo") as failed,
        ):
            await asks(client, peer)
        assert failed.value.error_code is None
        logged = [each["event"] for each in logs]
        assert ("channel_request_failed" in logged) is isinstance(error, KeyError)


async def test_unknown_request_is_refused_in_a_sentence(client: ChannelClient, peer: Peer) -> None:
    with pytest.raises(
        PeerFailed, match=r"knows no request 'test\.unknown'.*same version"
    ) as failed:
        await client.ask(peer.address, Unknown("x"), timeout_s=10)
    assert failed.value.error_code == ServerError.NOT_ALLOWED_ERROR


async def test_answer_of_another_type_is_malformed(client: ChannelClient, peer: Peer) -> None:
    peer.server._handlers = {Echo.KIND: lambda *_: asyncio.sleep(0, 7)}
    with pytest.raises(MalformedRequest, match=r"answer to test\.echo"):
        await asks(client, peer)


async def test_lost_connection_fails_what_waits_and_is_opened_again(
    client: ChannelClient, peer: Peer
) -> None:
    peer.work.go_on.clear()
    waiting = [asks(client, peer, text) for text in "ab"]
    await until(lambda: peer.work.running == 2)
    peer.abort()
    for task in waiting:
        with pytest.raises(PeerFailed, match="b:1 does not answer") as failed:
            await task
        assert failed.value.error_code is None
    peer.work.go_on.set()
    assert await asks(client, peer, "c") == "c"
    assert sorted(peer.work.done) == ["a", "b", "c"], "carried out to the end"
    assert peer.connections == 2


async def test_broker_that_does_not_listen_is_connected_to_again_after_a_pause(
    client: ChannelClient, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await peer.stop()
    attempts: list[str] = []
    connect = aiohttp.ClientSession.ws_connect

    def counted(http: aiohttp.ClientSession, url: str, **_: object) -> object:
        attempts.append(url)
        return connect(http, url)

    monkeypatch.setattr(aiohttp.ClientSession, "ws_connect", counted)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    for _ in range(3):
        tasks = [asks(client, peer) for _ in range(5)]
        for task in tasks:
            with pytest.raises(PeerFailed, match="b:1 does not answer"):
                await task
    assert len(attempts) == 3
    assert loop.time() - began_s >= 0.05 + 0.1
    await peer.start()
    assert await asks(client, peer, "back") == "back"


async def test_request_ends_with_its_time_and_others_go_on(
    client: ChannelClient, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(
        monkeypatch, "CHANNEL_REQUESTS_IN_FLIGHT", 2, in_module="broker.placement.channel_client"
    )
    peer.work.go_on.clear()
    other, cancelled = asks(client, peer, "other"), asks(client, peer)
    await until(lambda: peer.work.running == 2)
    with pytest.raises(PeerFailed, match="time is up"):
        await asks(client, peer, timeout_s=0.05)
    cancelled.cancel()
    last = asks(client, peer, "last")
    await until(lambda: peer.work.running == 3)
    peer.work.go_on.set()
    assert await other == "other"
    assert await last == "last"
    assert peer.connections == 1


async def test_requests_beyond_the_bound_wait_for_others(
    client: ChannelClient, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(
        monkeypatch, "CHANNEL_REQUESTS_IN_FLIGHT", 2, in_module="broker.placement.channel_client"
    )
    tasks = [asks(client, peer, str(number)) for number in range(9)]
    assert await asyncio.gather(*tasks) == [str(number) for number in range(9)]
    assert peer.work.most <= 2


async def test_frame_beyond_the_bound_is_not_sent(
    client: ChannelClient, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await asks(client, peer)
    connection = client._channels["b:1"]._connection
    assert connection is not None
    monkeypatch.setattr(connection._end, "max_frame_bytes", 100)
    with pytest.raises(FrameTooLarge, match="ask for less"):
        await asks(client, peer, "x" * 100)
    assert await asks(client, peer, "y") == "y"


async def test_broker_without_a_channel_is_named_in_the_error(
    client: ChannelClient, peer: Peer
) -> None:
    await peer.stop()

    async def no_channel(_: web.Request) -> web.StreamResponse:
        raise web.HTTPNotFound

    await peer.start(no_channel)
    with pytest.raises(PeerFailed, match=r"b:1 has no channel.*the same version") as failed:
        await asks(client, peer)
    assert failed.value.error_code is None


async def test_broker_of_another_version_is_refused_at_both_ends(
    client: ChannelClient,
    peer: Peer,
    raw: Callable[..., Awaitable[aiohttp.ClientWebSocketResponse]],
) -> None:
    socket = await raw()
    await socket.send_str(write_frame(Hello(99, "a:1")))
    goodbye = read_frame((await socket.receive()).data)
    assert isinstance(goodbye, Goodbye)
    assert "a:1 speaks version 99" in goodbye.reason
    assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSE
    await peer.stop()
    heard: list[str] = []

    async def newer(request: web.Request) -> web.StreamResponse:
        served = web.WebSocketResponse()
        await served.prepare(request)
        heard.append(await served.receive_str())
        await served.send_str(write_frame(Hello(99, "b:1")))
        heard.append(await served.receive_str())
        return served

    await peer.start(newer)
    with pytest.raises(PeerFailed, match=r"b:1 speaks version 99.*the same version"):
        await asks(client, peer)
    await until(lambda: len(heard) == 2)
    assert isinstance(read_frame(heard[1]), Goodbye)


async def test_broker_that_answers_no_ping_is_lost(
    client: ChannelClient, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "CHANNEL_HEARTBEAT_S", 0.1, in_module="broker.placement.channel_client")
    await peer.stop()
    end = asyncio.Event()

    async def silent(request: web.Request) -> web.StreamResponse:
        served = web.WebSocketResponse(autoping=False)
        await served.prepare(request)
        await served.send_str(write_frame(Hello(CHANNEL_VERSION, "b:1")))
        await end.wait()
        return served

    await peer.start(silent)
    with capture_logs() as logs, pytest.raises(PeerFailed, match="does not answer"):
        await asks(client, peer)
    end.set()
    assert "channel_lost" in [each["event"] for each in logs]


async def test_asking_broker_that_answers_no_ping_is_let_go(
    peer: Peer,
    raw: Callable[..., Awaitable[aiohttp.ClientWebSocketResponse]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_bound(monkeypatch, "CHANNEL_HEARTBEAT_S", 0.1, in_module="broker.placement.channel_server")
    socket = await raw(autoping=False)
    await socket.send_str(HELLO)
    await until(lambda: len(peer.server._sessions) == 1)
    await until(lambda: not peer.server._sessions)
    await socket.close()


@pytest.mark.parametrize("text", ["no JSON", write_frame(RequestFrame(1, "test.echo", {}))])
async def test_broker_that_breaks_the_protocol_gets_a_sentence(
    peer: Peer, raw: Callable[..., Awaitable[aiohttp.ClientWebSocketResponse]], text: str
) -> None:
    socket = await raw()
    await socket.send_str(text)
    assert isinstance(read_frame((await socket.receive()).data), Goodbye)
    assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSE
    binary = await raw()
    await binary.send_bytes(HELLO.encode())
    assert isinstance(read_frame((await binary.receive()).data), Goodbye)
    await until(lambda: not peer.server._sessions)


async def test_broker_that_stops_answers_what_it_has_and_refuses_the_rest(
    client: ChannelClient, peer: Peer
) -> None:
    peer.work.go_on.clear()
    first = asks(client, peer, "first")
    await until(lambda: peer.work.running == 1)
    stopping = asyncio.create_task(peer.stop(timeout_s=10))
    await asyncio.sleep(0)
    with pytest.raises(PeerFailed, match="b:1 stops") as failed:
        await asks(client, peer, "late")
    assert failed.value.error_code == ServerError.SERVICE_NOT_READY
    peer.work.go_on.set()
    assert await first == "first"
    await stopping


async def test_broker_that_stops_waits_no_longer_than_its_time(
    client: ChannelClient, peer: Peer
) -> None:
    peer.work.go_on.clear()
    waiting = asks(client, peer)
    await until(lambda: peer.work.running == 1)
    await peer.stop(timeout_s=0.01)
    with pytest.raises(PeerFailed, match="does not answer"):
        await waiting
    assert peer.work.running == 0


async def test_client_that_is_closed_fails_what_waits(client: ChannelClient, peer: Peer) -> None:
    peer.work.go_on.clear()
    waiting = asks(client, peer)
    await until(lambda: peer.work.running == 1)
    await client.close()
    with pytest.raises(PeerFailed, match="the connection was closed"):
        await waiting
    peer.work.go_on.set()
    await until(lambda: not peer.server._sessions)


async def test_brokers_that_are_gone_are_forgotten_once_their_connection_is(
    client: ChannelClient, peer: Peer
) -> None:
    await asks(client, peer)
    client.forget_gone(())
    assert client._channels.keys() == {"b:1"}
    await peer.stop()
    await until(lambda: client._channels["b:1"].idle)
    client.forget_gone({"b:1"})
    assert client._channels.keys() == {"b:1"}
    client.forget_gone(())
    assert not client._channels


async def test_events_arrive_in_order_beside_answers(client: ChannelClient, peer: Peer) -> None:
    connection = await client.connect(peer.address)
    events: list[object] = []
    connection.on_event("test", events.append)
    await connection.ask(Echo("x"), timeout_s=10)
    for number in range(100):
        peer.work.sink.send_event("test", {"number": number})
        peer.work.sink.send_event("other", number)
    assert await connection.ask(Echo("y"), timeout_s=10) == "y"
    await until(lambda: len(events) == 100)
    assert events == [{"number": number} for number in range(100)]
    connection.on_event("test", None)
    peer.work.sink.send_event("test", 1)
    connection.on_event("last", events.append)
    peer.work.sink.send_event("last", 2)
    await until(lambda: len(events) == 101)
    assert events[-1] == 2


async def test_listener_that_fails_closes_the_connection(client: ChannelClient, peer: Peer) -> None:
    connection = await client.connect(peer.address)
    errors: list[object] = []

    def fails(event: object) -> None:
        errors.append(event)
        raise KeyError("a defect")

    connection.on_event("test", fails)
    await connection.ask(Echo("x"), timeout_s=10)
    for _ in range(2):
        peer.work.sink.send_event("test", None)
    with pytest.raises(KeyError, match="a defect"):
        await connection.wait_lost()
    assert errors == [None]
    await until(lambda: not peer.server._sessions)
    assert await asks(client, peer, "y") == "y"


async def test_broker_that_carries_out_learns_when_the_connection_is_lost(
    client: ChannelClient, peer: Peer
) -> None:
    connection = await client.connect(peer.address)
    await connection.ask(Echo("x"), timeout_s=10)
    closed: list[str] = []
    peer.work.sink.on_close(lambda: closed.append("first"))
    await connection.close()
    with pytest.raises(PeerFailed, match="the connection was closed"):
        await connection.wait_lost()
    await until(lambda: bool(closed))
    peer.work.sink.send_event("test", "nobody reads this")
    peer.work.sink.on_close(lambda: closed.append("late"))
    assert closed == ["first", "late"]


@pytest.mark.parametrize("bound", ["events", "bytes"])
async def test_broker_that_cannot_get_its_events_is_disconnected(
    client: ChannelClient, peer: Peer, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    connection = await client.connect(peer.address)
    await connection.ask(Echo("x"), timeout_s=10)
    if bound == "events":
        set_bound(
            monkeypatch, "CHANNEL_EVENTS_WAITING", 2, in_module="broker.placement.channel_server"
        )
    else:
        next(iter(peer.server._sessions)).end.max_frame_bytes = 10
    closed: list[bool] = []
    peer.work.sink.on_close(lambda: closed.append(True))
    with capture_logs() as logs:
        for number in range(4):
            peer.work.sink.send_event("test", number)
        assert not closed, "not in the middle of sending"
        with pytest.raises(PeerFailed, match="does not answer"):
            await connection.wait_lost()
    await until(lambda: closed == [True])
    assert [each["event"] for each in logs].count("channel_aborted") == 1


async def test_defect_in_sending_events_closes_the_connection(
    client: ChannelClient, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = await client.connect(peer.address)
    await connection.ask(Echo("x"), timeout_s=10)
    session = next(iter(peer.server._sessions))

    async def fails(_: str) -> None:
        raise KeyError("a defect")

    with capture_logs() as logs:
        monkeypatch.setattr(session.socket, "send_str", fails)
        peer.work.sink.send_event("test", None)
        with pytest.raises(PeerFailed, match="does not answer"):
            await connection.wait_lost()
    assert "channel_events_broken" in [each["event"] for each in logs]


async def test_nothing_is_opened_after_the_client_is_closed(
    client: ChannelClient, peer: Peer
) -> None:
    await client.close()
    with pytest.raises(PeerFailed, match="this broker stops"):
        await asks(client, peer)
    assert peer.connections == 0
