"""A small Oxia cluster inside the test: what the real server of 0.14 cannot be told to do.

It takes several writers on one shard, as servers from 0.14.4 do, and keeps its keys in the order of
those from 0.15.  It has TLS, asks for a token, answers to some names only, hands out any map of
shards, refuses to lead, keeps requests waiting, and notices two writers on one shard.

Rules:
- What the cluster knows is in one `World`: each write is one entry of its shard's log, applied at
  once, with one batch of notifications.  Ephemerals go when their session is closed, or was not
  beaten at a leader of its shard for its timeout; a new leader gives every session the whole
  timeout again.
- A server that is cut off goes on with the map and the records of that moment: it answers reads and
  beats of what it led, acknowledges no write, and tells no change.
- A list is of one moment.  A scan of an index finds keys at one moment and looks their records up
  while it sends them, a few at a time: one that went meanwhile is sent as missing.
- A put that would poison a real server's log fails the test: the shard answers nothing any more.
"""

import asyncio
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn, Protocol, TypeVar
from urllib.parse import quote

import grpc
import grpc.aio
from google.protobuf.message import Message

from storage.metadata.oxia import oxia_pb2 as pb
from storage.metadata.oxia.routing import HASHES
from tests.support.child_process import HOST

SERVICE = "io.streamnative.oxia.proto.OxiaClient"
NAMESPACE = "default"
FIRST_CHUNK = 10
"""Keys or records in the first message of an answer: few, so that ranges come in several.  Each
message has twice as many as the one before."""

T = TypeVar("T")
Handler = Callable[..., AsyncIterator[Message]]
Change = tuple[pb.NotificationType, int]
"""What became of a key, and its version id; -1 without one."""


class Context(Protocol):
    """What gRPC hands to a handler."""

    def invocation_metadata(self) -> Iterable[tuple[str, str]]: ...

    def peer(self) -> str: ...

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn: ...


class Stored(NamedTuple):
    """A record, and its entries: name of the index, secondary key."""

    value: bytes
    version: pb.Version
    entries: tuple[tuple[str, str], ...] = ()

    def answer(self, key: str | None = None) -> pb.GetResponse:
        """As reads tell it."""
        return pb.GetResponse(version=self.version, value=self.value, key=key)


class Poisoned(Exception):
    """A write that no real server would start again from."""


@dataclass
class Session:
    """One of a shard.  `expiry` is the timer that ends it."""

    timeout_s: float
    expiry: asyncio.TimerHandle | None = None


class Snapshot(NamedTuple):
    """What a server that is cut off knows: leaders, records, sessions, ends of the shards' logs."""

    leaders: Sequence[str]
    records: Mapping[tuple[int, str], Stored]
    sessions: Collection[tuple[int, int]]
    ends: Mapping[int, int]


@dataclass
class World:
    """What all servers share.  `leaders` is the map of shards."""

    leaders: list[str] = field(default_factory=list)
    authorities: list[str] = field(default_factory=list)
    """More names of servers, which newer ones tell with the map."""
    router: pb.ShardKeyRouter = pb.XXHASH3
    hierarchical: bool = True
    records: dict[tuple[int, str], Stored] = field(default_factory=dict)
    logs: dict[int, list[pb.NotificationBatch]] = field(default_factory=dict)
    """By shard; a batch for each entry, its offset is its place."""
    versions: dict[int, int] = field(default_factory=dict)
    alive: dict[tuple[int, int], Session] = field(default_factory=dict)
    """Sessions by shard and id."""
    sessions: int = 0
    """How many were ever made."""
    requests: list[pb.WriteRequest] = field(default_factory=list)
    writing: dict[int, int] = field(default_factory=dict)
    most_writing: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    written: asyncio.Event = field(default_factory=asyncio.Event)
    open: asyncio.Event = field(default_factory=asyncio.Event)
    losing: bool = False
    """The next writes are lost with their stream; then it is False again."""
    after_read: Callable[[], object] | None = None
    """Called once, when records were read."""
    after_listed: Callable[[], object] | None = None
    """Called once, when a scan of an index found its keys and before it looks records up."""
    poison: str | None = None
    """What a client sent that it must never send."""

    def __post_init__(self) -> None:
        self.open.set()

    # The map

    def assignments(self, leaders: Sequence[str]) -> pb.ShardAssignments:
        message = pb.ShardAssignments(allowed_authorities=self.authorities)
        assigned = message.namespaces[NAMESPACE]
        assigned.shard_key_router = self.router
        count = len(leaders)
        for shard, leader in enumerate(leaders):
            added = assigned.assignments.add(shard=shard, leader=leader)
            added.int32_hash_range.min_hash_inclusive = HASHES * shard // count
            added.int32_hash_range.max_hash_inclusive = HASHES * (shard + 1) // count - 1
        return message

    def lead(self, *leaders: str) -> None:
        """Another map."""
        self.leaders = list(leaders)
        for key in self.alive:
            self._renew(key)
        self.changed = _tell(self.changed)

    # The log

    def log(self, shard: int) -> list[pb.NotificationBatch]:
        """Of a shard; a first entry makes its offsets those of a shard that was elected."""
        return self.logs.setdefault(shard, [pb.NotificationBatch(shard=shard, offset=0)])

    def _append(self, shard: int, changes: Mapping[str, Change]) -> None:
        log = self.log(shard)
        batch = pb.NotificationBatch(shard=shard, offset=len(log))
        for key, (kind, version_id) in changes.items():
            batch.notifications[key].type = kind
            if version_id >= 0:
                batch.notifications[key].version_id = version_id
        log.append(batch)
        self.written = _tell(self.written)

    def _next_version(self, shard: int) -> int:
        self.versions[shard] = self.versions.get(shard, -1) + 1
        return self.versions[shard]

    # Writes

    def put(self, shard: int, key: str, value: bytes, identity: str = "") -> pb.Version:
        """Of whoever."""
        request = pb.WriteRequest(puts=[pb.PutRequest(key=key, value=value)])
        request.puts[0].client_identity = identity
        return self.apply(shard, request).puts[0].version

    def apply(self, shard: int, request: pb.WriteRequest) -> pb.WriteResponse:
        """One entry of the log: puts, then deletes, then ranges."""
        response = pb.WriteResponse()
        changes: dict[str, Change] = {}
        for put in request.puts:
            response.puts.append(self._put(shard, put, changes))
        for delete in request.deletes:
            response.deletes.add(status=self._delete(shard, delete, changes))
        for each in request.delete_ranges:
            for key in self.keys_in(self.records, shard, each.start_inclusive, each.end_exclusive):
                del self.records[shard, key]
            changes[each.start_inclusive] = pb.KEY_RANGE_DELETED, -1
            response.delete_ranges.add()
        self._append(shard, changes)
        return response

    def _put(self, shard: int, put: pb.PutRequest, changes: dict[str, Change]) -> pb.PutResponse:
        self._check_poison(put)
        key = self._sequence_key(shard, put) if put.sequence_key_delta else put.key
        before = self.records.get((shard, key))
        if put.HasField("expected_version_id") and put.expected_version_id != _version_id(before):
            return pb.PutResponse(status=pb.UNEXPECTED_VERSION_ID)
        if put.HasField("session_id") and (shard, put.session_id) not in self.alive:
            return pb.PutResponse(status=pb.SESSION_DOES_NOT_EXIST)
        now_ms = int(time.time() * 1000)
        version = pb.Version(
            version_id=self._next_version(shard),
            modifications_count=0 if before is None else before.version.modifications_count + 1,
            created_timestamp=now_ms if before is None else before.version.created_timestamp,
            modified_timestamp=now_ms,
            client_identity=put.client_identity,
            session_id=put.session_id if put.HasField("session_id") else None,
        )
        entries = {(each.index_name, each.secondary_key) for each in put.secondary_indexes}
        self.records[shard, key] = Stored(put.value, version, tuple(entries))
        kind = pb.KEY_CREATED if before is None else pb.KEY_MODIFIED
        changes[key] = kind, version.version_id
        return pb.PutResponse(version=version, key=key if put.sequence_key_delta else None)

    def _check_poison(self, put: pb.PutRequest) -> None:
        alone = not put.HasField("expected_version_id") and not put.HasField("session_id")
        deltas = put.sequence_key_delta
        if deltas and not (deltas[0] >= 1 and len(deltas) == 1 and put.partition_key and alone):
            raise Poisoned(f"a put on the sequence {put.key!r} with {put}")
        for entry in put.secondary_indexes:
            key = entry.secondary_key
            if not key or "\x01" in key or "/" in key or "/" in entry.index_name:
                raise Poisoned(f"the index entry {entry}")

    def _sequence_key(self, shard: int, put: pb.PutRequest) -> str:
        begin = f"{put.key}-"
        keys = [key for of, key in self.records if of == shard and key.startswith(begin)]
        last = max(keys, default=f"{begin}0").removeprefix(begin)
        if not last.isdigit():
            raise Poisoned(f"the sequence {put.key!r} beside the key {begin}{last}")
        return f"{begin}{int(last) + put.sequence_key_delta[0]:020}"

    def _delete(
        self, shard: int, delete: pb.DeleteRequest, changes: dict[str, Change]
    ) -> pb.Status:
        there = self.records.get((shard, delete.key))
        wanted = delete.HasField("expected_version_id")
        if wanted and delete.expected_version_id != _version_id(there):
            return pb.UNEXPECTED_VERSION_ID
        if there is None:
            return pb.KEY_NOT_FOUND
        del self.records[shard, delete.key]
        changes[delete.key] = pb.KEY_DELETED, -1
        return pb.OK

    def begin(self, shard: int) -> None:
        self.writing[shard] = self.writing.get(shard, 0) + 1
        self.most_writing = max(self.most_writing, self.writing[shard])

    def end(self, shard: int) -> None:
        self.writing[shard] -= 1

    # Ranges

    def keys_in(
        self, records: Mapping[tuple[int, str], Stored], shard: int, lo: str, hi: str
    ) -> list[str]:
        """A shard's keys with lo <= key < hi, in the servers' order."""
        begin, end = self._order(lo), self._order(hi)
        placed = sorted((self._order(key), key) for of, key in records if of == shard)
        return [key for place, key in placed if begin <= place and (not hi or place < end)]

    def _order(self, key: str) -> tuple[int, bytes]:
        if not self.hierarchical:
            return 0, key.encode()
        # Two slashes at the end are the bound behind a level, and begin no level.
        depth = key.count("/") - key.endswith("//")
        return depth, key.encode().replace(b"/", b"\xff")

    # Sessions

    def make_session(self, shard: int, timeout_ms: int) -> int:
        self.sessions += 1
        self._next_version(shard)
        self._append(shard, {})
        key = shard, len(self.log(shard)) - 1
        self.alive[key] = Session(timeout_ms / 1000)
        self._renew(key)
        return key[1]

    def beat(self, shard: int, session_id: int) -> bool:
        """False: there is no such session."""
        known = (shard, session_id) in self.alive
        if known:
            self._renew((shard, session_id))
        return known

    def end_session(self, shard: int, session_id: int) -> bool:
        """Remove it and its ephemerals; False: there is no such session."""
        session = self.alive.pop((shard, session_id), None)
        if session is None:
            return False
        if session.expiry is not None:
            session.expiry.cancel()
        gone = [
            key
            for (of, key), stored in self.records.items()
            if of == shard
            and stored.version.HasField("session_id")
            and stored.version.session_id == session_id
        ]
        for key in gone:
            del self.records[shard, key]
        self._append(shard, dict.fromkeys(gone, (pb.KEY_DELETED, -1)))
        return True

    def _renew(self, key: tuple[int, int]) -> None:
        session = self.alive[key]
        if session.expiry is not None:
            session.expiry.cancel()
        loop = asyncio.get_running_loop()
        session.expiry = loop.call_later(session.timeout_s, self.end_session, *key)


class FakeOxia:
    """One server of a world.

    `authority_of` tells by what name a peer has called: see `authority_proxy`.  Without it every
    name is good, as on a server that is told not to look.
    """

    def __init__(
        self,
        world: World,
        *,
        token: str | None = None,
        authority_of: Callable[[str], str] | None = None,
    ) -> None:
        self.world = world
        self.token = token
        self.calls: list[str] = []
        self.refused = 0
        self.address = ""
        self.authority_of = authority_of
        self._past: Snapshot | None = None
        self._back = asyncio.Event()
        self._map_streams: set[asyncio.Event] = set()
        self._server = grpc.aio.server()

    async def start(self, credentials: grpc.ServerCredentials | None = None) -> None:
        handlers: dict[str, tuple[Handler, type[Message], bool]] = {
            "GetShardAssignments": (self._assignments, pb.ShardAssignmentsRequest, False),
            "GetNotifications": (self._notifications, pb.NotificationsRequest, False),
            "Read": (self._read, pb.ReadRequest, False),
            "List": (self._list, pb.ListRequest, False),
            "RangeScan": (self._range_scan, pb.RangeScanRequest, False),
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

    def cut_off(self) -> None:
        """From now on it knows nothing of what happens elsewhere."""
        world = self.world
        ends = {shard: len(log) for shard, log in world.logs.items()}
        self._past = Snapshot(list(world.leaders), dict(world.records), set(world.alive), ends)
        self._back.clear()

    def come_back(self) -> None:
        """It is one of the others again, and knows what it missed."""
        self._past = None
        self._back.set()
        self.world.written = _tell(self.world.written)
        self.end_map_streams()

    def end_map_streams(self) -> None:
        """Who follows the map here has to ask again, here or elsewhere."""
        for ended in self._map_streams:
            ended.set()

    @property
    def _leaders(self) -> Sequence[str]:
        return self.world.leaders if self._past is None else self._past.leaders

    @property
    def _records(self) -> Mapping[tuple[int, str], Stored]:
        return self.world.records if self._past is None else self._past.records

    def _checked(self, name: str, handler: Handler) -> Handler:
        async def checked(request: object, context: Context) -> AsyncIterator[Message]:
            self.calls.append(name)
            await self._check_authority(context)
            metadata = dict(context.invocation_metadata())
            wanted = None if self.token is None else f"Bearer {self.token}"
            if metadata.get("authorization") != wanted:
                self.refused += 1
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong token")
            async for each in handler(request, context):
                yield each

        return checked

    async def _check_authority(self, context: Context) -> None:
        """As servers after 0.17.1: host and port, one that the cluster's configuration has."""
        if self.authority_of is None:
            return
        authority = self.authority_of(context.peer())
        if ":" not in authority:
            text = f'oxia: invalid authority: authority address "{authority}" is not a valid pair'
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        if authority not in self.world.authorities:
            text = f'oxia: unexpected authority "{authority}"'
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, text)

    async def _must_lead(self, shard: int, context: Context) -> None:
        if self.world.poison is not None:
            text = f"oxia db: failed to apply batch: {self.world.poison}"
            await context.abort(grpc.StatusCode.UNKNOWN, text)
        if shard >= len(self._leaders) or self._leaders[shard] != self.address:
            text = f"node is not leader for shard {shard}"
            await context.abort(grpc.StatusCode.UNKNOWN, text)

    async def _assignments(self, _request: object, _context: Context) -> AsyncIterator[Message]:
        ended = asyncio.Event()
        self._map_streams.add(ended)
        ending = asyncio.create_task(ended.wait())
        while not ended.is_set():
            changed = self.world.changed
            yield self.world.assignments(self._leaders)
            changing = asyncio.create_task(changed.wait())
            await asyncio.wait({changing, ending}, return_when=asyncio.FIRST_COMPLETED)
        self._map_streams.discard(ended)

    async def _notifications(
        self, request: pb.NotificationsRequest, context: Context
    ) -> AsyncIterator[Message]:
        await self._must_lead(request.shard, context)
        shard = request.shard
        log = self.world.log(shard)
        after = request.start_offset_exclusive
        if not request.HasField("start_offset_exclusive"):
            after = self._end_of(shard) - 1
            yield pb.NotificationBatch(shard=shard, offset=after)
        while True:
            written = self.world.written
            while after + 1 < self._end_of(shard):
                after += 1
                yield log[after]
            await written.wait()

    def _end_of(self, shard: int) -> int:
        """How long the log is, as far as this server knows it."""
        log = self.world.log(shard)
        return len(log) if self._past is None else self._past.ends.get(shard, 1)

    async def _read(self, request: pb.ReadRequest, context: Context) -> AsyncIterator[Message]:
        await self._must_lead(request.shard, context)
        assert all(get.comparison_type == pb.EQUAL for get in request.gets)
        gets = [self._answer(request.shard, get.key) for get in request.gets]
        after_read, self.world.after_read = self.world.after_read, None
        if after_read is not None:
            after_read()
        for part in _chunks(gets):
            yield pb.ReadResponse(gets=part)

    def _answer(self, shard: int, key: str, told: str | None = None) -> pb.GetResponse:
        stored = self._records.get((shard, key))
        if stored is None:
            return pb.GetResponse(status=pb.KEY_NOT_FOUND, key=told)
        return stored.answer(told)

    async def _list(self, request: pb.ListRequest, context: Context) -> AsyncIterator[Message]:
        await self._must_lead(request.shard, context)
        for part in _chunks(self._keys_asked(request)):
            yield pb.ListResponse(keys=part)

    async def _range_scan(
        self, request: pb.RangeScanRequest, context: Context
    ) -> AsyncIterator[Message]:
        await self._must_lead(request.shard, context)
        shard, records = request.shard, dict(self._records)
        keys = self._keys_asked(request)
        if request.HasField("secondary_index_name"):
            after_listed, self.world.after_listed = self.world.after_listed, None
            if after_listed is not None:
                after_listed()
        for part in _chunks(keys):
            if request.HasField("secondary_index_name"):
                await asyncio.sleep(0)
                found = [self._answer(shard, key, key) for key in part]
            else:
                found = [records[shard, key].answer(key) for key in part]
            yield pb.RangeScanResponse(records=found)

    def _keys_asked(self, request: pb.ListRequest | pb.RangeScanRequest) -> list[str]:
        lo, hi = request.start_inclusive, request.end_exclusive
        if not request.HasField("secondary_index_name"):
            return self.world.keys_in(self._records, request.shard, lo, hi)
        places = sorted(
            (f"{secondary}\x01{quote(key, safe='')}", key)
            for (shard, key), stored in self._records.items()
            for name, secondary in stored.entries
            if shard == request.shard and name == request.secondary_index_name
        )
        return [key for place, key in places if lo <= place < hi]

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
            if self._past is not None:
                await self._back.wait()
                await self._must_lead(shard, context)
            if world.losing:
                world.losing = False
                world.end(shard)
                await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
            try:
                response = world.apply(shard, request)
            except Poisoned as error:
                world.poison = str(error)
                await self._must_lead(shard, context)
            yield response
            world.end(shard)

    async def _create_session(self, request: pb.CreateSessionRequest, context: Context) -> Message:
        await self._take_turn("CreateSession", request.shard, context)
        made = self.world.make_session(request.shard, request.session_timeout_ms)
        return pb.CreateSessionResponse(session_id=made)

    async def _close_session(self, request: pb.CloseSessionRequest, context: Context) -> Message:
        await self._take_turn("CloseSession", request.shard, context)
        if not self.world.end_session(request.shard, request.session_id):
            await context.abort(grpc.StatusCode.UNKNOWN, "oxia: session not found")
        return pb.CloseSessionResponse()

    async def _keep_alive(self, request: pb.SessionHeartbeat, context: Context) -> Message:
        await self._check_authority(context)
        await self._must_lead(request.shard, context)
        if self._past is not None:
            known = (request.shard, request.session_id) in self._past.sessions
        else:
            known = self.world.beat(request.shard, request.session_id)
        if not known:
            await context.abort(grpc.StatusCode.UNKNOWN, "oxia: session not found")
        return pb.KeepAliveResponse()

    async def _take_turn(self, name: str, shard: int, context: Context) -> None:
        """A write of its own, long enough for a second writer to be noticed."""
        self.calls.append(name)
        await self._check_authority(context)
        await self._must_lead(shard, context)
        self.world.begin(shard)
        for _ in range(20):
            await asyncio.sleep(0)
        self.world.end(shard)
        if self._past is not None:
            await self._back.wait()
            await self._must_lead(shard, context)


def _tell(event: asyncio.Event) -> asyncio.Event:
    """Wake who waits; returns what the next ones wait for."""
    event.set()
    return asyncio.Event()


def _version_id(stored: Stored | None) -> int:
    return -1 if stored is None else stored.version.version_id


def _chunks(found: list[T]) -> Iterator[list[T]]:
    start, count = 0, FIRST_CHUNK
    while start < len(found):
        yield found[start : start + count]
        start, count = start + count, 2 * count


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
