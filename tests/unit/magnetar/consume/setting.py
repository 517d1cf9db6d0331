"""A segment consumer at a broker made of calls."""

import asyncio
from dataclasses import dataclass

from magnetar.consume.message import RawMessage
from magnetar.consume.receiving import Inbox
from magnetar.consume.segment_consumer import SegmentConsumer
from magnetar.consume.settings import NackDelay, SubscribeSettings, SubscriptionKind
from magnetar.context import ClientContext
from magnetar.errors import ConnectionLost, MagnetarError
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.frames import Frame
from magnetar.protocol.message import build_batch, build_entry
from magnetar.wire.connection import PeerKind
from tests.support.waiting import TIMEOUT_S, until
from tests.unit.magnetar.layout.fakes import FakeConnection, FakePool, context_of

Kind = pb.BaseCommand


@dataclass(frozen=True)
class Place:
    """What is subscribed to."""

    topic: str = "segment://public/default/t/0000-ffff-0"
    segment_id: int = 0


class Setting:
    """A consumer, its inbox, and what it says to the broker."""

    def __init__(
        self,
        kind: SubscriptionKind = SubscriptionKind.SHARED,
        operation_timeout_s: float = TIMEOUT_S,
        *,
        ack_grouping_ms: int = 60_000,
        nack_delay: NackDelay | None = None,
        processing_timeout_ms: int = 0,
        durable: bool = True,
        beside: "Setting | None" = None,
    ) -> None:
        """`beside` shares its connection and its inbox."""
        self.pool: FakePool = beside.pool if beside else FakePool()
        self.inbox: Inbox[SegmentConsumer] = beside.inbox if beside else Inbox(100, 1_000_000)
        how = SubscribeSettings(
            subscription="s",
            kind=kind,
            durable=durable,
            receiver_queue_size=10,
            ack_grouping_ms=ack_grouping_ms,
            nack_delay=nack_delay or NackDelay(),
            processing_timeout_ms=processing_timeout_ms,
        )
        self.context: ClientContext = (
            beside.context if beside else context_of(self.pool, operation_timeout_s)
        )
        self.consumer = SegmentConsumer(self.context, Place(), how, self.inbox)

    @property
    def connection(self) -> FakeConnection:
        return self.pool.connection

    async def open(self) -> "Setting":
        await self.consumer.open(TIMEOUT_S)
        return self

    async def without_connection(self) -> None:
        """The connection is lost, and there is no other one."""
        refusals = [ConnectionLost("Nobody is there; wait.") for _ in range(1000)]
        self.pool.failures.extend(refusals)
        self.connection.lose()

    def deliver(self, entry_id: int, *payloads: bytes) -> list[RawMessage[SegmentConsumer]]:
        """A batch comes; its messages are taken."""
        raw = build_batch((pb.SingleMessageMetadata(payload_size=0), each) for each in payloads)
        about = pb.MessageMetadata(producer_name="p", sequence_id=1, publish_time=1)
        about.num_messages_in_batch = len(payloads)
        self.hand_in(entry_id, build_entry(about, raw))
        return self.taken()

    def hand_in(self, entry_id: int, entry: bytes) -> None:
        where = pb.MessageIdData(ledger_id=1, entry_id=entry_id)
        message = pb.CommandMessage(consumer_id=self.consumer.consumer_id, message_id=where)
        command = pb.BaseCommand(type=Kind.MESSAGE, message=message)
        handler = self.connection.handlers[PeerKind.CONSUMER, self.consumer.consumer_id]
        handler.received(Frame(command, entry))

    def taken(self) -> list[RawMessage[SegmentConsumer]]:
        found: list[RawMessage[SegmentConsumer]] = []
        while (received := self.inbox.take_nowait()) is not None:
            found.append(received)
        return found

    def said(self, kind: int) -> list[pb.BaseCommand]:
        """What was said of a kind since the last time; the rest is forgotten."""
        found: list[pb.BaseCommand] = []
        while not self.connection.sent.empty():
            command = self.connection.sent.get_nowait()
            if command.type == kind:
                found.append(command)
        return found

    def answer(self, command: pb.BaseCommand) -> None:
        self.connection.asked.pop(command.ack.request_id)(
            pb.BaseCommand(type=Kind.ACK_RESPONSE, ack_response=pb.CommandAckResponse())
        )


def single(payload: bytes = b"x") -> bytes:
    return build_entry(
        pb.MessageMetadata(producer_name="p", sequence_id=1, publish_time=1), payload
    )


def pieces(payload: bytes) -> list[bytes]:
    """A message of two pieces."""
    middle = len(payload) // 2
    return [
        build_entry(
            pb.MessageMetadata(
                producer_name="p",
                sequence_id=1,
                publish_time=1,
                uuid=payload.decode(),
                chunk_id=at,
                num_chunks_from_msg=2,
                total_chunk_msg_size=len(payload),
            ),
            piece,
        )
        for at, piece in enumerate((payload[:middle], payload[middle:]))
    ]


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class FakeTransaction:
    """One that may take no more."""

    def __init__(self) -> None:
        self.id = (1, 2)
        self.tracked: list[asyncio.Future[object]] = []
        self.refusal: MagnetarError | None = None
        self.said: asyncio.Future[None] | None = None
        """Resolved when the coordinator knows."""

    def acknowledging_on(self, topic: str, subscription: str) -> asyncio.Future[None] | None:
        return self.said

    def track(self, outcome: asyncio.Future[object]) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.tracked.append(outcome)


async def attached_anew(setting: Setting) -> None:
    """The connection is lost, and there is another one."""
    await setting.without_connection()
    setting.pool.failures.clear()
    setting.pool.connection = FakeConnection()
    await until(lambda: setting.consumer.connection is not None)


async def closed_by_the_broker(setting: Setting) -> None:
    """The broker closes the consumer, which attaches again on the same connection."""
    consumer_id = setting.consumer.consumer_id
    close = pb.CommandCloseConsumer(consumer_id=consumer_id, request_id=0)
    command = pb.BaseCommand(type=Kind.CLOSE_CONSUMER, close_consumer=close)
    setting.connection.say(PeerKind.CONSUMER, consumer_id, command)
    assert setting.consumer.connection is None
    await until(lambda: setting.consumer.connection is not None, poll_s=0)
