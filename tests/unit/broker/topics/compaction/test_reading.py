"""Compacted reads over real sockets and storage, by clients of the bare wire."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from broker.app.service import Broker
from broker.topics.compaction.run import compact
from broker.topics.topic import Topic
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import EARLIEST, Position, to_wire
from magnetar.protocol.message import build_batch
from magnetar.protocol.names import parse_topic_name
from storage.managed_ledger.compacted import CompactedLedger
from storage.managed_ledger.compacted_record import COMPACTION_CURSOR
from storage.managed_ledger.types import Entry
from tests.support.embedded_broker import running
from tests.support.raw_client import BrokerError, RawClient, RawConsumer
from tests.support.waiting import until
from tests.unit.broker.transactions.conftest import TransactionClient

NAME = "persistent://public/default/compacted"
FROM_START = pb.MessageIdData(ledger_id=to_wire(-1), entry_id=to_wire(-1))
Pair = tuple[str, bytes]


@pytest.fixture(params=[64 * 2**20, 0], ids=["cached", "from-disk"])
async def broker(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Broker]:
    async with running(tmp_path, entry_cache_bytes=request.param) as broker:
        yield broker


async def send(client: RawClient, *pairs: Pair, published_ms: int = 1) -> None:
    producer = await client.create_producer(NAME)
    for number, (key, value) in enumerate(pairs):
        metadata = pb.MessageMetadata(partition_key=key, publish_time=published_ms + number)
        await producer.send(value, metadata=metadata)
    await producer.close()


async def loaded(broker: Broker) -> Topic:
    return await broker.topics.get(parse_topic_name(NAME), create=True)


async def compacted(broker: Broker) -> Topic:
    topic = await loaded(broker)
    await topic.create_subscription(COMPACTION_CURSOR, EARLIEST)
    await compact(topic, None)
    return topic


async def reader(
    client: RawClient, start: pb.MessageIdData = FROM_START, name: str = "r"
) -> RawConsumer:
    asked = pb.CommandSubscribe(read_compacted=True, durable=False)
    asked.start_message_id.CopyFrom(start)
    return await client.subscribe(NAME, name, asked, permits=100)


async def taken(consumer: RawConsumer, count: int) -> list[Pair]:
    found = []
    for _ in range(count):
        delivery = await consumer.receive()
        found.append((delivery.metadata.partition_key, delivery.payload))
    await consumer.client.ping()
    assert consumer.messages.empty()
    return found


def place(answer: pb.CommandGetLastMessageIdResponse) -> tuple[int, int, int]:
    found = answer.last_message_id
    return found.ledger_id, found.entry_id, found.batch_index


ROUNDS: Sequence[Pair] = [("a", b"1"), ("b", b"1"), ("a", b"2"), ("c", b"1"), ("b", b"")]


async def test_a_reader_gets_the_newest_of_each_key_then_the_topic(broker: Broker) -> None:
    client = await RawClient.open("127.0.0.1", broker.port)
    await send(client, *ROUNDS)
    await compacted(broker)
    await send(client, ("a", b"3"))
    consumer = await reader(client)
    assert await taken(consumer, 3) == [("a", b"2"), ("c", b"1"), ("a", b"3")]
    await send(client, ("d", b"1"))
    assert await taken(consumer, 1) == [("d", b"1")]
    # Every other consumer gets everything.
    plain = pb.CommandSubscribe(initial_position=pb.CommandSubscribe.Earliest)
    other = await client.subscribe(NAME, "plain", plain, permits=100)
    assert await taken(other, 7) == [*ROUNDS, ("a", b"3"), ("d", b"1")]
    await client.close()


async def test_the_last_message_is_one_that_the_reader_gets(broker: Broker) -> None:
    client = await RawClient.open("127.0.0.1", broker.port)
    await send(client, *ROUNDS)
    early = await reader(client, name="early")
    topic = await compacted(broker)
    last = topic.ledger.last_confirmed
    # It reads the topic as it was when it came.
    assert place(await early.last_message_id())[:2] == last
    assert await taken(early, 5) == list(ROUNDS)
    late = await reader(client, name="late")
    assert place(await late.last_message_id())[:2] == (last.ledger_id, last.entry_id - 1)
    assert await taken(late, 2) == [("a", b"2"), ("c", b"1")]
    await send(client, ("a", b"3"))
    assert place(await late.last_message_id())[:2] == topic.ledger.last_confirmed
    await client.close()


async def test_when_every_key_is_deleted_there_is_no_last_message(broker: Broker) -> None:
    client = await RawClient.open("127.0.0.1", broker.port)
    await send(client, ("a", b"1"), ("a", b""))
    await compacted(broker)
    consumer = await reader(client)
    answer = await consumer.last_message_id()
    assert place(answer)[:2] == (to_wire(-1), to_wire(-1))
    assert await taken(consumer, 0) == []
    await send(client, ("b", b"1"))
    assert await taken(consumer, 1) == [("b", b"1")]
    await client.close()


ALL_DELETED: Sequence[Pair] = [("a", b"1"), ("a", b"")]


@pytest.mark.parametrize("pairs", [ROUNDS, ALL_DELETED], ids=["some are kept", "none is kept"])
async def test_a_reader_behind_which_all_was_removed_waits_and_learns_of_the_end(
    broker: Broker, pairs: Sequence[Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await RawClient.open("127.0.0.1", broker.port)
    await send(client, *pairs)
    topic = await compacted(broker)
    starts: list[Position] = []
    read = CompactedLedger.read

    async def counted(
        self: CompactedLedger, start: Position, *, max_entries: int, max_bytes: int
    ) -> list[Entry]:
        starts.append(start)
        return await read(self, start, max_entries=max_entries, max_bytes=max_bytes)

    monkeypatch.setattr(CompactedLedger, "read", counted)
    consumer = await reader(client)
    await taken(consumer, 2 if pairs is ROUNDS else 0)
    dispatcher = topic.subscriptions["r"].dispatcher
    assert dispatcher is not None
    await until(lambda: dispatcher.reader.next_position > topic.ledger.last_confirmed)
    # The kept ones, and once that there are no more.
    assert len(starts) <= 2
    await topic.seal()
    event = await client.wait(consumer.events.get())
    assert event.type == pb.BaseCommand.REACHED_END_OF_TOPIC
    assert len(starts) <= 2
    await client.close()


async def test_batches_keep_their_indexes(broker: Broker) -> None:
    client = await RawClient.open("127.0.0.1", broker.port)
    producer = await client.create_producer(NAME)
    keys = ["a", "b", "a", "c"]
    singles = [(pb.SingleMessageMetadata(partition_key=key, payload_size=0), b"v") for key in keys]
    singles[-1] = (singles[-1][0], b"")
    metadata = pb.MessageMetadata(num_messages_in_batch=4)
    await producer.send(build_batch(singles), metadata=metadata)
    await compacted(broker)
    consumer = await reader(client)
    delivery = await consumer.receive()
    assert list(delivery.metadata.compacted_batch_indexes) == [1, 2]
    assert delivery.metadata.num_messages_in_batch == 4
    assert place(await consumer.last_message_id())[2] == 2
    await client.close()


async def test_after_trimming_a_reader_behind_which_all_was_removed_waits(tmp_path: Path) -> None:
    async with running(tmp_path, ledger_max_entries=5, ledger_min_age_s=0) as broker:
        client = await RawClient.open("127.0.0.1", broker.port)
        await send(client, *ROUNDS)
        await compacted(broker)
        await client.close()
    async with running(tmp_path) as broker:
        topic = await loaded(broker)
        await until(lambda: not topic.ledger.ledgers)
        client = await RawClient.open("127.0.0.1", broker.port)
        consumer = await reader(client)
        assert await taken(consumer, 2) == [("a", b"2"), ("c", b"1")]
        dispatcher = topic.subscriptions["r"].dispatcher
        assert dispatcher is not None
        await until(lambda: dispatcher.reader.next_position > topic.ledger.last_confirmed)
        assert not dispatcher.reader.busy
        await send(client, ("d", b"1"))
        assert await taken(consumer, 1) == [("d", b"1")]
        await client.close()


async def test_after_trimming_readers_begin_anywhere(tmp_path: Path) -> None:
    """All ledgers of the topic are gone, over two restarts: the compacted ledger has it all."""
    async with running(tmp_path, ledger_max_entries=2, ledger_min_age_s=0) as broker:
        client = await RawClient.open("127.0.0.1", broker.port)
        await send(client, *ROUNDS)
        await compacted(broker)
        await send(client, ("x", b"1"), ("x", b"2"), ("x", b"3"), published_ms=1000)
        await compacted(broker)
        await client.close()
    async with running(tmp_path) as broker:
        topic = await loaded(broker)
        await until(lambda: not topic.ledger.ledgers)
        client = await RawClient.open("127.0.0.1", broker.port)
        consumer = await reader(client)
        first_one = await consumer.receive()
        assert await taken(consumer, 2) == [("c", b"1"), ("x", b"3")]
        # A reader that comes back says the last message that it got.
        again = await reader(client, first_one.message_id, "again")
        assert await taken(again, 3) == [("a", b"2"), ("c", b"1"), ("x", b"3")]
        await again.seek(FROM_START)
        again = await reader(client, FROM_START, "again")
        assert await taken(again, 3) == [("a", b"2"), ("c", b"1"), ("x", b"3")]
        # By a time before the last message.
        await again.seek(1002)
        again = await reader(client, FROM_START, "again")
        assert await taken(again, 1) == [("x", b"3")]
        asked = pb.CommandSubscribe(
            read_compacted=True, initial_position=pb.CommandSubscribe.Earliest
        )
        durable = await client.subscribe(NAME, "durable", asked, permits=100)
        assert await taken(durable, 3) == [("a", b"2"), ("c", b"1"), ("x", b"3")]
        await client.close()


@pytest.mark.parametrize("scalable", [True, False], ids=["v5 client", "v4 client"])
async def test_compaction_keeps_committed_messages_of_transactions(
    broker: Broker, scalable: bool
) -> None:
    client = await RawClient.open("127.0.0.1", broker.port)
    transactions = TransactionClient(client, scalable=scalable)
    await transactions.attach()
    await send(client, ("a", b"1"), ("b", b"1"), ("c", b"1"))
    producer = await client.create_producer(NAME)
    opened = []
    for key in ("a", "b", "c"):
        txn = await transactions.begin()
        await transactions.add_partitions(txn, NAME)
        metadata = pb.MessageMetadata(
            partition_key=key, txnid_most_bits=txn[0], txnid_least_bits=txn[1]
        )
        command = pb.CommandSend(txnid_most_bits=txn[0], txnid_least_bits=txn[1])
        await producer.send(b"2", metadata=metadata, send=command)
        opened.append(txn)
    await transactions.end(opened[0], pb.ABORT)
    await transactions.end(opened[1], pb.COMMIT)
    topic = await compacted(broker)
    # The third one is open: its message and what is behind it wait.
    assert topic.ledger.compaction.horizon == topic.max_read_position()
    assert topic.max_read_position() < topic.ledger.last_confirmed
    first = await reader(client, name="first")
    assert await taken(first, 3) == [("a", b"1"), ("c", b"1"), ("b", b"2")]
    await transactions.end(opened[2], pb.COMMIT)
    assert await taken(first, 1) == [("c", b"2")]
    await compacted(broker)
    second = await reader(client, name="second")
    assert await taken(second, 3) == [("a", b"1"), ("b", b"2"), ("c", b"2")]
    await client.close()


async def test_segments_refuse_compacted_reads(broker: Broker) -> None:
    client = await RawClient.open("127.0.0.1", broker.port)
    with pytest.raises(BrokerError, match="not compacted") as refused:
        await client.subscribe(
            "segment://public/default/t/0000-ffff-0", "s", pb.CommandSubscribe(read_compacted=True)
        )
    assert refused.value.code == pb.NotAllowedError
    await client.close()
