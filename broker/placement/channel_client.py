"""Channels to other brokers: sends typed requests and waits for their answers.

One connection to each broker is opened for the first request and kept.  See
`broker.placement.channel`.
"""

import asyncio
import contextlib
from collections.abc import Callable, Collection
from http import HTTPStatus
from typing import Final, TypeVar

import aiohttp
import structlog

from broker.placement.channel import (
    CHANNEL_PATH,
    Answer,
    AskingEnd,
    ChannelRefused,
    ChannelState,
    ChannelViolation,
    Event,
    Refusal,
    goodbye_of,
)
from broker.placement.dialing import Dialer
from broker.placement.peer_failed import PeerFailed
from broker.placement.placement import BrokerAddress
from broker.placement.typed_request import Request
from config.bounds import (
    CHANNEL_CLOSE_S,
    CHANNEL_CONNECT_S,
    CHANNEL_FRAME_BYTES,
    CHANNEL_HEARTBEAT_S,
    CHANNEL_REQUESTS_IN_FLIGHT,
    CHANNEL_RETRY_MAX_S,
    CHANNEL_RETRY_S,
)
from magnetar.protocol.backoff import Backoff
from security.errors import InvalidSecret

A = TypeVar("A")
H = TypeVar("H")
LOST: Final = (aiohttp.ClientError, OSError)
"""Errors of a connection that is lost or cannot be opened."""
log = structlog.get_logger(__name__)


class ChannelClient:
    """The channels of one broker to all others."""

    def __init__(self, broker_id: Callable[[], str], dialer: Dialer | None = None) -> None:
        """`broker_id` returns the id of this broker, for HELLO."""
        self._broker_id = broker_id
        self._dialer = dialer or Dialer()
        self._http: aiohttp.ClientSession | None = None
        self._channels: dict[str, _Channel] = {}
        self._closed = False

    async def ask(self, address: BrokerAddress, request: Request[H, A], *, timeout_s: float) -> A:
        """See `Placement.ask`.  `timeout_s` includes connecting."""
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self.connect(address)
                return await connection.ask(request, timeout_s=None)
        except TimeoutError as error:
            raise _no_answer(address, "time is up") from error

    async def connect(self, address: BrokerAddress) -> "ChannelConnection":
        """See `Placement.connect`."""
        if self._closed:
            raise _no_answer(address, "this broker stops")
        return await self._channel(address).connect()

    def forget_gone(self, live: Collection[str]) -> None:
        """Forget brokers that are not live and have no connection."""
        for broker_id in self._channels.keys() - set(live):
            if self._channels[broker_id].idle:
                del self._channels[broker_id]

    async def close(self) -> None:
        """Close all channels, and open no others.  May be called again."""
        self._closed = True
        channels, self._channels = self._channels, {}
        await asyncio.gather(*(each.close() for each in channels.values()))
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    def _channel(self, address: BrokerAddress) -> "_Channel":
        if self._http is None:
            self._http = aiohttp.ClientSession()
        known = self._channels.get(address.broker_id)
        if known is None:
            known = _Channel(self._http, self._broker_id, address, self._dialer)
            self._channels[address.broker_id] = known
        return known


class _Channel:
    """The channel to one broker: opens the connection and opens it again when it was lost."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        broker_id: Callable[[], str],
        address: BrokerAddress,
        dialer: Dialer,
    ) -> None:
        self._address = address
        self._dialer = dialer
        self._http = http
        self._broker_id = broker_id
        self._backoff = Backoff(CHANNEL_RETRY_S, CHANNEL_RETRY_MAX_S)
        self._not_before_s = 0.0
        self._connection: ChannelConnection | None = None
        self._opening: asyncio.Task[ChannelConnection] | None = None

    @property
    def idle(self) -> bool:
        """Whether there is no connection, and none is being opened."""
        return self._opening is None and (self._connection is None or not self._connection.open)

    async def connect(self) -> "ChannelConnection":
        """Return the connection, opened if need be.  Raises `PeerFailed`."""
        if self._connection is not None and self._connection.open:
            return self._connection
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
            self._opening.add_done_callback(self._opened)
        # Shielded: others wait for the same connection.
        return await asyncio.shield(self._opening)

    async def close(self) -> None:
        """Close the connection, and open no other one."""
        opening = self._opening
        if opening is not None:
            opening.cancel()
            await asyncio.wait({opening})
        if self._connection is not None:
            await self._connection.close()

    async def _open(self) -> "ChannelConnection":
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._not_before_s - loop.time())
        try:
            async with asyncio.timeout(CHANNEL_CONNECT_S):
                connection = await self._connect()
        except (
            *LOST,
            TimeoutError,
            ChannelViolation,
            ChannelRefused,
            InvalidSecret,
        ) as error:
            self._not_before_s = loop.time() + self._backoff.pause_s()
            raise self._failure(error) from error
        self._backoff.reset()
        return connection

    async def _connect(self) -> "ChannelConnection":
        web = self._dialer.web_of(self._address)
        socket = await self._http.ws_connect(
            web.url + CHANNEL_PATH,
            ssl=web.tls or True,
            headers=self._dialer.headers(),
            heartbeat=CHANNEL_HEARTBEAT_S,
            max_msg_size=CHANNEL_FRAME_BYTES,
            timeout=aiohttp.ClientWSTimeout(ws_close=CHANNEL_CLOSE_S),
        )
        end = AskingEnd(self._broker_id())
        try:
            await socket.send_str(end.hello())
            end.receive(_text_of(await socket.receive()))
        except BaseException as error:
            if isinstance(error, ChannelRefused | ChannelViolation):
                await _send(socket, goodbye_of(error))
            await socket.close()
            raise
        return ChannelConnection(self._address, socket, end)

    def _failure(self, error: Exception) -> PeerFailed:
        status = error.status if isinstance(error, aiohttp.WSServerHandshakeError) else None
        if isinstance(error, ChannelRefused | InvalidSecret):
            reason = str(error)
        elif status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            reason = (
                f"The broker {self._address.broker_id} refuses the credentials of this one: give "
                "all brokers a token of one superuser (broker_client_token_file)."
            )
        elif status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED):
            reason = (
                f"The broker {self._address.broker_id} has no channel between brokers: run the "
                "same version of the broker everywhere."
            )
        else:
            return _no_answer(self._address, str(error) or "connecting took too long")
        log.warning("channel_refused", broker=self._address.broker_id, error=reason)
        return PeerFailed(reason)

    def _opened(self, opening: "asyncio.Task[ChannelConnection]") -> None:
        self._opening = None
        # Reading the exception keeps asyncio from logging one that nobody waits for any more.
        if not opening.cancelled() and opening.exception() is None:
            self._connection = opening.result()


class ChannelConnection:
    """One WebSocket, once both ends have sent HELLO.  See `PeerConnection`."""

    def __init__(
        self, address: BrokerAddress, socket: aiohttp.ClientWebSocketResponse, end: AskingEnd
    ) -> None:
        self._address = address
        self._socket = socket
        self._end = end
        self._slots = asyncio.Semaphore(CHANNEL_REQUESTS_IN_FLIGHT)
        self._answers: dict[int, asyncio.Future[Answer | Refusal]] = {}
        self._lost: str | None = None
        """The reason, once the connection is lost."""
        self._listener_error: Exception | None = None
        self._listeners: dict[str, Callable[[object], None]] = {}
        self._reading = asyncio.create_task(self._read())

    @property
    def open(self) -> bool:
        """Whether requests can be sent."""
        return self._lost is None and self._end.state is ChannelState.OPEN

    async def ask(self, request: Request[H, A], *, timeout_s: float | None) -> A:
        """See `PeerConnection`.  It waits while CHANNEL_REQUESTS_IN_FLIGHT have no answer."""
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._answer_to(request)
        except TimeoutError as error:
            raise _no_answer(self._address, "time is up") from error
        if isinstance(answer, Answer):
            return request.answer_from_json(answer.value)
        raise PeerFailed(answer.reason, answer.code, owner_id=answer.owner_id or "")

    def on_event(self, kind: str, listener: Callable[[object], None] | None) -> None:
        """See `PeerConnection`."""
        if listener is None:
            self._listeners.pop(kind, None)
        else:
            self._listeners[kind] = listener

    async def wait_lost(self) -> None:
        """See `PeerConnection`."""
        await asyncio.wait({self._reading})
        raise self._listener_error or _no_answer(self._address, str(self._lost))

    async def close(self) -> None:
        """See `PeerConnection`."""
        self._reading.cancel()
        await asyncio.wait({self._reading})

    async def _answer_to(self, request: Request[H, A]) -> Answer | Refusal:
        async with self._slots:
            if self._lost is not None:
                raise _no_answer(self._address, self._lost)
            request_id, text = self._end.ask(request.KIND, request.to_json())
            answer: asyncio.Future[Answer | Refusal] = asyncio.get_running_loop().create_future()
            self._answers[request_id] = answer
            try:
                # If the connection is lost, the reader fails the answer with the reason.
                await _send(self._socket, text)
                return await answer
            finally:
                self._end.give_up(request_id)
                del self._answers[request_id]

    async def _read(self) -> None:
        reason = "the connection was closed"
        try:
            while True:
                frame = self._end.receive(_text_of(await self._socket.receive()))
                if isinstance(frame, Event):
                    self._call_listener(frame)
                elif frame is not None:
                    self._give(frame)
        except (*LOST, ChannelViolation, ChannelRefused) as error:
            reason = str(error) or reason
            log.info("channel_lost", broker=self._address.broker_id, error=reason)
        finally:
            self._end.close()
            self._lost = reason
            for each in self._answers.values():
                if not each.done():
                    each.set_exception(_no_answer(self._address, reason))
                    each.exception()  # as nobody may wait any more
            await self._socket.close()

    def _call_listener(self, event: Event) -> None:
        listener = self._listeners.get(event.kind)
        if listener is None:
            return
        try:
            listener(event.value)
        except Exception as error:
            self._listener_error = error
            raise ConnectionAbortedError(
                f"an event {event.kind} was not understood here: {error!r}"
            ) from error

    def _give(self, answer: Answer | Refusal) -> None:
        waiting = self._answers.get(answer.request_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)


async def _send(socket: aiohttp.ClientWebSocketResponse, text: str) -> None:
    with contextlib.suppress(*LOST):
        await socket.send_str(text)


def _text_of(message: aiohttp.WSMessage) -> str:
    """Return the text of a message.  Raises `ChannelViolation`, `ConnectionResetError`."""
    if message.type is aiohttp.WSMsgType.TEXT:
        return str(message.data)
    if message.type is aiohttp.WSMsgType.BINARY:
        raise ChannelViolation(
            "Another broker sent a binary frame over the channel: look at its log."
        )
    # CLOSE, CLOSING, CLOSED, or ERROR with its cause, as when no PONG came.
    cause = message.data if isinstance(message.data, Exception) else "the connection was lost"
    raise ConnectionResetError(str(cause) or type(cause).__name__)


def _no_answer(address: BrokerAddress, reason: str) -> PeerFailed:
    return PeerFailed(
        f"The broker {address.broker_id} does not answer ({reason}): try again, or look whether it "
        "is well."
    )
