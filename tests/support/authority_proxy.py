"""By what name a gRPC client calls: a TCP proxy that reads it and forwards everything as it is.

The name is the `:authority` of the first headers of a connection (RFC 9113, 7541).  A channel sends
the same with each call, and gRPC's core sends it as plain text.  gRPC's servers for Python do not
tell it.  Behind TLS the proxy is the server of the TLS connection, so it reads there too.
"""

import asyncio
import ssl
from contextlib import suppress

from tests.support.child_process import HOST

PREFACE_BYTES = len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
FRAME_HEADER_BYTES = 9
HEADERS = 1
PRIORITY, PADDED = 0x20, 0x08
AUTHORITY_NAME = b":authority"
AUTHORITY = 1
"""Its number in HPACK's static table."""


class AuthorityProxy:
    """Forwards to one server of this process.  `authority_of` is for `FakeOxia`."""

    def __init__(self, target: str, tls: ssl.SSLContext | None = None) -> None:
        self.target = target
        self.address = ""
        self.names: dict[str, str] = {}
        """By peers as gRPC's servers name them."""
        self._tls = tls
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, HOST, 0, ssl=self._tls)
        self.address = "{}:{}".format(*self._server.sockets[0].getsockname()[:2])

    def authority_of(self, peer: str) -> str:
        """The name that a peer of the server has called, such as `ipv4:127.0.0.1:40000`."""
        return self.names[peer]

    async def close(self) -> None:
        """Stop."""
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        there: asyncio.StreamWriter | None = None
        try:
            host, _, port = self.target.partition(":")
            answers, there = await asyncio.open_connection(host, int(port))
            async with asyncio.TaskGroup() as group:
                group.create_task(self._forward_requests(reader, there))
                group.create_task(_forward(answers, writer))
        except* (OSError, EOFError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            for each in (writer, there):
                if each is not None:
                    with suppress(OSError, RuntimeError):
                        each.transport.abort()

    async def _forward_requests(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """The server gets the first headers when the name in them is known."""
        peer = "ipv4:{}:{}".format(*writer.get_extra_info("sockname")[:2])
        writer.write(await reader.readexactly(PREFACE_BYTES))
        while peer not in self.names:
            header = await reader.readexactly(FRAME_HEADER_BYTES)
            payload = await reader.readexactly(int.from_bytes(header[:3]))
            if header[3] == HEADERS:
                assert not header[4] & PADDED
                block = payload[5 if header[4] & PRIORITY else 0 :]
                self.names[peer] = authority_in(block)
            writer.write(header + payload)
        await _forward(reader, writer)


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    raise EOFError


def authority_in(block: bytes) -> str:
    """The `:authority` of a block of headers, the first one of its connection."""
    at = 0
    while True:
        first = block[at]
        if first & 0x80:  # a field of the table
            at += 1
        elif first & 0xE0 == 0x20:  # the size of the table
            _, at = _number(block, at, 5)
        else:
            of_table, at = _number(block, at, 6 if first & 0x40 else 4)
            name = AUTHORITY_NAME if of_table == AUTHORITY else b""
            if of_table == 0:
                name, at = _text(block, at)
            value, at = _text(block, at)
            if name == AUTHORITY_NAME:
                return value.decode()


def _number(block: bytes, at: int, bits: int) -> tuple[int, int]:
    """A number in the last bits of a byte, and in those behind if it is long; where it ends."""
    most = (1 << bits) - 1
    number = block[at] & most
    at += 1
    if number < most:
        return number, at
    shift = 0
    while True:
        number += (block[at] & 0x7F) << shift
        shift += 7
        at += 1
        if not block[at - 1] & 0x80:
            return number, at


def _text(block: bytes, at: int) -> tuple[bytes, int]:
    """A text, and where it ends."""
    assert not block[at] & 0x80, "gRPC compresses headers now: this proxy has to read that"
    length, at = _number(block, at, 7)
    return block[at : at + length], at + length
