"""A ZooKeeper in memory, as one client sees it, whose connection breaks when a test says so.

Rules: requests of a client take effect in their order; a multi wholly or not; when a connection
breaks, the server has done some of the requests on their way, from the first one on, and all of
them are answered by CONNECTION_LOSS; ephemeral nodes go with their session.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from kazoo.protocol.serialization import (
    CheckVersion,
    Create,
    Delete,
    GetChildren,
    GetData,
    SetData,
    Sync,
)

from storage.metadata.zookeeper.client import RequestFailed
from storage.metadata.zookeeper.requests import (
    Answer,
    Done,
    Failure,
    MultiResult,
    Read,
    Request,
    Stat,
    Value,
    _Multi,
    _MultiRead,
)


@dataclass
class _Node:
    data: bytes
    version: int
    czxid: int
    mzxid: int
    owner: int


class _Refused(Exception):
    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure


class FakeTree:
    """What the servers hold."""

    def __init__(self) -> None:
        self.nodes: dict[str, _Node] = {"": _Node(b"", 0, 0, 0, 0)}
        self.zxid = 0
        self.sessions = 0

    def make(self, paths: Sequence[str]) -> None:
        for path in paths:
            self.apply(Create(path, b"", (), 0), 0)

    def expire(self, session: int) -> None:
        self.nodes = {path: each for path, each in self.nodes.items() if each.owner != session}

    def children(self, path: str) -> list[str]:
        level = f"{path}/"
        return [
            each.removeprefix(level)
            for each in self.nodes
            if each.startswith(level) and "/" not in each.removeprefix(level)
        ]

    def apply(self, request: Request, session: int) -> Value:
        if isinstance(request, _MultiRead):
            return [self._read(each) for each in request._operations]
        if isinstance(request, Sync):
            return "/"
        if isinstance(request, (GetData, GetChildren)):
            found = self._read(request)
            if isinstance(found, Failure):
                raise _Refused(found)
            return found
        self.zxid += 1
        if isinstance(request, _Multi):
            return self._apply_multi(request, session)
        return self._write(request, session)

    def _apply_multi(self, request: _Multi, session: int) -> MultiResult:
        before = {path: _Node(**vars(each)) for path, each in self.nodes.items()}
        for place, each in enumerate(request._operations):
            try:
                self._write(each, session)
            except _Refused as error:
                self.nodes = before
                return MultiResult(place, error.failure)
        return MultiResult()

    def _read(self, request: GetData | GetChildren) -> Read:
        node = self.nodes.get(request.path)
        if node is None:
            return Failure.NO_NODE
        if isinstance(request, GetChildren):
            return self.children(request.path)
        return node.data, Stat(node.czxid, node.mzxid, node.version, node.owner)

    def _write(self, request: Create | SetData | Delete | CheckVersion, session: int) -> Value:
        path = request.path
        if isinstance(request, Create):
            parent = self.nodes.get(path.rpartition("/")[0])
            if path in self.nodes:
                raise _Refused(Failure.NODE_EXISTS)
            if parent is None:
                raise _Refused(Failure.NO_NODE)
            if parent.owner:
                raise _Refused(Failure.NO_CHILDREN_FOR_EPHEMERALS)
            owner = session if request.flags & 1 else 0
            self.nodes[path] = _Node(request.data, 0, self.zxid, self.zxid, owner)
            return str(path)
        node = self.nodes.get(path)
        if node is None:
            raise _Refused(Failure.NO_NODE)
        if request.version not in (-1, node.version):
            raise _Refused(Failure.BAD_VERSION)
        if isinstance(request, Delete):
            if self.children(path):
                raise _Refused(Failure.NOT_EMPTY)
            del self.nodes[path]
        elif isinstance(request, SetData):
            node.data, node.version, node.mzxid = request.data, node.version + 1, self.zxid
        else:
            assert isinstance(request, CheckVersion)
        return True


class FakeClient:
    """What `ZooKeeperClient` is to writes; `breaks` is asked in each turn how to break."""

    def __init__(self, tree: FakeTree, rng: Random, breaks: Callable[[], str] = str) -> None:
        self.tree = tree
        self.on_change: Callable[[], None] = lambda: None
        self.connected = True
        self.broken = 0
        self._rng = rng
        self._breaks = breaks
        self._waiting: deque[tuple[Request, Done]] = deque()
        self._begin_session()

    def submit(self, request: Request, done: Done) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._turn)
        self._waiting.append((request, done))

    async def call(self, request: Request) -> Value:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.submit(request, future.set_result)
        answer = await future
        if answer.failure is not None:
            raise RequestFailed(answer.failure)
        return answer.value

    async def call_again(self, request: Request) -> tuple[Value, bool]:
        lost = False
        while True:
            try:
                return await self.call(request), lost
            except RequestFailed as error:
                if not error.failure.uncertain:
                    raise
                lost = True

    def _begin_session(self) -> None:
        self.tree.sessions += 1
        self.session = self.tree.sessions

    def _turn(self) -> None:
        waiting, self._waiting = list(self._waiting), deque()
        kind = self._breaks()
        if kind:
            self.broken += 1
            for request, _ in waiting[: self._rng.randint(0, len(waiting))]:
                self._answer(request)
            if kind == "expire":
                self.tree.expire(self.session)
                self._begin_session()
            for _, done in waiting:
                done(Answer(None, Failure.CONNECTION_LOSS, 0))
            self.on_change()
            return
        for request, done in waiting:
            done(self._answer(request))

    def _answer(self, request: Request) -> Answer:
        try:
            return Answer(self.tree.apply(request, self.session), None, self.tree.zxid)
        except _Refused as error:
            return Answer(None, error.failure, self.tree.zxid)
