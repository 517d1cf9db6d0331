"""The test client against a scripted peer: what it waits for, and what it refuses."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from google.protobuf.message import Message

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.frames import (
    Frame,
    FrameDecoder,
    Received,
    Send,
    encode_command,
    encode_message,
    encode_send_receipt,
)
from magnetar.protocol.message import build_entry
from tests.support.raw_client import BrokerError, RawClient, Receipt, basecommand

Kind = pb.BaseCommand
Peer = Callable[[Any], list[bytes]]
Connect = Callable[[Peer], Awaitable[RawClient]]
MESSAGE_ID = pb.MessageIdData(ledger_id=1, entry_id=2)
METADATA = pb.MessageMetadata(producer_name="p", sequence_id=1, publish_time=1)


def reply(kind: pb.BaseCommand.Type, body: Message) -> bytes:
    return encode_command(basecommand(kind, body))


def message(consumer_id: int, payload: bytes) -> bytes:
    body = pb.CommandMessage(consumer_id=consumer_id, message_id=MESSAGE_ID)
    return b"".join(encode_message(basecommand(Kind.MESSAGE, body), build_entry(METADATA, payload)))


def greet(frame: Received) -> list[bytes]:
    """The answers that every peer here gives."""
    if isinstance(frame, Send):
        return []
    command = frame.command
    if command.type == Kind.CONNECT:
        return [reply(Kind.CONNECTED, pb.CommandConnected(server_version="peer"))]
    if command.type == Kind.PRODUCER:
        success = pb.CommandProducerSuccess(
            request_id=command.producer.request_id, producer_name="named"
        )
        return [reply(Kind.PRODUCER_SUCCESS, success)]
    if command.type == Kind.SUBSCRIBE:
        return [
            reply(Kind.SUCCESS, pb.CommandSuccess(request_id=command.subscribe.request_id)),
            message(command.subscribe.consumer_id, b"hello"),
        ]
    return []


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Opens a client to a peer that answers each frame with what a function says."""
    servers: list[asyncio.Server] = []
    clients: list[RawClient] = []

    async def open_client(peer: Peer) -> RawClient:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            decoder = FrameDecoder(1 << 20)
            while data := await reader.read(65536):
                for frame in decoder.feed(data):
                    for answer in greet(frame) or peer(frame):
                        writer.write(answer)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        servers.append(server)
        port = server.sockets[0].getsockname()[1]
        clients.append(await RawClient.open("127.0.0.1", port, timeout_s=5))
        return clients[-1]

    yield open_client
    for client in clients:
        await client.close()
    for server in servers:
        server.close()
        await server.wait_closed()


def receipts(send: Received) -> list[bytes]:
    assert isinstance(send, Send)
    assert send.entry is not None
    return [encode_send_receipt(send.producer_id, send.sequence_id, 0, 5, send.sequence_id)]


async def test_sends_and_their_receipts(connect: Connect) -> None:
    producer = await (await connect(receipts)).create_producer("t")
    assert producer.name == "named"
    assert (await producer.send(b"x")).message_id.entry_id == 0
    assert (await producer.send(b"x", sequence_id=41)).message_id.entry_id == 41
    seen: list[Receipt] = []
    await producer.send_many([b"payload"] * 500, window=7, on_receipt=seen.append)
    ids = [receipt.sequence_id for receipt in seen if isinstance(receipt, pb.CommandSendReceipt)]
    assert ids == list(range(42, 542))
    assert producer.pending == 0


async def test_a_send_error_is_raised(connect: Connect) -> None:
    def refuse(send: Received) -> list[bytes]:
        assert isinstance(send, Send)
        error = pb.CommandSendError(
            producer_id=send.producer_id,
            sequence_id=send.sequence_id,
            error=pb.TopicTerminatedError,
            message="sealed",
        )
        return [reply(Kind.SEND_ERROR, error)]

    producer = await (await connect(refuse)).create_producer("t")
    with pytest.raises(BrokerError, match="TopicTerminatedError: sealed"):
        await producer.send(b"x")


async def test_a_receipt_out_of_order_ends_the_connection(connect: Connect) -> None:
    client = await connect(lambda send: [encode_send_receipt(send.producer_id, 99, 0, 1, 1)])
    producer = await client.create_producer("t")
    with pytest.raises(ConnectionError, match="receipt of 99 came where 0 was due"):
        await producer.send(b"x")


async def test_messages_and_events_of_a_consumer(connect: Connect) -> None:
    def end_of_topic(frame: Frame) -> list[bytes]:
        flow = frame.command.flow
        assert flow.message_permits == 10
        body = pb.CommandReachedEndOfTopic(consumer_id=flow.consumer_id)
        return [reply(Kind.REACHED_END_OF_TOPIC, body)]

    client = await connect(end_of_topic)
    consumer = await client.subscribe("t", "s", permits=10)
    delivery = await consumer.receive()
    assert (delivery.payload, delivery.message_id) == (b"hello", MESSAGE_ID)
    event = await client.wait(consumer.events.get())
    assert event.type == Kind.REACHED_END_OF_TOPIC


async def test_an_answer_with_an_error_is_raised(connect: Connect) -> None:
    def refuse(frame: Frame) -> list[bytes]:
        if frame.command.type == Kind.LOOKUP:
            number = frame.command.lookup.request_id
            body = pb.CommandError(request_id=number, error=pb.TopicNotFound, message="no")
            return [reply(Kind.ERROR, body)]
        ack = pb.CommandAckResponse(
            consumer_id=1,
            request_id=frame.command.ack.request_id,
            error=pb.TransactionConflict,
            message="held",
        )
        return [reply(Kind.ACK_RESPONSE, ack)]

    client = await connect(refuse)
    with pytest.raises(BrokerError) as caught:
        await client.lookup("t")
    assert caught.value.code == pb.TopicNotFound
    consumer = await client.subscribe("t", "s")
    with pytest.raises(BrokerError, match="TransactionConflict: held"):
        await consumer.ack_answered(MESSAGE_ID)


async def test_scalable_sessions(connect: Connect) -> None:
    def serve(frame: Frame) -> list[bytes]:
        command = frame.command
        if command.type == Kind.SCALABLE_TOPIC_LOOKUP:
            number = command.scalable_topic_lookup.session_id
            assert not command.scalable_topic_lookup.create_if_missing
            updates = [
                pb.CommandScalableTopicUpdate(
                    session_id=number, dag=pb.ScalableTopicDAG(epoch=epoch)
                )
                for epoch in (0, 1)
            ]
            return [reply(Kind.SCALABLE_TOPIC_UPDATE, update) for update in updates]
        if command.type == Kind.SCALABLE_TOPIC_SUBSCRIBE:
            subscribe = command.scalable_topic_subscribe
            assignment = pb.ScalableConsumerAssignment(layout_epoch=3)
            push = pb.CommandScalableTopicAssignmentUpdate(
                consumer_id=subscribe.consumer_id, assignment=assignment
            )
            answer = pb.CommandScalableTopicSubscribeResponse(
                request_id=subscribe.request_id, assignment=assignment
            )
            return [
                reply(Kind.SCALABLE_TOPIC_ASSIGNMENT_UPDATE, push),
                reply(Kind.SCALABLE_TOPIC_SUBSCRIBE_RESPONSE, answer),
            ]
        watch = pb.CommandWatchScalableTopicsUpdate(
            watch_id=command.watch_scalable_topics.watch_id,
            snapshot=pb.ScalableTopicsSnapshot(topics=["topic://t/n/x"]),
        )
        return [reply(Kind.WATCH_SCALABLE_TOPICS_UPDATE, watch)]

    client = await connect(serve)
    session, first = await client.watch_dag("topic://t/n/x", create_if_missing=False)
    assert first.dag.epoch == 0
    assert (await session.next()).scalable_topic_update.dag.epoch == 1
    stream, assignment = await client.subscribe_scalable("topic://t/n/x", "s", "c")
    assert assignment.layout_epoch == 3
    assert (await stream.next()).scalable_topic_assignment_update.assignment == assignment
    watch = await client.watch_namespace("t/n")
    update = (await watch.next()).watch_scalable_topics_update
    assert list(update.snapshot.topics) == ["topic://t/n/x"]


async def test_pings_both_ways(connect: Connect) -> None:
    seen: list[int] = []

    def ping_back(frame: Frame) -> list[bytes]:
        seen.append(frame.command.type)
        if frame.command.type == Kind.PING:
            return [reply(Kind.PING, pb.CommandPing()), reply(Kind.PONG, pb.CommandPong())]
        return []

    client = await connect(ping_back)
    await client.ping()
    await client.ping()
    assert seen[:3] == [Kind.PING, Kind.PONG, Kind.PING]


async def test_a_wait_ends_with_its_time_and_with_the_connection(connect: Connect) -> None:
    client = await connect(lambda frame: [])
    consumer = await client.subscribe("t", "s")
    await consumer.receive()
    with pytest.raises(TimeoutError):
        await consumer.receive(timeout_s=0.01)
    waiting = asyncio.ensure_future(consumer.receive())
    await client.close()
    with pytest.raises(ConnectionError):
        await waiting


async def test_a_refused_handshake_is_raised() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65536)
        body = pb.CommandError(
            request_id=2**64 - 1, error=pb.AuthenticationError, message="who are you"
        )
        writer.write(reply(Kind.ERROR, body))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(BrokerError, match="who are you"):
            await RawClient.open("127.0.0.1", port, timeout_s=5)
