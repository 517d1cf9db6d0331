"""Clients of this process, made when they are first needed.

    connected(connection).run(do_something, ...)      # await do_something(client, ...)

Rules:

- Spark forks its workers and pickles readers and writers, so a client belongs to neither: it is
  found by the process and by what it connects to, and lives as long as the process does.
- It runs on a thread of its own; any thread may call, and waits.
- Processes begin at any time, also while a broker is restarted: where none is reached it is tried
  again for the operation timeout, as later requests are.
"""

import asyncio
import os
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from functools import lru_cache
from typing import Concatenate, Final, ParamSpec, TypeVar

import magnetar
from magnetar.errors import AlreadyClosed, ConnectionLost
from magnetar.sync.bridge import Bridge
from magnetar.wire.backoff import Backoff
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
        try:
            self._client = self._bridge.run(lambda: _reached(connection))
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

    def iterate(self, items: Callable[[magnetar.Client], AsyncGenerator[T, None]]) -> Iterator[T]:
        """What `items(client)` gives, one after the other; left early, the rest is not read."""
        reading = self._bridge.call(lambda: items(self._client))
        try:
            while found := self._bridge.run(_next_of, reading):
                yield found[0]
        finally:
            self._leave(reading)

    def close(self) -> None:
        """Close the client.  Workers never do: the next task needs it."""
        self._bridge.close()

    def _leave(self, reading: AsyncGenerator[T, None]) -> None:
        try:
            self._bridge.run(reading.aclose)
        except AlreadyClosed:
            pass  # and the reading has ended with the client


async def _reached(connection: Connection) -> magnetar.Client:
    """A client that has reached a broker."""
    loop, backoff = asyncio.get_running_loop(), Backoff(random.SystemRandom())
    deadline = loop.time() + connection.operation_timeout_ms / 1000
    while True:
        try:
            return await magnetar.connect(connection.service_url, **connection.client_options())
        except ConnectionLost:
            left_s = deadline - loop.time()
            if left_s <= 0:
                raise
        await asyncio.sleep(min(backoff.pause_s(), left_s))


async def _next_of(items: AsyncGenerator[T, None]) -> tuple[T] | None:
    """The next item; None at the end."""
    try:
        return (await anext(items),)
    except StopAsyncIteration:
        return None


@lru_cache(maxsize=MAX_CLIENTS)
def _of_process(pid: int, connection: Connection) -> Connected:
    return Connected(connection)


def connected(connection: Connection) -> Connected:
    """The client of this process.  Raises what `magnetar.connect` does."""
    return _of_process(os.getpid(), connection)
