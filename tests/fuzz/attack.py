"""Connections that send mutated frames, as many as it takes until each was served.

Rules: after every frame goes a PING, so that the PONGs tell how far the broker came; what a closed
connection did not get to is sent on another one.  A session that the broker neither serves nor
closes in time is a hang.  Answers are counted, not looked at.
"""

import asyncio
import random
from collections import deque
from struct import Struct
from typing import Final, cast

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.frames import encode_command
from tests.fuzz import corpus
from tests.fuzz.mutations import PING, Effect, Fuzzer, Mutated
from tests.support.broker_process import BrokerProcess
from tests.support.child_process import HOST

HANG_S: Final = 30.0
BATCH: Final = 50
BATCHES: Final = 20
"""Most batches of one session."""
BREAKS_FULL_SESSION: Final = 4
"""One session with things open in so many gets a frame that breaks it."""
SIZES: Final = Struct(">II")
CONNECT: Final = encode_command(corpus.connect())
OPENING: Final = b"".join(map(encode_command, corpus.opening()))
OPENED: Final = len(corpus.opening())
ANSWERS: Final = frozenset(
    {
        *(pb.BaseCommand.SUCCESS, pb.BaseCommand.PRODUCER_SUCCESS, pb.BaseCommand.ERROR),
        *(pb.BaseCommand.CONNECTED, pb.BaseCommand.SCALABLE_TOPIC_UPDATE),
    }
)


class Hang(AssertionError):
    """The broker neither served nor closed a connection."""


class Socket(asyncio.Protocol):
    """One attacking connection."""

    def __init__(self) -> None:
        self.pongs = 0
        self.answers = 0
        self.closed = False
        self.local_port = 0
        self._transport: asyncio.Transport
        self._rest = b""
        self._changed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.local_port = transport.get_extra_info("sockname")[1]

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._changed.set()

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        place = 0
        while len(data) - place >= 10:
            total, _ = SIZES.unpack_from(data, place)
            if place + 4 + total > len(data):
                break
            kind = data[place + 9]
            self.pongs += kind == pb.BaseCommand.PONG
            self.answers += kind in ANSWERS
            place += 4 + total
        self._rest = data[place:]
        self._changed.set()

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def abort(self) -> None:
        self._transport.abort()

    async def until(self, *, pongs: int = 0, answers: int = 0, closed: bool = False) -> None:
        """Return when so many came and, with `closed`, the broker closed; or when it did anyway."""
        try:
            async with asyncio.timeout(HANG_S):
                while not self.closed and (closed or self.pongs < pongs or self.answers < answers):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            came = f"{self.pongs} of {pongs} PONGs, {self.answers} of {answers} answers"
            raise Hang(f"a connection got {came} within {HANG_S} s") from None


class Attack:
    """`target` frames over many sessions.  `sessions` are the latest ones, to look frames up."""

    def __init__(self, broker: BrokerProcess, seed: int, target: int) -> None:
        self.served = 0
        self.connections = 0
        self.sessions: deque[tuple[int, list[Mutated]]] = deque(maxlen=2000)
        self._broker = broker
        self._rng = random.Random(seed)
        self._fuzzer = Fuzzer(self._rng, breaking=24)
        self._target = target
        self._made = 0
        self._whole: list[Mutated] = []
        self._breaking: list[Mutated] = []

    async def run(self, side_by_side: int) -> None:
        """Attack over so many connections at a time until every frame was served."""
        async with asyncio.TaskGroup() as group:
            for _ in range(side_by_side):
                group.create_task(self._sessions())

    def frames_from(self, remote: str) -> list[Mutated]:
        """What the latest session from an address of ours sent."""
        port = int(remote.rpartition(":")[2])
        return next((sent for at, sent in reversed(self.sessions) if at == port), [])

    async def _sessions(self) -> None:
        while frames := self._take():
            await self._session(frames)

    def _take(self) -> list[Mutated]:
        """Frames for a session: a breaking one alone or last, else a batch that keeps in step."""
        while self._made < self._target and len(self._whole) < BATCH and not self._breaking:
            self._make()
        rng = self._rng
        if self._breaking and (not self._whole or rng.randrange(BREAKS_FULL_SESSION)):
            return [self._breaking.pop()]
        frames, self._whole = self._whole[:BATCH], self._whole[BATCH:]
        if rng.randrange(3) == 0:
            rng.shuffle(frames)
        if self._breaking:
            frames.append(self._breaking.pop())
        return frames

    def _make(self) -> None:
        for _ in range(BATCH):
            made = self._fuzzer.frame()
            copies = 2 if self._rng.randrange(20) == 0 else 1
            for _ in range(copies):
                (self._whole if made.effect is Effect.WHOLE else self._breaking).append(made)
            self._made += copies

    async def _session(self, frames: list[Mutated]) -> None:
        loop = asyncio.get_running_loop()
        _, socket = await loop.create_connection(Socket, HOST, self._broker.port)
        self.connections += 1
        sent: list[Mutated] = []
        self.sessions.append((socket.local_port, sent))
        full = len(frames) > 1
        socket.write(CONNECT + OPENING if full else CONNECT)
        await socket.until(answers=1 + OPENED if full else 1)
        for _ in range(BATCHES):
            await self._send(socket, frames, sent)
            if socket.closed or frames[-1].effect is not Effect.WHOLE or not full:
                break
            frames = self._take()
            if not frames:
                break
            if len(frames) == 1:
                self._breaking += [frame for frame in frames if frame.effect is not Effect.WHOLE]
                self._whole += [frame for frame in frames if frame.effect is Effect.WHOLE]
                break
        socket.abort()

    async def _send(self, socket: Socket, frames: list[Mutated], sent: list[Mutated]) -> None:
        before = socket.pongs
        sent += frames
        last = frames[-1].effect
        in_step = len(frames) - (last is not Effect.WHOLE)
        socket.write(b"".join(frame.data + PING for frame in frames))
        await socket.until(pongs=before + in_step, closed=last is Effect.BROKEN)
        served = socket.pongs - before
        if served < in_step:
            # One frame ended the connection; those after it were not looked at.
            for frame in frames[served + 1 :]:
                (self._whole if frame.effect is Effect.WHOLE else self._breaking).append(frame)
            self.served += served + 1
        else:
            self.served += len(frames)
