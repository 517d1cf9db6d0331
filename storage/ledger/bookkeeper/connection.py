"""One connection to one bookie."""

import asyncio
import enum
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Final, cast

import structlog

from magnetar.protocol.state_table import StateTable
from storage.ledger.bookkeeper import wire
from storage.ledger.bookkeeper.auth import AuthExchange, NewAuthProvider
from storage.ledger.bookkeeper.bookie_client import (
    AddDone,
    BatchDone,
    BookieCounters,
    ReadDone,
    ReplyCode,
)
from storage.ledger.bookkeeper.bookie_options import BookieOptions
from storage.ledger.bookkeeper.metadata_store import BookieAddress
from storage.ledger.bookkeeper.waiters import AddWaiter, BatchWaiter, ReadWaiter, Waiter
from storage.ledger.bookkeeper.window import TICKS, Admission, Window
from storage.ledger.store import LedgerAssertion, LedgerError

log = structlog.get_logger(__name__)

_START_TLS_REQUEST: Final = 1


class BookieUnusable(LedgerError):
    """A bookie cannot be used as this client is configured."""


class BookieState(enum.Enum):
    """State of a connection; it changes only as `_MOVES` allows."""

    CONNECTING = "connecting"
    STARTING_TLS = "starting TLS"
    AUTHENTICATING = "authenticating"
    READY = "ready"
    CLOSED = "closed"


_MOVES: Final[StateTable[BookieState]] = StateTable(
    {
        BookieState.CONNECTING: frozenset(
            {
                BookieState.STARTING_TLS,
                BookieState.AUTHENTICATING,
                BookieState.READY,
                BookieState.CLOSED,
            }
        ),
        BookieState.STARTING_TLS: frozenset(
            {BookieState.AUTHENTICATING, BookieState.READY, BookieState.CLOSED}
        ),
        BookieState.AUTHENTICATING: frozenset({BookieState.READY, BookieState.CLOSED}),
        BookieState.READY: frozenset({BookieState.CLOSED}),
        BookieState.CLOSED: frozenset(),
    },
    defect=LedgerAssertion,
)


class BookieConnection(asyncio.Protocol):
    """One connection to one bookie, which `open` makes; it is not made again after a loss.

    Requests wait until the connection is READY; once it is CLOSED they are answered DISCONNECTED.
    A request is answered TIMED_OUT between one timeout and an eighth more.  Requests in flight and
    waiting are bounded (`window`); beyond that they are answered TOO_MANY_REQUESTS.  Callbacks run
    from the loop, never within the call.
    """

    def __init__(
        self,
        options: BookieOptions,
        counters: BookieCounters,
        on_closed: "Callable[[BookieConnection], None]",
    ) -> None:
        self.state = BookieState.CONNECTING
        self.ended_while = BookieState.CONNECTING
        """The state before CLOSED."""
        self._options = options
        self._counters = counters
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        # A batch may be above its limit by one entry, and by the sizes in it.
        self._decoder = wire.ReplyDecoder(2 * options.max_frame_bytes)
        self._window = Window(
            inflight_requests=options.inflight_requests,
            inflight_bytes=options.inflight_bytes,
            waiting_requests=options.waiting_requests,
            waiting_bytes=options.waiting_bytes,
        )
        self._out: list[bytes] = []
        self._batch_reads = 0
        self._tick_s = options.request_timeout_s / TICKS
        # One timer serves all requests, which have no task or future of their own.
        self._timer = self._loop.call_later(self._tick_s, self._on_tick)
        self._handshake: asyncio.Future[bytes] | None = None
        self._plain = b""
        self._gone = asyncio.Event()

    # Requests

    def add(
        self,
        ledger_id: int,
        entry_id: int,
        master_key: bytes,
        body: Sequence[bytes],
        done: AddDone,
        *,
        recovery: bool = False,
    ) -> None:
        """See `BookieClient.add`."""
        size = 0
        for piece in body:
            size += len(piece)
        head = wire.encode_add_head(size, master_key, recovery=recovery)
        self._submit(
            AddWaiter(
                (wire.ADD, ledger_id, entry_id), wire.ADD_HEAD_BYTES + size, (head, *body), done
            )
        )

    def read(
        self, ledger_id: int, entry_id: int, done: ReadDone, *, fence_with: bytes | None = None
    ) -> None:
        """See `BookieClient.read`."""
        frame = wire.encode_read(ledger_id, entry_id, fence_with)
        self._submit(ReadWaiter((wire.READ, ledger_id, entry_id), len(frame), (frame,), done))

    def read_batch(
        self, ledger_id: int, first: int, max_entries: int, max_bytes: int, done: BatchDone
    ) -> None:
        """See `BookieClient.read_batch`."""
        self._batch_reads += 1
        request = self._batch_reads
        limit = min(max_bytes, self._options.max_frame_bytes)
        frame = wire.encode_batch_read(ledger_id, first, request, max_entries, limit)
        key = (wire.BATCH_READ, ledger_id, request)
        self._submit(BatchWaiter(key, len(frame), (frame,), done))

    def _submit(self, waiter: Waiter) -> None:
        self._counters.requests += 1
        if waiter.frame_bytes > self._options.max_frame_bytes:
            self._answer_soon((waiter,), ReplyCode.TOO_LARGE)
            return
        if self.state is BookieState.CLOSED:
            self._answer_soon((waiter,), ReplyCode.DISCONNECTED)
            return
        admission = self._window.admit(waiter)
        if admission is Admission.SEND:
            self._send(waiter)
        elif admission is Admission.REFUSE:
            self._answer_soon((waiter,), ReplyCode.TOO_MANY_REQUESTS)

    def _send(self, waiter: Waiter) -> None:
        # Frames of one loop turn leave in one write.
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.extend(waiter.pieces)
        self._counters.bytes_sent += waiter.frame_bytes
        waiter.pieces = ()

    def _send_waiting(self) -> None:
        for waiter in self._window.sendable():
            self._send(waiter)

    def _flush(self) -> None:
        out = self._out
        self._out = []
        if self._transport is not None and self.state is BookieState.READY:
            self._transport.writelines(out)

    # Answers

    def data_received(self, data: bytes) -> None:
        """Decode bytes of the bookie, and answer requests."""
        self._counters.bytes_received += len(data)
        if self.state is BookieState.STARTING_TLS:
            self._start_tls_received(data)
            return
        failure: LedgerError | None = None
        replies: Sequence[wire.Reply]
        try:
            replies = self._decoder.feed(data)
        except wire.MalformedReply as error:
            replies, failure = error.replies_before, error
        if self.state is BookieState.AUTHENTICATING:
            failure = self._auth_received(replies) or failure
        else:
            failure = self._replies_received(replies) or failure
        if failure is not None:
            # After an answer that is malformed, or belongs to no request, none could be trusted.
            log.warning("bookie_misbehaved", peer=self.peer, error=str(failure))
            self._shut(failure)
        else:
            self._send_waiting()

    def _replies_received(self, replies: Sequence[wire.Reply]) -> LedgerError | None:
        answered = self._window.answered
        for key, code, payload in replies:
            waiter = answered(key)
            if waiter is None:
                if self.state is BookieState.CLOSED:
                    return None
                return BookieUnusable(
                    f"A bookie answered operation {key[0]} on entry {key[2]} of ledger {key[1]}, "
                    "which was not requested: the connection is made anew."
                )
            if not waiter.expired:
                self._answer(waiter, code, payload)
        return None

    def _answer(self, waiter: Waiter, code: ReplyCode, payload: Sequence[bytes]) -> None:
        if code is not ReplyCode.OK:
            self._counters.refusals[code] += 1
        try:
            waiter.answer(code, payload)
        except Exception:
            log.exception("bookie_callback_failed", code=code.name, request=waiter.key)

    def _answer_soon(self, waiters: Sequence[Waiter], code: ReplyCode) -> None:
        self._loop.call_soon(self._answer_all, waiters, code)

    def _answer_all(self, waiters: Sequence[Waiter], code: ReplyCode) -> None:
        for waiter in waiters:
            self._answer(waiter, code, ())

    def _on_tick(self) -> None:
        """Answer overdue requests with TIMED_OUT."""
        self._timer = self._loop.call_later(self._tick_s, self._on_tick)
        try:
            overdue, given_up = self._window.tick()
        except Exception:
            log.exception("bookie_requests_not_timed", peer=self.peer)
            self._shut(None)  # else requests would wait for ever
            return
        self._counters.timeouts += len(overdue)
        self._answer_all(overdue, ReplyCode.TIMED_OUT)
        if given_up:
            log.warning("bookie_gave_no_answer", peer=self.peer)
            self._shut(None)

    # Life

    async def open(self, address: BookieAddress) -> None:
        """Connect, with TLS and authentication as configured, then send what waits.

        Raises OSError (TLS failures are some), `BookieUnusable`, `BookieAuthenticationFailed`,
        `MalformedReply`; the connection is CLOSED then.
        """
        try:
            await self._loop.create_connection(lambda: self, address.host, address.port)
            if self._options.tls is not None:
                await self._start_tls(self._options.tls, address.host)
            if self._options.auth is not None:
                await self._authenticate(self._options.auth)
            if self.state is BookieState.CLOSED:
                raise ConnectionResetError("the bookie closed the connection")
        except BaseException:
            self._shut(None)
            raise
        self._move(BookieState.READY)
        self._window.open()
        self._counters.connects += 1
        self._send_waiting()

    async def _start_tls(self, context: ssl.SSLContext, host: str) -> None:
        self._move(BookieState.STARTING_TLS)
        received = await self._ask(wire.encode_start_tls(_START_TLS_REQUEST))
        status = wire.start_tls_status(received, _START_TLS_REQUEST)
        if status != 0:
            raise BookieUnusable(
                f"A bookie at {host} answered START_TLS with status {status}: configure TLS "
                "on the bookie, or none here."
            )
        if self._transport is None:
            raise ConnectionResetError("the bookie closed the connection")
        transport: asyncio.Transport | None = None
        try:
            transport = await self._loop.start_tls(
                self._transport, self, context, server_hostname=host
            )
        finally:
            if transport is None:  # asyncio calls no connection_lost in the handshake
                self._gone.set()
        if transport is None:
            raise ConnectionResetError("the bookie closed the connection during START_TLS")
        self._transport = transport

    async def _authenticate(self, new_provider: NewAuthProvider) -> None:
        self._move(BookieState.AUTHENTICATING)
        exchange = AuthExchange(await asyncio.to_thread(new_provider))
        frame: bytes | None = exchange.first_frame()
        while frame is not None:
            frame = exchange.next_frame(await self._ask(frame))

    async def _ask(self, frame: bytes) -> bytes:
        """Send a frame before READY, and wait for the bookie's answer."""
        if self._transport is None or self.state is BookieState.CLOSED:
            raise ConnectionResetError("the bookie closed the connection")
        self._handshake = self._loop.create_future()
        self._transport.write(frame)
        try:
            return await self._handshake
        finally:
            self._handshake = None

    def _start_tls_received(self, data: bytes) -> None:
        """Before TLS: collect the answer to START_TLS; `_start_tls` checks it."""
        self._plain += data
        try:
            complete = wire.start_tls_status(self._plain, _START_TLS_REQUEST) is not None
        except wire.MalformedReply as error:
            self._shut(error)
            return
        if complete and self._handshake is not None and not self._handshake.done():
            self._handshake.set_result(self._plain)

    def _auth_received(self, replies: Sequence[wire.Reply]) -> LedgerError | None:
        for reply in replies:
            handshake = self._handshake
            if handshake is None or handshake.done() or reply.key != wire.AUTH_KEY:
                return BookieUnusable(
                    "A bookie did not answer a message of authentication with one: look at its log."
                )
            handshake.set_result(reply.payload[0])
        return None

    @property
    def peer(self) -> str:
        """Address of the bookie, for logs."""
        if self._transport is None:
            return ""
        return str(self._transport.get_extra_info("peername"))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport; `open` goes on with it."""
        # uvloop's transports are streams, though not of asyncio's class.
        self._transport = cast("asyncio.Transport", transport)
        sock: socket.socket | None = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if self.state is BookieState.CLOSED:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Close the connection, as the bookie, the network or `close` ended it."""
        self._gone.set()
        self._shut(exc)

    def close(self) -> None:
        """Close the connection; its requests are answered DISCONNECTED.  Idempotent."""
        self._shut(None)

    async def wait_closed(self) -> None:
        """Return when the socket is closed and all requests are answered."""
        if self._transport is not None:
            await self._gone.wait()
        await asyncio.sleep(0)

    def _shut(self, reason: Exception | None) -> None:
        if self.state is BookieState.CLOSED:
            return
        self.ended_while = self.state
        self._move(BookieState.CLOSED)
        self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()
        if self._handshake is not None and not self._handshake.done():
            self._handshake.set_exception(
                reason or ConnectionResetError("the bookie closed the connection")
            )
        self._answer_soon(self._window.drain(), ReplyCode.DISCONNECTED)
        self._on_closed(self)

    def _move(self, state: BookieState) -> None:
        self.state = _MOVES.move(self.state, state, "A bookie's connection")
