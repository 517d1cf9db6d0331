"""Frames within the size limit that are made to become far more than their bytes."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.checksum import seal_entry
from magnetar.protocol.frames import MAX_COMMAND_SIZE
from tests.support.broker_process import BrokerProcess, running
from tests.support.raw_client import RawClient

TOPIC: Final = "persistent://public/default/large"
PEAK_GROWTH: Final = 150 * 1024 * 1024
FIVE_MB: Final = 5_000_000
TINY_ID: Final = b"\x1a\x04\x08\x00\x10\x00"
ID_WITHOUT_FIELDS: Final = b"\x1a\x00"
TINY_PROPERTY: Final = b"\x22\x04\x0a\x00\x12\x00"
"""A property of message metadata with empty key and value."""
TINY_METADATA: Final = b"\x32\x04\x0a\x00\x12\x00"
"""The same of a PRODUCER."""


def varint(number: int) -> bytes:
    digits = []
    while number > 127:
        digits.append(number & 127 | 128)
        number >>= 7
    return bytes([*digits, number])


def simple_frame(kind: pb.BaseCommand.Type, body: bytes) -> bytes:
    """A command whose body is these bytes."""
    command = b"\x08" + varint(kind) + varint(kind << 3 | 2) + varint(len(body)) + body
    size = len(command)
    return (size + 4).to_bytes(4, "big") + size.to_bytes(4, "big") + command


def ack_of(ids: bytes) -> bytes:
    return simple_frame(pb.BaseCommand.ACK, b"\x08\x01\x10\x00" + ids)


def up_to(size: int, part: bytes) -> bytes:
    return part * ((size - 100) // len(part))


def producer_with(metadata: bytes) -> bytes:
    request = pb.CommandProducer(topic=TOPIC, producer_id=9, request_id=9)
    return simple_frame(pb.BaseCommand.PRODUCER, request.SerializeToString() + metadata)


REFUSED: Final[dict[str, Callable[[], bytes]]] = {
    "5 MB of acknowledged ids": lambda: ack_of(up_to(FIVE_MB, TINY_ID)),
    "5 MB of ids without their fields": lambda: ack_of(up_to(FIVE_MB, ID_WITHOUT_FIELDS)),
    "1 MB of ids without their fields": lambda: ack_of(up_to(MAX_COMMAND_SIZE, ID_WITHOUT_FIELDS)),
    "5 MB of producer metadata": lambda: producer_with(up_to(FIVE_MB, TINY_METADATA)),
}
TAKEN: Final[dict[str, Callable[[], bytes]]] = {
    "1 MB of acknowledged ids": lambda: ack_of(up_to(MAX_COMMAND_SIZE, TINY_ID)),
    "1 MB of producer metadata": lambda: producer_with(up_to(MAX_COMMAND_SIZE, TINY_METADATA)),
}


async def opened(broker: BrokerProcess) -> RawClient:
    """A connection with consumer 1 open."""
    client = await broker.connect()
    options = pb.CommandSubscribe(consumer_id=1, sub_type=pb.CommandSubscribe.Shared)
    await client.subscribe(TOPIC, "s", options, permits=10)
    return client


async def test_refused(tmp_path: Path) -> None:
    """The connection ends; the sentence in the log is short; memory is as before."""
    async with running(tmp_path) as broker:
        innocent = await opened(broker)
        for name, frame in REFUSED.items():
            peak = broker.peak_bytes()
            for _ in range(4):
                client = await opened(broker)
                client.write(frame())
                await client.wait_closed()
            await innocent.ping()
            assert broker.peak_bytes() - peak < PEAK_GROWTH, name
        assert max(map(len, broker.log().splitlines())) < 1000
        assert not broker.faults()
        await innocent.close()


async def test_taken(tmp_path: Path) -> None:
    """What is just within the limit is served, and costs a bounded multiple of its bytes."""
    async with running(tmp_path) as broker:
        client = await opened(broker)
        for name, frame in TAKEN.items():
            peak = broker.peak_bytes()
            for _ in range(4):
                client.write(frame())
            await client.ping()
            assert broker.peak_bytes() - peak < PEAK_GROWTH, name
        assert not broker.faults()
        await client.close()


async def test_metadata_of_a_million_properties(tmp_path: Path) -> None:
    """It is the message's own: stored and delivered as it came, whoever has to look into it."""
    head = pb.MessageMetadata(producer_name="p", sequence_id=0, publish_time=1).SerializeToString()
    metadata = head + up_to(FIVE_MB, TINY_PROPERTY)
    entry = seal_entry(len(metadata).to_bytes(4, "big") + metadata + b"payload")
    async with running(tmp_path, {"deduplication": True}) as broker:
        consuming = await opened(broker)
        client = await broker.connect()
        producer = await client.create_producer(TOPIC)
        peak = broker.peak_bytes()
        command = simple_frame(pb.BaseCommand.SEND, b"\x08%c\x10\x00" % producer.producer_id)[8:]
        size = len(command)
        sizes = (size + 4 + len(entry)).to_bytes(4, "big") + size.to_bytes(4, "big")
        producer.send_frame(0, sizes + command + entry, lambda receipt: None)
        delivery = await consuming.consumers[1].receive()
        assert delivery.entry == entry
        assert broker.peak_bytes() - peak < PEAK_GROWTH
        assert not broker.faults()
        await client.close()
        await consuming.close()
