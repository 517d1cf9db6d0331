"""`Connection`: a socket to a broker; `ConnectionCore` has its protocol."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from ssl import SSLCertVerificationError, SSLContext
from typing import Final, cast

from magnetar.bounds import CLOSE_FLUSH_S, RETRY_FIRST_S, RETRY_LIMIT_S, WRITE_HIGH_WATER
from magnetar.errors import ConnectionLost, MagnetarError, OperationTimedOut
from magnetar.identity import Identities
from magnetar.opening import completed
from magnetar.protocol.backoff import Backoff
from magnetar.protocol.commands import FIELD_OF_TYPE, encode_command
from magnetar.protocol.pulsar_pb2 import (
    AuthData,
    BaseCommand,
    CommandConnect,
    CommandConnected,
    FeatureFlags,
)
from magnetar.settings import ClientSettings
from magnetar.wire.authentication import Authentication
from magnetar.wire.connection_core import ConnectionCore, ConnectionState, Handler, PeerKind
from magnetar.wire.requests import Answered
from magnetar.wire.service_url import BrokerAddress

__all__ = ["Connection", "Handler", "PeerKind", "connect_to", "hello"]

PROTOCOL_VERSION: Final = 21


@cache
def client_version() -> str:
    """The name and version that the client sends; cached, as the lookup is slow."""
    from importlib.metadata import version

    return f"Magnetar-Python-{version('magnetar')}"


def hello(
    address: BrokerAddress, method: str, proof: bytes, description: str = ""
) -> CommandConnect:
    """The command CONNECT of this client, of the generation after 5.0.0-M1."""
    command = CommandConnect(
        client_version="-".join(filter(None, (client_version(), description))),
        protocol_version=PROTOCOL_VERSION,
        auth_method_name=method,
        auth_data=proof,
        feature_flags=FeatureFlags(
            supports_auth_refresh=True,
            supports_broker_entry_metadata=True,
            supports_partial_producer=True,
            supports_get_partitioned_metadata_without_auto_creation=True,
            supports_repl_dedup_by_lid_and_eid=True,
            supports_topic_watcher_reconcile=True,
            supports_scalable_topics=True,
        ),
    )
    if address.proxied:
        command.proxy_to_broker_url = str(address.logical)
    return command


class Connection(asyncio.Protocol):
    """One connection to a broker: the IO around a `ConnectionCore`.  Made by `connect_to`.

    All bytes of one turn of the loop are written at once.
    """

    def __init__(
        self,
        address: BrokerAddress,
        greeting: CommandConnect,
        settings: ClientSettings,
        ids: Identities,
        authentication: Authentication,
        max_frame_bytes: int | None = None,
    ) -> None:
        """`max_frame_bytes` is as for `ConnectionCore`."""
        self.address = address
        self.is_lost = False
        self.writable = True
        self._settings = settings
        self._ids = ids
        self._authentication = authentication
        self._core = ConnectionCore(self, greeting, settings.keep_alive_s, max_frame_bytes)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._out: list[bytes] = []
        self._greeted: asyncio.Future[None] = self._loop.create_future()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._drained: asyncio.Future[None] | None = None
        self._keep_alive: asyncio.TimerHandle | None = None
        self._proving: asyncio.Task[None] | None = None
        self._closing = False
        self.when_lost: Callable[[Connection], None] | None = None

    # The broker

    @property
    def max_message_size(self) -> int:
        """Bytes of the largest message, metadata and payload."""
        return self._core.max_message_size

    @property
    def features(self) -> FeatureFlags:
        """The broker's feature flags."""
        return self._core.connected.feature_flags

    @property
    def transaction_keys(self) -> bool:
        """Whether the broker has transaction keys (Magnetar's own)."""
        return self._core.connected.transaction_keys

    @property
    def transaction_groups(self) -> bool:
        """Whether the broker has groups of transactions (Magnetar's own)."""
        return self._core.connected.transaction_groups

    @property
    def segment_reads(self) -> bool:
        """Whether the broker plans and reads ranges of segments (Magnetar's own)."""
        return self._core.connected.segment_reads

    @property
    def segment_replication(self) -> bool:
        """Whether the broker takes segments of other clusters (Magnetar's own)."""
        return self._core.connected.segment_replication

    @property
    def replicated_segment_subscriptions(self) -> bool:
        """Whether the broker answers SUBSCRIPTION_POSITIONS (Magnetar's own)."""
        return self._core.connected.replicated_segment_subscriptions

    @property
    def knows_resends(self) -> bool:
        """Whether the broker recognises messages that a producer sends again after a reconnect.

        Such a broker stores none twice.  Magnetar's brokers do; those of Apache Pulsar only with
        deduplication, which no answer shows.
        """
        return self.segment_reads

    @property
    def server_version(self) -> str:
        """The broker's name and version."""
        return self._core.connected.server_version

    # Requests

    async def request(self, command: BaseCommand, timeout_s: float | None = None) -> BaseCommand:
        """Set the command's request id, send it, and wait for the answer.

        `timeout_s` is the client's operation timeout unless given; a producer that the broker has
        wait for exclusive access waits without limit.  Raises the error in the answer,
        `ConnectionLost`, `OperationTimedOut`.  If it raises or is cancelled, a late answer is
        dropped.
        """
        answer: asyncio.Future[BaseCommand] = self._loop.create_future()
        limit_s = self._settings.operation_timeout_s if timeout_s is None else timeout_s
        timer = self._loop.call_later(limit_s, _time_is_up, answer, command.type, limit_s)
        try:
            request_id = self.ask(command, partial(_resolve, answer), timer.cancel)
            try:
                return await answer
            finally:
                self._core.requests.forget(request_id)
        finally:
            timer.cancel()

    def ask(
        self,
        command: BaseCommand,
        answered: Answered,
        postponed: Callable[[], None] | None = None,
    ) -> int:
        """Send a request without a future and a timeout; `answered` is called once.

        `postponed` is called if the broker says that the answer may take any time.  Returns the
        request id, for `forget`.  Raises `ConnectionLost`.
        """
        request_id = self._ids.request_id()
        getattr(command, FIELD_OF_TYPE[command.type]).request_id = request_id
        self._core.request(request_id, encode_command(command), answered, postponed)
        return request_id

    def forget(self, request_id: int) -> None:
        """Drop the answer of a request: `answered` is not called any more."""
        self._core.requests.forget(request_id)

    # Sending

    def send(self, command: BaseCommand) -> None:
        """Send a command that has no answer.  Raises `ConnectionLost`."""
        self.write(encode_command(command))

    def write(self, *parts: bytes) -> None:
        """Write the bytes of whole frames, in order.  Raises `ConnectionLost`."""
        if self.is_lost:
            self._core.check_usable()
        out = self._out
        if not out:
            self._loop.call_soon(self._flush)
        out += parts

    async def drained(self) -> None:
        """Wait until the socket is writable.  Raises `ConnectionLost`."""
        while not self.writable and not self.is_lost:
            if self._drained is None:
                self._drained = self._loop.create_future()
            await asyncio.wait((self._drained,))
        if self.is_lost:
            self._core.check_usable()

    def _flush(self) -> None:
        out = self._out
        if out and self._transport is not None:
            self._out = []
            self._transport.writelines(out)

    # Handlers

    def attach(self, kind: PeerKind, number: int, handler: Handler) -> None:
        """Pass commands with this number to `handler`.  Raises `ConnectionLost`."""
        self._core.attach(kind, number, handler)

    def detach(self, kind: PeerKind, number: int) -> None:
        """Drop commands with this number from now on."""
        self._core.detach(kind, number)

    def detach_all(self, handler: Handler) -> None:
        """Detach a handler from all its numbers."""
        self._core.detach_all(handler)

    # The end

    async def close(self) -> None:
        """Write the buffered bytes, for CLOSE_FLUSH_S at most, and close.

        Cancelling it does not stop that.
        """
        await completed(self._close())

    async def _close(self) -> None:
        self._closing = True
        self._core.end(ConnectionLost("This client has closed the connection."))
        if self._proving is not None:
            await asyncio.wait((self._proving,))
        if self._transport is None:
            return
        await asyncio.wait((self._gone,), timeout=CLOSE_FLUSH_S)
        self._transport.abort()
        await self._gone

    def abort(self, error: MagnetarError) -> None:
        """Close it at once, with this error."""
        self._core.end(error)

    async def greeted(self) -> None:
        """Wait for the end of the handshake.  Raises its error."""
        await self._greeted

    # Shell of the core

    def prove(self, challenge: AuthData) -> None:
        """See `Shell.prove`."""
        if self._proving is None or self._proving.done():
            self._proving = self._loop.create_task(self._prove())

    async def _prove(self) -> None:
        """Answer the broker with new credentials.

        If there are none now, but may be later, it goes on trying for as long as the connection
        lasts: the broker serves it meanwhile, and closes it when its patience is over.
        """
        backoff = Backoff(RETRY_FIRST_S, RETRY_LIMIT_S)
        while True:
            try:
                proof = await self._authentication.data(anew=True)
            except MagnetarError as error:
                ready = self._core.state is ConnectionState.READY
                if not (ready and self._authentication.renewed):
                    self._core.end(error)
                    return
            else:
                # One proof waits for a broker that asks for many and reads none.
                with suppress(ConnectionLost):
                    if self._core.state is ConnectionState.READY:
                        await self.drained()
                self._core.prove(proof)
                return
            await asyncio.sleep(backoff.pause_s())

    def ready(self, connected: CommandConnected) -> None:
        """See `Shell.ready`."""
        self._tick()
        if not self._greeted.done():
            self._greeted.set_result(None)

    def end(self, error: MagnetarError) -> None:
        """See `Shell.end`."""
        self.is_lost = True
        if self._keep_alive is not None:
            self._keep_alive.cancel()
        if self._proving is not None and self._proving is not asyncio.current_task():
            self._proving.cancel()
        if not self._greeted.done():
            self._greeted.set_exception(error)
            self._greeted.exception()  # Retrieved, so that asyncio does not report it.
        self._wake()
        if self._transport is not None:
            if self._closing:
                self._flush()
                self._transport.close()
            else:
                self._transport.abort()
        self._out = []
        if self.when_lost is not None:
            self.when_lost(self)

    def _tick(self) -> None:
        wait_s = self._core.tick(self._loop.time())
        if not self.is_lost:
            self._keep_alive = self._loop.call_later(wait_s, self._tick)

    def _wake(self) -> None:
        drained, self._drained = self._drained, None
        if drained is not None:
            drained.set_result(None)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_WATER)
        if self.is_lost:
            self._transport.abort()
        else:
            self._core.begin(self._loop.time())

    def data_received(self, data: bytes) -> None:
        """Pass received bytes to the core."""
        self._core.received(data, self._loop.time())

    def connection_lost(self, exc: Exception | None) -> None:
        """End the connection, as the socket is closed."""
        why = "closed by the other side" if exc is None else str(exc) or type(exc).__name__
        self._core.socket_lost(why)
        if not self._gone.done():
            self._gone.set_result(None)

    def pause_writing(self) -> None:
        """Note that the socket's buffer is full."""
        self.writable = False

    def resume_writing(self) -> None:
        """Note that the socket is writable again."""
        self.writable = True
        self._wake()


def _resolve(answer: asyncio.Future[BaseCommand], outcome: BaseCommand | MagnetarError) -> None:
    if answer.done():
        return
    if isinstance(outcome, MagnetarError):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)


def _time_is_up(answer: asyncio.Future[BaseCommand], kind: int, limit_s: float) -> None:
    if not answer.done():
        name = BaseCommand.Type.Name(cast("BaseCommand.Type", kind))
        answer.set_exception(
            OperationTimedOut(
                f"The broker did not answer {name} within {limit_s:g} s; check whether it is "
                "overloaded, or raise operation_timeout_s."
            )
        )


async def connect_to(
    address: BrokerAddress,
    settings: ClientSettings,
    ids: Identities,
    authentication: Authentication,
    tls: SSLContext | None,
    max_frame_bytes: int | None = None,
) -> Connection:
    """Connect to a broker; returns the connection after the handshake.

    `max_frame_bytes` is as for `ConnectionCore`.

    Raises `ConnectionLost` if it cannot connect, or the broker's error.  When it raises or is
    cancelled, the socket is closed.
    """
    connection: Connection | None = None
    try:
        async with asyncio.timeout(settings.connect_timeout_s):
            proof = await authentication.data()
            greeting = hello(address, authentication.method, proof, settings.description)
            host, port = address.physical
            made = connection = Connection(
                address, greeting, settings, ids, authentication, max_frame_bytes
            )
            await asyncio.get_running_loop().create_connection(
                lambda: made, host, port, ssl=tls if address.tls else None
            )
            await made.greeted()
            return made
    except BaseException as error:
        if connection is not None:
            connection.abort(ConnectionLost("The connection was cancelled during the handshake."))
            await connection.close()
        if isinstance(error, MagnetarError) or not isinstance(error, OSError):
            raise
        if connection is None and isinstance(error, TimeoutError):
            raise ConnectionLost(
                f"The {authentication.method} credentials for {address} were not there within "
                f"{settings.connect_timeout_s:g} s; check their function or issuer, or raise "
                "connect_timeout_s."
            ) from error
        raise _not_made(address, error, settings.connect_timeout_s) from error


def _not_made(address: BrokerAddress, error: OSError, limit_s: float) -> ConnectionLost:
    if isinstance(error, SSLCertVerificationError):
        return ConnectionLost(
            f"The broker at {address} has a certificate that is not trusted ({error}); name its "
            "authority in tls_trust_file, and connect to a host name of the certificate."
        )
    in_time = f" within {limit_s:g} s"
    why = in_time if isinstance(error, TimeoutError) else f" ({str(error) or type(error).__name__})"
    return ConnectionLost(
        f"No connection to {address} could be made{why}; check the address, whether a broker "
        "listens there, and whether it expects TLS."
    )
