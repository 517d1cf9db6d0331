"""Writes in transactions on a whole broker: who sees what, after which restart."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from broker.app.service import Broker
from broker.topics.topic import Topic, TopicNotFound, TopicState
from config.bounds import READ_BATCH_ENTRIES
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.names import parse_topic_name
from magnetar.protocol.txn_id import TxnId
from storage.metadata.store import MetadataError
from tests.support.embedded_broker import running
from tests.support.raw_client import BrokerError, RawClient
from tests.support.raw_handles import RawConsumer, RawProducer
from tests.support.waiting import until
from tests.unit.broker.transactions.conftest import Connect, TransactionClient
from txn.errors import SegmentOwnershipLost
from txn.records import TxnState
from txn.segment_owner import SegmentOwner

TOPIC = "persistent://public/default/t"
OTHER = "persistent://public/default/u"
NAME = parse_topic_name(TOPIC)


async def send(producer: RawProducer, txn: tuple[int, int] | None, payload: bytes) -> None:
    if txn is None:
        await producer.send(payload)
        return
    most, least = txn
    await producer.send(
        payload,
        metadata=pb.MessageMetadata(txnid_most_bits=most, txnid_least_bits=least),
        send=pb.CommandSend(txnid_most_bits=most, txnid_least_bits=least),
    )


async def reader(client: RawClient, topic: str = TOPIC, name: str = "s") -> RawConsumer:
    options = pb.CommandSubscribe(initial_position=pb.CommandSubscribe.Earliest)
    return await client.subscribe(topic, name, options, permits=1000)


async def read_to(consumer: RawConsumer, last: bytes) -> list[bytes]:
    """Everything up to and with the payload `last`."""
    found: list[bytes] = []
    while not found or found[-1] != last:
        found.append((await consumer.receive()).payload)
    return found


async def topic_of(broker: Broker, name: str = TOPIC) -> Topic:
    return await broker.topics.get(parse_topic_name(name), create=False)


async def cleaned(broker: Broker, name: str = TOPIC) -> None:
    topic = await topic_of(broker, name)
    await until(lambda: topic.buffer.idle)


@asynccontextmanager
async def clients(broker: Broker) -> AsyncIterator[TransactionClient]:
    client = TransactionClient(await RawClient.open("127.0.0.1", broker.port))
    try:
        yield client
    finally:
        await client.raw.close()


async def test_commit_over_two_topics_shows_all_of_it_and_nothing_before(
    broker: Broker, txn_client: TransactionClient
) -> None:
    raw = txn_client.raw
    consumers = [await reader(raw, TOPIC), await reader(raw, OTHER)]
    producers = [await raw.create_producer(TOPIC), await raw.create_producer(OTHER)]
    txn = await txn_client.begin()
    await txn_client.add_partitions(txn, TOPIC, OTHER)
    for producer in producers:
        await send(producer, None, b"before")
        for number in range(3):
            await send(producer, txn, b"in %d" % number)
        await send(producer, None, b"behind")
    for consumer in consumers:
        assert (await consumer.receive()).payload == b"before"
        assert consumer.messages.empty()
    await txn_client.end(txn)
    for consumer in consumers:
        assert await read_to(consumer, b"behind") == [b"in 0", b"in 1", b"in 2", b"behind"]
    await cleaned(broker)
    assert await broker.transactions.store.operations_of(TxnId(*txn)) == []


async def test_an_aborted_transaction_is_never_seen(
    broker: Broker, txn_client: TransactionClient
) -> None:
    consumer = await reader(txn_client.raw)
    producer = await txn_client.raw.create_producer(TOPIC)
    aborted, committed = await txn_client.begin(), await txn_client.begin()
    for number in range(5):
        await send(producer, aborted, b"aborted")
        await send(producer, committed, b"%d" % number)
    await send(producer, None, b"last")
    await txn_client.end(aborted, pb.ABORT)
    await txn_client.end(committed)
    assert await read_to(consumer, b"last") == [b"0", b"1", b"2", b"3", b"4", b"last"]
    await cleaned(broker)
    again = await reader(txn_client.raw, name="from the start")
    assert await read_to(again, b"last") == [b"0", b"1", b"2", b"3", b"4", b"last"]


async def test_a_send_without_add_partition_joins_by_itself_and_keeps_the_order(
    broker: Broker, txn_client: TransactionClient
) -> None:
    consumer = await reader(txn_client.raw)
    producer = await txn_client.raw.create_producer(TOPIC)
    txn = await txn_client.begin()
    sends = [
        send(producer, txn if number % 3 == 1 else None, b"%d" % number) for number in range(30)
    ]
    await asyncio.gather(*sends)
    await txn_client.end(txn)
    assert await read_to(consumer, b"29") == [b"%d" % number for number in range(30)]


@pytest.mark.parametrize("known", [True, False])
async def test_a_late_send_is_refused_and_the_producer_goes_on(
    broker: Broker, txn_client: TransactionClient, known: bool
) -> None:
    producer = await txn_client.raw.create_producer(TOPIC)
    txn = await txn_client.begin()
    if known:
        await send(producer, txn, b"in time")
    await txn_client.end(txn)
    if known:
        await cleaned(broker)
    with pytest.raises(BrokerError) as refused:
        await send(producer, txn, b"late")
    assert refused.value.code == pb.NotAllowedError
    await send(producer, None, b"next")
    await cleaned(broker)
    assert await broker.transactions.store.operations_of(TxnId(*txn)) == []


async def test_open_ended_and_collected_transactions_read_the_same_after_restarts(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as broker, clients(broker) as client:
        producer = await client.raw.create_producer(TOPIC)
        txns = [await client.begin() for _ in range(4)]
        for number, txn in enumerate(txns):
            await send(producer, txn, b"%d" % number)
        await client.end(txns[0])
        await client.end(txns[1], pb.ABORT)
        await cleaned_but(broker, txns[2], txns[3])
        store = broker.transactions.store
        for txn in txns[:2]:
            stored = await store.read_header(TxnId(*txn))
            assert stored is not None
            await store.delete_header(stored)
        assert await store.operations_of(TxnId(*txns[0])) == []
    async with running(tmp_path) as broker, clients(broker) as client:
        consumer = await reader(client.raw)
        assert (await consumer.receive()).payload == b"0"
        producer = await client.raw.create_producer(TOPIC)
        await send(producer, txns[2], b"2 again")
        await client.end(txns[3], pb.ABORT)
        await client.end(txns[2])
        await send(producer, None, b"last")
        assert await read_to(consumer, b"last") == [b"2", b"2 again", b"last"]
        await cleaned(broker)
        assert await broker.transactions.store.claims_on(TOPIC) == []
    async with running(tmp_path) as broker, clients(broker) as client:
        consumer = await reader(client.raw, name="later")
        assert await read_to(consumer, b"last") == [b"0", b"2", b"2 again", b"last"]


async def cleaned_but(broker: Broker, *txns: tuple[int, int]) -> None:
    topic = await topic_of(broker)
    left = {TxnId(*txn) for txn in txns}
    await until(lambda: {each.txn for each in topic.buffer.open_transactions()} == left)


async def test_a_reload_in_mid_transaction_hides_and_shows_as_before(
    broker: Broker, connect: Connect
) -> None:
    client = TransactionClient(await connect())
    producer = await client.raw.create_producer(TOPIC)
    txn = await client.begin()
    await send(producer, None, b"before")
    await send(producer, txn, b"first")
    await broker.topics.unload(NAME)
    topic = await topic_of(broker)
    assert topic.max_read_position() < topic.ledger.last_confirmed
    other = TransactionClient(await connect())
    producer = await other.raw.create_producer(TOPIC)
    await send(producer, txn, b"second")
    await other.end(txn)
    consumer = await reader(other.raw)
    assert await read_to(consumer, b"second") == [b"before", b"first", b"second"]
    await cleaned(broker)


async def test_a_timeout_hides_what_was_written(
    broker: Broker, txn_client: TransactionClient
) -> None:
    producer = await txn_client.raw.create_producer(TOPIC)
    txn = await txn_client.begin(ttl_ms=100)
    await send(producer, txn, b"too slow")
    await send(producer, None, b"last")
    consumer = await reader(txn_client.raw)
    assert await read_to(consumer, b"last") == [b"last"]


async def test_a_sealed_topic_is_cleaned_up_like_any_other(
    broker: Broker, txn_client: TransactionClient
) -> None:
    consumer = await reader(txn_client.raw)
    producer = await txn_client.raw.create_producer(TOPIC)
    committed, aborted = await txn_client.begin(), await txn_client.begin()
    await send(producer, committed, b"0")
    await send(producer, aborted, b"1")
    await producer.close()
    topic = await topic_of(broker)
    await topic.seal()
    assert not topic.subscriptions["s"].drained
    await txn_client.end(committed)
    message = await consumer.receive()
    assert message.payload == b"0"
    await txn_client.end(aborted, pb.ABORT)
    consumer.ack(message.message_id)
    await until(lambda: topic.subscriptions["s"].drained)
    await cleaned(broker)
    assert await broker.transactions.store.claims_on(TOPIC) == []


async def test_a_deleted_topic_leaves_no_records(
    broker: Broker, txn_client: TransactionClient
) -> None:
    producer = await txn_client.raw.create_producer(TOPIC)
    txns = [await txn_client.begin() for _ in range(2)]
    for txn in txns:
        await send(producer, txn, b"x")
    await txn_client.end(txns[0], pb.ABORT)
    await cleaned_but(broker, txns[1])
    await broker.topics.delete(NAME, force=True)
    store = broker.transactions.store
    assert await store.claims_on(TOPIC) == []
    assert await store.aborted_on(TOPIC) == {}
    assert await store.read_owner(TOPIC) is None
    await txn_client.end(txns[1])
    stored = await store.read_header(TxnId(*txns[1]))
    assert stored is not None
    assert stored.header.state is TxnState.COMMITTED


async def test_transactions_switched_off_refuse_a_send_and_hide_what_is_open(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as broker, clients(broker) as client:
        producer = await client.raw.create_producer(TOPIC)
        txn = await client.begin()
        await send(producer, txn, b"open")
    async with (
        running(tmp_path, transactions_enabled=False) as broker,
        clients(broker) as client,
    ):
        producer = await client.raw.create_producer(TOPIC)
        with pytest.raises(BrokerError) as refused:
            await send(producer, txn, b"more")
        assert refused.value.code == pb.NotAllowedError
        topic = await topic_of(broker)
        assert topic.max_read_position() < topic.ledger.last_confirmed


async def test_a_topic_is_closed_and_loaded_again_after_its_ownership_was_lost(
    broker: Broker, txn_client: TransactionClient
) -> None:
    producer = await txn_client.raw.create_producer(TOPIC)
    txn = await txn_client.begin()
    await send(producer, txn, b"first")
    topic = await topic_of(broker)
    await SegmentOwner(TOPIC, broker.transactions.parts, lambda _: None).take()
    with pytest.raises(SegmentOwnershipLost):
        await topic.owner.confirm()
    await until(lambda: topic.state is TopicState.CLOSED)
    again = await topic_of(broker)
    assert again is not topic
    await txn_client.end(txn)
    await cleaned(broker)
    assert not again.buffer.is_aborted(TxnId(*txn))
    assert again.max_read_position() == again.ledger.last_confirmed


async def test_where_others_may_own_the_segment_the_epoch_is_taken_before_the_log_is_opened(
    broker: Broker,
) -> None:
    transactions = broker.transactions
    transactions.parts = dataclasses.replace(transactions.parts, eager_epochs=True)
    opened: list[int] = []
    open_ledger = broker.managed_ledgers.open

    async def noting(*args: object, **more: object) -> object:
        stored = await transactions.store.read_owner(TOPIC)
        opened.append(0 if stored is None else stored.owner.epoch)
        return await open_ledger(*args, **more)  # type: ignore[arg-type]

    broker.managed_ledgers.open = noting  # type: ignore[assignment, method-assign]
    for epoch in (1, 2):
        topic = await broker.topics.get(NAME, create=True)
        assert topic.owner.epoch == epoch
        await broker.topics.unload(NAME)
    assert opened == [1, 2]


async def test_a_load_that_fails_leaves_nothing_open_and_can_be_tried_again(
    broker: Broker, txn_client: TransactionClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = await txn_client.raw.create_producer(TOPIC)
    txn = await txn_client.begin()
    await send(producer, txn, b"x")
    await txn_client.raw.close()
    await broker.topics.unload(NAME)

    async def fails(*_: object) -> None:
        raise MetadataError("The store is gone.")

    with monkeypatch.context() as broken:
        broken.setattr(broker.transactions.store, "aborted_on", fails)
        with pytest.raises(MetadataError):
            await topic_of(broker)
    assert broker.transactions.decisions.followed == 0
    topic = await topic_of(broker)
    assert topic.max_read_position() < topic.ledger.last_confirmed


@pytest.mark.parametrize("what", ["segment", "ledger"])
async def test_a_topic_that_was_lost_while_it_was_loaded_is_given_up(
    broker: Broker, txn_client: TransactionClient, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Else it stays for ever, and refuses every write in a transaction."""
    load = Topic.load_subscriptions

    async def loses(topic: Topic) -> None:
        await load(topic)
        if what == "ledger":
            topic.ledger._core.fence(MetadataError("Somebody else has it."))
            return
        await topic.owner.take()
        await SegmentOwner(TOPIC, broker.transactions.parts, lambda _: None).take()
        with pytest.raises(SegmentOwnershipLost):
            await topic.owner.confirm()

    with monkeypatch.context() as losing:
        losing.setattr(Topic, "load_subscriptions", loses)
        topic = await broker.topics.get(NAME, create=True)
    await until(lambda: topic.state is TopicState.CLOSED)
    producer = await txn_client.raw.create_producer(TOPIC)
    txn = await txn_client.begin()
    await send(producer, txn, b"taken")


@pytest.mark.parametrize(
    "named",
    [(0, 77), (1, 0)],
    ids=["another one", "another coordinator"],
)
async def test_a_message_that_says_otherwise_than_its_send_is_refused(
    broker: Broker, txn_client: TransactionClient, named: tuple[int, int]
) -> None:
    consumer = await reader(txn_client.raw)
    producer = await txn_client.raw.create_producer(TOPIC)
    most, least = txn = await txn_client.begin()
    metadata = pb.MessageMetadata()
    metadata.txnid_most_bits, metadata.txnid_least_bits = named
    with pytest.raises(BrokerError, match="its message names"):
        await producer.send(
            b"of two minds",
            metadata=metadata,
            send=pb.CommandSend(txnid_most_bits=most, txnid_least_bits=least),
        )
    await send(producer, txn, b"of one mind")
    await txn_client.end(txn, pb.ABORT)
    await send(producer, None, b"last")
    assert await read_to(consumer, b"last") == [b"last"]


@pytest.mark.parametrize("end", [pb.COMMIT, pb.ABORT])
async def test_message_that_names_no_transaction_gets_the_one_of_its_send(
    tmp_path: Path, end: "pb.TxnAction"
) -> None:
    """As Pulsar's Go client sends it; after a restart too, as readers go by the message."""
    async with running(tmp_path) as broker, clients(broker) as client:
        producer = await client.raw.create_producer(TOPIC)
        most, least = txn = await client.begin()
        for payload in (b"first", b"second"):
            await producer.send(
                payload,
                metadata=pb.MessageMetadata(partition_key="k"),
                send=pb.CommandSend(txnid_most_bits=most, txnid_least_bits=least),
            )
        await client.end(txn, end)
        await send(producer, None, b"last")
    async with running(tmp_path) as broker, clients(broker) as client:
        consumer = await reader(client.raw)
        if end == pb.COMMIT:
            for payload in (b"first", b"second"):
                found = await consumer.receive()
                assert found.payload == payload
                assert found.metadata.partition_key == "k"
                named = found.metadata.txnid_most_bits, found.metadata.txnid_least_bits
                assert named == txn
        assert (await consumer.receive()).payload == b"last"


@pytest.mark.parametrize("deduplication", [False, True], ids=["as it comes", "deduplicated"])
@pytest.mark.parametrize("ended", [False, True], ids=["open", "aborted"])
async def test_a_message_that_names_a_transaction_under_a_plain_send_is_refused_alone(
    tmp_path: Path, deduplication: bool, ended: bool
) -> None:
    """Readers go by the message: it would be receipted, and hidden with that transaction."""
    async with (
        running(tmp_path, deduplication=deduplication) as broker,
        clients(broker) as client,
    ):
        consumer = await reader(client.raw)
        producer = await client.raw.create_producer(TOPIC)
        txn = await client.begin()
        await send(producer, txn, b"aborted")
        if ended:
            await client.end(txn, pb.ABORT)
        metadata = pb.MessageMetadata(txnid_most_bits=txn[0], txnid_least_bits=txn[1])
        metadata.num_messages_in_batch = 1
        sends = [
            producer.send(b"before"),
            producer.send(b"of two minds", metadata=metadata),
            producer.send(b"after"),
        ]
        before, refused, after = await asyncio.gather(*sends, return_exceptions=True)
        assert isinstance(refused, BrokerError)
        assert pb.ServerError.Name(refused.code) == "NotAllowedError"
        assert "no transaction" in str(refused)
        assert not isinstance(before, BaseException)
        assert not isinstance(after, BaseException)
        if not ended:
            await client.end(txn, pb.ABORT)
        assert await read_to(consumer, b"after") == [b"before", b"after"]


async def test_the_last_message_is_one_that_readers_get(
    broker: Broker, txn_client: TransactionClient
) -> None:
    """Else whoever reads up to it waits for what never comes."""
    raw = txn_client.raw
    producer, consumer = await raw.create_producer(TOPIC), await raw.subscribe(TOPIC, "s")

    async def last() -> tuple[int, int]:
        found = (await consumer.last_message_id()).last_message_id
        return found.ledger_id, found.entry_id

    nothing = (2**64 - 1, 2**64 - 1)
    for count in (1, 3, READ_BATCH_ENTRIES + 1):
        txn = await txn_client.begin()
        await asyncio.gather(*(send(producer, txn, b"aborted") for _ in range(count)))
        assert await last() == nothing
        await txn_client.end(txn, pb.ABORT)
        await cleaned(broker)
        assert await last() == nothing
    seen = (await producer.send(b"seen")).message_id
    aborted, still_open = await txn_client.begin(), await txn_client.begin()
    await send(producer, aborted, b"aborted")
    await txn_client.end(aborted, pb.ABORT)
    await send(producer, still_open, b"open")
    assert await last() == (seen.ledger_id, seen.entry_id)
    await txn_client.end(still_open)
    await cleaned(broker)
    assert await last() == (seen.ledger_id, seen.entry_id + 2)


@pytest.mark.parametrize("remade", ["by_use", "by_an_operator"])
async def test_leftovers_of_a_deleted_topic_do_not_hold_back_the_next_one(
    broker: Broker, txn_client: TransactionClient, monkeypatch: pytest.MonkeyPatch, remade: str
) -> None:
    """The process may die, or the disk be full, between the end of the log and of the records."""
    raw, store = txn_client.raw, broker.transactions.store
    producer = await raw.create_producer(TOPIC)
    txn, aborted = await txn_client.begin(), await txn_client.begin()
    await send(producer, txn, b"of the first topic")
    await send(producer, aborted, b"of the first topic")
    await txn_client.end(aborted, pb.ABORT)
    await cleaned_but(broker, txn)

    async def fail(segment: str) -> None:
        raise MetadataError("The disk is full: give it room.")

    with monkeypatch.context() as patch:
        patch.setattr(store, "claims_on", fail)
        await broker.topics.delete(NAME, force=True)
    assert len(await store.claims_on(TOPIC)) == 1
    if remade == "by_an_operator":
        await broker.topics.create(NAME)
    again = await raw.create_producer(TOPIC)
    await again.send(b"of the second")
    assert await read_to(await reader(raw), b"of the second") == [b"of the second"]
    assert await store.claims_on(TOPIC) == []
    assert await store.aborted_on(TOPIC) == {}


async def test_a_deletion_that_is_tried_again_deletes_what_was_left(
    broker: Broker, txn_client: TransactionClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = broker.transactions.store
    txn = await txn_client.begin()
    await send(await txn_client.raw.create_producer(TOPIC), txn, b"x")

    async def fail(segment: str) -> None:
        raise MetadataError("The disk is full: give it room.")

    with monkeypatch.context() as patch:
        patch.setattr(store, "claims_on", fail)
        await broker.topics.delete(NAME, force=True)
    with pytest.raises(TopicNotFound):
        await broker.topics.delete(NAME, force=True)
    assert await store.claims_on(TOPIC) == []
