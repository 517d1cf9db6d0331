"""A broker made of calls: what is sent to it is looked at, what it says is handed in."""

import asyncio
import random
from collections.abc import Callable
from typing import cast

from magnetar.context import ClientContext
from magnetar.errors import ConnectionLost, MagnetarError
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.commands import FIELD_OF_TYPE
from magnetar.protocol.frames import Frame
from magnetar.settings import ClientSettings
from magnetar.wire.connection import Connection, Handler, PeerKind
from magnetar.wire.pool import ConnectionPool
from tests.support.waiting import TIMEOUT_S

Answered = Callable[[pb.BaseCommand | MagnetarError], None]


class FakeConnection:
    """One connection; `sent` is what was sent, oldest first."""

    def __init__(self) -> None:
        self.address = "pulsar://fake:6650"
        self.features = pb.FeatureFlags(supports_scalable_topics=True)
        self.server_version = "Magnetar 0"
        self.is_lost = False
        self.sent: asyncio.Queue[pb.BaseCommand] = asyncio.Queue()
        self.handlers: dict[tuple[PeerKind, int], Handler] = {}
        self.asked: dict[int, Answered] = {}
        self.refusals: list[MagnetarError] = []
        """What the next requests are answered with."""
        self._last_id = 0

    def attach(self, kind: PeerKind, number: int, handler: Handler) -> None:
        self.handlers[kind, number] = handler

    def detach_all(self, handler: Handler) -> None:
        for key in [key for key, each in self.handlers.items() if each is handler]:
            del self.handlers[key]

    def send(self, command: pb.BaseCommand) -> None:
        if self.is_lost:
            raise ConnectionLost("The connection has ended; take another one.")
        self.sent.put_nowait(command)

    def ask(self, command: pb.BaseCommand, answered: Answered) -> int:
        self._last_id += 1
        getattr(command, FIELD_OF_TYPE[command.type]).request_id = self._last_id
        self.asked[self._last_id] = answered
        self.send(command)
        return self._last_id

    def forget(self, request_id: int) -> None:
        self.asked.pop(request_id, None)

    async def request(self, command: pb.BaseCommand, timeout_s: float | None = None) -> None:
        self.send(command)
        if self.refusals:
            raise self.refusals.pop(0)

    # What the broker does

    async def next(self, kind: int) -> pb.BaseCommand:
        """The next that was sent, which is of this kind."""
        command = await asyncio.wait_for(self.sent.get(), TIMEOUT_S)
        assert command.type == kind
        return command

    def say(self, kind: PeerKind, number: int, command: pb.BaseCommand) -> None:
        self.handlers[kind, number].received(Frame(command))

    def lose(self) -> None:
        self.is_lost = True
        handlers, self.handlers = self.handlers, {}
        for handler in handlers.values():
            handler.connection_lost(ConnectionLost("The test broke it; nothing to do."))


class FakePool:
    """Whoever is asked for, the broker is `connection`; `asked` says who was."""

    tls = False

    def __init__(self) -> None:
        self.connection = FakeConnection()
        self.asked: list[str] = []
        self.failures: list[MagnetarError] = []
        self.tls_urls: dict[str, str] = {}

    def tls_url_of(self, url: str) -> str | None:
        return self.tls_urls.get(url)

    async def any(self) -> Connection:
        return await self.of_topic("any")

    async def at(self, url: str) -> Connection:
        return await self.of_topic(url)

    async def of_topic(self, topic: str) -> Connection:
        self.asked.append(topic)
        if self.failures:
            raise self.failures.pop(0)
        return cast("Connection", self.connection)


class Impatient(random.Random):
    """Luck that makes every pause as short as it can be."""

    def random(self) -> float:
        return 1.0


def context_of(pool: FakePool, operation_timeout_s: float = TIMEOUT_S) -> ClientContext:
    settings = ClientSettings(operation_timeout_s=operation_timeout_s)
    return ClientContext(cast("ConnectionPool", pool), settings, rng=Impatient())


def layout_update(
    session_id: int,
    *ranges: tuple[int, int, int],
    epoch: int = 0,
    at_ms: int = 0,
    topic: str = "topic://public/default/orders",
) -> pb.BaseCommand:
    """SCALABLE_TOPIC_UPDATE with active segments (id, start, end)."""
    dag = pb.ScalableTopicDAG(epoch=epoch, controller_broker_url="pulsar://leader:6650")
    dag.controller_broker_url_tls = "pulsar+ssl://leader:6651"
    for segment_id, start, end in ranges:
        dag.segments.add(
            segment_id=segment_id,
            hash_start=start,
            hash_end=end,
            state=pb.ACTIVE,
            created_at_epoch=epoch,
            created_at_ms=at_ms,
        )
    update = pb.CommandScalableTopicUpdate(session_id=session_id, dag=dag)
    update.resolved_topic_name = topic
    return _layout_command(update)


def layout_refusal(session_id: int, error: pb.ServerError, message: str = "No.") -> pb.BaseCommand:
    """SCALABLE_TOPIC_UPDATE with an error."""
    return _layout_command(
        pb.CommandScalableTopicUpdate(session_id=session_id, error=error, message=message)
    )


def _layout_command(update: pb.CommandScalableTopicUpdate) -> pb.BaseCommand:
    return pb.BaseCommand(type=pb.BaseCommand.SCALABLE_TOPIC_UPDATE, scalable_topic_update=update)
