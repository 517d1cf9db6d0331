"""TCP between hosts: ordered within a connection, delayed, cut into pieces, broken.

Rules:

- Bytes of one direction arrive in order, each piece after a delay of its own; what one write
  sent may come in two pieces, and two writes in any relation to other connections.
- A write that was on its way when the connection broke arrives or not; nothing after it does.
- A host that crashed is noticed by its peers later, or only by their own timers.
- Callbacks of a protocol run on the host that made it.
"""

import asyncio
import contextvars
import random
from collections.abc import Callable
from dataclasses import dataclass

from tests.simulation.loop import Host, SimulatedLoop, current_host


@dataclass
class NetworkFaults:
    """How bad the network is.  Times in seconds, the rest are probabilities."""

    delay: tuple[float, float] = (0.0002, 0.003)
    slow: float = 0.0
    """That a piece takes up to a second."""
    split: float = 0.05
    told_after_s: float = 15.0
    """When the peers of a crash learn of it at the latest."""


class Listener:
    def __init__(self, factory: Callable[[], asyncio.Protocol], network: "Network", port: int):
        self.factory = factory
        self.host = current_host()
        self._network = network
        self._port = port

    def close(self) -> None:
        self._network.listeners.pop(self._port, None)


class Network:
    """All connections."""

    def __init__(self, loop: SimulatedLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        self.faults = NetworkFaults()
        self.listeners: dict[int, Listener] = {}
        self.transports: dict[int, SimulatedTransport] = {}
        self._number = 0
        loop.network = self

    def listen(self, factory: Callable[[], asyncio.Protocol], port: int) -> Listener:
        listener = self.listeners[port] = Listener(factory, self, port)
        return listener

    async def connect(
        self, factory: Callable[[], asyncio.Protocol], port: int
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        host = current_host()
        await asyncio.sleep(self.delay())
        listener = self.listeners.get(port)
        if listener is None or listener.host.dead:
            raise ConnectionRefusedError(f"nobody listens on {port}")
        protocol = factory()
        here = SimulatedTransport(self, host, protocol)
        there = SimulatedTransport(self, listener.host, None)
        here.peer, there.peer = there, here
        self.loop.call_later(
            self.delay(), _accept, listener, there, context=listener.host.context.copy()
        )
        protocol.connection_made(here)
        return here, protocol

    def number(self, transport: "SimulatedTransport") -> int:
        self._number += 1
        self.transports[self._number] = transport
        return self._number

    def delay(self) -> float:
        if self.faults.slow and self.rng.random() < self.faults.slow:
            return self.rng.uniform(0.01, 1.0)
        return self.rng.uniform(*self.faults.delay)

    # Faults

    def connections_of(self, host: Host) -> list["SimulatedTransport"]:
        return [each for each in self.transports.values() if each.host is host]

    def break_connection(self, transport: "SimulatedTransport") -> None:
        """Both ends learn of it, each in its time."""
        for end in (transport, transport.peer):
            end.cut = True
            end.lose_later(self.delay(), ConnectionResetError("the network broke it"))

    def stall(self, transport: "SimulatedTransport", seconds: float) -> None:
        """Nothing passes for so long."""
        for end in (transport, transport.peer):
            end.last = max(end.last, self.loop.time() + seconds)

    def crashed(self, host: Host) -> None:
        """Tell the peers of a host: soon, or hardly ever."""
        self.listeners = {
            port: each for port, each in self.listeners.items() if each.host is not host
        }
        for transport in self.connections_of(host):
            self.transports.pop(transport.number, None)
            seconds = self.rng.choice(
                [self.delay(), self.rng.uniform(0, 3), self.faults.told_after_s]
            )
            peer = transport.peer
            peer.lose_later(seconds, ConnectionResetError("the peer crashed"))


def _accept(listener: Listener, transport: "SimulatedTransport") -> None:
    transport.protocol = listener.factory()
    transport.protocol.connection_made(transport)
    transport.resume_reading()


class SimulatedTransport(asyncio.Transport):
    """One end."""

    peer: "SimulatedTransport"

    def __init__(self, network: Network, host: Host, protocol: asyncio.Protocol | None) -> None:
        super().__init__()
        self.network = network
        self.host = host
        self.protocol = protocol
        self.last = 0.0
        """When the newest piece that was written arrives."""
        self.cut = False
        """What arrives here is lost."""
        self.written_at = 0.0
        """When the peer wrote what is being received."""
        self.context: contextvars.Context = host.context.copy()
        self._loop = network.loop
        self.queued = 0
        self.high_water = 64 * 1024
        self.full = False
        self._reading = protocol is not None
        self._inbox: list[tuple[bytes | None, float]] = []
        self._closing = False
        self._lost = False
        self.number = network.number(self)

    # What protocols call

    def get_extra_info(self, name: str, default: object = None) -> object:
        return ("10.0.0.1", self.number) if name == "peername" else default

    def write(self, data: bytes) -> None:  # type: ignore[override]
        if self._closing or not data:
            return
        data = bytes(data)
        network = self.network
        if len(data) > 1 and network.rng.random() < network.faults.split:
            at = network.rng.randrange(1, len(data))
            self._send(data[:at])
            data = data[at:]
        self._send(data)
        if not self.full and self.queued > self.high_water and self.protocol is not None:
            self.full = True
            self._loop.call_soon(self.protocol.pause_writing, context=self.context)

    def _send(self, piece: bytes | None) -> None:
        self.queued += len(piece or b"")
        self.last = max(self.last, self._loop.time() + self.network.delay())
        now = self._loop.time()
        self._loop.call_at(self.last, self.peer.arrived, piece, now, context=self.peer.context)

    def get_write_buffer_size(self) -> int:
        return self.queued

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high_water = high or 64 * 1024

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        if self._inbox:
            self._loop.call_soon(self._serve, context=self.context)

    def is_closing(self) -> bool:
        return self._closing

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._inbox.clear()
        self._send(None)
        self._loop.call_at(self.last, self._lose, None, context=self.context)

    def abort(self) -> None:
        if not self._lost:
            self._closing = True
            self.peer.cut = self.network.rng.random() < 0.5
            self.peer.lose_later(self.network.delay(), ConnectionResetError("reset by peer"))
            self._loop.call_soon(self._lose, None, context=self.context)

    # What the network does

    def lose_later(self, seconds: float, why: Exception | None) -> None:
        when = max(self.peer.last, self._loop.time() + seconds) if not self.cut else 0
        when = max(when, self._loop.time() + seconds)
        self._loop.call_at(when, self._lose, why, context=self.context)

    def arrived(self, piece: bytes | None, written_at: float) -> None:
        sender = self.peer
        sender.queued -= len(piece or b"")
        if sender.full and sender.queued < sender.high_water // 2 and sender.protocol is not None:
            sender.full = False
            self._loop.call_soon(sender.protocol.resume_writing, context=sender.context)
        if self.cut or self._closing:
            return
        self._inbox.append((piece, written_at))
        self._serve()

    def _serve(self) -> None:
        while self._inbox and self._reading and not self._closing and self.protocol is not None:
            piece, self.written_at = self._inbox.pop(0)
            if piece is None:
                self.protocol.eof_received()
                self.close()
            else:
                self.protocol.data_received(piece)

    def _lose(self, why: Exception | None) -> None:
        if self._lost:
            return
        self._lost = self._closing = True
        self.network.transports.pop(self.number, None)
        if self.protocol is not None:
            self.protocol.connection_lost(why)
