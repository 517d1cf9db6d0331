"""`ConnectionCore`: the protocol of one connection to a broker, from CONNECT to its end.  Pure.

    UNSENT -> GREETING -> READY -> ENDED          any state -> ENDED
    GREETING <-> CHALLENGED                       the broker asks for credentials before CONNECTED

Bytes, time and requests come in by calls.  The `Shell` does the IO: bytes to write, credentials to
fetch, the end.
"""

import enum
import logging
from collections.abc import Callable, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Final, Protocol

from magnetar.bounds import FRAME_HEADROOM, MAX_ANNOUNCED_MESSAGE_SIZE, MAX_MESSAGE_SIZE
from magnetar.errors import (
    MAX_REASON,
    BrokerError,
    ConnectionLost,
    MagnetarError,
    error_of,
)
from magnetar.protocol.commands import encode_command
from magnetar.protocol.frames import Frame, FrameDecoder, FrameError, Received
from magnetar.protocol.pulsar_pb2 import (
    AuthData,
    AuthenticationError,
    BaseCommand,
    CommandAuthChallenge,
    CommandAuthResponse,
    CommandConnect,
    CommandConnected,
    CommandPing,
    CommandPong,
    CommandTopicMigrated,
)
from magnetar.protocol.server_error import InternalError
from magnetar.protocol.state_table import StateTable
from magnetar.wire.requests import ANSWERS, Answered, Requests

__all__ = ["ConnectionCore", "ConnectionState", "Handler", "PeerKind", "Shell"]

_log = logging.getLogger(__name__)


class ConnectionState(enum.Enum):
    """The state of a connection."""

    UNSENT = "unsent"
    GREETING = "greeting"
    CHALLENGED = "challenged"
    READY = "ready"
    ENDED = "ended"


_S: Final = ConnectionState
_READY: Final = _S.READY
_ENDED: Final = _S.ENDED
_NEXT: Final[StateTable[ConnectionState]] = StateTable(
    {
        _S.UNSENT: frozenset({_S.GREETING, _S.ENDED}),
        _S.GREETING: frozenset({_S.CHALLENGED, _S.READY, _S.ENDED}),
        _S.CHALLENGED: frozenset({_S.GREETING, _S.ENDED}),
        _S.READY: frozenset({_S.ENDED}),
        _S.ENDED: frozenset(),
    },
    defect=InternalError,
)
_AWAITED: Final[Mapping[ConnectionState, frozenset[int]]] = MappingProxyType(
    {
        _S.UNSENT: frozenset(),
        _S.GREETING: frozenset(
            {BaseCommand.CONNECTED, BaseCommand.AUTH_CHALLENGE, BaseCommand.ERROR}
        ),
        _S.CHALLENGED: frozenset({BaseCommand.ERROR}),
    }
)
"""The commands that a broker may send before the connection is ready, beside PING and PONG."""


class PeerKind(enum.Enum):
    """The kinds of handlers to which a broker sends commands unasked, by number."""

    PRODUCER = "producer"
    CONSUMER = "consumer"
    LAYOUT = "layout"
    NAMESPACE = "namespace"
    COORDINATORS = "coordinators"


class Handler(Protocol):
    """The receiver of commands that a broker sends unasked."""

    def received(self, frame: Frame) -> None:
        """Called with each command for it, in order."""

    def connection_lost(self, error: ConnectionLost) -> None:
        """Called once at the end of the connection; it is detached already."""


class Shell(Protocol):
    """The IO of a connection."""

    @property
    def writable(self) -> bool:
        """Whether the other side reads what is written."""
        ...

    def write(self, *parts: bytes) -> None:
        """Write bytes, in order."""

    def prove(self, challenge: AuthData) -> None:
        """Fetch the credentials, and pass them to `ConnectionCore.prove`."""

    def ready(self, connected: CommandConnected) -> None:
        """Called when requests can be sent."""

    def end(self, error: MagnetarError) -> None:
        """Close the socket; called once, before requests and handlers get the error."""


class _NoShell:
    """The shell of a connection that has ended."""

    writable = False

    def write(self, *parts: bytes) -> None:
        pass

    def prove(self, challenge: AuthData) -> None:
        pass

    def ready(self, connected: CommandConnected) -> None:
        pass

    def end(self, error: MagnetarError) -> None:
        pass


_ROUTES: Final[Mapping[int, tuple[PeerKind, str]]] = MappingProxyType(
    {
        BaseCommand.SEND_RECEIPT: (PeerKind.PRODUCER, "send_receipt.producer_id"),
        BaseCommand.SEND_ERROR: (PeerKind.PRODUCER, "send_error.producer_id"),
        BaseCommand.CLOSE_PRODUCER: (PeerKind.PRODUCER, "close_producer.producer_id"),
        BaseCommand.MESSAGE: (PeerKind.CONSUMER, "message.consumer_id"),
        BaseCommand.CLOSE_CONSUMER: (PeerKind.CONSUMER, "close_consumer.consumer_id"),
        BaseCommand.REACHED_END_OF_TOPIC: (
            PeerKind.CONSUMER,
            "reached_end_of_topic.consumer_id",
        ),
        BaseCommand.ACTIVE_CONSUMER_CHANGE: (
            PeerKind.CONSUMER,
            "active_consumer_change.consumer_id",
        ),
        BaseCommand.SCALABLE_TOPIC_ASSIGNMENT_UPDATE: (
            PeerKind.CONSUMER,
            "scalable_topic_assignment_update.consumer_id",
        ),
        BaseCommand.SCALABLE_TOPIC_UPDATE: (PeerKind.LAYOUT, "scalable_topic_update.session_id"),
        BaseCommand.WATCH_SCALABLE_TOPICS_UPDATE: (
            PeerKind.NAMESPACE,
            "watch_scalable_topics_update.watch_id",
        ),
        BaseCommand.WATCH_TC_ASSIGNMENTS_UPDATE: (
            PeerKind.COORDINATORS,
            "watch_tc_assignments_update.watch_id",
        ),
    }
)
"""The kind of handler of each command, and the field with its number."""
_PING: Final = encode_command(BaseCommand(type=BaseCommand.PING, ping=CommandPing()))
_PONG: Final = encode_command(BaseCommand(type=BaseCommand.PONG, pong=CommandPong()))


class ConnectionCore:
    """The state of one connection to a broker, from CONNECT to its end.

    Answers go to their requests, and other commands to their handlers, in order.  A command without
    a handler is dropped: the broker may not know yet that the handler was closed.  PING is answered
    at once.  After `keep_alive_s` without a byte the core sends PING, and after as much again the
    connection is lost.  A malformed frame ends the connection, after the frames before it.  At the
    end each pending request, then each handler, gets the error once.

    If a handler raises, that is logged, and all others are served as before.  Times are in seconds
    of one clock.
    """

    def __init__(
        self,
        shell: Shell,
        hello: CommandConnect,
        keep_alive_s: float,
        max_frame_bytes: int | None = None,
    ) -> None:
        """`max_frame_bytes`: of the largest frame that is taken, whatever the broker announces.

        Without it frames are as large as the broker's largest message.
        """
        self.state = ConnectionState.UNSENT
        self.connected = CommandConnected()
        self.max_message_size = MAX_MESSAGE_SIZE
        self.requests = Requests()
        self._shell: Shell = shell
        self._hello = hello
        self._keep_alive_s = keep_alive_s
        self._heard_at = 0.0
        self._pinged_at: float | None = None
        self._refusal: str | None = None
        self._end_reason: str | None = None
        """The sentence of the error that ended it.  The error itself gathers tracebacks."""
        self._max_frame_bytes = max_frame_bytes
        self._decoder = self._make_decoder()
        self._next_decoder: FrameDecoder | None = None
        self._handlers: dict[PeerKind, dict[int, Handler]] = {kind: {} for kind in PeerKind}
        self._routes: dict[int, tuple[Callable[[BaseCommand], int], dict[int, Handler]]] = {
            number: (attrgetter(field), self._handlers[kind])
            for number, (kind, field) in _ROUTES.items()
        }
        self._others: dict[int, Callable[[BaseCommand], None]] = {
            BaseCommand.PING: self._ping,
            BaseCommand.PONG: self._pong,
            BaseCommand.AUTH_CHALLENGE: self._challenge,
            BaseCommand.TOPIC_MIGRATED: self._migrated,
        }

    # Beginning and end

    def begin(self, now: float) -> None:
        """Send CONNECT, as the socket is open."""
        self._enter(ConnectionState.GREETING)
        self._heard_at = now
        self._shell.write(
            encode_command(BaseCommand(type=BaseCommand.CONNECT, connect=self._hello))
        )
        # A secret that is not there any more shows up nowhere.
        self._hello.ClearField("auth_data")

    def prove(self, data: bytes) -> None:
        """Send the credentials that the broker asked for, during the handshake or later."""
        if self.state is ConnectionState.ENDED:
            return
        if self.state is ConnectionState.CHALLENGED:
            self._enter(ConnectionState.GREETING)
        hello = self._hello
        answer = CommandAuthResponse(
            client_version=hello.client_version,
            protocol_version=hello.protocol_version,
            response=AuthData(auth_method_name=hello.auth_method_name, auth_data=data),
        )
        self._shell.write(
            encode_command(BaseCommand(type=BaseCommand.AUTH_RESPONSE, auth_response=answer))
        )

    def end(self, error: MagnetarError) -> None:
        """End the connection, unless it has ended already."""
        if self.state is ConnectionState.ENDED:
            return
        self._enter(ConnectionState.ENDED)
        self._end_reason = str(error)
        self._decoder.discard()
        self._next_decoder = None
        lost = error if isinstance(error, ConnectionLost) else ConnectionLost(str(error))
        handlers = [each for some in self._handlers.values() for each in some.values()]
        for some in self._handlers.values():
            some.clear()
        self._shell.end(error)
        # What refers back to the core goes, so that it is freed without a garbage collection.
        self._shell = _NoShell()
        self._others.clear()
        self.requests.fail(lost)
        for handler in handlers:
            try:
                handler.connection_lost(lost)
            except Exception as defect:  # noqa: BLE001 - the other handlers must get the error
                _defect(handler, "its loss of the connection", defect)

    def socket_lost(self, why: str) -> None:
        """End the connection, as the socket is closed."""
        said = f"; it had said: {self._refusal}" if self._refusal else ""
        advice = "check whether the broker runs, and read its log."
        if self.state is ConnectionState.GREETING:
            # Brokers end a handshake that they do not understand, or refuse, without an answer.
            advice = (
                "check whether it expects TLS (pulsar+ssl://) and whether it trusts this client's "
                "certificate, and read its log."
            )
        self.end(ConnectionLost(f"The connection to the broker was lost ({why}{said}); {advice}"))

    def check_usable(self) -> None:
        """Raises `ConnectionLost` unless requests can be sent."""
        if self.state is ConnectionState.READY:
            return
        raise ConnectionLost(
            "The connection is not ready yet; wait until it is."
            if self._end_reason is None
            else f"The connection has ended: {self._end_reason}"
        )

    def _enter(self, state: ConnectionState) -> None:
        self.state = _NEXT.move(self.state, state, "A connection")

    # Handlers and requests

    def attach(self, kind: PeerKind, number: int, handler: Handler) -> None:
        """Pass commands with this number to `handler`.  Raises `ConnectionLost`."""
        self.check_usable()
        self._handlers[kind][number] = handler

    def detach(self, kind: PeerKind, number: int) -> None:
        """Drop commands with this number from now on."""
        self._handlers[kind].pop(number, None)

    def detach_all(self, handler: Handler) -> None:
        """Detach a handler from all numbers to which it is attached."""
        for some in self._handlers.values():
            for number in [number for number, each in some.items() if each is handler]:
                del some[number]

    def request(
        self,
        request_id: int,
        frame: bytes,
        answered: Answered,
        postponed: Callable[[], None] | None = None,
    ) -> None:
        """Send the frame of a request.  Raises `ConnectionLost`."""
        self.check_usable()
        self.requests.add(request_id, answered, postponed)
        self._shell.write(frame)

    # Time

    def tick(self, now: float) -> float:
        """Check for how long the broker has been silent; returns the seconds to the next check."""
        if self.state is not ConnectionState.READY:
            return self._keep_alive_s
        silent_s = now - self._heard_at
        if silent_s < self._keep_alive_s:
            return self._keep_alive_s - silent_s
        if self._pinged_at is None or self._pinged_at < self._heard_at:
            self._pinged_at = now
            self._shell.write(_PING)
            return self._keep_alive_s
        waited_s = now - self._pinged_at
        if waited_s < self._keep_alive_s:
            return self._keep_alive_s - waited_s
        self.end(
            ConnectionLost(
                f"The broker has sent nothing for {silent_s:.0f} s, not even after a PING; check "
                "whether it and the network are well."
            )
        )
        return self._keep_alive_s

    # Received bytes

    def received(self, data: bytes, now: float) -> None:
        """Decode bytes of the broker, and serve their frames."""
        if self.state is _ENDED:
            return
        self._heard_at = now
        if self._next_decoder is not None and not self._decoder.buffered_size:
            self._decoder, self._next_decoder = self._next_decoder, None
        try:
            frames = self._decoder.feed(data)
        except FrameError as error:
            self._serve(error.frames_before)
            self.end(
                ConnectionLost(
                    f"The broker sent bytes that cannot be read: {error} Check whether this "
                    "address is that of a broker's binary protocol, and whether both sides use TLS."
                )
            )
            return
        self._serve(frames)

    def _serve(self, frames: "list[Received] | tuple[Received, ...]") -> None:
        routes = self._routes
        for frame in frames:
            if not isinstance(frame, Frame):
                self._unexpected("SEND")
                return
            if self.state is not _READY:
                if self.state is _ENDED:
                    return
                self._greeted(frame.command)
                continue
            command = frame.command
            kind = command.type
            route = routes.get(kind)
            if route is not None:
                number_of, handlers = route
                handler = handlers.get(number_of(command))
                if handler is not None:
                    try:
                        handler.received(frame)
                    except Exception as defect:  # noqa: BLE001 - other frames must be served
                        _defect(handler, BaseCommand.Type.Name(kind), defect)
            elif kind in ANSWERS:
                self._answer(command)
            else:
                other = self._others.get(kind)
                if other is None:
                    self._unexpected(BaseCommand.Type.Name(kind))
                    return
                other(command)

    def _answer(self, command: BaseCommand) -> None:
        if command.type == BaseCommand.ERROR:
            # An ERROR without a request says why the broker closes the connection.
            self._refusal = command.error.message[:MAX_REASON]
        try:
            self.requests.answer(command)
        except Exception as defect:  # noqa: BLE001 - other frames must be served
            _defect(self.requests, BaseCommand.Type.Name(command.type), defect)

    def _greeted(self, command: BaseCommand) -> None:
        """Handle a command before the connection is ready."""
        kind = command.type
        if kind in (BaseCommand.PING, BaseCommand.PONG):
            self._others[kind](command)
        elif kind not in _AWAITED.get(self.state, ()):
            self._unexpected(BaseCommand.Type.Name(kind))
        elif kind == BaseCommand.ERROR:
            self.end(_refused(command, self._hello.auth_method_name))
        elif kind == BaseCommand.AUTH_CHALLENGE:
            self._enter(ConnectionState.CHALLENGED)
            self._shell.prove(command.auth_challenge.challenge)
        else:
            self._ready(command.connected)

    def _ready(self, connected: CommandConnected) -> None:
        self.connected = connected
        if connected.max_message_size > 0:
            self.max_message_size = min(connected.max_message_size, MAX_ANNOUNCED_MESSAGE_SIZE)
            self._next_decoder = self._make_decoder()
        self._enter(ConnectionState.READY)
        self._shell.ready(connected)

    def _make_decoder(self) -> FrameDecoder:
        limit = self._max_frame_bytes or self.max_message_size + FRAME_HEADROOM
        return FrameDecoder(limit, limit)

    def _ping(self, command: BaseCommand) -> None:
        # What a broker does not read would fill the memory, and shows it as well that we live.
        if self._shell.writable:
            self._shell.write(_PONG)

    def _pong(self, command: BaseCommand) -> None:
        """Do nothing: every received byte shows that the broker lives."""

    def _challenge(self, command: BaseCommand) -> None:
        challenge: CommandAuthChallenge = command.auth_challenge
        self._shell.prove(challenge.challenge)

    def _migrated(self, command: BaseCommand) -> None:
        """Pass TOPIC_MIGRATED to its producer or consumer."""
        migrated: CommandTopicMigrated = command.topic_migrated
        producer = migrated.resource_type == CommandTopicMigrated.Producer
        kind = PeerKind.PRODUCER if producer else PeerKind.CONSUMER
        handler = self._handlers[kind].get(migrated.resource_id)
        if handler is not None:
            handler.received(Frame(command))

    def _unexpected(self, name: str) -> None:
        self.end(
            ConnectionLost(
                f"The broker sent {name}, which is not allowed in the state {self.state.value}; "
                "check whether it is a Pulsar broker of version 5."
            )
        )


def _defect(handler: object, what: str, defect: Exception) -> None:
    _log.error(
        "handler_failed handler=%s what=%r error=%r",
        type(handler).__name__,
        what,
        defect,
        exc_info=defect,
    )


def _refused(command: BaseCommand, method: str) -> BrokerError:
    """The error for a refused handshake; `method` is that of the client's credentials."""
    refusal = command.error
    said = refusal.message or "The broker refused the connection."
    if refusal.error == AuthenticationError:
        reason = said.rstrip(". ")
        said = (
            f"The broker wants credentials, and this client has none ({reason}); give it a token, "
            "basic or OAuth2 credentials, or a certificate."
            if method == "none"
            else f"The broker does not accept this client's {method} credentials ({reason}); check "
            "them, and read the broker's log."
        )
    return error_of(refusal.error, said)
