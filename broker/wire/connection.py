"""The connection of one peer: frames in, replies out."""

import asyncio
import enum
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

import structlog

from broker.topics.client_connection import address_of
from broker.topics.closed_consumers import ClosedConsumers
from broker.topics.consumer import Consumer
from broker.topics.producer import Producer
from broker.topics.throttled_sends import THROTTLED
from broker.wire.client_addresses import ClientAddresses
from broker.wire.outbox import Outbox
from broker.wire.peer_memory import PeerMemory
from broker.wire.protocol_violation import ProtocolViolation
from broker.wire.request_share import Turn
from broker.wire.services import BrokerServices
from config.bounds import (
    CLOSE_FLUSH_S,
    CONNECTION_WRITE_HIGH_WATER,
    CONNECTION_WRITE_LIMIT,
    COSTLY_REQUEST_S,
    COSTLY_REQUESTS_WAITING,
    DECODED_COMMANDS,
    ECHO_WAIT_S,
    HANDSHAKE_FRAME_BYTES,
    HANDSHAKE_TIMEOUT_S,
    LIVENESS_CHECK_S,
    MAX_FRAME_SIZE,
    MAX_PENDING_REQUESTS,
    RECENTLY_CLOSED_PRODUCERS,
    SHORT_READ_S,
    TURN_S,
)
from magnetar.protocol.commands import FIELD_OF_TYPE
from magnetar.protocol.frames import FrameDecoder, FrameError, Received, Send, encode_command
from magnetar.protocol.pulsar_pb2 import BaseCommand, CommandError, CommandPing, FeatureFlags
from magnetar.protocol.pulsar_pb2 import ServerError as WireError
from magnetar.protocol.server_error import MagnetarError
from magnetar.protocol.state_table import StateTable

if TYPE_CHECKING:
    from broker.transactions.own_transactions import OwnTransactions
    from broker.wire.login import Login
    from security.identity import Principal

__all__ = ["Connection", "ConnectionState", "ProtocolViolation", "UnexpectedFailure"]

log = structlog.get_logger(__name__)

_CONNECT = int(BaseCommand.CONNECT)
_NO_REQUEST = 2**64 - 1
"""Request id -1 of the wire: an answer to no request."""
_REQUESTS = "requests"
_COSTLY = "costly requests"
_WRITING = "writing"
_CHECKING = "checking access"
_CONNECT_FIRST = "send CONNECT first, and larger frames when CONNECTED has come."
REPORTED_PARTIAL_BYTES = 4 * 1024
"""Less of an incomplete frame is not accounted: most reads of a busy producer leave so much."""
_PING_FRAME = encode_command(BaseCommand(type=BaseCommand.PING, ping=CommandPing()))


class ConnectionState(enum.Enum):
    """State of a connection; `_MOVES` has the moves between them."""

    HANDSHAKE = "handshake"
    """Only CONNECT is served."""
    AUTHENTICATING = "authenticating"
    """The credentials of CONNECT are checked; nothing is served."""
    READY = "ready"
    CLOSING = "closing"
    """Queued replies are flushed; nothing more is served."""
    CLOSED = "closed"


_MOVES: StateTable[ConnectionState] = StateTable(
    {
        ConnectionState.HANDSHAKE: frozenset(
            {
                ConnectionState.AUTHENTICATING,
                ConnectionState.READY,
                ConnectionState.CLOSING,
                ConnectionState.CLOSED,
            }
        ),
        ConnectionState.AUTHENTICATING: frozenset(
            {ConnectionState.READY, ConnectionState.CLOSING, ConnectionState.CLOSED}
        ),
        ConnectionState.READY: frozenset({ConnectionState.CLOSING, ConnectionState.CLOSED}),
        ConnectionState.CLOSING: frozenset({ConnectionState.CLOSED}),
        ConnectionState.CLOSED: frozenset(),
    },
    defect=RuntimeError,
)
_BEFORE_READY = (ConnectionState.HANDSHAKE, ConnectionState.AUTHENTICATING)
_SERVING = (*_BEFORE_READY, ConnectionState.READY)


class TopicWatch(Protocol):
    """A watch that ends with its connection."""

    def close(self) -> None:
        """Send nothing more."""
        ...


class ConnectionHost(BrokerServices, Protocol):
    """The parts of a broker that its connections use."""

    connections: "set[Connection]"
    client_addresses: ClientAddresses
    peer_memory: PeerMemory


class Connection(asyncio.Protocol):
    """One connection of a client: decodes frames, runs their handlers, writes the replies.

    `producers` and `consumers` have the attached ones by the peer's ids; while one is being opened,
    a future takes its id.  Asynchronous requests are tasks of the connection, which its end
    cancels.  Reading stops for named reasons: too many requests, more than
    CONNECTION_WRITE_HIGH_WATER of queued output, or the reasons of `pause_reading`.
    """

    principal: "Principal | None" = None
    """The role that the connection acts for; None without authentication."""
    own_transactions: "OwnTransactions | None" = None
    """The transactions that it may use.  None: all of them; before the first PRODUCER or SUBSCRIBE
    that authorization allowed, there is nothing that could use one."""
    login: "Login | None" = None
    """None without authentication, and before CONNECT."""
    _used_s = 0.0
    """What the reads of this turn of the loop have taken, short ones aside."""

    def __init__(
        self, broker: ConnectionHost, handlers: "Mapping[int, Handler]", send: "SendHandler"
    ) -> None:
        self.broker = broker
        self.keep_alive_interval_s = broker.settings.keep_alive_interval_s
        self.state = ConnectionState.HANDSHAKE
        self.closing = False
        """True from the decision to close on."""
        self._ready = False
        self.remote = ""
        self.client_version = ""
        self.protocol_version = 0
        self.features = FeatureFlags()
        self.connected_ms = 0
        self.producers: dict[int, Producer | asyncio.Future[Producer]] = {}
        self.consumers: dict[int, Consumer | asyncio.Future[Consumer]] = {}
        self.closed_producers: dict[int, None] = {}
        self.closed_consumers = ClosedConsumers()
        self.topic_watches: dict[int, TopicWatch] = {}
        self.inflight_bytes = 0
        self._handlers = handlers
        self._send = send
        self._decoder = FrameDecoder(HANDSHAKE_FRAME_BYTES, advice=_CONNECT_FIRST)
        self._forward: Callable[[bytes], None] | None = None
        """Receiver of all that is read, once the connection is handed over."""
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._outbox: Outbox
        self.put: Callable[[bytes], None]
        """Queue one encoded frame, without asking whether the connection is still open."""
        self._held: list[Received] = []
        """Frames that were decoded before reading was paused, in order."""
        self._frame_error: FrameError | None = None
        self._partial_bytes = 0
        """Bytes of an incomplete frame after the newest read; 0 if they are too few to report."""
        self._frame_bytes = 0
        """Bytes of the frames in `_held`, at most."""
        self._input_bytes = 0
        """Bytes of the reads that left something here."""
        self.paused: set[str] = set()
        """Reasons why reading is paused; empty while the connection is read."""
        self._reading = True
        # No `BackgroundTasks`: it is a bounded queue, which pauses reading.
        self._tasks: set[asyncio.Future[None]] = set()
        self._on_close: dict[object, Callable[[], None]] = {}
        self._liveness: list[asyncio.Future[None]] = []
        self._pings: deque[asyncio.Future[None] | None] = deque()
        """PINGs without their PONG, oldest first, each with the future that waits for it."""
        self._received_any = True
        self._ping_sent = False
        self._output_seen = 0
        self._timer: asyncio.TimerHandle
        self._gone: asyncio.Future[None] = self._loop.create_future()

    @property
    def tls(self) -> bool:
        """Whether the connection came over TLS."""
        return self._established is not None

    @property
    def _established(self) -> ssl.SSLObject | None:
        return cast("ssl.SSLObject | None", self._transport.get_extra_info("ssl_object"))

    def peer_certificate(self) -> bytes | None:
        """The client's certificate (DER), whose chain TLS has verified; None without one."""
        established = self._established
        return None if established is None else established.getpeercert(True)

    # Calls of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set up output, limits and the handshake timer."""
        self._transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername")
        self.remote = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else str(peer or "unknown")
        self.connected_ms = self.broker.clock.now_ms()
        self._outbox = Outbox(
            self._transport,
            high_water=CONNECTION_WRITE_HIGH_WATER,
            limit=CONNECTION_WRITE_LIMIT,
            on_change=self._writable_changed,
            on_queued=self._report_held,
            give_up=self._give_up_writing,
        )
        self.put = self._outbox.put
        self._timer = self._loop.call_later(HANDSHAKE_TIMEOUT_S, self._handshake_late)
        self.broker.connections.add(self)
        if not self.broker.client_addresses.add(self, self.address):
            self.abort("there are too many connections, or too many of its address")
            return
        self.on_close(partial(self.broker.costly_requests.drop, self))

    def data_received(self, data: bytes) -> None:
        """Serve the frames that `data` completes."""
        self._received_any = True
        if self._liveness:
            self._end_liveness_checks()
        if self.closing:
            return
        if self._forward is not None:
            self._forward(data)
            return
        if self._frame_bytes and not self._held:
            self._frame_bytes = 0
        began_s = self._loop.time()
        frames = self._decode(data)
        if self._held or self.paused:
            self._held.extend(frames)
        else:
            self._serve(frames, began_s)
        if self._decoder.has_more and not self._held:
            self._leave_for_next_turn(())
        if self._frame_error is not None and not self._held and not self.closing:
            self._close_for_violation(self._frame_error)
        partial = self._decoder.buffered_size
        if partial > REPORTED_PARTIAL_BYTES or self._held or self._partial_bytes:
            self._note_held(len(data), partial)
        used_s = self._loop.time() - began_s
        if used_s >= SHORT_READ_S and self._reading:
            self._account_read(used_s)

    def eof_received(self) -> bool:
        """Have the transport closed: the peer sends nothing more."""
        return False

    def pause_writing(self) -> None:
        """Note that the transport's buffer is above the high water."""
        self._outbox.transport_full(True)

    def resume_writing(self) -> None:
        """Note that the transport's buffer has drained."""
        self._outbox.transport_full(False)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the connection: the socket is closed."""
        self._end()
        self._move(ConnectionState.CLOSED)
        self._timer.cancel()
        # What refers to this connection goes, so that it is freed without a garbage collection.
        self._outbox.close()
        self._forward = None
        self.login = None
        for attached in (self.producers, self.consumers, self.topic_watches):
            attached.clear()
        self.broker.peer_memory.forget(self)
        self.broker.client_addresses.discard(self)
        self.broker.connections.discard(self)
        self._gone.set_result(None)
        if exc is not None:
            log.debug("connection_lost", remote=self.remote, error=str(exc))

    # Output

    @property
    def writable(self) -> bool:
        """False while more than the high water is queued towards the peer."""
        return self._outbox.writable

    def send(self, command: BaseCommand) -> None:
        """Queue a command.  Nothing happens once the connection is closing."""
        if not self.closing:
            self._outbox.put(encode_command(command))

    def send_encoded(self, *buffers: bytes) -> None:
        """Queue encoded frames.  Check `writable` before each batch of messages."""
        if not self.closing:
            for buffer in buffers:
                self._outbox.put(buffer)

    def reply_error(self, request_id: int, error: MagnetarError) -> None:
        """Queue ERROR with the error's code and sentence."""
        self.send(
            BaseCommand(
                type=BaseCommand.ERROR,
                error=CommandError(
                    request_id=request_id,
                    error=cast("WireError", int(error.code)),
                    message=str(error),
                ),
            )
        )

    def on_writable(self, callback: Callable[[], None]) -> None:
        """Run `callback` once, when the connection is (again) writable; never if it closes."""
        self._outbox.when_writable(callback)

    @asynccontextmanager
    async def costly(self) -> AsyncIterator[None]:
        """Wait for this connection's turn among all costly requests; the block is the request.

        A connection has one of them in progress.  It waits while the peer reads no answers, and
        reading stops while COSTLY_REQUESTS_WAITING wait.
        """
        requests = self.broker.costly_requests
        turn = self._loop.create_future()

        def start() -> None:
            if turn.done():
                requests.finished(self)
            else:
                turn.set_result(None)

        requests.add(self, start)
        if requests.waiting(self) >= COSTLY_REQUESTS_WAITING:
            self.pause_reading(_COSTLY)
        try:
            await turn
        except BaseException:
            # Cancelled: it may have been started just before.
            if turn.done() and not turn.cancelled():
                requests.finished(self)
            else:
                requests.withdraw(self, start)
            raise
        finally:
            if requests.waiting(self) < COSTLY_REQUESTS_WAITING // 2:
                self.resume_reading(_COSTLY)
        late = self._loop.call_later(COSTLY_REQUEST_S, requests.late, self)
        try:
            yield
        finally:
            late.cancel()
            requests.finished(self)

    def costly_if(self, condition: bool) -> AbstractAsyncContextManager[None]:
        """`costly` if the condition holds; else the block runs at once."""
        return self.costly() if condition else nullcontext()

    # Roles

    @property
    def address(self) -> str:
        """The peer's address, without a port."""
        return address_of(self.remote)

    @property
    def roles(self) -> tuple[str, ...]:
        """Every role that must be allowed to do what this connection asks; two behind a proxy."""
        return () if self.principal is None else self.principal.roles

    @property
    def owner(self) -> str | None:
        """The role that owns what is made here, such as transactions; None without one."""
        return None if self.principal is None else self.principal.role

    # Ids

    def forget_producer(self, producer_id: int, producer: object) -> None:
        """Free the id if it is this producer's; late SENDs for it are dropped for a while."""
        if self.producers.get(producer_id) is producer:
            del self.producers[producer_id]
            self.remember_closed(producer_id)

    def remember_closed(self, producer_id: int) -> None:
        """Let SENDs for this id pass for a while: those on their way are no violation."""
        closed = self.closed_producers
        closed.pop(producer_id, None)
        closed[producer_id] = None
        if len(closed) > RECENTLY_CLOSED_PRODUCERS:
            del closed[next(iter(closed))]

    def forget_consumer(self, consumer_id: int, consumer: object) -> None:
        """Free the id if it is this consumer's."""
        if self.consumers.get(consumer_id) is consumer:
            del self.consumers[consumer_id]

    # Life cycle

    def authenticate(self) -> "Login | None":
        """Move to AUTHENTICATING, and return the login; None where authentication is off."""
        authenticator = self.broker.authenticator
        if authenticator is None:
            return None
        # A broker without authentication starts sooner.
        from broker.wire.login import Login  # noqa: PLC0415

        self._move(ConnectionState.AUTHENTICATING)
        self.login = Login(
            self,
            authenticator,
            check_interval_s=self.broker.settings.authentication_refresh_check_s,
            now_s=lambda: self.broker.clock.now_ms() / 1000,
        )
        self.on_close(self.login.stop)
        return self.login

    @property
    def server_version(self) -> str:
        """The name and version of this broker, as clients get it."""
        return f"Magnetar {self.broker.version}"

    def ready(self) -> None:
        """Move to READY after CONNECT, and begin to keep the connection alive."""
        self._move(ConnectionState.READY)
        self._decoder.set_limit(MAX_FRAME_SIZE)
        self._timer.cancel()
        self._timer = self._loop.call_later(self.keep_alive_interval_s, self._keep_alive)

    def hand_over(self, receiver: Callable[[bytes], None]) -> bool:
        """Pass everything that is read to `receiver` from now on, keep-alive included.

        False if the peer has sent more already, for which the destination is not known.
        """
        if self._held or self._decoder.buffered_size:
            return False
        self._forward = receiver
        self._move(ConnectionState.READY)
        self._timer.cancel()
        if self.login is not None:
            self.login.handed_over()
        return True

    def on_close(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Run `callback` when the connection ends; returns a function that removes it."""
        if self.closing:
            self._loop.call_soon(callback)
            return lambda: None
        token = object()
        self._on_close[token] = callback
        return lambda: (self._on_close.pop(token, None), None)[1]

    def close(self, why: str) -> None:
        """Flush what is queued, then end the connection."""
        if self.closing:
            return
        log.debug("connection_closing", remote=self.remote, why=why)
        self._outbox.flush()
        self._move(ConnectionState.CLOSING)
        self._end()
        self._timer.cancel()
        self._timer = self._loop.call_later(CLOSE_FLUSH_S, self._transport.abort)
        self._transport.close()

    def abort(self, why: str) -> None:
        """End the connection at once; what is queued is lost."""
        if self.state is ConnectionState.CLOSED:
            return
        log.debug("connection_aborted", remote=self.remote, why=why)
        if not self.closing:
            self._move(ConnectionState.CLOSING)
        self._end()
        self._transport.abort()

    async def is_alive(self) -> bool:
        """Whether the peer sends anything within LIVENESS_CHECK_S, PONG at least.

        A connection that is not read counts as alive.
        """
        if self.closing:
            return False
        if self.paused:
            return True
        received: asyncio.Future[None] = self._loop.create_future()
        self._liveness.append(received)
        self._ping()
        await asyncio.wait((received,), timeout=LIVENESS_CHECK_S)
        return received.done() and not self.closing

    async def echo(self) -> None:
        """Return when the peer has answered a new PING: all that it wrote before is served then.

        Returns after ECHO_WAIT_S in any case, and when the connection ends.
        """
        if self.closing:
            return
        answered: asyncio.Future[None] = self._loop.create_future()
        self._ping(answered)
        await asyncio.wait((answered,), timeout=ECHO_WAIT_S)

    def pong(self) -> None:
        """Take a PONG, the answer to the oldest PING."""
        answered = self._pings.popleft() if self._pings else None
        if answered is not None and not answered.done():
            answered.set_result(None)

    async def requests_done(self) -> None:
        """Return when no request is in progress."""
        while self._tasks and not self.closing:
            await asyncio.wait(self._tasks)

    async def closed(self) -> None:
        """Return when the socket is closed."""
        await asyncio.shield(self._gone)

    # Bytes held for the peer

    @property
    def held_bytes(self) -> int:
        """See `Holder`."""
        waiting = self._frame_bytes if self._held else 0
        return waiting + self._decoder.buffered_size + self._outbox.queued_bytes

    @property
    def progress_bytes(self) -> int:
        """See `Holder`."""
        return self._input_bytes + self._outbox.drained_bytes

    @property
    def address_before_login(self) -> str | None:
        """See `Holder`."""
        return None if self._ready else self.broker.client_addresses.before_login(self)

    @property
    def waits_for_broker(self) -> bool:
        """See `Holder`.  A connection is not read as the broker is behind, or the peer is."""
        return bool(self._held or self.paused) and _WRITING not in self.paused

    def give_up(self) -> None:
        """See `Holder`."""
        self._loop.call_soon(self._abort_for_memory, self.held_bytes)

    def _note_held(self, size: int, partial: int) -> None:
        """Account a read of `size` bytes that leaves `partial` of an incomplete frame."""
        if self.closing:
            return
        if self._held:
            self._frame_bytes += max(0, self._partial_bytes + size - partial)
        self._partial_bytes = partial if partial > REPORTED_PARTIAL_BYTES else 0
        self._input_bytes += size
        self._report_held()

    def _report_held(self) -> None:
        self.broker.peer_memory.report(self)

    def _abort_for_memory(self, held_bytes: int) -> None:
        if self.state is ConnectionState.CLOSED:
            return
        log.warning(
            "connection_held_too_much",
            remote=self.remote,
            client=self.client_version,
            held_bytes=held_bytes,
        )
        self.abort("it held the most of what all peers leave unread or unfinished")

    # Input

    @property
    def socket(self) -> socket.socket | None:
        """The socket of the connection."""
        return cast("socket.socket | None", self._transport.get_extra_info("socket"))

    def probe(self) -> None:
        """Send PING, unless output is queued anyway: a system without the peer refuses it."""
        if self._ready and self._forward is None and not self._outbox.queued_bytes:
            self._pings.append(None)
            self.send_encoded(_PING_FRAME)

    def pause_reading(self, why: str) -> None:
        """Read nothing until every reason is withdrawn."""
        if self._reading and not self.closing:
            self._reading = False
            self._transport.pause_reading()
        self.paused.add(why)

    def resume_reading(self, why: str) -> None:
        """Withdraw one reason."""
        if why not in self.paused:
            return
        self.paused.discard(why)
        if not self.paused and not self.closing:
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        """Serve held frames, then read again."""
        if self.paused or self.closing:
            return
        held, self._held = self._held, []
        self._serve(held, self._loop.time())
        if self.paused or self.closing or self._held:
            return
        if self._decoder.has_more:
            self._decode_more()
            return
        if self._frame_error is not None:
            self._close_for_violation(self._frame_error)
            return
        if not self._reading:
            self._reading = True
            self._transport.resume_reading()

    def _decode_more(self) -> None:
        """Decode frames that came before, and serve them in the next turn of the loop."""
        self._leave_for_next_turn(self._decode(b""))

    def _decode(self, data: bytes) -> Sequence[Received]:
        """The next frames; an error of the decoder is kept until they are served."""
        try:
            return self._decoder.feed(data, DECODED_COMMANDS)
        except FrameError as error:
            frames, error.frames_before = error.frames_before, ()
            # Without its traceback, which would keep the connection and what was read.
            self._frame_error = error.with_traceback(None)
            return frames

    def _account_read(self, used_s: float) -> None:
        """Read nothing more in this turn of the loop once its reads have taken TURN_S together."""
        # libuv goes on reading a socket that has more, up to 32 times, before it serves others.
        if not self._used_s:
            self._loop.call_soon(self._begin_turn)
        self._used_s += used_s
        if self._used_s >= TURN_S:
            self._leave_for_next_turn(())

    def _begin_turn(self) -> None:
        self._used_s = 0.0

    def _serve(self, frames: Sequence[Received], began_s: float) -> None:
        """Serve frames for as long as the turn lasts that began at `began_s`; hold the others."""
        handlers = self._handlers
        at, end = 0, len(frames)
        turn = Turn(self._loop.time, began_s)
        while at < end:
            frame = frames[at]
            if self.paused:
                if not self.closing:
                    self._held.extend(frames[at:])
                return
            if at >= turn.next_check and turn.is_over(at):
                self._leave_for_next_turn(frames[at:])
                return
            if not self._ready and not self._may_begin(frame):
                return
            if isinstance(frame, Send):
                at = self._serve_sends(frames, at)
                continue
            at += 1
            command = frame.command
            handler = handlers.get(command.type)
            if handler is None:
                self._refuse_command(command)
                continue
            try:
                result = handler(self, command, frame.entry)
            except Deferred as deferred:
                self._serve_after(deferred, command, frames[at:])
                return
            except Exception as error:  # noqa: BLE001 - every fault of a handler is answered
                self._answer_failure(command, error)
                continue
            if result is not None:
                self._start(command, result)

    def _serve_after(
        self, deferred: "Deferred", command: BaseCommand, frames: Sequence[Received]
    ) -> None:
        """Serve a command when its check is done, and nothing else of this connection before it."""

        async def serve() -> None:
            try:
                work = await deferred.check()
            finally:
                self.resume_reading(_CHECKING)
            if work is not None:
                await work

        self._held.extend(frames)
        self.pause_reading(_CHECKING)
        self._start(command, serve())

    def _leave_for_next_turn(self, frames: Sequence[Received]) -> None:
        """Serve these frames when other connections have been served; read nothing until then."""
        if self.closing:
            return
        self._held.extend(frames)
        if self._reading:
            self._reading = False
            self._transport.pause_reading()
        self._loop.call_soon(self._go_on)

    def _serve_sends(self, frames: Sequence[Received], at: int) -> int:
        """Serve the SEND at frames[at], with those behind it that can be published with it.

        Returns the index behind the last one.
        """
        try:
            return self._send(self, frames, at)
        except Exception as error:  # noqa: BLE001 - every fault of a handler is answered
            self._close_for_violation(self._error_for_peer("SEND", error))
            return at + 1

    def _may_begin(self, frame: Received) -> bool:
        """Whether a connection that is not READY may serve this; if not, it is closed."""
        if self.closing:
            return False
        kind = BaseCommand.SEND if isinstance(frame, Send) else frame.command.type
        if kind == _CONNECT and self.state is ConnectionState.HANDSHAKE:
            return True
        before = "CONNECT: send CONNECT first."
        if self.state is ConnectionState.AUTHENTICATING:
            before = "CONNECTED: wait for it."
        self._close_for_violation(
            ProtocolViolation(f"{BaseCommand.Type.Name(kind)} came before {before}")
        )
        return False

    def _start(self, command: BaseCommand, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._done, command))
        if len(self._tasks) >= MAX_PENDING_REQUESTS:
            self.pause_reading(_REQUESTS)

    def _done(self, command: BaseCommand, task: asyncio.Future[None]) -> None:
        self._tasks.discard(task)
        if len(self._tasks) < MAX_PENDING_REQUESTS // 2:
            self.resume_reading(_REQUESTS)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._answer_failure(command, error)

    def _answer_failure(self, command: BaseCommand, error: BaseException) -> None:
        """Answer a command with the error of its handler."""
        name = BaseCommand.Type.Name(command.type)
        answer = self._error_for_peer(name, error)
        request_id = getattr(getattr(command, FIELD_OF_TYPE[command.type]), "request_id", None)
        if request_id is None or isinstance(answer, ProtocolViolation | FrameError):
            self._close_for_violation(answer)
        else:
            log.debug("request_refused", command=name, remote=self.remote, error=str(answer))
            self.reply_error(request_id, answer)

    def _error_for_peer(self, name: str, error: BaseException) -> MagnetarError:
        """The error that the peer gets; a fault of the broker is logged, and not described."""
        if isinstance(error, MagnetarError):
            return error
        log.error("request_failed", command=name, remote=self.remote, exc_info=error)
        return UnexpectedFailure(f"The broker failed on {name}: its log has the cause.")

    def _refuse_command(self, command: BaseCommand) -> None:
        self._close_for_violation(
            ProtocolViolation(
                f"{BaseCommand.Type.Name(command.type)} is no request that a broker serves: "
                "check the client against protocol version 21."
            )
        )

    def _close_for_violation(self, error: MagnetarError) -> None:
        """Close the connection because of what the peer sent."""
        log.warning(
            "connection_refused",
            remote=self.remote,
            client=self.client_version,
            error=type(error).__name__,
            why=str(error),
        )
        if self.state in _BEFORE_READY:
            self.reply_error(_NO_REQUEST, error)
        self.close(str(error))

    # Timers and bookkeeping

    def _move(self, to: ConnectionState) -> None:
        self.state = _MOVES.move(self.state, to, "A connection")
        self._ready = to is ConnectionState.READY
        if self._ready:
            self.broker.client_addresses.logged_in(self)
        self.closing = to not in _SERVING

    def _end(self) -> None:
        """Cancel requests and run the callbacks of the end, once."""
        self._held.clear()
        self._decoder.discard()
        self._frame_error = None
        for task in self._tasks:
            task.cancel()
        self._end_liveness_checks()
        while self._pings:
            self.pong()
        callbacks = list(self._on_close.values())
        self._on_close.clear()
        for callback in callbacks:
            try:
                callback()
            except Exception:
                log.exception("close_callback_failed", remote=self.remote)

    def _ping(self, answered: asyncio.Future[None] | None = None) -> None:
        """Send PING; with `answered` the PONG sets it."""
        # Without it any sign of life will do, so one PING in flight is enough.
        if answered is not None or not self._pings:
            self._pings.append(answered)
            self.send_encoded(_PING_FRAME)

    def _end_liveness_checks(self) -> None:
        waiting, self._liveness = self._liveness, []
        for received in waiting:
            if not received.done():
                received.set_result(None)

    def _handshake_late(self) -> None:
        self.abort(f"no CONNECT within {HANDSHAKE_TIMEOUT_S} s")

    def _keep_alive(self) -> None:
        """Once an interval: PING a silent peer; abort if it stays silent, or reads nothing."""
        self._timer = self._loop.call_later(self.keep_alive_interval_s, self._keep_alive)
        # Not `==`: in the transport's buffer a PING is larger by what TLS adds to it.
        stuck = _WRITING in self.paused and self._outbox.drained_bytes <= self._output_seen
        self._output_seen = self._outbox.drained_bytes
        silent = not self._received_any and not self.paused
        self._received_any = False
        if THROTTLED in self.paused and _WRITING not in self.paused:
            # Its own PINGs are not read now: anything from here tells it that the broker is alive.
            self._pings.append(None)
            self.send_encoded(_PING_FRAME)
        if not silent and not stuck:
            self._ping_sent = False
        elif self._ping_sent:
            self.abort("the peer reads nothing" if stuck else "the peer does not answer PING")
        else:
            self._ping_sent = True
            self._ping()

    def _writable_changed(self, writable: bool) -> None:
        # A peer that does not read must not make the broker queue more replies.
        if not self.closing:
            self.broker.costly_requests.set_writable(self, writable)
        if writable:
            self.resume_reading(_WRITING)
        else:
            self.pause_reading(_WRITING)

    def _give_up_writing(self) -> None:
        self._loop.call_soon(self.abort, "more is queued than the peer may leave unread")


class Deferred(Exception):
    """Raised by a handler: whether it may serve the command has to be found out first.

    `check` finds it out, and returns what the handler would have returned.
    """

    def __init__(self, check: Callable[[], Coroutine[None, None, Awaitable[None] | None]]) -> None:
        super().__init__()
        self.check = check


class UnexpectedFailure(MagnetarError):
    """The broker failed on a request; its log has the cause."""


Handler = Callable[[Connection, BaseCommand, bytes | None], Awaitable[None] | None]
"""Serves a command, with its entry if it has one: see `broker.wire.handlers`."""
SendHandler = Callable[[Connection, Sequence[Received], int], int]
"""Publishes the SEND at an index, with those behind it; returns the index behind the last one."""
