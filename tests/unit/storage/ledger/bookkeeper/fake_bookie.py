"""A bookie in this process, on a real socket: stores what it gets, and answers as it is told to."""

import asyncio
import ssl
import struct
from collections.abc import Callable
from contextlib import suppress

from storage.ledger.bookkeeper import bookie_protocol_pb2 as pb
from storage.ledger.bookkeeper.ledger_metadata import BookieId
from storage.ledger.bookkeeper.metadata_store import BookieAddress
from tests.unit.storage.ledger.bookkeeper.bookie_frames import (
    Asked,
    add_reply,
    auth_reply,
    batch_reply,
    parse_request,
    read_reply,
    start_tls_reply,
)

HOST = "127.0.0.1"


class FakeBookie:
    """`asked` is what came, in order; while `holding`, answers wait for `release`."""

    def __init__(self, tls: ssl.SSLContext | None = None, auth_rounds: int = 0) -> None:
        self.asked: list[Asked] = []
        self.connections = 0
        self.entries: dict[tuple[int, int], bytes] = {}
        self.answer: Callable[[Asked], bytes] = self.stored
        self.holding = False
        self.secure: list[bool] = []
        self.auth_plugin = "test-plugin"
        self._tls = tls
        self._auth_rounds = auth_rounds
        self._held: list[tuple[asyncio.StreamWriter, bytes]] = []
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server
        self.port = 0

    @property
    def address(self) -> BookieAddress:
        return BookieAddress(HOST, self.port)

    @property
    def bookie_id(self) -> BookieId:
        return BookieId(f"{HOST}:{self.port}")

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, HOST, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._server.close()
        self.drop()
        await self._server.wait_closed()

    def drop(self) -> None:
        """End every connection."""
        for writer in list(self._writers):
            writer.transport.abort()

    def hold(self) -> None:
        self.holding = True

    def release(self, *, reverse: bool = False) -> None:
        """Send what was held, and hold no more."""
        self.holding = False
        held = self._held[::-1] if reverse else self._held
        for writer, answer in held:
            writer.write(answer)
        self._held = []

    def say(self, raw: bytes) -> None:
        """Send bytes that nobody asked for."""
        for writer in self._writers:
            writer.write(raw)

    def stored(self, asked: Asked) -> bytes:
        """What a bookie without faults answers."""
        place = (asked.ledger, asked.entry)
        if asked.operation == 1:
            self.entries[place] = asked.body
            return add_reply(0, *place)
        if asked.operation == 7:
            found: list[bytes] = []
            while (body := self.entries.get((asked.ledger, asked.entry + len(found)))) is not None:
                found.append(body)
                if len(found) == asked.max_entries:
                    break
            return batch_reply(0 if found else 2, *place, asked.request, found)
        if asked.entry == -1:
            held = [entry for ledger, entry in self.entries if ledger == asked.ledger]
            body = self.entries[asked.ledger, max(held)] if held else None
        else:
            body = self.entries.get(place)
        return read_reply(2, *place) if body is None else read_reply(0, *place, body)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        with suppress(ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            if self._tls is not None:
                await self._start_tls(reader, writer)
            self.secure.append(writer.get_extra_info("ssl_object") is not None)
            for number in range(self._auth_rounds):
                asked = await self._next(reader)
                assert asked.operation == 3
                assert pb.AuthMessage.FromString(asked.body).authPluginName == "test-plugin"
                writer.write(auth_reply(self.auth_plugin, b"round %d" % number))
            await self._answer_all(reader, writer)
        self._writers.discard(writer)
        writer.close()

    async def _start_tls(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (size,) = struct.unpack(">I", await reader.readexactly(4))
        request = pb.Request.FromString(await reader.readexactly(size))
        assert (request.header.version, request.header.operation) == (3, 9)
        writer.write(start_tls_reply(request.header.txnId, 0))
        await writer.drain()
        assert self._tls is not None
        await writer.start_tls(self._tls)

    async def _next(self, reader: asyncio.StreamReader) -> Asked:
        (size,) = struct.unpack(">I", await reader.readexactly(4))
        asked = parse_request(await reader.readexactly(size))
        self.asked.append(asked)
        return asked

    async def _answer_all(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            asked = await self._next(reader)
            answer = self.answer(asked)
            if self.holding:
                self._held.append((writer, answer))
            else:
                writer.write(answer)
