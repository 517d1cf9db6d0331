"""Channels to Oxia servers, and their calls."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar, cast

import grpc
import grpc.aio
import structlog
from google.protobuf.message import Message

from config import bounds
from storage.metadata.access import StoreAccess, UnusableAccessFile, read_access_file
from storage.metadata.oxia import oxia_pb2 as pb
from storage.metadata.oxia.errors import Action, Failure, classify

_log = structlog.get_logger(__name__)

# The first name of the service, which servers know before and after it was renamed.
_SERVICE = "/io.streamnative.oxia.proto.OxiaClient/"
_DETAILS = "grpc-status-details-bin"
_CHANNEL_CLOSED = "Channel is closed."
_UNREADABLE = Failure(Action.RETRY, "INTERNAL", "an answer that is no message of Oxia's service")

M = TypeVar("M", bound=Message)


class CallFailed(Exception):
    """A call to a server failed; `failure` has the reason."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.code}: {failure.text}")
        self.failure = failure


class WriteStream(Protocol):
    """The open stream of writes to one shard."""

    async def write(self, request: pb.WriteRequest) -> None:
        """Send a request."""
        ...

    async def read(self) -> object:
        """The next response, or `grpc.aio.EOF`."""
        ...

    def cancel(self) -> bool:
        """End the stream now."""
        ...


@contextmanager
def call_failures() -> Iterator[None]:
    """Turn the errors that gRPC raises into `CallFailed`.  Put only calls of gRPC into the block.

    Errors of a wrong use of gRPC pass unchanged.
    """
    try:
        yield
    except asyncio.CancelledError as error:
        # A call that ends as its channel is closed raises this too, without a cancelled task.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise CallFailed(Failure(Action.RETRY, "CANCELLED", "the connection was closed")) from error
    except grpc.aio.AioRpcError as error:
        details = b""
        for name, value in error.trailing_metadata() or ():
            if name == _DETAILS and isinstance(value, bytes):
                details = value
        failure = classify(error.code().name, error.details() or "", details)
        raise CallFailed(failure) from error
    except grpc.aio.UsageError as error:
        # A call on a closed channel is reported as a wrong use.
        if str(error) != _CHANNEL_CLOSED:
            raise
        raise CallFailed(Failure(Action.RETRY, "CANCELLED", str(error))) from error
    except (asyncio.InvalidStateError, grpc.aio.InternalError) as error:
        raise CallFailed(Failure(Action.RETRY, "CANCELLED", str(error) or "call ended")) from error
    except TimeoutError as error:
        raise CallFailed(Failure(Action.RETRY, "DEADLINE_EXCEEDED", "no answer")) from error


class Token:
    """The bearer token, read again when its file changes."""

    __slots__ = ("_access", "_seen", "_token")

    def __init__(self, access: StoreAccess) -> None:
        """Raises `UnusableAccessFile`."""
        self._access = access
        self._seen = _changed_at(access.token_file)
        self._token = access.read_token()

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of every call.  The token stays as it is while its file cannot be read."""
        seen = _changed_at(self._access.token_file)
        if seen != self._seen:
            self._seen = seen
            try:
                self._token = self._access.read_token()
            except UnusableAccessFile as error:
                _log.error("oxia_token_unreadable", error=str(error))
        return () if self._token is None else (("authorization", f"Bearer {self._token}"),)


class Peer:
    """One server.  Every method raises `CallFailed`."""

    __slots__ = ("_channel", "_namespace", "_token", "address")

    def __init__(
        self, address: str, channel: grpc.aio.Channel, namespace: str, token: Token
    ) -> None:
        self.address = address
        self._channel = channel
        self._namespace = namespace
        self._token = token

    def open_writes(self, shard_id: int) -> WriteStream:
        """A new stream of writes to a shard that this server leads."""
        opened = self._channel.stream_stream(
            f"{_SERVICE}WriteStream", pb.WriteRequest.SerializeToString, pb.WriteResponse.FromString
        )
        metadata = (("shard-id", str(shard_id)), ("namespace", self._namespace))
        return cast(WriteStream, opened(metadata=(*metadata, *self._token.metadata())))

    def assignments(self) -> AsyncIterator[pb.ShardAssignments]:
        """The map of shards now, and again whenever it changes."""
        request = pb.ShardAssignmentsRequest(namespace=self._namespace)
        return self._stream("GetShardAssignments", request, pb.ShardAssignments, None)

    def notifications(
        self, shard_id: int, after_offset: int | None
    ) -> AsyncIterator[pb.NotificationBatch]:
        """Changes of a shard; without an offset the first batch is empty and has the offset."""
        request = pb.NotificationsRequest(shard=shard_id, start_offset_exclusive=after_offset)
        return self._stream("GetNotifications", request, pb.NotificationBatch, None)

    async def read(
        self, shard_id: int, keys: Iterable[str], timeout_s: float
    ) -> list[pb.GetResponse]:
        """Records by key, in the order of the keys."""
        gets = [pb.GetRequest(key=key, include_value=True) for key in keys]
        request = pb.ReadRequest(shard=shard_id, gets=gets)
        stream = self._stream("Read", request, pb.ReadResponse, timeout_s)
        return [each async for chunk in stream for each in chunk.gets]

    async def list_keys(
        self, shard_id: int, lo: str, hi: str, index: str | None, timeout_s: float
    ) -> list[str]:
        """Keys in a range of keys, or of an index."""
        request = pb.ListRequest(
            shard=shard_id, start_inclusive=lo, end_exclusive=hi, secondary_index_name=index
        )
        stream = self._stream("List", request, pb.ListResponse, timeout_s)
        return [each async for chunk in stream for each in chunk.keys]

    async def range_scan(
        self,
        shard_id: int,
        lo: str,
        hi: str,
        index: str | None,
        timeout_s: float,
        enough: Callable[[list[pb.GetResponse]], bool] | None = None,
    ) -> list[pb.GetResponse]:
        """Records in a range of keys, or of an index; it ends after a chunk when `enough`."""
        request = pb.RangeScanRequest(
            shard=shard_id, start_inclusive=lo, end_exclusive=hi, secondary_index_name=index
        )
        stream = self._stream("RangeScan", request, pb.RangeScanResponse, timeout_s)
        records: list[pb.GetResponse] = []
        async for chunk in stream:
            records += chunk.records
            if enough is not None and enough(records):
                break
        return records

    async def create_session(
        self, shard_id: int, timeout_ms: int, identity: str, timeout_s: float
    ) -> int:
        """The id of a new session on a shard.  A write: see `shard_writer`."""
        request = pb.CreateSessionRequest(
            shard=shard_id, session_timeout_ms=timeout_ms, client_identity=identity
        )
        made = await self._call("CreateSession", request, pb.CreateSessionResponse, timeout_s)
        return made.session_id

    async def keep_alive(self, shard_id: int, session_id: int, timeout_s: float) -> None:
        """Send a heartbeat."""
        request = pb.SessionHeartbeat(shard=shard_id, session_id=session_id)
        await self._call("KeepAlive", request, pb.KeepAliveResponse, timeout_s)

    async def close_session(self, shard_id: int, session_id: int, timeout_s: float) -> None:
        """End a session and its ephemerals.  A write: see `shard_writer`."""
        request = pb.CloseSessionRequest(shard=shard_id, session_id=session_id)
        await self._call("CloseSession", request, pb.CloseSessionResponse, timeout_s)

    async def _call(self, method: str, request: Message, answer: type[M], timeout_s: float) -> M:
        called = self._channel.unary_unary(
            _SERVICE + method, type(request).SerializeToString, answer.FromString
        )
        metadata = self._token.metadata()
        with call_failures():
            made = cast(M | None, await called(request, timeout=timeout_s, metadata=metadata))
        return _readable(made)

    async def _stream(
        self, method: str, request: Message, answer: type[M], timeout_s: float | None
    ) -> AsyncIterator[M]:
        called = self._channel.unary_stream(
            _SERVICE + method, type(request).SerializeToString, answer.FromString
        )
        metadata = self._token.metadata()
        with call_failures():
            stream = called(request, timeout=timeout_s, metadata=metadata)
            try:
                async for each in stream:
                    yield _readable(each)
            finally:
                stream.cancel()


class Connections:
    """The channels of one store: one for each leader of a shard, and one for the map of shards.

    Connections without traffic are tested by pings.
    """

    __slots__ = ("_access", "_credentials", "_guide", "_namespace", "_peers", "_token")

    def __init__(self, namespace: str, access: StoreAccess) -> None:
        """Raises `UnusableAccessFile`."""
        self._namespace = namespace
        self._access = access
        self._token = Token(access)
        self._credentials = _credentials(access)
        self._peers: dict[str, tuple[Peer, grpc.aio.Channel]] = {}
        self._guide: tuple[Peer, grpc.aio.Channel] | None = None

    def peer(self, address: str) -> Peer:
        """The leader at `host:port`, connected when it is first called."""
        found = self._peers.get(address)
        if found is None:
            found = self._peers[address] = self._connect(address)
        return found[0]

    async def guide(self, address: str) -> Peer:
        """The server at `host:port`, for the map of shards; closes the channel of the last one."""
        before, self._guide = self._guide, None
        if before is not None:
            await before[1].close()
        self._guide = self._connect(address)
        return self._guide[0]

    async def keep_only(self, addresses: Iterable[str]) -> None:
        """Close the channels to all other leaders, with the streams that they left open."""
        kept = set(addresses)
        gone = [self._peers.pop(address) for address in list(self._peers) if address not in kept]
        for _, channel in gone:
            await channel.close()

    async def close(self) -> None:
        """Close all channels."""
        await self.keep_only(())
        if self._guide is not None:
            await self._guide[1].close()

    def _connect(self, address: str) -> tuple[Peer, grpc.aio.Channel]:
        channel = self._open(address)
        return Peer(address, channel, self._namespace, self._token), channel

    def _open(self, address: str) -> grpc.aio.Channel:
        options: list[tuple[str, int | str]] = [
            ("grpc.max_receive_message_length", bounds.OXIA_MESSAGE_BYTES),
            ("grpc.max_send_message_length", bounds.OXIA_MESSAGE_BYTES),
            ("grpc.keepalive_time_ms", bounds.OXIA_KEEPALIVE_S * 1000),
            ("grpc.keepalive_timeout_ms", bounds.OXIA_KEEPALIVE_TIMEOUT_S * 1000),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.initial_reconnect_backoff_ms", int(bounds.OXIA_BACKOFF_MIN_S * 1000)),
            ("grpc.min_reconnect_backoff_ms", int(bounds.OXIA_BACKOFF_MIN_S * 1000)),
            ("grpc.max_reconnect_backoff_ms", 1000),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
        ]
        if self._credentials is None:
            return grpc.aio.insecure_channel(address, options)
        if self._access.server_name is not None:
            name = self._access.server_name
            options.append(("grpc.ssl_target_name_override", name))
            # Servers after 0.17.1 answer only to names that they know, with a port; without this
            # option the name goes without one.  gRPC allows no name that is not in the certificate.
            options.append(("grpc.default_authority", f"{name}:{address.rpartition(':')[2]}"))
        return grpc.aio.secure_channel(address, self._credentials, options)


def _readable(answer: M | None) -> M:
    """The answer; raises `CallFailed` for None, which gRPC gives for bytes it cannot parse."""
    if answer is None:
        raise CallFailed(_UNREADABLE)
    return answer


def _credentials(access: StoreAccess) -> grpc.ChannelCredentials | None:
    if not access.uses_tls:
        return None
    return grpc.ssl_channel_credentials(
        root_certificates=read_access_file(access.trust_certs_file),
        private_key=read_access_file(access.key_file),
        certificate_chain=read_access_file(access.cert_file),
    )


def _changed_at(path: Path | None) -> int:
    if path is None:
        return 0
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
