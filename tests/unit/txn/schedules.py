"""Every interleaving: a metadata store whose operations wait until an explorer lets one go.

What runs is run again from the start for each schedule, on a loop without time; two schedules that
lead to the same state are followed once.  A state is what is stored, what each actor was answered,
what its present request has read and written, and what a world adds of its own.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

from storage.metadata.memory import MemoryMetadataStore
from storage.metadata.store import Record, VersionConflict

T = TypeVar("T")
ACTOR: ContextVar[str] = ContextVar("actor", default="")
LIFE: ContextVar[int] = ContextVar("life", default=0)
"""In which life of the servers a request is served."""
Choice = tuple[object, ...]


class Died(ConnectionError):
    """The process that served this is gone."""


class _NoFiles:
    def select(self, timeout: float | None = None) -> list[object]:
        return []

    def close(self) -> None:
        """Nothing is open."""


class StepLoop(asyncio.BaseEventLoop):
    """A loop that runs what is ready, and whose time stands still."""

    _ready: "deque[object]"

    def __init__(self) -> None:
        super().__init__()
        self._selector = _NoFiles()
        self.failures: list[str] = []
        self.set_exception_handler(self._failed)

    def time(self) -> float:
        return 0.0

    def settle(self) -> None:
        """Run until everybody waits."""
        while self._ready:
            self._run_once()  # type: ignore[attr-defined]

    def _process_events(self, events: object) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nobody sleeps."""

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        if "exception" in context:
            self.failures.append(repr(context["exception"]))


@dataclass(eq=False)
class Operation:
    """One that waits to be let go."""

    actor: str
    kind: str
    key: str
    go: "asyncio.Future[None]"
    work: Callable[[], Awaitable[object]]


class GatedStore(MemoryMetadataStore):
    """Operations on keys that begin with one of `GATED` wait; others go at once."""

    GATED: ClassVar[tuple[str, ...]] = ("/txn/key", "/txn/id/")

    def __init__(self, clock: object) -> None:
        super().__init__(clock)  # type: ignore[arg-type]
        self.waiting: list[Operation] = []
        self.life = 0
        self.free: set[str] = set()
        """Actors whose operations wait for nobody."""
        self.writes: Counter[str] = Counter()
        """Of each key: versions, but the same in every schedule that leads to a state."""
        self.seen: dict[str, list[Hashable]] = {}
        """What operations told each actor, since its request began."""

    async def get(self, key: str, **given: object) -> Record | None:
        one = super().get
        return await self._gated("get", key, lambda: one(key, **given))  # type: ignore[arg-type]

    async def put(self, key: str, value: bytes, **given: object) -> object:  # type: ignore[override]
        one = super().put
        return await self._gated("put", key, lambda: one(key, value, **given))  # type: ignore[arg-type]

    async def delete(self, key: str, **given: object) -> bool:
        one = super().delete
        return await self._gated("delete", key, lambda: one(key, **given))  # type: ignore[arg-type]

    async def _gated(self, kind: str, key: str, work: Callable[[], Awaitable[T]]) -> T:
        if not key.startswith(self.GATED) or ACTOR.get() in self.free:
            return await work()
        if LIFE.get() < self.life:
            raise Died
        go = asyncio.get_running_loop().create_future()
        operation = Operation(ACTOR.get(), kind, key, go, work)
        self.waiting.append(operation)
        await go
        self.begins(operation)
        try:
            result = await self.land(operation)
        except VersionConflict:
            self.seen.setdefault(operation.actor, []).append((kind, key, "conflict"))
            raise
        self.seen.setdefault(operation.actor, []).append((kind, key, self.writes[key]))
        return result  # type: ignore[return-value]

    def kill(self) -> list[Operation]:
        """Whoever waits is dead, and does nothing more; what it was waiting for."""
        self.life += 1
        dead, self.waiting = self.waiting, []
        for each in dead:
            if not each.go.done():
                each.go.set_exception(Died())
        return dead

    async def land(self, operation: Operation) -> object:
        """Do it, whoever may still wait for it."""
        result = await operation.work()
        if operation.kind != "get":
            self.writes[operation.key] += 1
            self.changed(operation)
        return result

    def begins(self, operation: Operation) -> None:
        """It was let go."""

    def changed(self, operation: Operation) -> None:
        """A write was made."""

    def contents(self) -> Hashable:
        """What is stored under gated keys."""
        tables = self._tables
        found = []
        for key in sorted(tables._records):
            if key.startswith(self.GATED):
                record = tables.record(key)
                assert record is not None
                found.append((key, record.value, self.writes[key]))
        return tuple(found)


class Explored(Protocol):
    """What an explorer needs of a world."""

    def choices(self) -> Sequence[Choice]: ...

    def do(self, choice: Choice) -> None: ...

    def check(self) -> None: ...

    def state(self) -> Hashable: ...

    def finish(self) -> None: ...

    def close(self) -> None: ...


class Found(AssertionError):
    """A schedule on which something is wrong."""


@dataclass
class Extent:
    """How much there was."""

    states: int = 0
    schedules: int = 0
    ends: int = 0


def explore(make: Callable[[StepLoop], Explored], *, limit: int = 200_000) -> Extent:
    """Follow every schedule.  Raises `Found`, which tells the schedule, for the first wrong one."""
    loop = StepLoop()
    count, known = Extent(), set[int]()
    to_do: list[tuple[Choice, ...]] = [()]
    asyncio._set_running_loop(loop)
    try:
        while to_do:
            count.schedules += 1
            assert count.schedules < limit, "more schedules than this is meant for"
            _follow(make(loop), list(to_do.pop()), to_do, known, count)
            assert not loop.failures, loop.failures
    finally:
        asyncio._set_running_loop(None)
        loop.close()
    return count


def _follow(
    world: Explored,
    path: list[Choice],
    to_do: list[tuple[Choice, ...]],
    known: set[int],
    count: Extent,
) -> None:
    try:
        for choice in path[:-1]:
            world.do(choice)  # on the way there nothing was wrong
        if path:
            world.do(path[-1])
            world.check()
        while choices := world.choices():
            state = hash(world.state())
            if state in known:
                return
            known.add(state)
            count.states += 1
            to_do += [(*path, other) for other in choices[1:]]
            path.append(choices[0])
            world.do(choices[0])
            world.check()
        count.ends += 1
        world.finish()
    except AssertionError as error:
        steps = "\n  ".join(" ".join(map(str, step)) for step in path)
        raise Found(f"{error}\nafter\n  {steps}") from error
    finally:
        world.close()
