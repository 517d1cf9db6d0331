"""A broker that says what a test wants it to say, on a real socket."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import cast

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.commands import encode_command
from magnetar.protocol.frames import Frame, FrameDecoder
from magnetar.protocol.received import Send
from tests.unit.magnetar.wire.shells import Kind, command

MAX_FRAME = 8 * 1024 * 1024
Answer = Callable[["Peer", pb.BaseCommand], None]


class Peer(asyncio.Protocol):
    """One connection of a client."""

    def __init__(self, broker: "FakeBroker") -> None:
        self.broker = broker
        self.received: list[pb.BaseCommand] = []
        self.chunks = 0
        self.transport: asyncio.Transport | None = None
        self.lost = asyncio.get_running_loop().create_future()
        self._decoder = FrameDecoder(MAX_FRAME, MAX_FRAME)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.broker.peers.append(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(None)

    def data_received(self, data: bytes) -> None:
        self.chunks += 1
        for frame in self._decoder.feed(data):
            if isinstance(frame, Frame):
                self.received.append(frame.command)
                self.broker.answer(self, frame.command)
            elif isinstance(frame, Send) and self.broker.take_send is not None:
                self.broker.take_send(self, frame)

    def send(self, made: pb.BaseCommand) -> None:
        assert self.transport is not None
        self.transport.write(encode_command(made))

    def say(self, kind: pb.BaseCommand.Type, **fields: object) -> None:
        self.send(command(kind, **fields))

    def welcome(self) -> None:
        self.say(Kind.CONNECTED, server_version="fake")


class FakeBroker:
    """Welcomes every client, and answers PING; the rest is `then`."""

    def __init__(self, then: Answer | None = None, greet: Answer | None = None) -> None:
        self.peers: list[Peer] = []
        self.port = 0
        self.take_send: Callable[[Peer, Send], None] | None = None
        """Answers SENDs, which `answer` does not get."""
        self._then = then
        self._greet = greet

    @property
    def url(self) -> str:
        return f"pulsar://127.0.0.1:{self.port}"

    @property
    def live(self) -> list[Peer]:
        return [each for each in self.peers if not each.lost.done()]

    def answer(self, peer: Peer, received: pb.BaseCommand) -> None:
        if received.type in (Kind.CONNECT, Kind.AUTH_RESPONSE) and self._greet is not None:
            self._greet(peer, received)
        elif received.type == Kind.CONNECT:
            peer.welcome()
        elif received.type == Kind.PING:
            peer.say(Kind.PONG)
        elif self._then is not None:
            self._then(peer, received)


@asynccontextmanager
async def serving(
    then: Answer | None = None, greet: Answer | None = None
) -> AsyncIterator[FakeBroker]:
    """A broker that listens; its sockets are gone afterwards."""
    broker = FakeBroker(then, greet)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Peer(broker), "127.0.0.1", 0)
    broker.port = server.sockets[0].getsockname()[1]
    try:
        yield broker
    finally:
        server.close()
        for peer in broker.live:
            assert peer.transport is not None
            peer.transport.abort()
            await peer.lost
        await server.wait_closed()
