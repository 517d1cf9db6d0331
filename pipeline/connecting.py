"""Clients of this process, made when they are first needed.

    connected(connection).run(do_something, ...)      # await do_something(client, ...)

Rules:

- Spark forks its workers and pickles readers and writers, so a client belongs to neither: it is
  found by the process and by what it connects to, and lives as long as the process does.
- It runs on a thread of its own; any thread may call, and waits.
- Of what is iterated over the next item is read while the caller works on the last, no more.  An
  iteration that is left early ends the reading.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from functools import lru_cache
from typing import Concatenate, Final, Generic, ParamSpec, TypeVar

import magnetar
from magnetar.errors import AlreadyClosed
from magnetar.sync.bridge import Bridge
from pipeline.options import Connection

__all__ = ["Connected", "connected"]

T = TypeVar("T")
P = ParamSpec("P")

MAX_CLIENTS: Final = 16
"""Clients of one process; the one that was not used for longest is left to its end."""


class Connected:
    """See the module's rules."""

    def __init__(self, connection: Connection) -> None:
        """Connects.  Raises what `magnetar.connect` does."""
        self._bridge = Bridge("magnetar pipeline")
        url, settings = connection.service_url, connection.client_options()
        try:
            self._client = self._bridge.run(lambda: magnetar.connect(url, **settings))
        except BaseException:
            self._bridge.close()
            raise
        self._bridge.at_end(self._client.close)

    def run(
        self,
        function: Callable[Concatenate[magnetar.Client, P], Awaitable[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Await `function(client, ...)` on the client's thread; its result or its error."""
        return self._bridge.run(lambda: function(self._client, *args, **kwargs))

    def iterate(self, items: Callable[[magnetar.Client], AsyncIterator[T]]) -> Iterator[T]:
        """What `items(client)` gives, one after the other."""
        reading = self._bridge.call(lambda: _ReadAhead(items(self._client)))
        try:
            while found := self._bridge.run(reading.next):
                yield found[0]
        finally:
            self._leave(reading)

    def close(self) -> None:
        """Close the client.  Workers never do: the next task needs it."""
        self._bridge.close()

    def _leave(self, reading: "_ReadAhead[T]") -> None:
        try:
            self._bridge.run(reading.close)
        except AlreadyClosed:
            pass  # and the reading has ended with the client


class _ReadAhead(Generic[T]):
    """Of an iterator whose next item is asked for before somebody waits for it."""

    def __init__(self, items: AsyncIterator[T]) -> None:
        self._items = items
        self._next = asyncio.ensure_future(self._read())

    async def next(self) -> tuple[T] | None:
        """The next item; None at the end."""
        found = await self._next
        if found is not None:
            self._next = asyncio.ensure_future(self._read())
        return found

    async def close(self) -> None:
        """End the reading."""
        self._next.cancel()
        await asyncio.wait((self._next,))
        if not self._next.cancelled():
            self._next.exception()  # seen: nobody asks for that item any more
        if isinstance(self._items, AsyncGenerator):
            await self._items.aclose()

    async def _read(self) -> tuple[T] | None:
        try:
            return (await anext(self._items),)
        except StopAsyncIteration:
            return None


@lru_cache(maxsize=MAX_CLIENTS)
def _of_process(pid: int, connection: Connection) -> Connected:
    return Connected(connection)


def connected(connection: Connection) -> Connected:
    """The client of this process.  Raises what `magnetar.connect` does."""
    return _of_process(os.getpid(), connection)
