"""A thread that works in batches: items that queue while it works are its next batch."""

import asyncio
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Generic, TypeAlias, TypeVar

T = TypeVar("T")

Delivery: TypeAlias = Callable[[], None]
"""Runs on the loop and completes a batch."""


class BatchThread(Generic[T]):
    """A thread that takes everything that is queued as one batch.

    Items are processed in the order of `submit`, at most once.  Each batch comes back in one call
    on the loop.  A batch that raises fails alone, and the thread goes on.  All methods belong to
    the loop.
    """

    __slots__ = (
        "_ended",
        "_failed",
        "_loop",
        "_max_items",
        "_max_weight",
        "_queue",
        "_stopped",
        "_thread",
        "_weigh",
        "_work",
    )

    def __init__(
        self,
        name: str,
        work: Callable[[list[T]], Delivery],
        failed: Callable[[list[T], Exception], Delivery],
        *,
        weigh: Callable[[T], int],
        max_items: int,
        max_weight: int,
    ) -> None:
        """`work` and `failed` run on the thread.

        A batch ends with the item that takes it to `max_items` or `max_weight`.
        """
        self._work = work
        self._failed = failed
        self._weigh = weigh
        self._max_items = max_items
        self._max_weight = max_weight
        self._loop = asyncio.get_running_loop()
        self._stopped: asyncio.Future[None] = self._loop.create_future()
        self._queue: SimpleQueue[T | None] = SimpleQueue()
        self._ended = False
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, item: T) -> None:
        """Queue an item."""
        self._queue.put(item)

    async def stop(self) -> None:
        """Process and deliver the queued items, then end the thread.

        A cancelled call does not stop that; another call can wait for it.
        """
        self._queue.put(None)
        await asyncio.wait({self._stopped})

    def _run(self) -> None:
        backlog: deque[T] = deque()
        while self._fill(backlog):
            if not self._post(self._delivery(self._take(backlog))):
                return
        self._post(self._set_stopped)

    def _fill(self, backlog: deque[T]) -> bool:
        """Move queued items into the backlog, waiting only if both are empty; False at the end."""
        while not self._ended and (
            not backlog or (len(backlog) < self._max_items and not self._queue.empty())
        ):
            item = self._queue.get()
            if item is None:
                self._ended = True
            else:
                backlog.append(item)
        return bool(backlog)

    def _take(self, backlog: deque[T]) -> list[T]:
        batch: list[T] = []
        weight = 0
        while backlog and len(batch) < self._max_items and weight < self._max_weight:
            item = backlog.popleft()
            weight += self._weigh(item)
            batch.append(item)
        return batch

    def _delivery(self, batch: list[T]) -> Delivery:
        try:
            return self._work(batch)
        except Exception as error:  # noqa: BLE001 - dying here would leave every caller waiting
            return self._failed(batch, error)

    def _set_stopped(self) -> None:
        if not self._stopped.done():
            self._stopped.set_result(None)

    def _post(self, delivery: Delivery) -> bool:
        try:
            self._loop.call_soon_threadsafe(delivery)
        except RuntimeError:  # the loop is closed: no caller is left
            return False
        return True
