"""Producers that come back, and deduplication: nothing stored twice, nothing lost."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from broker.app.service import Broker
from broker.topics.deduplication import Chunk, Deduplication, ProducerSequence
from broker.topics.sequence_store import SequenceStore
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import EARLIEST, Position, to_wire
from magnetar.protocol.message import parse_metadata
from magnetar.protocol.names import NamespaceName, parse_topic_name
from storage.ledger.store import CorruptEntry, LedgerError, NoSuchLedger
from storage.managed_ledger.ledger import ManagedLedger
from storage.managed_ledger.types import Entry, Retention
from tests.support.bounds import set_bound
from tests.support.embedded_broker import running
from tests.support.raw_client import BrokerError, RawClient, RawProducer
from tests.support.waiting import until
from tests.unit.broker.topics.test_produce import SEGMENT, TOPIC, make_segment, named

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
async def test_resend_after_a_restart_is_stored_once(tmp_path: Path) -> None:
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
    producer.write_many(300)
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


async def deduplicate(broker: Broker, *, on: bool = True) -> None:
    await broker.namespaces.change(
        NamespaceName("public", "default"),
        lambda record: record.update({"deduplicationEnabled": on}),
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


async def test_the_policy_holds_for_attached_producers_from_its_change_on(
    broker: Broker, connect: Connect
) -> None:
    producer = await (await connect()).create_producer(TOPIC)
    assert await send(producer, 5)
    await deduplicate(broker)
    assert [await send(producer, number) for number in (5, 3, 6, 6)] == [False, False, True, False]
    await deduplicate(broker, on=False)
    assert [await send(producer, number) for number in (6, 0)] == [True, True]
    assert producer.events.empty()


async def test_named_producers_of_segments_come_back_when_the_policy_changes(
    broker: Broker, connect: Connect
) -> None:
    """What a client has sent under its name is passed on when the layout changes."""
    await make_segment(broker)
    client = await connect()
    producer = await client.create_producer(SEGMENT, named("p"))
    assert await send(producer, 5)
    await deduplicate(broker)
    told = await client.wait(producer.events.get())
    assert told.type == pb.BaseCommand.CLOSE_PRODUCER
    again = await client.create_producer(SEGMENT, named("p", 1))
    assert [await send(again, number) for number in (5, 6)] == [False, True]


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
    set_bound(monkeypatch, "SEQUENCE_SNAPSHOT_ENTRIES", 50)
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


# Sealed topics


async def seal(broker: Broker) -> None:
    await broker.topics.loaded()[TOPIC].seal()


async def is_terminated(sent: Awaitable[object]) -> bool:
    """Whether that is refused, as its topic is sealed."""
    with pytest.raises(BrokerError) as caught:
        await sent
    return caught.value.code == pb.TopicTerminatedError


@pytest.mark.parametrize("unloaded", [False, True], ids=["loaded", "unloaded"])
async def test_reconnecting_producer_of_a_sealed_topic_gets_receipts(
    broker: Broker, connect: Connect, unloaded: bool
) -> None:
    client = await connect()
    producer = await client.create_producer(TOPIC)
    for number in range(5):
        await send(producer, number)
    await seal(broker)
    if unloaded:
        await broker.topics.unload(parse_topic_name(TOPIC))
    again = await client.create_producer(TOPIC, back(producer.name))
    assert [await send(again, number) for number in (3, 4)] == [False, False]
    assert await is_terminated(send(again, 5))
    assert [number for number, _ in await sequences(broker)] == [0, 1, 2, 3, 4]
    await until(lambda: not broker.topics.loaded()[TOPIC].producers)


async def test_new_producer_on_a_sealed_topic_is_refused(broker: Broker, connect: Connect) -> None:
    client = await connect()
    producer = await client.create_producer(TOPIC, named("mine"))
    await send(producer, 0)
    await seal(broker)
    assert await is_terminated(client.create_producer(TOPIC))
    assert await is_terminated(client.create_producer(TOPIC, named("mine")))
    assert await is_terminated(client.create_producer(TOPIC, named("another", 1)))
    assert await is_terminated(client.create_producer(TOPIC, back("")))
    assert not broker.topics.loaded()[TOPIC].producers


async def test_reconnecting_producer_waits_for_sends_in_flight_during_a_seal(
    broker: Broker, connect: Connect
) -> None:
    """Also for what is the first of its name, so that nothing is known of it yet."""
    stale, fresh = await connect(), await connect()
    producer = await stale.create_producer(TOPIC)
    producer.write_many(300)
    topic = broker.topics.loaded()[TOPIC]
    await until(lambda: any(each.pending or each.messages_in for each in topic.producers.values()))
    topic.begin_seal()
    again = await fresh.create_producer(TOPIC, back(producer.name))
    again.next_sequence_id = 0
    for number in range(300):
        await send(again, number)
    await seal(broker)
    assert [number for number, _ in await sequences(broker)] == list(range(300))


@pytest.mark.usefixtures("ending")
@pytest.mark.parametrize("breaks_off", [False, True], ids=["whole", "broken off"])
async def test_a_sealed_topic_knows_after_a_restart_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaks_off: bool
) -> None:
    """Also if the broker dies between the seal and the last snapshot; the entries may go then."""
    if breaks_off:

        async def dies(store: SequenceStore) -> None:
            return None

        monkeypatch.setattr(SequenceStore, "end", dies)
    async with running(tmp_path) as broker:
        client = await RawClient.open("127.0.0.1", broker.port)
        producer = await client.create_producer(TOPIC)
        for number in range(3):
            await send(producer, number)
        await seal(broker)
        await broker.drain()
    monkeypatch.undo()
    for _ in range(2):
        async with running(tmp_path) as broker:
            topic = await broker.topics.get(parse_topic_name(TOPIC), create=False)
            topic.ledger.use_retention(lambda: Retention(0, 0))
            await topic.ledger.trim()
            client = await RawClient.open("127.0.0.1", broker.port)
            again = await client.create_producer(TOPIC, back(producer.name))
            assert [await send(again, number) for number in (1, 2)] == [False, False]
            assert await is_terminated(send(again, 3))
            assert await sequences(broker) == [], "they were trimmed, and are not needed"


async def test_a_new_program_with_the_old_name_is_not_resending_to_a_trimmed_topic(
    broker: Broker, connect: Connect
) -> None:
    client = await connect()
    producer = await client.create_producer(TOPIC, named("mine"))
    assert await send(producer, 100)
    await producer.close()
    producer = await client.create_producer(TOPIC, named("mine"))
    await seal(broker)
    topic = broker.topics.loaded()[TOPIC]
    topic.ledger.use_retention(lambda: Retention(0, 0))
    await topic.ledger.trim()
    assert await sequences(broker) == []
    await broker.topics.unload(topic.name)
    again = await client.create_producer(TOPIC, named("mine", 1))
    assert await is_terminated(send(again, 0, at=5000))


async def test_under_the_policy_a_sealed_topic_tells_the_last_sequence_id(
    broker: Broker, connect: Connect
) -> None:
    await deduplicate(broker)
    client = await connect()
    producer = await client.create_producer(TOPIC, named("p"))
    assert [await send(producer, number) for number in (3, 7)] == [True, True]
    await producer.close()
    await seal(broker)
    again = await client.create_producer(TOPIC, named("p", 1))
    assert again.success.last_sequence_id == 7
    assert not await send(again, 7, at=5000)
    assert await is_terminated(send(again, 8, at=5000))


async def test_of_an_incomplete_message_a_sealed_topic_wants_no_more_chunks(
    broker: Broker, connect: Connect
) -> None:
    client = await connect()
    producer = await client.create_producer(TOPIC)
    await send(producer, 0)
    assert [await send_chunk(producer, 1, chunk, 3) for chunk in range(2)] == [True, True]
    await seal(broker)
    await broker.topics.unload(parse_topic_name(TOPIC))
    again = await client.create_producer(TOPIC, back(producer.name))
    assert [await send_chunk(again, 1, chunk, 3) for chunk in range(2)] == [False, False]
    assert await is_terminated(send_chunk(again, 1, 2, 3))


async def sealed_without_last_snapshot(
    broker: Broker, client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> RawProducer:
    """A producer of an unloaded topic with two messages, of which the snapshot has the first."""
    producer = await client.create_producer(TOPIC)
    await send(producer, 0)
    await broker.topics.loaded()[TOPIC].sequence_store.save()
    await send(producer, 1)

    async def unsaved(store: SequenceStore) -> None:
        return None

    monkeypatch.setattr(SequenceStore, "end", unsaved)
    monkeypatch.setattr(SequenceStore, "close", unsaved)
    await seal(broker)

    await broker.topics.unload(parse_topic_name(TOPIC))
    monkeypatch.undo()
    return producer


def break_reads(monkeypatch: pytest.MonkeyPatch, error: LedgerError) -> None:
    async def unreadable(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(ManagedLedger, "read", unreadable)


@pytest.mark.parametrize("lost", [NoSuchLedger, CorruptEntry])
async def test_a_sealed_topic_whose_entries_are_lost_is_served_and_claims_to_know_nothing(
    broker: Broker, connect: Connect, monkeypatch: pytest.MonkeyPatch, lost: type[LedgerError]
) -> None:
    client = await connect()
    producer = await sealed_without_last_snapshot(broker, client, monkeypatch)
    break_reads(monkeypatch, lost("It is gone."))
    topic = await broker.topics.get(parse_topic_name(TOPIC), create=False)
    monkeypatch.undo()
    assert topic.sealed
    assert await is_terminated(client.create_producer(TOPIC, back(producer.name)))
    assert await sequences(broker) == [(0, 0), (1, 0)]


async def test_a_sealed_topic_that_cannot_be_read_for_a_while_knows_afterwards_what_it_has(
    broker: Broker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who comes back meanwhile hears no TopicTerminated: it would send again what is stored."""
    client = await connect()
    producer = await sealed_without_last_snapshot(broker, client, monkeypatch)
    break_reads(monkeypatch, LedgerError("The bookies do not answer."))
    with pytest.raises(BrokerError) as caught:
        await client.create_producer(TOPIC, back(producer.name))
    monkeypatch.undo()
    assert caught.value.code == pb.PersistenceError
    again = await client.create_producer(TOPIC, back(producer.name))
    assert [await send(again, number) for number in (0, 1)] == [False, False]
    assert await is_terminated(send(again, 2))


async def test_a_seal_reads_publish_times_together_but_not_too_many(
    broker: Broker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await connect()
    for number in range(10):
        producer = await client.create_producer(TOPIC, named(f"p{number}"))
        await send(producer, number)
    under_way: list[int] = []
    most = 0
    read = ManagedLedger.read

    async def counted(ledger: ManagedLedger, start: Position, **bounds: int) -> list[Entry]:
        nonlocal most
        under_way.append(1)
        most = max(most, len(under_way))
        await asyncio.sleep(0)
        try:
            return await read(ledger, start, **bounds)  # type: ignore[arg-type]
        finally:
            under_way.pop()

    monkeypatch.setattr(ManagedLedger, "read", counted)
    set_bound(monkeypatch, "SEQUENCE_READS_AT_ONCE", 4)
    await seal(broker)
    assert most == 4
    known = broker.topics.loaded()[TOPIC].sequences
    times = [
        found and found.publish_time_ms for found in map(known.get, map("p{}".format, range(10)))
    ]
    assert times == [1000 + number for number in range(10)]


async def test_a_last_snapshot_that_fails_is_taken_when_the_topic_is_closed(
    broker: Broker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await connect()
    producer = await client.create_producer(TOPIC)
    await send(producer, 0)

    async def fails(ledger: ManagedLedger, changes: object) -> None:
        raise LedgerError("Not now.")

    monkeypatch.setattr(ManagedLedger, "set_properties", fails)
    await seal(broker)
    assert await reader_names(broker), "entries are kept for the replay"
    monkeypatch.undo()
    await broker.topics.unload(parse_topic_name(TOPIC))
    again = await client.create_producer(TOPIC, back(producer.name))
    assert not await send(again, 0)


def test_a_snapshot_has_times_beside_incomplete_messages() -> None:
    known = Deduplication(limit=10, keep_ms=10_000)
    for name in ("plain", "timed", "chunks", "timed chunks"):
        sequence = known.attach(name)
        sequence.stored(4, Position(1, 4), None)
        if "chunks" in name:
            sequence.stored(5, Position(1, 5), Chunk("u-5", 1, last=False))
        if "timed" in name:
            sequence.publish_time_ms = 77
    again = Deduplication(limit=10, keep_ms=10_000)
    again.load(known.snapshot(Position(1, 5), 0))

    def facts(each: ProducerSequence | None) -> object:
        assert each is not None
        return each.last, each.position, each.publish_time_ms, each.chunk

    for name in ("plain", "timed", "chunks", "timed chunks"):
        assert facts(again.get(name)) == facts(known.get(name)), name
