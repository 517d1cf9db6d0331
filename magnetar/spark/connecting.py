"""Clients of this process, made when they are first needed.

    process_client(connection).run(do_something, ...)      # await do_something(client, ...)

Spark forks its workers and pickles readers and writers, so neither of them can own a client: a
client is looked up by the process and the connection, and lives as long as the process does.
"""

import asyncio
import os
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from functools import lru_cache
from typing import Concatenate, Final, ParamSpec, TypeVar

import magnetar
from magnetar.context import client_backoff
from magnetar.errors import AlreadyClosed, ConnectionLost
from magnetar.spark.options import Connection
from magnetar.sync.bridge import Bridge

__all__ = ["ClientThread", "process_client"]

T = TypeVar("T")
P = ParamSpec("P")

MAX_CLIENTS: Final = 16
"""Clients of one process; beyond it the least recently used one is dropped."""


class ClientThread:
    """A client on a thread of its own.  Any thread may call; the call waits for its result."""

    def __init__(self, connection: Connection) -> None:
        """Connect.  Raises what `magnetar.connect` does."""
        self._bridge = Bridge("magnetar pipeline")
        try:
            self._client = self._bridge.run(lambda: _connect(connection))
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
        """Iterate over `items(client)`; a caller that stops early reads no further."""
        reading = self._bridge.call(lambda: items(self._client))
        try:
            while found := self._bridge.run(_next_of, reading):
                yield found[0]
        finally:
            self._leave(reading)

    def close(self) -> None:
        """Close the client.  Workers never close it: the next task needs it."""
        self._bridge.close()

    def _leave(self, reading: AsyncGenerator[T, None]) -> None:
        try:
            self._bridge.run(reading.aclose)
        except AlreadyClosed:
            pass  # The reading has ended with the client.


async def _connect(connection: Connection) -> magnetar.Client:
    """Connect; where no broker is reached, retry for the operation timeout."""
    # Spark starts processes at any time, also while a broker restarts.
    loop, backoff = asyncio.get_running_loop(), client_backoff(random.SystemRandom())
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
def _of_process(pid: int, connection: Connection) -> ClientThread:
    return ClientThread(connection)


def process_client(connection: Connection) -> ClientThread:
    """The client of this process.  Raises what `magnetar.connect` does."""
    return _of_process(os.getpid(), connection)
