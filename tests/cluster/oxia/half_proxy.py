"""A TCP proxy that can hold back answers, so that what was done stays unheard."""

import asyncio
import ssl
from contextlib import suppress

from tests.support.child_process import HOST


class HalfProxy:
    """Forwards to one server.  `mute` holds answers back; `cut` breaks all connections.

    With a TLS context clients speak TLS, and the server does not.
    """

    def __init__(self, target: str, tls: ssl.SSLContext | None = None) -> None:
        self._target = target
        self._tls = tls
        self._answers = asyncio.Event()
        self._answers.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.address = ""

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, HOST, 0, ssl=self._tls)
        self.address = "{}:{}".format(*self._server.sockets[0].getsockname()[:2])

    def mute(self) -> None:
        """No answer passes from now on; requests do."""
        self._answers.clear()

    def cut(self) -> None:
        """Break every connection; answers to new ones pass."""
        for task in list(self._tasks):
            task.cancel()
        self._answers.set()

    async def close(self) -> None:
        """Stop."""
        self.cut()
        assert self._server is not None
        self._server.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        server_writer: asyncio.StreamWriter | None = None
        try:
            host, _, port = self._target.partition(":")
            server_reader, server_writer = await asyncio.open_connection(host, int(port))
            async with asyncio.TaskGroup() as group:
                group.create_task(self._forward(reader, server_writer, None))
                group.create_task(self._forward(server_reader, writer, self._answers))
        except* (OSError, EOFError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            for each in (writer, server_writer):
                if each is not None:
                    with suppress(OSError, RuntimeError):
                        each.transport.abort()

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        allowed: asyncio.Event | None,
    ) -> None:
        while data := await reader.read(65536):
            if allowed is not None:
                await allowed.wait()
            writer.write(data)
            await writer.drain()
        raise EOFError
