"""A relay in front of a broker, by whole frames, so that tests see or change what is said.

Rules: where a broker tells its own address, the relay puts its own, whose port has as many digits,
so that whoever has come to the relay stays there; entries go through as they are.  A subclass says
what becomes of a frame.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, TypeVar

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.commands import FIELD_OF_TYPE
from tests.support.child_process import HOST, free_port

CHUNK_SIZE: Final = 1 << 20
HEAD: Final = 8
"""Bytes of the two sizes that begin a frame."""


class CutByRelay(ConnectionError):
    """The relay itself ends a connection."""


@dataclass
class FrameRelay:
    """See the module's rules."""

    broker_port: int
    port: int = field(default_factory=free_port)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def url(self) -> str:
        """`pulsar://host:port` of the relay."""
        return f"pulsar://{HOST}:{self.port}"

    def sent(self, frame: bytes, command: pb.BaseCommand | None) -> bool:
        """The client has sent that; `command` is None if it has an entry.

        Whether `answered` is to be asked about its answer.
        """
        return False

    def answered(self, answer: pb.BaseCommand) -> bool:
        """Whether the client gets that answer.  Raises `CutByRelay` to end its connection."""
        return True

    def receipted(self, receipt: pb.CommandSendReceipt) -> bool:
        """Whether the client gets that receipt.  Raises as `answered`."""
        return True

    async def send_on(
        self, frame: bytes, command: pb.BaseCommand | None, writer: asyncio.StreamWriter
    ) -> None:
        """Write what the client has sent to the broker.  Raises as `answered`."""
        writer.write(frame)

    async def hand_back(self, frame: bytes, writer: asyncio.StreamWriter) -> None:
        """Write what the broker has sent to the client.  Raises as `answered`."""
        writer.write(frame)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until one side of it ends."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        writers = {writer}
        self._writers |= writers
        try:
            from_broker, to_broker = await asyncio.open_connection(HOST, self.broker_port)
            writers.add(to_broker)
            self._writers.add(to_broker)
            awaited: set[int] = set()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._send_on(reader, to_broker, awaited))
                group.create_task(self._hand_back(from_broker, writer, awaited))
        except* (OSError, EOFError):
            pass
        finally:
            self._tasks.discard(task)
            self._writers -= writers
            for each in writers:
                each.transport.abort()

    def reset(self) -> None:
        """End all connections, whatever is on its way."""
        for writer in self._writers:
            writer.transport.abort()

    async def close(self) -> None:
        """End all connections.  Their tasks end by it: asyncio logs a trace of one cancelled."""
        self.reset()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _is_handed_back(self, answer: pb.BaseCommand) -> bool:
        is_receipt = answer.type == pb.BaseCommand.SEND_RECEIPT
        return not is_receipt or self.receipted(answer.send_receipt)

    async def _send_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, awaited: set[int]
    ) -> None:
        frames = _Frames()
        while data := await reader.read(CHUNK_SIZE):
            for frame in frames.feed(data):
                command = _command(frame)
                if self.sent(frame, command) and command is not None:
                    awaited.add(_request_id(command))
                await self.send_on(frame, command, writer)
            await writer.drain()
        raise EOFError

    async def _hand_back(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, awaited: set[int]
    ) -> None:
        frames = _Frames()
        theirs = f"pulsar://{HOST}:{self.broker_port}".encode()
        while data := await reader.read(CHUNK_SIZE):
            for frame in frames.feed(data):
                answer = _command(frame)
                if answer is not None and _request_id(answer) in awaited:
                    awaited.discard(_request_id(answer))
                    if not self.answered(answer):
                        continue
                elif answer is not None and not self._is_handed_back(answer):
                    continue
                ours = frame if answer is None else frame.replace(theirs, self.url.encode())
                await self.hand_back(ours, writer)
            await writer.drain()
        raise EOFError


class _Frames:
    """Cuts what one side says into frames, each with its sizes."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Those that are complete now."""
        data, found, at = self._rest + data, [], 0
        while len(data) - at >= HEAD:
            size = 4 + int.from_bytes(data[at : at + 4], "big")
            if len(data) - at < size:
                break
            found.append(data[at : at + size])
            at += size
        self._rest = data[at:]
        return found


def _command(frame: bytes) -> pb.BaseCommand | None:
    """None for a frame with an entry."""
    size = int.from_bytes(frame[4:HEAD], "big")
    return pb.BaseCommand.FromString(frame[HEAD:]) if HEAD + size == len(frame) else None


def _request_id(command: pb.BaseCommand) -> int:
    """-1 for what is neither a request nor an answer."""
    body = getattr(command, FIELD_OF_TYPE[command.type])
    return int(getattr(body, "request_id", -1))


R = TypeVar("R", bound=FrameRelay)


@asynccontextmanager
async def serving(relay: R) -> AsyncIterator[R]:
    """The relay, for as long as the block runs."""
    server = await asyncio.start_server(relay.serve, HOST, relay.port)
    try:
        yield relay
    finally:
        server.close()
        await relay.close()
