"""A small Oxia server inside the test: what the real one of 0.14 cannot be told to do.

It has TLS, asks for a token, hands out any map of shards, refuses to lead, keeps requests waiting,
and notices two writers on one shard.  Records are kept by all servers of one `World`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

import grpc
import grpc.aio
from google.protobuf.message import Message

from storage.metadata.oxia import oxia_pb2 as pb
from storage.metadata.oxia.routing import HASHES
from tests.support.child_process import HOST

SERVICE = "io.streamnative.oxia.proto.OxiaClient"


class Context(Protocol):
    """What gRPC hands to a handler."""

    def invocation_metadata(self) -> Iterable[tuple[str, str]]: ...

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn: ...


@dataclass
class World:
    """What all servers share.  `leaders` is the map of shards."""

    leaders: list[str] = field(default_factory=list)
    router: pb.ShardKeyRouter = pb.XXHASH3
    hierarchical: bool = True
    records: dict[tuple[int, str], pb.GetResponse] = field(default_factory=dict)
    version: int = -1
    sessions: int = 0
    requests: list[pb.WriteRequest] = field(default_factory=list)
    writing: dict[int, int] = field(default_factory=dict)
    most_writing: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    open: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.open.set()

    def assignments(self) -> pb.ShardAssignments:
        message = pb.ShardAssignments()
        assigned = message.namespaces["default"]
        assigned.shard_key_router = self.router
        count = len(self.leaders)
        for shard, leader in enumerate(self.leaders):
            added = assigned.assignments.add(shard=shard, leader=leader)
            added.int32_hash_range.min_hash_inclusive = HASHES * shard // count
            added.int32_hash_range.max_hash_inclusive = HASHES * (shard + 1) // count - 1
        return message

    def lead(self, *leaders: str) -> None:
        """Another map."""
        self.leaders = list(leaders)
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    def begin(self, shard: int) -> None:
        self.writing[shard] = self.writing.get(shard, 0) + 1
        self.most_writing = max(self.most_writing, self.writing[shard])

    def end(self, shard: int) -> None:
        self.writing[shard] -= 1


class FakeOxia:
    """One server of a world."""

    def __init__(self, world: World, *, token: str | None = None) -> None:
        self.world = world
        self.token = token
        self.calls: list[str] = []
        self.refused = 0
        self.address = ""
        self._server = grpc.aio.server()

    async def start(self, credentials: grpc.ServerCredentials | None = None) -> None:
        handlers = {
            "GetShardAssignments": (self._assignments, pb.ShardAssignmentsRequest, False),
            "GetNotifications": (self._notifications, pb.NotificationsRequest, False),
            "Read": (self._read, pb.ReadRequest, False),
            "List": (self._list, pb.ListRequest, False),
            "RangeScan": (self._nothing, pb.RangeScanRequest, False),
            "WriteStream": (self._writes, pb.WriteRequest, True),
        }
        methods = {
            name: (
                grpc.stream_stream_rpc_method_handler
                if streams
                else grpc.unary_stream_rpc_method_handler
            )(self._checked(name, handler), request.FromString, _serialize)
            for name, (handler, request, streams) in handlers.items()
        }
        for name, call, request in (
            ("CreateSession", self._create_session, pb.CreateSessionRequest),
            ("CloseSession", self._close_session, pb.CloseSessionRequest),
            ("KeepAlive", self._keep_alive, pb.SessionHeartbeat),
        ):
            methods[name] = grpc.unary_unary_rpc_method_handler(
                call, request.FromString, _serialize
            )
        handler = grpc.method_handlers_generic_handler(SERVICE, methods)
        self._server.add_generic_rpc_handlers((handler,))
        if credentials is None:
            port = self._server.add_insecure_port(f"{HOST}:0")
        else:
            port = self._server.add_secure_port(f"{HOST}:0", credentials)
        await self._server.start()
        self.address = f"{HOST}:{port}"

    async def stop(self) -> None:
        await self._server.stop(None)

    def _checked(
        self, name: str, handler: Callable[..., AsyncIterator[Message]]
    ) -> Callable[..., AsyncIterator[Message]]:
        async def checked(request: object, context: Context) -> AsyncIterator[Message]:
            self.calls.append(name)
            metadata = dict(context.invocation_metadata())
            wanted = None if self.token is None else f"Bearer {self.token}"
            if metadata.get("authorization") != wanted:
                self.refused += 1
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong token")
            async for each in handler(request, context):
                yield each

        return checked

    async def _must_lead(self, shard: int, context: Context) -> None:
        if self.world.leaders[shard] != self.address:
            text = f"node is not leader for shard {shard}"
            await context.abort(grpc.StatusCode.UNKNOWN, text)

    async def _assignments(self, _request: object, _context: Context) -> AsyncIterator[Message]:
        while True:
            changed = self.world.changed
            yield self.world.assignments()
            await changed.wait()

    async def _notifications(
        self, request: pb.NotificationsRequest, context: Context
    ) -> AsyncIterator[Message]:
        await self._must_lead(request.shard, context)
        yield pb.NotificationBatch(shard=request.shard, offset=0)
        await asyncio.Event().wait()

    async def _read(self, request: pb.ReadRequest, context: Context) -> AsyncIterator[Message]:
        await self._must_lead(request.shard, context)
        missing = pb.GetResponse(status=pb.KEY_NOT_FOUND)
        gets = [self.world.records.get((request.shard, get.key), missing) for get in request.gets]
        yield pb.ReadResponse(gets=gets)

    async def _list(self, request: pb.ListRequest, context: Context) -> AsyncIterator[Message]:
        """Of a level."""
        await self._must_lead(request.shard, context)
        level = request.start_inclusive
        keys = [key for shard, key in self.world.records if shard == request.shard]
        children = [key for key in keys if key.startswith(level) and "/" not in key[len(level) :]]
        yield pb.ListResponse(keys=children if self.world.hierarchical else ())

    async def _nothing(
        self, request: pb.RangeScanRequest, context: Context
    ) -> AsyncIterator[Message]:
        await self._must_lead(request.shard, context)
        nothing: tuple[Message, ...] = ()
        for each in nothing:
            yield each

    async def _writes(
        self, requests: AsyncIterator[pb.WriteRequest], context: Context
    ) -> AsyncIterator[Message]:
        shard = int(dict(context.invocation_metadata())["shard-id"])
        async for request in requests:
            await self._must_lead(shard, context)
            world = self.world
            world.requests.append(request)
            world.begin(shard)
            await world.open.wait()
            yield self._apply(shard, request)
            world.end(shard)

    def _apply(self, shard: int, request: pb.WriteRequest) -> pb.WriteResponse:
        response = pb.WriteResponse()
        for put in request.puts:
            self.world.version += 1
            version = pb.Version(version_id=self.world.version, client_identity=put.client_identity)
            self.world.records[shard, put.key] = pb.GetResponse(version=version, value=put.value)
            response.puts.add(version=version)
        for _ in request.deletes:
            response.deletes.add()
        return response

    async def _create_session(self, request: pb.CreateSessionRequest, _context: Context) -> Message:
        await self._turn(request.shard)
        self.world.sessions += 1
        return pb.CreateSessionResponse(session_id=self.world.sessions)

    async def _close_session(self, request: pb.CloseSessionRequest, _context: Context) -> Message:
        await self._turn(request.shard)
        return pb.CloseSessionResponse()

    async def _keep_alive(self, _request: object, _context: Context) -> Message:
        return pb.KeepAliveResponse()

    async def _turn(self, shard: int) -> None:
        """Long enough for a second writer to be noticed."""
        self.world.begin(shard)
        for _ in range(20):
            await asyncio.sleep(0)
        self.world.end(shard)


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
