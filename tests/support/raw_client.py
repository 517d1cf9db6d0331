"""A client of the bare protocol, for tests and benchmarks: it does what it is told and no more.

Nothing is retried, looked up or closed on its own; only PING is answered.  Every wait ends with
the answer, or raises: `BrokerError` for an answer that carries an error, `ConnectionError` when the
peer has gone, `TimeoutError` after `timeout_s`.  What the broker sends unasked is in queues: of the
producer, consumer or session that it names, else of the client (`events`; the second
PRODUCER_SUCCESS of a producer that waited is there too).
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Awaitable
from typing import Final, TypeVar, cast

from google.protobuf.message import Message

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.commands import FIELD_OF_TYPE
from magnetar.protocol.frames import Frame, FrameDecoder, FrameError, Received, encode_command
from magnetar.protocol.message import parse_metadata, payload_of
from tests.support.raw_handles import (
    BrokerError,
    Delivery,
    RawConsumer,
    RawProducer,
    Receipt,
    ReceiptCallback,
    Session,
    basecommand,
)
from tests.support.waiting import TIMEOUT_S

__all__ = [
    "BrokerError",
    "Delivery",
    "RawClient",
    "RawConsumer",
    "RawProducer",
    "Receipt",
    "ReceiptCallback",
    "Session",
    "basecommand",
]

T = TypeVar("T")
Kind = pb.BaseCommand
MAX_FRAME_SIZE: Final = 64 * 1024 * 1024


class RawClient(asyncio.Protocol):
    """One connection."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        self.connected = pb.CommandConnected()
        self.events: asyncio.Queue[pb.BaseCommand] = asyncio.Queue()
        self.producers: dict[int, RawProducer] = {}
        self.consumers: dict[int, RawConsumer] = {}
        self.sessions: dict[tuple[int, int], Session] = {}
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._last_id = 0
        self._answers: dict[int, asyncio.Future[pb.BaseCommand]] = {}
        self.handshake: asyncio.Future[pb.BaseCommand] | None = None
        self._pongs: deque[asyncio.Future[None]] = deque()
        self._decoder = FrameDecoder(MAX_FRAME_SIZE, MAX_FRAME_SIZE)
        self.transport: asyncio.Transport | None = None

    @classmethod
    async def open(
        cls,
        host: str,
        port: int,
        connect: pb.CommandConnect | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        tls: ssl.SSLContext | None = None,
        local: str | None = None,
        first_id: int = 1,
    ) -> "RawClient":
        """Connect and shake hands; fields set in `connect` replace those of an M1 client.

        Requests are counted from `first_id` on.
        """
        client = await cls.open_socket(host, port, timeout_s=timeout_s, tls=tls, local=local)
        client.count_from(first_id)
        command = pb.CommandConnect(client_version="Pulsar-Java-v5.0.0-M1", protocol_version=21)
        if connect is not None:
            command.MergeFrom(connect)
        client.handshake = asyncio.get_running_loop().create_future()
        client.send(Kind.CONNECT, command)
        client.connected = (await client.wait(client.handshake)).connected
        return client

    @classmethod
    async def open_socket(
        cls,
        host: str,
        port: int,
        *,
        timeout_s: float = TIMEOUT_S,
        tls: ssl.SSLContext | None = None,
        local: str | None = None,
    ) -> "RawClient":
        """Connect, over TLS if there is a context, and send nothing; `local` is our address."""
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(
            lambda: cls(timeout_s),
            host,
            port,
            ssl=tls,
            local_addr=None if local is None else (local, 0),
        )
        return client

    def count_from(self, first_id: int) -> None:
        """Have `next_id` begin there."""
        self._last_id = first_id - 1

    def next_id(self) -> int:
        """A number not used before on this connection."""
        self._last_id += 1
        return self._last_id

    def write(self, data: bytes) -> None:
        """Put raw bytes on the wire."""
        if self.transport is not None and data:
            self.transport.write(data)

    def send(self, kind: pb.BaseCommand.Type, body: Message) -> None:
        """Send a command without waiting for anything."""
        self.write(encode_command(basecommand(kind, body)))

    async def request(self, kind: pb.BaseCommand.Type, body: Message) -> pb.BaseCommand:
        """Send a command under a fresh request id; returns its answer."""
        command = basecommand(kind, body)
        request_id = self.next_id()
        getattr(command, FIELD_OF_TYPE[kind]).request_id = request_id
        future: asyncio.Future[pb.BaseCommand] = asyncio.get_running_loop().create_future()
        self._answers[request_id] = future
        self.write(encode_command(command))
        try:
            return await self.wait(future)
        finally:
            self._answers.pop(request_id, None)

    def send_pong(self) -> None:
        """Answer a PING."""
        self.send(Kind.PONG, pb.CommandPong())

    async def ping(self) -> None:
        """PING, answered."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pongs.append(future)
        self.send(Kind.PING, pb.CommandPing())
        await self.wait(future)

    async def create_producer(
        self, topic: str, options: pb.CommandProducer | None = None
    ) -> RawProducer:
        """PRODUCER and its (first) answer; `options` may set every other field."""
        command = pb.CommandProducer(topic=topic, producer_id=self.next_id())
        if options is not None:
            command.MergeFrom(options)
        producer = self.producers[command.producer_id] = RawProducer(self, command.producer_id)
        try:
            producer.success = (await self.request(Kind.PRODUCER, command)).producer_success
        except BrokerError:
            del self.producers[command.producer_id]
            raise
        return producer

    async def subscribe(
        self,
        topic: str,
        subscription: str,
        options: pb.CommandSubscribe | None = None,
        *,
        permits: int = 0,
    ) -> RawConsumer:
        """SUBSCRIBE (Exclusive unless `options` say else), answered; then FLOW if permits."""
        command = pb.CommandSubscribe(
            topic=topic,
            subscription=subscription,
            sub_type=pb.CommandSubscribe.Exclusive,
            consumer_id=self.next_id(),
        )
        if options is not None:
            command.MergeFrom(options)
        consumer = self.consumers[command.consumer_id] = RawConsumer(self, command.consumer_id)
        try:
            await self.request(Kind.SUBSCRIBE, command)
        except BrokerError:
            del self.consumers[command.consumer_id]
            raise
        if permits:
            consumer.flow(permits)
        return consumer

    async def lookup(
        self, topic: str, *, authoritative: bool = False
    ) -> pb.CommandLookupTopicResponse:
        """LOOKUP and its answer; `authoritative` as in the redirect, if there was one."""
        command = pb.CommandLookupTopic(topic=topic, authoritative=authoritative)
        answer = await self.request(Kind.LOOKUP, command)
        return answer.lookup_response

    async def watch_dag(
        self, topic: str, *, create_if_missing: bool | None = None, session_id: int | None = None
    ) -> tuple[Session, pb.CommandScalableTopicUpdate]:
        """SCALABLE_TOPIC_LOOKUP: the session and its first update, which may carry an error."""
        number = self.next_id() if session_id is None else session_id
        command = pb.CommandScalableTopicLookup(session_id=number, topic=topic)
        if create_if_missing is not None:
            command.create_if_missing = create_if_missing
        session = self.session_of(Kind.SCALABLE_TOPIC_UPDATE, number)
        self.send(Kind.SCALABLE_TOPIC_LOOKUP, command)
        return session, (await session.next()).scalable_topic_update

    def close_dag(self, session: Session) -> None:
        """SCALABLE_TOPIC_CLOSE, which has no answer."""
        self.sessions.pop((Kind.SCALABLE_TOPIC_UPDATE, session.session_id), None)
        command = pb.CommandScalableTopicClose(session_id=session.session_id)
        self.send(Kind.SCALABLE_TOPIC_CLOSE, command)

    async def subscribe_scalable(
        self,
        topic: str,
        subscription: str,
        consumer_name: str,
        *,
        kind: pb.ScalableConsumerType = pb.STREAM,
        consumer_id: int | None = None,
    ) -> tuple[Session, pb.ScalableConsumerAssignment]:
        """SCALABLE_TOPIC_SUBSCRIBE: the session of later assignments, and the one answered."""
        number = self.next_id() if consumer_id is None else consumer_id
        session = self.session_of(Kind.SCALABLE_TOPIC_ASSIGNMENT_UPDATE, number)
        command = pb.CommandScalableTopicSubscribe(
            topic=topic,
            subscription=subscription,
            consumer_name=consumer_name,
            consumer_id=number,
            consumer_type=kind,
        )
        answer = await self.request(Kind.SCALABLE_TOPIC_SUBSCRIBE, command)
        return session, answer.scalable_topic_subscribe_response.assignment

    async def unsubscribe_scalable(self, session: Session) -> None:
        """SCALABLE_TOPIC_UNSUBSCRIBE, answered."""
        command = pb.CommandScalableTopicUnsubscribe(consumer_id=session.session_id)
        await self.request(Kind.SCALABLE_TOPIC_UNSUBSCRIBE, command)

    async def watch_namespace(
        self, namespace: str, filters: dict[str, str] | None = None, current_hash: str | None = None
    ) -> Session:
        """WATCH_SCALABLE_TOPICS; with an equal hash nothing comes at first."""
        session = self.session_of(Kind.WATCH_SCALABLE_TOPICS_UPDATE, self.next_id())
        command = pb.CommandWatchScalableTopics(watch_id=session.session_id, namespace=namespace)
        for key, value in (filters or {}).items():
            command.property_filters.add(key=key, value=value)
        if current_hash is not None:
            command.current_hash = current_hash
        self.send(Kind.WATCH_SCALABLE_TOPICS, command)
        return session

    def session_of(self, update: int, session_id: int) -> Session:
        session = self.sessions[update, session_id] = Session(self, session_id)
        return session

    async def wait(self, what: Awaitable[T], timeout_s: float | None = None) -> T:
        """What the awaitable gives, unless the connection ends first or time is up."""
        task = asyncio.ensure_future(what)
        limit = self.timeout_s if timeout_s is None else timeout_s
        try:
            both: set[asyncio.Future[T] | asyncio.Future[str]] = {task, self.closed}
            await asyncio.wait(both, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if self.closed.done():
                raise ConnectionError(self.closed.result())
            raise TimeoutError(f"nothing came within {limit} s")
        finally:
            task.cancel()

    async def wait_closed(self, timeout_s: float | None = None) -> str:
        """Wait until the connection has ended; returns why."""
        limit = self.timeout_s if timeout_s is None else timeout_s
        return await asyncio.wait_for(asyncio.shield(self.closed), limit)

    async def close(self) -> None:
        """End the connection."""
        if self.transport is not None:
            self.transport.close()
        await self.wait_closed()

    def fail(self, why: str) -> None:
        """End the connection because the broker did what it must not."""
        if not self.closed.done():
            self.closed.set_result(f"protocol violated: {why}")
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: the socket is there."""
        self.transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: the socket has gone."""
        if not self.closed.done():
            self.closed.set_result(f"the peer closed the connection ({exc})")

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes are there."""
        try:
            for frame in self._decoder.feed(data):
                self._take(frame)
        except FrameError as error:
            for frame in error.frames_before:
                self._take(frame)
            self.fail(str(error))

    def _take(self, frame: Received) -> None:
        if not isinstance(frame, Frame):
            self.fail("the broker sent a SEND")
            return
        command = frame.command
        kind = command.type
        if kind == Kind.SEND_RECEIPT:
            receipt = command.send_receipt
            self._receipt(receipt.producer_id, receipt.sequence_id, receipt)
        elif kind == Kind.MESSAGE:
            self._message(frame)
        elif kind == Kind.SEND_ERROR:
            refusal = command.send_error
            error = BrokerError(refusal.error, refusal.message)
            self._receipt(refusal.producer_id, refusal.sequence_id, error)
        elif kind == Kind.PING:
            self.send_pong()
        elif kind == Kind.PONG and self._pongs:
            self._pongs.popleft().set_result(None)
        elif not (self._answer(command) or self._push(command)):
            self.events.put_nowait(command)

    def _receipt(self, producer_id: int, sequence_id: int, receipt: Receipt) -> None:
        producer = self.producers.get(producer_id)
        if producer is None:
            self.fail(f"receipt for producer {producer_id}, which is not open")
        else:
            producer.take_receipt(sequence_id, receipt)

    def _message(self, frame: Frame) -> None:
        message = frame.command.message
        consumer = self.consumers.get(message.consumer_id)
        if consumer is None or frame.entry is None:
            self.fail(f"message for consumer {message.consumer_id}: {frame.error or 'not open'}")
            return
        payload = bytes(payload_of(frame.entry))
        metadata = parse_metadata(frame.entry)
        consumer.messages.put_nowait(Delivery(message, metadata, payload, frame.entry))

    def _answer(self, command: pb.BaseCommand) -> bool:
        """Whether somebody waited for it."""
        kind = command.type
        body: Message = getattr(command, FIELD_OF_TYPE[kind])
        greeting = self.handshake is not None and not self.handshake.done()
        if kind == Kind.CONNECTED or (kind == Kind.ERROR and greeting):
            future = self.handshake
        else:
            future = self._answers.get(getattr(body, "request_id", -1))
        if future is None or future.done():
            return False
        error = _error_of(body)
        if error is None:
            future.set_result(command)
        else:
            future.set_exception(error)
        return True

    def _push(self, command: pb.BaseCommand) -> bool:
        """Whether something open is named by it."""
        body = getattr(command, FIELD_OF_TYPE[command.type])
        queue: asyncio.Queue[pb.BaseCommand] | None = None
        for field in ("session_id", "watch_id", "consumer_id"):
            session = self.sessions.get((command.type, getattr(body, field, -1)))
            queue = session.updates if session else queue
        if queue is None and (consumer := self.consumers.get(getattr(body, "consumer_id", -1))):
            queue = consumer.events
        if queue is None and (producer := self.producers.get(getattr(body, "producer_id", -1))):
            queue = producer.events
        if queue is not None:
            queue.put_nowait(command)
        return queue is not None


def _error_of(body: Message) -> BrokerError | None:
    """The error that an answer carries, under either pair of names."""
    for code, text in (("error", "message"), ("error_code", "error_message")):
        if code in body.DESCRIPTOR.fields_by_name and body.HasField(code):
            return BrokerError(getattr(body, code), getattr(body, text))
    return None
