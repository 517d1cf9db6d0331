"""What a `RawClient` has open at a broker: producers, consumers, sessions."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from google.protobuf.message import Message

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.commands import FIELD_OF_TYPE
from magnetar.protocol.frames import encode_message
from magnetar.protocol.message import build_entry

if TYPE_CHECKING:
    from tests.support.raw_client import RawClient

Kind = pb.BaseCommand


class BrokerError(Exception):
    """An answer that carries an error."""

    def __init__(self, code: pb.ServerError, message: str) -> None:
        super().__init__(f"{pb.ServerError.Name(code)}: {message}")
        self.code = code
        self.message = message


class Delivery(NamedTuple):
    """One MESSAGE: a whole entry, batch or not."""

    command: pb.CommandMessage
    metadata: pb.MessageMetadata
    payload: bytes
    entry: bytes

    @property
    def message_id(self) -> pb.MessageIdData:
        """The id to acknowledge it by."""
        return self.command.message_id


Receipt = pb.CommandSendReceipt | BrokerError
ReceiptCallback = Callable[[Receipt], None]


def basecommand(kind: pb.BaseCommand.Type, body: Message) -> pb.BaseCommand:
    """The command of a type around its body."""
    command = pb.BaseCommand(type=kind)
    getattr(command, FIELD_OF_TYPE[kind]).CopyFrom(body)
    return command


class RawProducer:
    """A producer.  Receipts must come in the order of the sends; anything else is an error."""

    def __init__(self, client: "RawClient", producer_id: int) -> None:
        self.client = client
        self.producer_id = producer_id
        self.success = pb.CommandProducerSuccess()
        self.events: asyncio.Queue[pb.BaseCommand] = asyncio.Queue()
        self.next_sequence_id = 0
        self._pending: deque[tuple[int, ReceiptCallback]] = deque()
        self._room = asyncio.Event()

    @property
    def name(self) -> str:
        """The name that the broker gave or confirmed."""
        return self.success.producer_name

    @property
    def pending(self) -> int:
        """Sends without a receipt."""
        return len(self._pending)

    def frame(
        self,
        payload: bytes,
        *,
        metadata: pb.MessageMetadata | None = None,
        send: pb.CommandSend | None = None,
        sequence_id: int | None = None,
    ) -> tuple[int, bytes]:
        """The sequence id and frame of the next SEND; required fields that are unset are filled."""
        number = self.next_sequence_id if sequence_id is None else sequence_id
        self.next_sequence_id = number + 1
        head = pb.MessageMetadata(producer_name=self.name, sequence_id=number, publish_time=1)
        command = pb.CommandSend(producer_id=self.producer_id, sequence_id=number)
        if metadata is not None:
            head.MergeFrom(metadata)
        if send is not None:
            command.MergeFrom(send)
        entry = build_entry(head, payload)
        return number, b"".join(encode_message(basecommand(Kind.SEND, command), entry))

    def send_frame(self, sequence_id: int, frame: bytes, on_receipt: ReceiptCallback) -> None:
        """Write a frame as it is; `on_receipt` is called with its receipt or refusal."""
        self._pending.append((sequence_id, on_receipt))
        self.client.write(frame)

    async def send(
        self,
        payload: bytes,
        *,
        metadata: pb.MessageMetadata | None = None,
        send: pb.CommandSend | None = None,
        sequence_id: int | None = None,
    ) -> pb.CommandSendReceipt:
        """Send and wait for the receipt; raises `BrokerError` for SEND_ERROR."""
        number, frame = self.frame(payload, metadata=metadata, send=send, sequence_id=sequence_id)
        future: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        self.send_frame(number, frame, lambda r: None if future.done() else future.set_result(r))
        receipt = await self.client.wait(future)
        if isinstance(receipt, BrokerError):
            raise receipt
        return receipt

    async def send_many(
        self,
        payloads: Iterable[bytes],
        *,
        window: int = 1000,
        metadata: pb.MessageMetadata | None = None,
        on_receipt: ReceiptCallback = lambda receipt: None,
    ) -> None:
        """Send with at most `window` without receipt; returns when the last receipt is there."""
        block: list[bytes] = []
        for payload in payloads:
            if len(self._pending) >= window:
                self.client.write(b"".join(block))
                block.clear()
                await self._below(window)
            number, frame = self.frame(payload, metadata=metadata)
            self._pending.append((number, on_receipt))
            block.append(frame)
        self.client.write(b"".join(block))
        await self._below(1)

    def write_many(self, count: int, *, size: int = 2000) -> None:
        """Write sends in one piece, and return before any is answered.

        Their publish times are 1000, 1001 and so on.  Receipts are taken, whatever they say.
        """
        frames: list[bytes] = []
        for index in range(count):
            number, frame = self.frame(
                b"x" * size, metadata=pb.MessageMetadata(publish_time=1000 + index)
            )
            self._pending.append((number, lambda receipt: None))
            frames.append(frame)
        self.client.write(b"".join(frames))

    async def _below(self, limit: int) -> None:
        while len(self._pending) >= limit:
            self._room.clear()
            await self.client.wait(self._room.wait())

    def take_receipt(self, sequence_id: int, receipt: Receipt) -> None:
        """Give the oldest send its receipt."""
        expected, callback = self._pending.popleft() if self._pending else (None, None)
        if callback is None or expected != sequence_id:
            self.client.fail(f"receipt of {sequence_id} came where {expected} was due")
            return
        self._room.set()
        callback(receipt)

    async def close(self) -> None:
        """CLOSE_PRODUCER, answered."""
        await self.client.request(
            Kind.CLOSE_PRODUCER, pb.CommandCloseProducer(producer_id=self.producer_id)
        )
        self.client.producers.pop(self.producer_id, None)


class RawConsumer:
    """A consumer.  Permits are given by `flow` alone."""

    def __init__(self, client: "RawClient", consumer_id: int) -> None:
        self.client = client
        self.consumer_id = consumer_id
        self.messages: asyncio.Queue[Delivery] = asyncio.Queue()
        self.events: asyncio.Queue[pb.BaseCommand] = asyncio.Queue()

    def flow(self, permits: int) -> None:
        """Room for so many more messages."""
        flow = pb.CommandFlow(consumer_id=self.consumer_id, message_permits=permits)
        self.client.send(Kind.FLOW, flow)

    async def receive(self, timeout_s: float | None = None) -> Delivery:
        """The next entry."""
        return await self.client.wait(self.messages.get(), timeout_s)

    def ack(
        self,
        *message_ids: pb.MessageIdData,
        cumulative: bool = False,
        request_id: int | None = None,
    ) -> None:
        """ACK without waiting."""
        self.client.send(Kind.ACK, self.ack_command(message_ids, cumulative, request_id))

    async def ack_answered(
        self, *message_ids: pb.MessageIdData, cumulative: bool = False
    ) -> pb.CommandAckResponse:
        """ACK with a request id, and its ACK_RESPONSE."""
        ack = self.ack_command(message_ids, cumulative, None)
        return (await self.client.request(Kind.ACK, ack)).ack_response

    def ack_command(
        self, ids: Sequence[pb.MessageIdData], cumulative: bool, request_id: int | None
    ) -> pb.CommandAck:
        kind = pb.CommandAck.Cumulative if cumulative else pb.CommandAck.Individual
        ack = pb.CommandAck(consumer_id=self.consumer_id, ack_type=kind, message_id=ids)
        if request_id is not None:
            ack.request_id = request_id
        return ack

    def redeliver(self, *message_ids: pb.MessageIdData, epoch: int | None = None) -> None:
        """REDELIVER_UNACKNOWLEDGED_MESSAGES; without ids, everything."""
        command = pb.CommandRedeliverUnacknowledgedMessages(
            consumer_id=self.consumer_id, message_ids=message_ids
        )
        if epoch is not None:
            command.consumer_epoch = epoch
        self.client.send(Kind.REDELIVER_UNACKNOWLEDGED_MESSAGES, command)

    async def seek(self, target: pb.MessageIdData | int) -> None:
        """SEEK to an id or a publish time in ms, answered."""
        command = pb.CommandSeek(consumer_id=self.consumer_id)
        if isinstance(target, int):
            command.message_publish_time = target
        else:
            command.message_id.CopyFrom(target)
        await self.client.request(Kind.SEEK, command)

    async def last_message_id(self) -> pb.CommandGetLastMessageIdResponse:
        """GET_LAST_MESSAGE_ID and its answer."""
        command = pb.CommandGetLastMessageId(consumer_id=self.consumer_id)
        answer = await self.client.request(Kind.GET_LAST_MESSAGE_ID, command)
        return answer.get_last_message_id_response

    async def unsubscribe(self, *, force: bool = False) -> None:
        """UNSUBSCRIBE, answered."""
        command = pb.CommandUnsubscribe(consumer_id=self.consumer_id, force=force)
        await self.client.request(Kind.UNSUBSCRIBE, command)

    async def close(self) -> None:
        """CLOSE_CONSUMER, answered."""
        command = pb.CommandCloseConsumer(consumer_id=self.consumer_id)
        await self.client.request(Kind.CLOSE_CONSUMER, command)
        self.client.consumers.pop(self.consumer_id, None)


class Session:
    """What the broker pushes under one id: a DAG, a stream consumer's assignments, a watch."""

    def __init__(self, client: "RawClient", session_id: int) -> None:
        self.client = client
        self.session_id = session_id
        self.updates: asyncio.Queue[pb.BaseCommand] = asyncio.Queue()

    async def next(self, timeout_s: float | None = None) -> pb.BaseCommand:
        """The next push, whatever it says."""
        return await self.client.wait(self.updates.get(), timeout_s)
