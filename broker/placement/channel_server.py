"""The channel at the broker that answers: carries out the requests of other brokers.

See `broker.placement.channel`.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping

import structlog
from aiohttp import WSMsgType, web

from broker.placement.channel import (
    Answer,
    AnsweringEnd,
    ChannelRefused,
    ChannelState,
    ChannelViolation,
    FrameTooLarge,
    Refusal,
    RequestFrame,
    goodbye_of,
    refusal_of,
)
from broker.placement.typed_request import MalformedRequest, RequestHandler
from config.bounds import (
    CHANNEL_CLOSE_S,
    CHANNEL_EVENTS_WAITING,
    CHANNEL_FRAME_BYTES,
    CHANNEL_HEARTBEAT_S,
)
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.server_error import MagnetarError

log = structlog.get_logger(__name__)


class ChannelServer:
    """Serves the channels of other brokers to this one."""

    def __init__(
        self, broker_id: Callable[[], str], handlers: Mapping[str, RequestHandler]
    ) -> None:
        """`broker_id` returns the id of this broker.  `handlers` carry requests out, by kind."""
        self._broker_id = broker_id
        self._handlers = handlers
        self._sessions: dict[ChannelSession, None] = {}
        self._working = BackgroundTasks()
        self._stopping = False

    async def serve(
        self, request: web.Request, *, for_s: float | None = None
    ) -> web.WebSocketResponse:
        """Serve one connection until it is closed or lost, or for `for_s` seconds.

        Requests of a lost connection are carried out to their end: the broker that asked sends
        them again, and they may be made twice.
        """
        socket = web.WebSocketResponse(
            heartbeat=CHANNEL_HEARTBEAT_S,
            max_msg_size=CHANNEL_FRAME_BYTES,
            timeout=CHANNEL_CLOSE_S,
            compress=False,
        )
        await socket.prepare(request)
        session = ChannelSession(socket, AnsweringEnd(self._broker_id()), request.transport)
        self._sessions[session] = None
        sending = asyncio.create_task(session.send_events())
        try:
            async with asyncio.timeout(for_s):
                await self._read(session)
        except TimeoutError:
            # The credentials have expired: the other broker connects again, with new ones.
            log.debug("channel_credentials_expired", broker=session.end.peer_id)
        except (ChannelViolation, ChannelRefused) as error:
            log.warning("channel_refused", remote=request.remote, error=str(error))
            await session.send(goodbye_of(error))
        except ConnectionError as error:
            log.debug("channel_lost", broker=session.end.peer_id, error=str(error))
        finally:
            del self._sessions[session]
            session.close()
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            await socket.close()
        return socket

    async def stop(self, timeout_s: float) -> None:
        """Refuse new requests, give those in progress `timeout_s` to end, close all channels."""
        self._stopping = True
        for session in self._sessions:
            session.end.stop()
        if self._working.busy:
            await asyncio.wait(self._working.running, timeout=timeout_s)
        await self._working.end()
        await asyncio.gather(*(session.socket.close() for session in list(self._sessions)))

    async def _read(self, session: "ChannelSession") -> None:
        end = session.end
        async for message in session.socket:
            if message.type is WSMsgType.ERROR:
                raise ConnectionResetError(repr(message.data))
            if message.type is not WSMsgType.TEXT:
                raise ChannelViolation(
                    "Another broker sent a binary frame over the channel: look at its log."
                )
            greeting = end.state is ChannelState.GREETING
            frame = end.receive(str(message.data))
            if greeting:
                await session.socket.send_str(end.hello())
                if self._stopping:
                    end.stop()
            elif isinstance(frame, Refusal):
                # Sent before the next frame is read: a peer that reads no refusals sends no more.
                await session.socket.send_str(end.refuse(frame))
            elif frame is not None:
                # Tasks start in this order, so handlers that await nothing run in it.
                self._working.start(self._carry_out(session, frame))

    async def _carry_out(self, session: "ChannelSession", frame: RequestFrame) -> None:
        end = session.end
        try:
            try:
                value = await self._answer_to(session, frame)
                text = end.answer(Answer(frame.request_id, value))
            except MagnetarError as error:
                text = end.answer(refusal_of(frame.request_id, error))
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                # Something that the request waited for was cancelled, and not the request itself.
                text = end.answer(self._failed(frame))
            except Exception:
                log.exception("channel_request_failed", kind=frame.kind)
                text = end.answer(self._failed(frame))
            if text is not None:
                await session.send(text)
        finally:
            end.sent(frame.request_id)

    async def _answer_to(self, session: "ChannelSession", frame: RequestFrame) -> object:
        handler = self._handlers.get(frame.kind)
        if handler is None:
            raise MalformedRequest(
                f"{self._broker_id()} knows no request {frame.kind!r}: run the same version of the "
                "broker everywhere."
            )
        return await handler(session, frame.fields)

    def _failed(self, frame: RequestFrame) -> Refusal:
        return Refusal(
            frame.request_id,
            f"{self._broker_id()} failed on {frame.kind}: its log has the cause. Try again.",
        )


class ChannelSession:
    """A connection from another broker, and the `EventSink` of the requests on it."""

    def __init__(
        self,
        socket: web.WebSocketResponse,
        end: AnsweringEnd,
        transport: asyncio.Transport | None,
    ) -> None:
        self.socket = socket
        self.end = end
        self._transport = transport
        self._events: deque[str] = deque()
        self._wake = asyncio.Event()
        self._sends = True
        self._closed = False
        self._listeners: list[Callable[[], None]] = []

    def send_event(self, kind: str, value: object) -> None:
        """See `EventSink`.  CHANNEL_EVENTS_WAITING bounds the events that wait."""
        if not self._sends:
            return
        if len(self._events) >= CHANNEL_EVENTS_WAITING:
            self._abort("it reads its events too slowly")
            return
        try:
            self._events.append(self.end.event(kind, value))
        except FrameTooLarge as error:
            self._abort(str(error))
        self._wake.set()

    def on_close(self, listener: Callable[[], None]) -> None:
        """See `EventSink`."""
        if self._closed:
            listener()
        else:
            self._listeners.append(listener)

    async def send_events(self) -> None:
        """Send events as they come, until the connection is lost."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._events:
                    await self.socket.send_str(self._events.popleft())
        except ConnectionError:
            return
        except Exception as error:
            # Closed, because events that are missing would not be noticed.
            log.exception("channel_events_broken", broker=self.end.peer_id)
            self._abort(repr(error))

    async def send(self, text: str) -> None:
        """Send a frame.  Nothing happens if the connection is lost."""
        # The broker that asked sends its requests again over another connection.
        with contextlib.suppress(ConnectionError):
            await self.socket.send_str(text)

    def close(self) -> None:
        """Note that the connection is closed or lost.  May be called again."""
        self._sends, self._closed = False, True
        self._events.clear()
        self.end.close()
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener()

    def _abort(self, reason: str) -> None:
        log.warning("channel_aborted", broker=self.end.peer_id, reason=reason)
        # Listeners are called later, by `close`: this may be one of their own calls.
        self._sends = False
        self._events.clear()
        if self._transport is not None:
            self._transport.abort()
