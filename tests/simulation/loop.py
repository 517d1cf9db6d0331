"""An event loop whose time, order and randomness come from a seed.

Rules:

- Nothing is ready: time jumps to the next timer.  Nothing is ready and no timer is set: the run is
  stuck, and says so.
- Every callback belongs to a *host* (a process), named by the context that it runs in: tasks,
  timers and callbacks of futures carry the context of whoever made them.
- Within a host callbacks run in the order in which they became ready, as asyncio promises and as
  code relies on.  Between hosts nothing is promised by anybody, so the seed chooses.
- A host that crashed runs nothing any more, from one callback to the next: no `finally`, no
  `except`.  Its tasks are kept until the end of the run, so that nothing of them is ever woken by
  their destruction.  A host that is paused runs later what became ready meanwhile.
- Tasks hash by their number, so that sets of them have the same order in every run.
"""

import asyncio
import contextlib
import contextvars
import heapq
import itertools
import math
import random
import struct
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

STEPS_WITHOUT_TIME = 300_000
"""Callbacks in one instant above which the run is a livelock."""
EXECUTOR_S = (0.00005, 0.002)
"""Least and most time that a job of an executor takes."""

HOST: "contextvars.ContextVar[Host]" = contextvars.ContextVar("host")


class Stuck(Exception):
    """The run cannot go on: everybody waits for somebody, or nobody ever waits."""


class Host:
    """One process."""

    __slots__ = (
        "__weakref__",
        "context",
        "crash_at_step",
        "dead",
        "name",
        "number",
        "on_crash",
        "paused",
        "ready",
        "replaced_at",
        "steps",
        "tasks",
    )

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.ready: deque[asyncio.Handle] = deque()
        self.dead = False
        self.paused = False
        self.replaced_at = math.inf
        """Since when another process does its work."""
        self.steps = 0
        self.crash_at_step = -1
        self.on_crash: Callable[[], None] = lambda: None
        """Called by the loop when step `crash_at_step` has run."""
        self.tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self.context = contextvars.Context()
        self.context.run(HOST.set, self)

    def __repr__(self) -> str:
        return f"<Host {self.name}>"


class NumberedTask(asyncio.Task[T]):
    """A task with the same hash in every run."""

    def __init__(
        self,
        number: int,
        coro: Coroutine[Any, Any, T],
        loop: asyncio.AbstractEventLoop,
        name: str,
        context: contextvars.Context | None,
    ) -> None:
        self.number = number
        super().__init__(coro, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


class SimulatedLoop(asyncio.BaseEventLoop):
    """See the module's rules."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.digest = 0
        """Changes with every step: two runs are the same if it is the same."""
        self.steps = 0
        self.network: Any = None
        self._rng = rng
        self._now = 0.0
        self._at_same_time = 0
        self._runnable: list[Host] = []
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = itertools.count(1)
        self._hosts: list[Host] = []
        self._graveyard: list[object] = []
        self.world = self.new_host("world")

    # Hosts

    def new_host(self, name: str) -> Host:
        host = Host(name, len(self._hosts))
        self._hosts.append(host)
        return host

    def spawn(self, host: Host, coro: Coroutine[Any, Any, T], name: str = "") -> "asyncio.Task[T]":
        """Run a coroutine as a task of `host`."""
        return self.create_task(coro, name=name or None, context=host.context)

    def crash(self, host: Host) -> None:
        """Nothing of the host runs from now on."""
        host.dead = True
        self._graveyard.append((host, list(host.tasks), list(host.ready)))
        for task in host.tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        host.ready.clear()
        if host in self._runnable:
            self._runnable.remove(host)

    def bury(self) -> None:
        """The run is over: end what would still have run, and whatever it says to that."""
        self.set_exception_handler(lambda loop, context: None)
        for task in [task for host in self._hosts for task in host.tasks if not task.done()]:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            coroutine = task.get_coro()
            if coroutine is None:  # From Python 3.12 on, of an eager task that has ended.
                continue
            for _ in range(3):
                with contextlib.suppress(BaseException):
                    coroutine.close()
        self._graveyard.clear()
        self._timers.clear()
        for host in self._hosts:
            host.ready.clear()
        self._runnable.clear()

    def pause(self, host: Host) -> None:
        host.paused = True
        if host in self._runnable:
            self._runnable.remove(host)

    def resume(self, host: Host) -> None:
        if host.paused and not host.dead:
            host.paused = False
            if host.ready:
                self._runnable.append(host)

    def timers_of(self, host: Host) -> int:
        """The number of timers of a host that are set."""
        return sum(
            each._context.get(HOST) is host and not each._cancelled  # type: ignore[attr-defined]
            for _, _, each in self._timers
        )

    # What asyncio asks of a loop

    def time(self) -> float:
        return self._now

    def call_soon(
        self,
        callback: Callable[..., object],
        *args: object,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._make_ready(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: object,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: object,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def create_task(  # type: ignore[override]
        self,
        coro: Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> "asyncio.Task[T]":
        number = next(self._numbers)
        name = name or f"Task-{number}"
        task = NumberedTask(number, coro, self, name, context)
        host = (context if context is not None else contextvars.copy_context()).get(HOST)
        (host or self.world).tasks.add(task)
        return task

    def run_in_executor(
        self, executor: object, func: Callable[..., T], *args: object
    ) -> "asyncio.Future[T]":
        future: asyncio.Future[T] = self.create_future()
        self.call_later(self._rng.uniform(*EXECUTOR_S), _run_job, future, func, args)
        return future

    async def create_server(self, protocol_factory, host=None, port=None, **given):  # type: ignore[no-untyped-def]
        return self.network.listen(protocol_factory, given["sock"].port)

    async def create_connection(self, protocol_factory, host=None, port=None, **given):  # type: ignore[no-untyped-def]
        return await self.network.connect(protocol_factory, port)

    # One step

    def _make_ready(self, handle: asyncio.Handle) -> None:
        host = handle._context.get(HOST) or self.world  # type: ignore[attr-defined]
        if host.dead:
            return
        if not host.ready and not host.paused:
            self._runnable.append(host)
        host.ready.append(handle)

    def _run_once(self) -> None:
        while not self._stopping:  # type: ignore[attr-defined]
            runnable = self._runnable
            if not runnable:
                self._advance()
                continue
            count = len(runnable)
            place = int(self._rng.random() * count) if count > 1 else 0
            host = runnable[place]
            handle = host.ready.popleft()
            if not host.ready:
                runnable[place] = runnable[-1]
                runnable.pop()
            if handle._cancelled:
                continue
            self._step(host, handle)

    def _step(self, host: Host, handle: asyncio.Handle) -> None:
        self.steps += 1
        self._at_same_time += 1
        if self._at_same_time > STEPS_WITHOUT_TIME:
            raise Stuck(f"{STEPS_WITHOUT_TIME} callbacks ran at {self._now} s; next: {handle!r}")
        self.digest = zlib.crc32(struct.pack("<dI", self._now, host.number), self.digest)
        handle._run()
        host.steps += 1
        if host.steps == host.crash_at_step and not host.dead:
            host.on_crash()

    def _advance(self) -> None:
        """Time goes on to the next timer; all of that instant become ready, in order."""
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not timers:
            raise Stuck("nothing is ready and no timer is set")
        when = timers[0][0]
        if when > self._now:
            self._now = when
            self._at_same_time = 0
        while timers and timers[0][0] <= self._now:
            timer = heapq.heappop(timers)[2]
            if not timer._cancelled:
                self._make_ready(timer)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Left in the heap; passed over when its time comes."""

    def _write_to_self(self) -> None:
        """There are no other threads."""

    def _process_events(self, event_list: object) -> None:
        """There is no selector."""


def _run_job(future: "asyncio.Future[T]", func: Callable[..., T], args: tuple[Any, ...]) -> None:
    try:
        result = func(*args)
    except Exception as error:  # noqa: BLE001 - it is the caller's
        if not future.done():
            future.set_exception(error)
    else:
        if not future.done():
            future.set_result(result)


def current_host() -> Host:
    """Whose callback is running."""
    return HOST.get()
