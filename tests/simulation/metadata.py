"""The metadata service: one durable store, and one handle on it for each broker process.

Rules:

- What a handle asks takes time to get there and time to come back; what it asks first arrives
  first.  Watches tell late, newest state only, and now and then only "resync".
- A request may fail without having been made, or after it was made: the caller cannot know.
- When a process dies, what it had asked arrives up to some point and not beyond (`embedded`), or
  all of it, later, while its successor is running already (a service over the network).
- A session lives as long as its process shows signs of life; its end is told late.
"""

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from storage.clock import Clock
from storage.metadata.memory import MemoryMetadataStore
from storage.metadata.store import (
    Event,
    EventKind,
    IndexEntry,
    IndexHit,
    MetadataError,
    MetadataStore,
    PutResult,
    Record,
    Session,
    SessionLost,
    Version,
    Wanted,
    Watch,
)
from tests.simulation.loop import Host, SimulatedLoop

T = TypeVar("T")
Request = Callable[[MemoryMetadataStore], Awaitable[object]]


@dataclass
class MetadataFaults:
    """How bad the service is.  Times in seconds, the rest are probabilities."""

    delay: tuple[float, float] = (0.0001, 0.002)
    slow: float = 0.0
    """That a request takes up to two seconds on its way."""
    slow_keys: tuple[str, ...] = ("",)
    """Parts of the keys of requests that may be slow."""
    stale_slow: float = 0.0
    stale_slow_keys: tuple[str, ...] = ("",)
    """The same, of requests of a process that was replaced."""
    refused: float = 0.0
    """That a request fails and was not made."""
    lost_answer: float = 0.0
    """That a request fails though it was made."""
    watch_delay: tuple[float, float] = (0.0, 0.002)
    watch_slow: float = 0.0
    """That an event is up to three seconds late."""
    resync: float = 0.0
    session_expiry: float = 0.0
    """That a session ends for no reason within ten seconds."""
    late: bool = False
    """Requests of a dead process arrive later."""


class MetadataService:
    """What outlives brokers."""

    def __init__(self, loop: SimulatedLoop, rng: random.Random, clock: Clock) -> None:
        self.loop = loop
        self.rng = rng
        self.faults = MetadataFaults()
        self.host = loop.new_host("metadata")
        asyncio.events._set_running_loop(loop)  # the store is made on the loop that will run
        try:
            self.store = self.host.context.copy().run(MemoryMetadataStore, clock)
        finally:
            asyncio.events._set_running_loop(None)
        self.handles: list[MetadataHandle] = []
        self.holds: list[tuple[MetadataHandle, str, str]] = []
        """(whose, kind, part of a key) of requests that wait on their way until released."""
        self.held: list[tuple[MetadataHandle, _Call]] = []
        self.asked: Callable[[Host, str, str], None] = lambda host, kind, key: None
        """Called with the process, kind and key of each request, before it is on its way."""
        self.stored: Callable[[Host, str], None] = lambda host, key: None
        """Called with the process and key of each put that was made."""

    def holding(self, handle: "MetadataHandle", call: "_Call") -> bool:
        return any(
            handle is whose and kind == call.kind and part in call.key
            for whose, kind, part in self.holds
        )

    def holding_event(self, handle: "MetadataHandle", event: Event) -> bool:
        return any(
            handle is whose and kind == "watch" and part in event.key
            for whose, kind, part in self.holds
        )

    def release(self, part: str) -> None:
        """What was held of that key arrives now, in order, whoever asked for it."""
        self.holds = [hold for hold in self.holds if part not in hold[2]]
        held, self.held = self.held, []
        for handle, call in held:
            if self.holding(handle, call):
                self.held.append((handle, call))
            else:
                self.host.context.copy().run(handle.arrive, call)

    def handle(self, host: Host) -> "MetadataHandle":
        handle = MetadataHandle(self, host)
        self.handles.append(handle)
        return handle

    def delay(self, key: str = "", host: Host | None = None) -> float:
        faults = self.faults
        share = faults.slow if any(part in key for part in faults.slow_keys) else 0.0
        if faults.stale_slow and host is not None and host.replaced_at <= self.loop.time():
            stale = any(part in key for part in faults.stale_slow_keys)
            share = faults.stale_slow if stale else 0.0
        if share and self.rng.random() < share:
            return self.rng.uniform(0.01, 2.0)
        return self.rng.uniform(*faults.delay)

    def crashed(self, host: Host) -> None:
        for handle in self.handles:
            if handle.host is host:
                handle.crashed()


class _Call:
    """One request on its way."""

    __slots__ = ("answer", "fault", "key", "kind", "made", "request")

    def __init__(
        self, kind: str, key: str, request: Request, answer: "asyncio.Future[object]", fault: str
    ) -> None:
        self.kind = kind
        self.key = key
        self.request = request
        self.answer = answer
        self.fault = fault
        self.made = False


class MetadataHandle(MetadataStore):
    """The service as one process sees it."""

    def __init__(self, service: MetadataService, host: Host) -> None:
        self.host = host
        self._service = service
        self._loop = service.loop
        self._calls: deque[_Call] = deque()
        self._last = 0.0
        self._sessions: list[SimulatedSession] = []
        self._watches: list[SimulatedWatch] = []
        self._closed = False

    # Requests

    def ask(self, kind: str, key: str, request: Request) -> "asyncio.Future[object]":
        """Put a request on its way; it arrives behind those before it."""
        service, loop = self._service, self._loop
        if self._closed:
            raise MetadataError("The metadata store is closed: open it again.")
        service.asked(self.host, kind, key)
        answer: asyncio.Future[object] = loop.create_future()
        call = _Call(kind, key, request, answer, self._fault())
        self._calls.append(call)
        self._last = max(self._last, loop.time() + service.delay(key, self.host))
        loop.call_at(self._last, self._arrive, call, context=service.host.context.copy())
        return answer

    def _fault(self) -> str:
        faults, luck = self._service.faults, self._service.rng.random()
        if luck < faults.refused:
            return "refused"
        return "lost_answer" if luck < faults.refused + faults.lost_answer else ""

    def _arrive(self, call: _Call) -> None:
        if call.made:
            return
        self._calls.remove(call)
        if self._service.holding(self, call):
            self._service.held.append((self, call))
        else:
            self.arrive(call)

    def arrive(self, call: _Call) -> None:
        """The service has it."""
        call.made = True
        if call.fault == "refused":
            self._answer(call, None, _unavailable())
            return
        made = asyncio.ensure_future(_run(call.request, self._service.store))
        made.add_done_callback(lambda done: self._made(call, done))

    def _made(self, call: _Call, done: "asyncio.Future[object]") -> None:
        error = done.exception()
        result = None if error is not None else done.result()
        if error is None and call.kind == "put":
            self._service.stored(self.host, call.key)
        if call.fault == "lost_answer":
            error = _unavailable()
        self._answer(call, result, cast("Exception | None", error))

    def _answer(self, call: _Call, result: object, error: Exception | None) -> None:
        self._loop.call_later(
            self._service.delay(call.key),
            _complete,
            call.answer,
            result,
            error,
            context=self.host.context.copy(),
        )

    def crashed(self) -> None:
        """The process is dead: what it asked arrives in part, or all of it later."""
        calls, rng = list(self._calls), self._service.rng
        if not self._service.faults.late:
            arrived = rng.randrange(len(calls) + 1)
            for call in calls[arrived:]:
                call.made = True
            for call in calls[:arrived]:
                self._service.host.context.copy().run(self._arrive, call)
        for session in self._sessions:
            session.expire_later(rng.choice((0.0, rng.uniform(0, 30))))
        for watch in self._watches:
            watch.inner.close()

    # The interface

    async def get(
        self, key: str, *, partition: str | None = None, fresh: bool = False
    ) -> Record | None:
        found = await self.ask("get", key, lambda s: s.get(key, partition=partition, fresh=fresh))
        return cast("Record | None", found)

    async def get_many(
        self, keys: Sequence[str], *, partition: str | None = None
    ) -> list[Record | None]:
        asked = list(keys)
        found = await self.ask(
            "get", " ".join(asked), lambda s: s.get_many(asked, partition=partition)
        )
        return cast("list[Record | None]", found)

    async def put(
        self,
        key: str,
        value: bytes,
        *,
        partition: str | None = None,
        expect: Version | None = None,
        session: Session | None = None,
        sequence: bool = False,
        indexes: Sequence[IndexEntry] = (),
    ) -> PutResult:
        inner = None
        if session is not None:
            if session.lost:
                raise SessionLost("The session has ended: open a new one.")
            inner = cast("SimulatedSession", session).inner
        result = await self.ask(
            "put",
            key,
            lambda s: s.put(
                key,
                value,
                partition=partition,
                expect=expect,
                session=inner,
                sequence=sequence,
                indexes=list(indexes),
            ),
        )
        return cast(PutResult, result)

    async def delete(
        self, key: str, *, partition: str | None = None, expect: Version | None = None
    ) -> bool:
        deleted = await self.ask(
            "delete", key, lambda s: s.delete(key, partition=partition, expect=expect)
        )
        return cast(bool, deleted)

    async def children(self, key: str) -> list[str]:
        return cast("list[str]", await self.ask("scan", key, lambda s: s.children(key)))

    async def scan(
        self, lo: str, hi: str, *, partition: str | None = None, fresh: bool = False
    ) -> list[Record]:
        found = await self.ask(
            "scan", lo, lambda s: s.scan(lo, hi, partition=partition, fresh=fresh)
        )
        return cast("list[Record]", found)

    async def scan_index(
        self,
        index: str,
        lo: str,
        hi: str,
        *,
        partition: str | None = None,
        fresh: bool = False,
        limit: int | None = None,
        max_bytes: int | None = None,
    ) -> list[IndexHit]:
        found = await self.ask(
            "scan",
            f"{index} {lo}",
            lambda s: s.scan_index(
                index, lo, hi, partition=partition, fresh=fresh, limit=limit, max_bytes=max_bytes
            ),
        )
        return cast("list[IndexHit]", found)

    def watch_key(self, key: str, *, partition: str | None = None) -> Watch:
        return self._watch(self._service.store.watch_key(key, partition=partition))

    def watch_children(self, key: str, *, wanted: Wanted | None = None) -> Watch:
        return self._watch(self._service.store.watch_children(key, wanted=wanted))

    def watch_sequence(self, prefix: str, *, partition: str) -> Watch:
        return self._watch(self._service.store.watch_sequence(prefix, partition=partition))

    def _watch(self, inner: Watch) -> Watch:
        watch = SimulatedWatch(self._service, self, inner)
        self._watches.append(watch)
        return watch

    def expire_sessions(self) -> None:
        """End all sessions of the process, for no reason."""
        for session in self._sessions:
            session.expire_later(0)

    async def open_session(self, *, timeout_ms: int, identity: str) -> Session:
        inner = await self.ask(
            "session", "", lambda s: s.open_session(timeout_ms=timeout_ms, identity=identity)
        )
        session = SimulatedSession(self, self._service, cast(Session, inner))
        self._sessions.append(session)
        if self._service.rng.random() < self._service.faults.session_expiry:
            session.expire_later(self._service.rng.uniform(0, 10))
        return session

    async def close(self) -> None:
        if not self._closed:
            for session in self._sessions:
                await session.close()
            self._closed = True


class SimulatedSession(Session):
    """A session whose keeper is the service."""

    def __init__(self, handle: MetadataHandle, service: MetadataService, inner: Session) -> None:
        self.inner = inner
        self._handle = handle
        self._service = service
        self._ended = asyncio.Event()

    @property
    def lost(self) -> bool:
        return self._ended.is_set()

    async def wait_lost(self) -> None:
        await self._ended.wait()

    async def close(self) -> None:
        self._ended.set()
        if not self.inner.lost:
            await self._handle.ask("session", "", lambda store: self.inner.close())

    def expire_later(self, seconds: float) -> None:
        """The service gives it up; the process hears of it."""
        loop, context = self._service.loop, self._service.host.context.copy()
        loop.call_later(seconds, self._expire, context=context)

    def _expire(self) -> None:
        if not self.inner.lost:
            self._service.loop.create_task(self.inner.close())
        context = self._handle.host.context.copy()
        self._service.loop.call_later(self._service.delay(), self._ended.set, context=context)


class SimulatedWatch(Watch):
    """A watch that tells late."""

    def __init__(self, service: MetadataService, handle: MetadataHandle, inner: Watch) -> None:
        self.inner = inner
        self._handle = handle
        self._service = service
        self._held: Event | None = None
        self._closed = False

    def __aiter__(self) -> "SimulatedWatch":
        return self

    async def __anext__(self) -> Event:
        if self._held is None:
            self._held = await self.inner.__anext__()
        faults, rng = self._service.faults, self._service.rng
        seconds = rng.uniform(*faults.watch_delay)
        if faults.watch_slow and rng.random() < faults.watch_slow:
            seconds = rng.uniform(0, 3)
        await asyncio.sleep(seconds)
        while self._held is not None and self._service.holding_event(self._handle, self._held):
            await asyncio.sleep(0.05)
        if self._closed:
            raise StopAsyncIteration
        event, self._held = self._held, None
        if faults.resync and rng.random() < faults.resync:
            return Event(EventKind.RESYNC)
        return event

    def close(self) -> None:
        self._closed = True
        self.inner.close()


async def _run(request: Request, store: MemoryMetadataStore) -> object:
    return await request(store)


def _complete(answer: "asyncio.Future[object]", result: object, error: Exception | None) -> None:
    if answer.done():
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result)


def _unavailable() -> MetadataError:
    return MetadataError("The metadata service did not answer: try again.")
