"""Producers that come back, and deduplication: nothing stored twice, nothing lost."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from broker.sequence_store import SequenceStore
from broker.service import Broker
from protocol import pulsar_pb2 as pb
from protocol.ids import EARLIEST, to_wire
from protocol.message import parse_metadata
from protocol.names import NamespaceName, parse_topic_name
from tests.support.raw_client import RawClient, RawProducer
from tests.support.waiting import until
from tests.unit.broker.ingress.conftest import running
from tests.unit.broker.ingress.test_produce import TOPIC, named

Connect = Callable[[], Awaitable[RawClient]]
NO_ID = to_wire(-1)


def back(name: str, epoch: int = 1) -> pb.CommandProducer:
    return named(name, epoch, user_provided_producer_name=False)


async def sequences(broker: Broker) -> list[tuple[int, int]]:
    """Sequence id and chunk of everything stored, in order."""
    topic = await broker.topics.get(parse_topic_name(TOPIC), create=True)
    found: list[tuple[int, int]] = []
    position = EARLIEST
    while entries := await topic.ledger.read(position, max_entries=100, max_bytes=10**9):
        for entry in entries:
            metadata = parse_metadata(entry.data)
            found.append((metadata.sequence_id, metadata.chunk_id))
        position = topic.ledger.next_position(entries[-1].position)
    return found


async def send(producer: RawProducer, number: int, *, at: int | None = None) -> bool:
    """Send one; whether it was stored now."""
    metadata = pb.MessageMetadata(publish_time=1000 + number if at is None else at)
    receipt = await producer.send(b"x", metadata=metadata, sequence_id=number)
    return receipt.message_id.ledger_id != NO_ID


async def send_chunk(producer: RawProducer, number: int, chunk: int, of: int) -> bool:
    metadata = pb.MessageMetadata(
        uuid=f"u-{number}",
        chunk_id=chunk,
        num_chunks_from_msg=of,
        total_chunk_msg_size=of,
        publish_time=1000 + number,
    )
    receipt = await producer.send(
        b"x", metadata=metadata, send=pb.CommandSend(is_chunk=True), sequence_id=number
    )
    return receipt.message_id.ledger_id != NO_ID


@pytest.fixture(params=["drained", "crashed"])
def ending(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the first broker ends: with its last snapshot taken, or with entries to replay."""
    if request.param == "crashed":

        async def forgets(store: SequenceStore) -> None:
            return None

        monkeypatch.setattr(SequenceStore, "close", forgets)
    return str(request.param)


@pytest.mark.usefixtures("ending")
async def test_what_is_sent_again_after_a_restart_is_stored_once(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        client = await RawClient.open("127.0.0.1", broker.port)
        producer = await client.create_producer(TOPIC)
        assert all([await send(producer, number) for number in range(10)])
        await broker.drain()
    async with running(tmp_path) as broker:
        client = await RawClient.open("127.0.0.1", broker.port)
        again = await client.create_producer(TOPIC, back(producer.name))
        assert again.success.last_sequence_id == -1
        assert [await send(again, number) for number in range(7, 13)] == [False] * 3 + [True] * 3
        assert await send(again, 2)
        expected = [*range(13), 2]
        assert [number for number, _ in await sequences(broker)] == expected


@pytest.mark.usefixtures("ending")
async def test_a_new_program_with_the_old_name_is_not_resending(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        client = await RawClient.open("127.0.0.1", broker.port)
        producer = await client.create_producer(TOPIC, named("mine"))
        assert await send(producer, 100)
        await broker.drain()
    async with running(tmp_path) as broker:
        client = await RawClient.open("127.0.0.1", broker.port)
        again = await client.create_producer(TOPIC, named("mine", 1))
        assert await send(again, 0, at=5000)
        assert await send(again, 1, at=5001)


@pytest.mark.usefixtures("ending")
async def test_chunks_are_sent_again_from_the_first_missing_one(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        client = await RawClient.open("127.0.0.1", broker.port)
        producer = await client.create_producer(TOPIC)
        await send(producer, 0)
        assert [await send_chunk(producer, 1, chunk, 4) for chunk in range(2)] == [True, True]
        await broker.drain()
    async with running(tmp_path) as broker:
        client = await RawClient.open("127.0.0.1", broker.port)
        again = await client.create_producer(TOPIC, back(producer.name))
        answers = [await send_chunk(again, 1, chunk, 4) for chunk in range(4)]
        assert answers == [False, False, True, True]
        assert await send(again, 2)
        assert await sequences(broker) == [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3), (2, 0)]


async def test_a_reconnect_waits_for_what_is_in_flight(broker: Broker, connect: Connect) -> None:
    stale, fresh = await connect(), await connect()
    producer = await stale.create_producer(TOPIC)
    frames = [
        producer.frame(b"x" * 2000, metadata=pb.MessageMetadata(publish_time=1000 + number))[1]
        for number in range(300)
    ]
    stale.write(b"".join(frames))
    again = await fresh.create_producer(TOPIC, back(producer.name))
    again.next_sequence_id = 0
    last = -1
    for number in range(300):
        await send(again, number)
        last = number
    assert last == 299
    assert [number for number, _ in await sequences(broker)] == list(range(300))


async def test_batches_count_by_their_highest_id(connect: Connect) -> None:
    client = await connect()
    producer = await client.create_producer(TOPIC)
    batch = pb.CommandSend(num_messages=5, highest_sequence_id=4)
    metadata = pb.MessageMetadata(num_messages_in_batch=5, highest_sequence_id=4)
    await producer.send(b"x", metadata=metadata, send=batch, sequence_id=0)
    again = await (await connect()).create_producer(TOPIC, back(producer.name))
    receipt = await again.send(b"x", metadata=metadata, send=batch, sequence_id=0)
    assert receipt.message_id.ledger_id == NO_ID
    assert receipt.highest_sequence_id == 4
    assert await send(again, 5, at=1)


async def test_without_the_policy_numbers_may_repeat(broker: Broker, connect: Connect) -> None:
    producer = await (await connect()).create_producer(TOPIC)
    assert [await send(producer, number) for number in (0, 1, 1, 0)] == [True] * 4


async def deduplicate(broker: Broker) -> None:
    await broker.namespaces.change(
        NamespaceName("public", "default"),
        lambda record: record.update({"deduplicationEnabled": True}),
    )


async def test_the_policy_refuses_what_was_sent_before(broker: Broker, connect: Connect) -> None:
    await deduplicate(broker)
    client = await connect()
    producer = await client.create_producer(TOPIC, named("p"))
    assert [await send(producer, number) for number in (0, 1, 1, 5, 3, 6)] == [
        True,
        True,
        False,
        True,
        False,
        True,
    ]
    await producer.close()
    await broker.topics.unload(parse_topic_name(TOPIC))
    again = await client.create_producer(TOPIC, named("p"))
    assert again.success.last_sequence_id == 6
    assert [await send(again, number) for number in (6, 7)] == [False, True]


async def test_answers_keep_the_order_of_sends_when_some_are_duplicates(
    broker: Broker, connect: Connect
) -> None:
    await deduplicate(broker)
    producer = await (await connect()).create_producer(TOPIC, named("p"))
    answers: list[pb.CommandSendReceipt] = []
    for number in [0, 1, 1, 2, 0, 3] * 50:
        frame = producer.frame(b"x" * 500, sequence_id=number)
        producer.send_frame(*frame, answers.append)  # type: ignore[arg-type]
    await until(lambda: len(answers) == 300)
    assert [answer.sequence_id for answer in answers] == [0, 1, 1, 2, 0, 3] * 50
    assert [number for number, _ in await sequences(broker)] == [0, 1, 2, 3]


async def test_a_topic_that_lives_long_takes_snapshots(
    broker: Broker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.sequence_store.SEQUENCE_SNAPSHOT_ENTRIES", 50)
    producer = await (await connect()).create_producer(TOPIC)
    await producer.send_many([b"x"] * 200, window=20)
    topic = broker.topics.loaded()[TOPIC]
    await until(lambda: topic.sequence_store.unsaved_entries < 100)
    assert producer.name in topic.ledger.properties["magnetar.producer-sequences"]


async def reader_names(broker: Broker) -> set[str]:
    topic = await broker.topics.get(parse_topic_name(TOPIC), create=False)
    return set(topic.ledger._cursors.readers)


async def test_entries_wait_for_a_snapshot_until_the_topic_is_sealed(
    broker: Broker, connect: Connect
) -> None:
    producer = await (await connect()).create_producer(TOPIC)
    await send(producer, 0)
    await producer.close()
    assert len(await reader_names(broker)) == 1
    await broker.topics.loaded()[TOPIC].seal()
    assert not await reader_names(broker)
    await broker.topics.unload(parse_topic_name(TOPIC))
    assert not await reader_names(broker)


async def test_a_snapshot_that_cannot_be_read_is_replaced_by_a_replay(
    broker: Broker, connect: Connect
) -> None:
    client = await connect()
    producer = await client.create_producer(TOPIC)
    for number in range(3):
        await send(producer, number)
    await producer.close()
    topic = broker.topics.loaded()[TOPIC]
    topic.sequence_store.unsaved_entries = 0
    await topic.ledger.set_properties({"magnetar.producer-sequences": '{"position":'})
    await broker.topics.unload(topic.name)
    again = await client.create_producer(TOPIC, back(producer.name))
    assert [await send(again, number) for number in (2, 3)] == [False, True]
