"""`Bridge`: a background thread with an event loop, and calls to it from other threads."""

import asyncio
import concurrent.futures
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Generic, ParamSpec, Self, TypeVar

from magnetar.bounds import SYNC_CANCEL_WAIT_S, SYNC_CLOSE_S, SYNC_NOTICE_S
from magnetar.errors import AlreadyClosed, ClientError
from magnetar.event_loop import new_event_loop

T = TypeVar("T")
P = ParamSpec("P")


class ClosedAfterwards(ABC):
    """An object that `with` returns as it is, and closes at the end of the block."""

    @abstractmethod
    def close(self) -> None:
        """Close it.  Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class Bridge:
    """A daemon thread with an event loop, which runs until `close`.

    A call runs as a task on the loop while its thread waits.  If the caller is interrupted (by
    KeyboardInterrupt, say), the task is cancelled, and the interruption goes on when the task has
    ended, or after SYNC_CANCEL_WAIT_S.  After `close` every call, also a waiting one, raises
    `AlreadyClosed`.

    A bridge that is not closed ends when it is garbage-collected, or when the interpreter exits.  A
    bridge belongs to the process that made it: calls after a fork are refused.
    """

    def __init__(self, name: str = "magnetar") -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._life = _Life(name)
        self._loop = self._life.loop
        self._end = weakref.finalize(self, self._life.end)

    def run(self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Await `function(...)` on the loop; returns its result or raises its error.

        Raises `AlreadyClosed`, and `ClientError` on the loop's own thread or after a fork.
        """
        return self._await(lambda: function(*args, **kwargs), None)

    def run_or_hand(
        self,
        unclaimed: Callable[[T], None],
        function: Callable[P, Awaitable[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Like `run`; passes a result that comes while the caller is interrupted to `unclaimed`."""
        return self._await(lambda: function(*args, **kwargs), unclaimed)

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function(...)`, which must not wait, on the loop; returns or raises like `run`."""

        async def called() -> T:
            return function(*args, **kwargs)

        return self.run(called)

    def soon(self, callback: Callable[[], None]) -> None:
        """Schedule a callback on the loop, in the order of these calls, without waiting.

        Raises `AlreadyClosed`, and `ClientError` after a fork.
        """
        self.check_process()
        with self._lock:
            self._check()
            self._loop.call_soon_threadsafe(callback)

    def at_end(self, function: Callable[[], Awaitable[None]]) -> None:
        """Set the function that is awaited on the loop when the bridge ends."""
        self._life.at_end = function

    def close(self) -> None:
        """End the loop and its thread; waits up to SYNC_CLOSE_S.  Idempotent."""
        if not self._life.is_here:
            return  # The lock must not be touched: the parent may have held it at the fork.
        with self._lock:
            self._closed = True
        self._life.end()
        self._end.detach()

    def _check(self) -> None:
        if self._closed:
            raise AlreadyClosed("The client is closed: connect a new one.")

    def _await(self, make: Callable[[], Awaitable[T]], unclaimed: Callable[[T], None] | None) -> T:
        self._check_caller()
        call = _Call(self._loop, make)
        try:
            self.soon(call.start)
            return outcome_of(call.outcome)
        except BaseException as error:
            if not (call.outcome.done() and call.outcome.exception() is error):
                self._give_up(call, unclaimed)
            raise

    def check_process(self) -> None:
        """Raises `ClientError` after a fork."""
        if not self._life.is_here:
            raise ClientError(
                "This client was connected before the process forked, and its thread does not "
                "exist in the child: connect a client in each process."
            )

    def _check_caller(self) -> None:
        self.check_process()
        if self._life.on_its_thread:
            raise ClientError(
                "A callback on the client's own thread would wait for itself: make the call on "
                "another thread."
            )

    def _give_up(self, call: "_Call[T]", unclaimed: Callable[[T], None] | None) -> None:
        """Cancel the task of an interrupted caller, and wait until it has ended."""
        try:
            self.soon(call.cancel)
        except AlreadyClosed:
            return
        concurrent.futures.wait([call.outcome], SYNC_CANCEL_WAIT_S)
        if unclaimed is not None and call.outcome.done() and call.outcome.exception() is None:
            unclaimed(call.outcome.result())


def outcome_of(future: "concurrent.futures.Future[T]") -> T:
    """Wait for a future, so that Ctrl-C takes effect; returns its result or raises its error."""
    # A signal in the instant before a thread begins to wait is noticed only when the wait ends.
    while True:
        try:
            return future.result(SYNC_NOTICE_S)
        except TimeoutError:
            if future.done():
                return future.result()


class _Call(Generic[T]):
    """One task on the loop.  `outcome` is done when the task has ended, in any way."""

    __slots__ = ("_loop", "_make", "_task", "outcome")

    def __init__(self, loop: asyncio.AbstractEventLoop, make: Callable[[], Awaitable[T]]) -> None:
        self.outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._loop = loop
        self._make = make
        self._task: asyncio.Task[T] | None = None

    def start(self) -> None:
        self._task = self._loop.create_task(self._awaited())
        self._task.add_done_callback(self._ended)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        else:  # Interrupted before `start` was scheduled, so it will never run.
            self.outcome.set_exception(AlreadyClosed("The call was interrupted."))

    async def _awaited(self) -> T:
        return await self._make()

    def _ended(self, task: "asyncio.Task[T]") -> None:
        if task.cancelled():
            self.outcome.set_exception(
                AlreadyClosed("The client was closed meanwhile: connect a new one.")
            )
            return
        error = task.exception()
        if error is not None:
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(task.result())


class _Life:
    """The thread and its loop.  It has no reference to the bridge, which thus can be collected."""

    def __init__(self, name: str) -> None:
        self.at_end: Callable[[], Awaitable[None]] | None = None
        self._pid = os.getpid()
        self._stop = asyncio.Event()
        self._ready: concurrent.futures.Future[asyncio.AbstractEventLoop]
        self._ready = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()
        self.loop = self._ready.result()

    @property
    def is_here(self) -> bool:
        """Whether this process made it."""
        return self._pid == os.getpid()

    @property
    def on_its_thread(self) -> bool:
        """Whether the caller runs on the loop, and so must not wait for it."""
        return threading.get_ident() == self._thread.ident

    def end(self) -> None:
        """Stop the loop, and wait for its end, up to SYNC_CLOSE_S.  Idempotent."""
        if not self.is_here:
            return
        try:
            self.loop.call_soon_threadsafe(self._stop.set)
        except RuntimeError:
            return  # The loop is closed: it has ended.
        if not self.on_its_thread:
            self._thread.join(SYNC_CLOSE_S)

    def _serve(self) -> None:
        """Run the loop until it is stopped, and then the tasks that this cancels."""
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(self._until_stopped())

    async def _until_stopped(self) -> None:
        self._ready.set_result(asyncio.get_running_loop())
        await self._stop.wait()
        if self.at_end is not None:
            await self.at_end()
