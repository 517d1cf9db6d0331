"""TLS between the socket of an accepted connection and the protocol that is served on it.

Event loops have TLS of their own.  It does not tell how many bytes it holds for a peer, or from
which address a handshake comes, and it computes all handshakes that are due in one turn of the
loop.
"""

import asyncio
import enum
import ssl
from collections.abc import Callable, Iterable
from typing import Final, cast

import structlog

from broker.wire.peer_memory import PeerMemory
from broker.wire.tls_handshakes import Handshakes
from config.bounds import CLOSE_FLUSH_S, TLS_HANDSHAKE_S
from magnetar.protocol.state_table import StateTable

log = structlog.get_logger(__name__)

_RECORD_BYTES: Final = 16 * 1024
"""The most bytes that one TLS record carries (RFC 8446, 5.1)."""
_PIECE_BYTES: Final = 64 * 1024
"""As much is read at once, and encrypted at once."""
# Bytes are copied several times between the socket and the protocol.  In pieces that stay in the
# processor's own cache that is cheaper (docs/decisions/tls-layer.md).
_REPORTED_BYTES: Final = 4 * 1024
"""Less of an incomplete record is not accounted, as of an incomplete frame."""
_WANTS_INPUT: Final = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


def new_read_buffer() -> memoryview:
    """Make the buffer into which the connections of one port are read."""
    return memoryview(bytearray(_PIECE_BYTES))


class StreamState(enum.Enum):
    """State of the TLS of one connection."""

    HANDSHAKE = "handshake"
    OPEN = "open"
    CLOSING = "closing"
    """What is queued is sent; nothing more is read."""
    CLOSED = "closed"


_MOVES: StateTable[StreamState] = StateTable(
    {
        StreamState.HANDSHAKE: frozenset(
            {StreamState.OPEN, StreamState.CLOSING, StreamState.CLOSED}
        ),
        StreamState.OPEN: frozenset({StreamState.CLOSING, StreamState.CLOSED}),
        StreamState.CLOSING: frozenset({StreamState.CLOSED}),
        StreamState.CLOSED: frozenset(),
    },
    defect=RuntimeError,
)


class TlsStream(asyncio.BufferedProtocol):
    """The TLS of one accepted connection.

    It is the protocol of the socket's transport.  When the handshake is done it makes the protocol
    that is served, which gets a `TlsTransport`.  It is a `Holder` of `PeerMemory` for encrypted
    bytes that are no whole record yet, or wait for the handshake.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        make_protocol: Callable[[], asyncio.Protocol],
        handshakes: Handshakes,
        memory: PeerMemory,
        read_buffer: memoryview,
        *,
        handshake_s: float = TLS_HANDSHAKE_S,
    ) -> None:
        """`read_buffer` may be shared by all connections: it is empty between two reads."""
        self.state = StreamState.HANDSHAKE
        self._context = context
        self._make_protocol = make_protocol
        self._handshakes = handshakes
        self._memory = memory
        self._read_buffer = read_buffer
        self._handshake_s = handshake_s
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._ssl: ssl.SSLObject | None = None
        """None until the peer has sent something, so that silent peers cost little."""
        self._raw: asyncio.Transport
        self._protocol: asyncio.Protocol | None = None
        self._transport: TlsTransport | None = None
        self._remote = ""
        self._input_bytes = 0
        self._incomplete_bytes = 0
        """Bytes that came since the last whole record.  OpenSSL has them, and does not tell."""
        self._reported = False
        self._error: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None

    # Calls of the socket's transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake, or close the connection above the bounds."""
        # Not checked: uvloop's transports are of no class of asyncio's.
        self._raw = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername")
        self._remote = str(peer[0]) if isinstance(peer, tuple) else str(peer or "unknown")
        self._timer = asyncio.get_running_loop().call_later(self._handshake_s, self._too_late)
        if not self._handshakes.begin(self, self._remote):
            self.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the next read."""
        return self._read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Take encrypted bytes of the peer."""
        if self.state not in (StreamState.HANDSHAKE, StreamState.OPEN):
            return
        self._input_bytes += nbytes
        self._incomplete_bytes += nbytes
        self._incoming.write(self._read_buffer[:nbytes])
        if self.state is StreamState.OPEN:
            self._receive()
            if self._incomplete_bytes > _REPORTED_BYTES or self._reported:
                self._report_held()
        else:
            # What comes next waits in the system, until these bytes have had their turn.
            self._raw.pause_reading()
            self._handshakes.has_input(self)
            self._report_held()

    def eof_received(self) -> bool:
        """Have the transport closed: the peer sends nothing more."""
        return False

    def pause_writing(self) -> None:
        """Note that the socket's buffer is above the high water."""
        if self._protocol is not None:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """Note that the socket's buffer has drained."""
        if self._protocol is not None:
            self._protocol.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """End: the socket is closed."""
        self._move(StreamState.CLOSED)
        self._cancel_timer()
        self._memory.forget(self)
        self._handshakes.end(self, completed=False)
        protocol, self._protocol = self._protocol, None
        # The OpenSSL object and the context that it keeps go without a garbage collection, even if
        # somebody keeps the transport.
        self._ssl = None
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.release()
        if protocol is not None:
            protocol.connection_lost(self._error or exc)

    # Handshake

    def step(self) -> None:
        """See `Handshake`."""
        if self.state is not StreamState.HANDSHAKE:
            return
        if self._ssl is None:
            self._ssl = self._context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        try:
            self._ssl.do_handshake()
        except _WANTS_INPUT:
            self._send_encrypted()
            self._handshakes.needs_input(self)
            self._raw.resume_reading()
            self._report_held()
        except (ssl.SSLError, ssl.CertificateError) as error:
            # OpenSSL has written an alert, which tells the peer the reason.
            self._send_encrypted()
            self._fail(_reason_of(error))
        else:
            self._complete(self._ssl)

    def _complete(self, established: ssl.SSLObject) -> None:
        self._cancel_timer()
        self._handshakes.end(self, completed=True)
        self._incomplete_bytes = self._incoming.pending
        self._move(StreamState.OPEN)
        self._send_encrypted()
        self._protocol = self._make_protocol()
        self._raw.resume_reading()
        self._transport = TlsTransport(self, self._raw, self._context, established)
        self._protocol.connection_made(self._transport)
        # The last bytes of the handshake may have had the first ones of the client behind them.
        self._receive()
        self._report_held()

    def _fail(self, reason: str) -> None:
        log.info("tls_handshake_failed", remote=self._remote, error=reason)
        self._handshakes.end(self, completed=False)
        self._close_raw()

    def _too_late(self) -> None:
        log.info("tls_handshake_failed", remote=self._remote, error="it took too long")
        self.abort()

    # Bytes of the protocol

    @property
    def protocol(self) -> asyncio.Protocol | None:
        """The protocol that is served; None before the handshake is done, and after the end."""
        return self._protocol

    def set_protocol(self, protocol: asyncio.Protocol) -> None:
        """Have another protocol served from now on."""
        self._protocol = protocol

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt bytes, and pass them to the socket's transport."""
        if self.state is not StreamState.OPEN or self._ssl is None or not data:
            return
        try:
            if len(data) <= _PIECE_BYTES:
                self._ssl.write(data)
                self._raw.write(self._outgoing.read())
                return
            whole = memoryview(data)
            for at in range(0, len(data), _PIECE_BYTES):
                self._ssl.write(whole[at : at + _PIECE_BYTES])
                self._raw.write(self._outgoing.read())
        except ssl.SSLError as error:
            self._break(error)

    def writelines(self, buffers: Iterable[bytes | bytearray | memoryview]) -> None:
        """Write buffers.  Small ones share records; a large one is not copied."""
        small: list[bytes | bytearray | memoryview] = []
        small_bytes = 0
        for buffer in buffers:
            if len(buffer) >= _RECORD_BYTES:
                self.write(b"".join(small))
                self.write(buffer)
                small, small_bytes = [], 0
                continue
            small.append(buffer)
            small_bytes += len(buffer)
            if small_bytes >= _PIECE_BYTES:
                self.write(b"".join(small))
                small, small_bytes = [], 0
        self.write(b"".join(small))

    def close(self) -> None:
        """Say that nothing more comes, send what is queued, and close the socket."""
        if self.state is not StreamState.OPEN or self._ssl is None:
            return
        try:
            self._ssl.unwrap()
        except ssl.SSLError:
            # It wants the peer's own end, which is not waited for.
            pass
        self._send_encrypted()
        self._close_raw()

    def abort(self) -> None:
        """See `Handshake`."""
        if self.state is not StreamState.CLOSED:
            self._raw.abort()

    def _receive(self) -> None:
        """Decrypt the whole records that have come, and pass them to the protocol."""
        stream, incoming, ended = self._ssl, self._incoming, False
        if self.state is not StreamState.OPEN or stream is None:
            return
        parts: list[bytes] = []
        try:
            while incoming.pending or stream.pending():
                part = stream.read(_RECORD_BYTES)
                if not part:
                    ended = True
                    break
                parts.append(part)
        except _WANTS_INPUT:
            pass
        except ssl.SSLZeroReturnError:
            ended = True
        except ssl.SSLError as error:
            self._break(error)
            return
        # An answer to a message of TLS itself, such as a change of keys.
        self._send_encrypted()
        if parts:
            # The beginning of another record may be behind; it counts when more of it comes.
            self._incomplete_bytes = 0
        if parts and self._protocol is not None:
            self._protocol.data_received(parts[0] if len(parts) == 1 else b"".join(parts))
        if ended and self._protocol is not None:
            self._protocol.eof_received()
            self.close()

    def _send_encrypted(self) -> None:
        if self._outgoing.pending:
            self._raw.write(self._outgoing.read())

    def _break(self, error: ssl.SSLError) -> None:
        """End the connection: the peer sent no TLS."""
        self._error = ConnectionResetError(f"TLS failed: {_reason_of(error)}")
        self._send_encrypted()
        self._close_raw()

    def _close_raw(self) -> None:
        self._move(StreamState.CLOSING)
        self._cancel_timer()
        self._timer = asyncio.get_running_loop().call_later(CLOSE_FLUSH_S, self._raw.abort)
        self._raw.close()

    # Bytes held for the peer

    @property
    def held_bytes(self) -> int:
        """See `Holder`.  The protocol accounts its own input, and all output."""
        return self._incomplete_bytes

    @property
    def progress_bytes(self) -> int:
        """See `Holder`."""
        return self._input_bytes

    @property
    def address_before_login(self) -> str | None:
        """See `Holder`.  One incomplete record is little, and handshakes have a bound of theirs."""
        return None

    @property
    def waits_for_broker(self) -> bool:
        """See `Holder`.  An incomplete record waits for the peer."""
        return False

    def give_up(self) -> None:
        """See `Holder`."""
        asyncio.get_running_loop().call_soon(self.abort)

    def _report_held(self) -> None:
        if self.state in (StreamState.HANDSHAKE, StreamState.OPEN):
            self._reported = self._incomplete_bytes > _REPORTED_BYTES
            self._memory.report(self)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _move(self, to: StreamState) -> None:
        self.state = _MOVES.move(self.state, to, "The TLS of a connection")


class TlsTransport(asyncio.Transport):
    """The transport of the protocol that is served over a `TlsStream`.

    Its buffer is that of the socket's transport, so its size is the size of all output that the
    peer has not taken.
    """

    def __init__(
        self,
        stream: TlsStream,
        raw: asyncio.Transport,
        context: ssl.SSLContext,
        established: ssl.SSLObject,
    ) -> None:
        super().__init__()
        self._information: dict[str, object] = {
            "sslcontext": context,
            "ssl_object": established,
            "cipher": established.cipher(),
            "compression": established.compression(),
        }
        self._established: ssl.SSLObject | None = established
        self._stream = stream
        self._raw = raw
        # Each call of these would pass through a method of its own.
        self.write = stream.write  # type: ignore[method-assign]
        self.get_write_buffer_size = raw.get_write_buffer_size  # type: ignore[method-assign]

    def get_extra_info(self, name: str, default: object = None) -> object:
        """Information about the connection: about TLS, else about the socket."""
        if name == "peercert" and self._established is not None:
            return self._established.getpeercert()
        if name in self._information:
            return self._information[name]
        return self._raw.get_extra_info(name, default)

    def release(self) -> None:
        """Drop the OpenSSL object, as the connection has ended."""
        self._established = None
        del self._information["ssl_object"]

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        """Write buffers, in order."""
        self._stream.writelines(list_of_data)

    def close(self) -> None:
        """Send what is queued, and close the connection."""
        self._stream.close()

    def abort(self) -> None:
        """Close the connection at once."""
        self._stream.abort()

    def is_closing(self) -> bool:
        """Whether the connection is closed, or closes."""
        return self._raw.is_closing()

    def is_reading(self) -> bool:
        """Whether the socket is read."""
        return self._raw.is_reading()

    def pause_reading(self) -> None:
        """Read nothing more.  Whole records that have come are passed on all the same."""
        self._raw.pause_reading()

    def resume_reading(self) -> None:
        """Read again."""
        self._raw.resume_reading()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set the high and low water of the socket's buffer."""
        self._raw.set_write_buffer_limits(high, low)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """The low and high water of the socket's buffer."""
        return self._raw.get_write_buffer_limits()

    def can_write_eof(self) -> bool:
        """False: the end of the output ends the connection."""
        return False

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Have another protocol served from now on."""
        self._stream.set_protocol(cast("asyncio.Protocol", protocol))

    def get_protocol(self) -> asyncio.BaseProtocol:
        """The protocol that is served."""
        return cast("asyncio.BaseProtocol", self._stream.protocol)


def _reason_of(error: Exception) -> str:
    """OpenSSL's reason, without its place in the source."""
    reason = getattr(error, "reason", None)
    text = getattr(error, "verify_message", None) or reason or str(error)
    return str(text).replace("_", " ").lower()
