"""A relay in front of a broker that keeps what the client says.

Rules: the broker's answers name its own port; the relay puts its port there, which has as many
digits, so that clients stay on the relay.  Only for looking: it may miss a port that is cut in two.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from protocol import pulsar_pb2 as pb
from protocol.frames import FrameDecoder, Send
from tests.support.child_process import HOST, free_port

CHUNK_SIZE = 1 << 20
MAX_FRAME_SIZE = 6 * CHUNK_SIZE


@dataclass
class Relay:
    """`commands` and `entries` are those of all connections, in order."""

    broker_port: int
    port: int = field(default_factory=free_port)
    commands: list[pb.BaseCommand] = field(default_factory=list)
    entries: list[bytes] = field(default_factory=list)
    open: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def url(self) -> str:
        """`pulsar://host:port` of the relay."""
        return f"pulsar://{HOST}:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        from_broker, to_broker = await asyncio.open_connection(HOST, self.broker_port)
        self.open |= {writer, to_broker}
        try:
            await asyncio.gather(self._record(reader, to_broker), self._answer(from_broker, writer))
        except ConnectionError:
            pass
        finally:
            to_broker.close()
            writer.close()
            self.open -= {writer, to_broker}

    async def _record(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decoder = FrameDecoder(MAX_FRAME_SIZE)
        while data := await reader.read(CHUNK_SIZE):
            for received in decoder.feed(data):
                if isinstance(received, Send):
                    self.entries.append(bytes(received.entry or b""))
                    continue
                self.commands.append(received.command)
                if received.entry is not None:
                    self.entries.append(bytes(received.entry))
            writer.write(data)
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ours, theirs = f":{self.port}".encode(), f":{self.broker_port}".encode()
        while data := await reader.read(CHUNK_SIZE):
            writer.write(data.replace(theirs, ours))
        writer.close()


@asynccontextmanager
async def relaying(broker_port: int) -> AsyncIterator[Relay]:
    """A relay to the broker on that port of 127.0.0.1."""
    relay = Relay(broker_port)
    server = await asyncio.start_server(relay.serve, HOST, relay.port)
    try:
        yield relay
    finally:
        server.close()
        while relay.open:
            for writer in list(relay.open):
                writer.close()
            await asyncio.sleep(0)
