"""A TCP relay on a thread of its own that can hold back all bytes, as a broken network does."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from tests.support.child_process import HOST

CHUNK: Final = 64 * 1024
READY_TIMEOUT_S: Final = 10


class StallingRelay:
    """Relays to one server.  While it is stalled, no byte passes and no connection is closed."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._loop = asyncio.new_event_loop()
        self._passing = asyncio.Event()
        self._passing.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        listening = asyncio.run_coroutine_threadsafe(self._listen(), self._loop)
        self.address: Final = listening.result(READY_TIMEOUT_S)
        """`host:port` at which it listens."""

    def stall(self) -> None:
        """Hold back all bytes in both directions from now on."""
        self._call(self._passing.clear)

    def resume(self) -> None:
        """Let pass what was held back, and all that follows."""
        self._call(self._passing.set)

    def close(self) -> None:
        """End all connections and the thread."""
        asyncio.run_coroutine_threadsafe(self._end_connections(), self._loop).result()
        self._call(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, function: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(function)

    async def _listen(self) -> str:
        self._server = await asyncio.start_server(self._serve, HOST, 0)
        return "{}:{}".format(*self._server.sockets[0].getsockname()[:2])

    async def _end_connections(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        there: asyncio.StreamWriter | None = None
        try:
            await self._passing.wait()
            answers, there = await asyncio.open_connection(self._host, self._port)
            passing = (self._pass(reader, there), self._pass(answers, writer))
            both = [asyncio.ensure_future(each) for each in passing]
            try:
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in both:
                    each.cancel()
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            if there is not None:
                there.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(CHUNK):
                await self._passing.wait()
                writer.write(data)
                await writer.drain()
            # The end of a connection is held back too.
            await self._passing.wait()
