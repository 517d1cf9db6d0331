"""The channel at the broker that answers: carries out the requests of other brokers.

See `broker.placement.channel`.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping

import structlog
from aiohttp import WSMsgType, web

from broker.placement.channel import (
    Answer,
    AnsweringEnd,
    ChannelRefused,
    ChannelState,
    ChannelViolation,
    Refusal,
    RequestFrame,
    goodbye_of,
    refusal_of,
)
from broker.placement.typed_request import MalformedRequest, RequestHandler
from config.bounds import CHANNEL_CLOSE_S, CHANNEL_FRAME_BYTES, CHANNEL_HEARTBEAT_S
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
        self._ends: dict[web.WebSocketResponse, AnsweringEnd] = {}
        self._working: set[asyncio.Task[None]] = set()
        self._stopping = False

    async def serve(self, request: web.Request) -> web.WebSocketResponse:
        """Serve one connection until it is closed or lost.

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
        end = self._ends[socket] = AnsweringEnd(self._broker_id())
        try:
            await self._read(socket, end)
        except (ChannelViolation, ChannelRefused) as error:
            log.warning("channel_refused", remote=request.remote, error=str(error))
            await _send(socket, goodbye_of(error))
        except ConnectionError as error:
            log.debug("channel_lost", broker=end.peer_id, error=str(error))
        finally:
            end.close()
            del self._ends[socket]
            await socket.close()
        return socket

    async def stop(self, timeout_s: float) -> None:
        """Refuse new requests, give those in progress `timeout_s` to end, close all channels."""
        self._stopping = True
        for end in self._ends.values():
            end.stop()
        if self._working:
            await asyncio.wait(set(self._working), timeout=timeout_s)
        for task in self._working:
            task.cancel()
        await asyncio.gather(*self._working, return_exceptions=True)
        await asyncio.gather(*(socket.close() for socket in list(self._ends)))

    async def _read(self, socket: web.WebSocketResponse, end: AnsweringEnd) -> None:
        async for message in socket:
            if message.type is WSMsgType.ERROR:
                raise ConnectionResetError(repr(message.data))
            if message.type is not WSMsgType.TEXT:
                raise ChannelViolation(
                    "Another broker sent a binary frame over the channel: look at its log."
                )
            greeting = end.state is ChannelState.GREETING
            frame = end.receive(str(message.data))
            if greeting:
                await socket.send_str(end.hello())
                if self._stopping:
                    end.stop()
            elif isinstance(frame, Refusal):
                # Sent before the next frame is read: a peer that reads no refusals sends no more.
                await socket.send_str(end.refuse(frame))
            elif frame is not None:
                task = asyncio.create_task(self._carry_out(socket, end, frame))
                self._working.add(task)
                task.add_done_callback(self._working.discard)

    async def _carry_out(
        self, socket: web.WebSocketResponse, end: AnsweringEnd, frame: RequestFrame
    ) -> None:
        try:
            try:
                text = end.answer(Answer(frame.request_id, await self._answer_to(frame)))
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
                await _send(socket, text)
        finally:
            end.sent(frame.request_id)

    async def _answer_to(self, frame: RequestFrame) -> object:
        handler = self._handlers.get(frame.kind)
        if handler is None:
            raise MalformedRequest(
                f"{self._broker_id()} knows no request {frame.kind!r}: run the same version of the "
                "broker everywhere."
            )
        return await handler(frame.fields)

    def _failed(self, frame: RequestFrame) -> Refusal:
        return Refusal(
            frame.request_id,
            f"{self._broker_id()} failed on {frame.kind}: its log has the cause. Try again.",
        )


async def _send(socket: web.WebSocketResponse, text: str) -> None:
    # The broker that asked is gone: it sends its requests again over another connection.
    with contextlib.suppress(ConnectionError):
        await socket.send_str(text)
