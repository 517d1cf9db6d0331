"""Publishing over real sockets and storage: receipts, refusals, opening and closing."""

import asyncio
import contextvars
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from broker.app.service import Broker
from broker.app.stores import Stores
from broker.topics.producer import Producer, ProducerRequest
from broker.topics.schemas import SchemaNotFound
from broker.topics.topic import Topic
from broker.wire.handlers.produce import close_producer
from config.bounds import MAX_MESSAGE_SIZE, PRODUCER_METADATA_BYTES
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import UNSOLICITED_REQUEST_ID, Position
from magnetar.protocol.names import NamespaceName, parse_topic_name
from storage.clock import SystemClock
from storage.ledger.bookkeeper.store import BookKeeperLedgerStore, BookKeeperOptions
from storage.managed_ledger.ledger import ManagedLedger
from storage.metadata.memory import MemoryMetadataStore
from storage.metadata.store import MetadataError
from tests.support.bounds import set_bound
from tests.support.embedded_broker import running_on
from tests.support.raw_client import BrokerError, RawClient, RawProducer
from tests.support.waiting import TIMEOUT_S, until
from tests.unit.storage.ledger.bookkeeper.simulated_bookies import (
    SimulatedBookie,
    SimulatedBookieClient,
    SimulatedCluster,
    SimulatedMetadata,
    Weather,
)

TOPIC = "persistent://public/default/ingress"
SEGMENT = "segment://public/default/s/0000-ffff-0"
Kind = pb.BaseCommand
Connect = Callable[[], Awaitable[RawClient]]
WAIT, EXCLUSIVE = pb.WaitForExclusive, pb.Exclusive
FENCING = pb.ExclusiveWithFencing


def named(name: str, epoch: int = 0, **fields: object) -> pb.CommandProducer:
    options = pb.CommandProducer()
    options.producer_name = name
    options.user_provided_producer_name = True
    options.epoch = epoch
    for field, value in fields.items():
        setattr(options, field, value)
    return options


async def make_segment(broker: Broker) -> None:
    """A scalable topic whose only segment is SEGMENT."""
    name = parse_topic_name("topic://public/default/s")
    await broker.scalable.create(name, segments=1, properties={})


async def stored(broker: Broker, topic: str = TOPIC) -> int:
    """Entries that are durable."""
    return (await broker.topics.get(parse_topic_name(topic), create=False)).ledger.entry_count


async def code_of(work: Awaitable[object]) -> str:
    with pytest.raises(BrokerError) as refused:
        await work
    return pb.ServerError.Name(refused.value.code)


async def test_every_send_gets_its_receipt_in_order(broker: Broker, connect: Connect) -> None:
    client = await connect()
    producer = await client.create_producer(TOPIC)
    receipts: list[pb.CommandSendReceipt] = []
    await producer.send_many([b"x" * 100] * 3000, on_receipt=receipts.append)  # type: ignore[arg-type]
    assert [receipt.sequence_id for receipt in receipts] == list(range(3000))
    places = [(each.message_id.ledger_id, each.message_id.entry_id) for each in receipts]
    assert places == sorted(set(places))
    assert await stored(broker) == 3000


async def test_the_highest_id_of_a_batch_is_echoed(connect: Connect) -> None:
    producer = await (await connect()).create_producer(TOPIC)
    receipt = await producer.send(b"x", send=pb.CommandSend(num_messages=5, highest_sequence_id=4))
    assert (receipt.sequence_id, receipt.highest_sequence_id) == (0, 4)


async def test_a_close_is_answered_after_the_receipts(broker: Broker, connect: Connect) -> None:
    client = await connect()
    producer = await client.create_producer(TOPIC)
    answered: list[object] = []
    for _ in range(500):
        number, frame = producer.frame(b"x" * 1000)
        producer.send_frame(number, frame, answered.append)
    await producer.close()
    assert len(answered) == 500
    assert not any(isinstance(answer, BrokerError) for answer in answered)
    assert await stored(broker) == 500


async def test_late_sends_of_a_closed_producer_are_dropped(
    broker: Broker, connect: Connect
) -> None:
    client = await connect()
    producer = await client.create_producer(TOPIC)
    await producer.close()
    client.write(producer.frame(b"late")[1])
    await client.ping()
    assert await stored(broker) == 0
    again = await client.create_producer(
        TOPIC, pb.CommandProducer(producer_id=producer.producer_id)
    )
    assert again.name != producer.name
    await again.send(b"x")


async def test_a_segment_takes_what_was_queued_behind_the_close_of_its_producer(
    broker: Broker, connect: Connect
) -> None:
    await make_segment(broker)
    client = await connect()
    producer = await client.create_producer(SEGMENT)
    close = pb.CommandCloseProducer(producer_id=producer.producer_id)
    closing = asyncio.ensure_future(client.request(Kind.CLOSE_PRODUCER, close))
    await asyncio.sleep(0)
    await asyncio.gather(producer.send(b"queued"), producer.send(b"queued too"))
    assert (await closing).HasField("success")
    client.write(producer.frame(b"late")[1])
    await client.ping()
    assert await stored(broker, SEGMENT) == 2


async def test_a_send_for_no_producer_ends_that_connection_alone(connect: Connect) -> None:
    client, other = await connect(), await connect()
    producer = RawProducer(client, 77)
    client.write(producer.frame(b"x")[1])
    await client.wait_closed()
    await other.ping()


async def test_a_close_takes_an_open_in_progress_back(broker: Broker, connect: Connect) -> None:
    client = await connect()
    holder = await client.create_producer(TOPIC)
    waiting = await client.create_producer(TOPIC, pb.CommandProducer(producer_access_mode=WAIT))
    assert not waiting.success.producer_ready
    await waiting.close()
    await holder.close()
    await client.create_producer(
        TOPIC,
        pb.CommandProducer(producer_id=waiting.producer_id, producer_access_mode=EXCLUSIVE),
    )
    topic = broker.topics.loaded()[TOPIC]
    assert len(topic.producers) == 1


async def test_a_close_in_the_last_step_of_an_open_takes_it_back(
    broker: Broker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When nothing is left to cancel.  What stayed would outlive a grant that is withdrawn."""
    add_producer = Topic.add_producer

    async def add_as_the_close_comes(topic: Topic, request: ProducerRequest) -> Producer:
        added = await add_producer(topic, request)
        (connection,) = broker.connections
        fields = pb.CommandCloseProducer(producer_id=request.producer_id, request_id=77)
        close = pb.BaseCommand(type=Kind.CLOSE_PRODUCER, close_producer=fields)
        assert close_producer(connection, close, None) is None
        return added

    monkeypatch.setattr(Topic, "add_producer", add_as_the_close_comes)
    client = await connect()
    client.send(Kind.PRODUCER, pb.CommandProducer(topic=TOPIC, producer_id=5, request_id=76))
    await until(lambda: TOPIC in broker.topics.loaded())
    await client.ping()
    (connection,) = broker.connections
    assert not connection.producers
    assert not broker.topics.loaded()[TOPIC].producers


async def test_producer_and_close_in_one_write_leave_nothing(
    broker: Broker, connect: Connect
) -> None:
    client = await connect()
    command = pb.CommandProducer(topic=TOPIC, producer_id=5, request_id=900)
    client.send(Kind.PRODUCER, command)
    await client.request(Kind.CLOSE_PRODUCER, pb.CommandCloseProducer(producer_id=5))
    await client.ping()
    topic = await broker.topics.get(parse_topic_name(TOPIC), create=True)
    await until(lambda: not topic.producers)
    assert client.events.empty()


async def test_the_same_id_again_is_the_same_producer(connect: Connect) -> None:
    client = await connect()
    producer = await client.create_producer(TOPIC)
    again = await client.request(
        Kind.PRODUCER, pb.CommandProducer(topic=TOPIC, producer_id=producer.producer_id)
    )
    assert again.producer_success.producer_name == producer.name


async def test_closing_a_producer_that_was_never_open_succeeds(connect: Connect) -> None:
    """As in Apache Pulsar: a client does so when it does not know what became of its PRODUCER."""
    client = await connect()
    close = pb.CommandCloseProducer(producer_id=99)
    assert (await client.request(Kind.CLOSE_PRODUCER, close)).type == Kind.SUCCESS
    await client.ping()


async def test_nothing_overtakes_a_damaged_message(broker: Broker, connect: Connect) -> None:
    client = await connect()
    producer = await client.create_producer(TOPIC)
    frames = [producer.frame(b"message %d" % number) for number in range(4)]
    answers: list[object] = []
    producer.send_frame(*frames[0], answers.append)
    producer.send_frame(frames[1][0], frames[1][1][:-1] + b"!", answers.append)
    client.write(frames[2][1] + frames[3][1])
    await client.ping()
    await until(lambda: len(answers) == 2)
    refused = answers[1]
    assert isinstance(refused, BrokerError)
    assert pb.ServerError.Name(refused.code) == "ChecksumError"
    for frame in frames[1:]:
        producer.send_frame(*frame, answers.append)
    await until(lambda: len(answers) == 5)
    assert not any(isinstance(answer, BrokerError) for answer in answers[2:])
    assert await stored(broker) == 4


async def test_a_message_that_is_too_large_fails_alone(broker: Broker, connect: Connect) -> None:
    producer = await (await connect()).create_producer(TOPIC)
    await producer.send(b"x" * MAX_MESSAGE_SIZE)
    assert await code_of(producer.send(b"x" * (MAX_MESSAGE_SIZE + 1))) == "NotAllowedError"
    await producer.send(b"x")
    assert await stored(broker) == 2


async def on_bookies(frame_bytes: int) -> Stores:
    """Stores whose ledgers are on bookies inside this process."""
    weather = Weather(random.Random(1), slow_s=0.0002)
    loop, clock = asyncio.get_running_loop(), SystemClock()
    bookies = SimulatedCluster(loop, contextvars.Context(), weather, timeout_s=60)
    for number in range(3):
        bookie = SimulatedBookie(f"bookie-{number}")
        bookies.bookies[bookie.id] = bookie
    ledgers = BookKeeperLedgerStore(
        SimulatedMetadata(bookies),
        SimulatedBookieClient(bookies),
        clock,
        random.Random(2),
        BookKeeperOptions(frame_bytes=frame_bytes),
    )
    await ledgers.start()
    return Stores(MemoryMetadataStore(clock), ledgers, bookkeeper=ledgers)


async def test_entry_too_large_for_bookies_is_refused_alone(tmp_path: Path) -> None:
    """It says nothing about the ledger: others, who write to the topic, notice nothing."""
    stores = await on_bookies(100_000)
    async with running_on(stores, tmp_path) as broker, AsyncExitStack() as stack:

        async def connected() -> RawClient:
            client = await RawClient.open("127.0.0.1", broker.port)
            stack.push_async_callback(client.close)
            return client

        client, other = await connected(), await connected()
        largest = client.connected.max_message_size
        assert 90_000 < largest < 100_000
        producer, others = await client.create_producer(TOPIC), await other.create_producer(TOPIC)
        await producer.send(bytes(largest))
        before = await stores.ledgers.list_ledgers()
        sends = [producer.send(bytes(largest + 1)), others.send(b"x"), producer.send(bytes(99_950))]
        sends += [producer.send(b"x"), others.send(bytes(largest))]
        answers = await asyncio.gather(*sends, return_exceptions=True)
        codes = [
            pb.ServerError.Name(each.code) if isinstance(each, BrokerError) else "stored"
            for each in answers
        ]
        assert codes == ["NotAllowedError", "stored", "NotAllowedError", "stored", "stored"]
        assert await stored(broker) == 4
        assert await stores.ledgers.list_ledgers() == before
        assert stores.bookkeeper is not None
        assert stores.bookkeeper.counters.recoveries == 0


async def test_transactional_sends_are_refused_alone(connect: Connect) -> None:
    producer = await (await connect()).create_producer(TOPIC)
    in_txn = pb.CommandSend(txnid_most_bits=1, txnid_least_bits=0)
    assert await code_of(producer.send(b"x", send=in_txn)) == "NotAllowedError"
    await producer.send(b"x")


@pytest.mark.parametrize("policy", [False, True], ids=["as it comes", "deduplicated"])
@pytest.mark.parametrize(
    ("replicated", "why"),
    [
        (pb.CommandSend(message_id=pb.MessageIdData(ledger_id=1, entry_id=2)), "message id"),
        (pb.CommandSend(marker=True), "which only replicators"),
    ],
    ids=["message id", "marker"],
)
async def test_sends_of_a_replicator_are_refused_alone(
    broker: Broker, connect: Connect, replicated: pb.CommandSend, why: str, policy: bool
) -> None:
    await broker.namespaces.change(
        NamespaceName("public", "default"),
        lambda record: record.update({"deduplicationEnabled": policy}),
    )
    producer = await (await connect()).create_producer(TOPIC)
    with pytest.raises(BrokerError, match=why) as refused:
        await producer.send(b"x", send=replicated)
    assert refused.value.code == pb.NotAllowedError
    await producer.send(b"x")
    assert await stored(broker) == 1


async def test_producer_with_more_metadata_than_is_kept_is_refused(connect: Connect) -> None:
    client = await connect()
    options = pb.CommandProducer()
    options.metadata.add(key="k", value="v" * PRODUCER_METADATA_BYTES)
    assert await code_of(client.create_producer(TOPIC, options)) == "MetadataError"
    options.metadata[0].value = "v" * (PRODUCER_METADATA_BYTES - 1)
    await (await client.create_producer(TOPIC, options)).send(b"x")


async def test_names_are_unique_and_kept_by_whom_they_belong_to(connect: Connect) -> None:
    client, other = await connect(), await connect()
    first = await client.create_producer(TOPIC, named("n"))
    assert first.name == "n"
    assert await code_of(other.create_producer(TOPIC, named("n"))) == "ProducerBusy"
    assert await code_of(client.create_producer(TOPIC, named("n", 1))) == "ProducerBusy"
    await first.close()
    assert (await other.create_producer(TOPIC, named("n"))).name == "n"


async def test_reconnecting_producer_replaces_its_stale_connection(
    broker: Broker, connect: Connect
) -> None:
    stale, fresh = await connect(), await connect()
    first = await stale.create_producer(TOPIC, pb.CommandProducer(producer_id=3))
    back = named(first.name, 1, producer_id=3, user_provided_producer_name=False)
    second = await fresh.create_producer(TOPIC, back)
    await second.send(b"x")
    stale.write(first.frame(b"late")[1])
    await stale.ping()
    assert await stored(broker) == 1
    assert list(broker.topics.loaded()[TOPIC].producers) == [first.name]


async def test_exclusive_producers(connect: Connect) -> None:
    client = await connect()
    first = await client.create_producer(TOPIC, named("a", producer_access_mode=EXCLUSIVE))
    assert first.success.topic_epoch == 0
    assert await code_of(client.create_producer(TOPIC)) == "ProducerBusy"
    refused = client.create_producer(TOPIC, named("b", producer_access_mode=EXCLUSIVE))
    assert await code_of(refused) == "ProducerFenced"
    waiting = await client.create_producer(TOPIC, named("c", producer_access_mode=WAIT))
    assert not waiting.success.producer_ready
    await first.close()
    ready = await client.wait(client.events.get())
    assert ready.producer_success.producer_ready
    assert ready.producer_success.topic_epoch == 1
    await waiting.send(b"x")


async def test_fencing_puts_others_out_and_outlives_a_reload(
    broker: Broker, connect: Connect
) -> None:
    client = await connect()
    first = await client.create_producer(TOPIC, named("a", producer_access_mode=EXCLUSIVE))
    waiting = await client.create_producer(TOPIC, named("w", producer_access_mode=WAIT))
    fencing = named("b", producer_access_mode=FENCING)
    second = await client.create_producer(TOPIC, fencing)
    closed = await client.wait(first.events.get())
    assert closed.close_producer.request_id == UNSOLICITED_REQUEST_ID
    assert closed.close_producer.producer_id == first.producer_id
    refused = await client.wait(client.events.get())
    assert pb.ServerError.Name(refused.error.error) == "ProducerFenced"
    assert waiting.success.producer_ready is False
    assert second.success.topic_epoch == 1
    await second.close()
    await broker.topics.unload(parse_topic_name(TOPIC))
    outdated = named("a", 1, producer_access_mode=EXCLUSIVE, topic_epoch=0)
    assert await code_of(client.create_producer(TOPIC, outdated)) == "ProducerFenced"
    mine = named("b", 1, producer_access_mode=EXCLUSIVE, topic_epoch=1)
    assert (await client.create_producer(TOPIC, mine)).success.topic_epoch == 1


async def test_a_producer_is_closed_though_the_one_that_fences_it_leaves_meanwhile(
    broker: Broker, connect: Connect
) -> None:
    client, fencing = await connect(), await connect()
    first = await client.create_producer(TOPIC, named("a"))
    attached = broker.topics.loaded()[TOPIC].producers["a"]
    attached.pending += 1  # a SEND whose entry is not durable yet
    command = named("b", producer_access_mode=FENCING)
    opening = asyncio.create_task(fencing.create_producer(TOPIC, command))
    await until(lambda: attached.stopped)
    await fencing.close()
    await asyncio.wait((opening,))
    assert opening.exception() is not None
    await until(lambda: "b" not in broker.topics.loaded()[TOPIC].producers)
    attached.pending -= 1
    attached.now_idle()
    # Else it would go on, and everything that it sends would be dropped without an answer.
    closed = await client.wait(first.events.get())
    assert closed.type == Kind.CLOSE_PRODUCER
    await (await client.create_producer(TOPIC, named("a", 1))).send(b"x")


async def test_sealing_waits_for_producers_and_refuses_new_ones(
    broker: Broker, connect: Connect
) -> None:
    await make_segment(broker)
    client = await connect()
    producer = await client.create_producer(SEGMENT)
    topic = broker.topics.loaded()[SEGMENT]
    topic.begin_seal()
    assert await code_of(client.create_producer(SEGMENT)) == "TopicTerminatedError"
    sealing = asyncio.create_task(topic.seal())
    receipt = await producer.send(b"in time")
    assert not topic.sealed
    await producer.close()
    last = await sealing
    assert (last.ledger_id, last.entry_id) == (
        receipt.message_id.ledger_id,
        receipt.message_id.entry_id,
    )
    assert topic.sealed
    assert await topic.seal() == last
    await broker.topics.unload(topic.name)
    assert await code_of(client.create_producer(SEGMENT)) == "TopicTerminatedError"


async def test_sends_behind_the_close_of_a_sealing_segment_are_taken(
    broker: Broker, connect: Connect
) -> None:
    """The official client's close overtakes what it has queued; order holds only if that counts."""
    await make_segment(broker)
    client = await connect()
    producer = await client.create_producer(SEGMENT)
    await producer.send(b"before")
    topic = broker.topics.loaded()[SEGMENT]
    sealing = asyncio.create_task(topic.seal())
    closing = asyncio.create_task(producer.close())
    await asyncio.sleep(0)
    receipts: list[object] = []
    for payload in (b"queued 1", b"queued 2"):
        producer.send_frame(*producer.frame(payload), receipts.append)
    await client.wait(closing)
    assert [type(receipt) for receipt in receipts] == [pb.CommandSendReceipt] * 2
    await client.wait(sealing)
    assert await stored(broker, SEGMENT) == 3


async def test_a_close_of_a_sealing_segment_does_not_wait_for_ever_for_an_answer(
    broker: Broker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "ECHO_WAIT_S", 0.05)
    await make_segment(broker)
    client = await connect()
    producer = await client.create_producer(SEGMENT)
    monkeypatch.setattr(client, "send_pong", lambda: None)
    broker.topics.loaded()[SEGMENT].begin_seal()
    await producer.close()
    await broker.topics.loaded()[SEGMENT].seal()
    assert broker.topics.loaded()[SEGMENT].sealed


@pytest.mark.parametrize(("topic", "wait_s"), [(TOPIC, 1000), (SEGMENT, 0.05)])
async def test_sealing_does_not_wait_for_ever(
    broker: Broker,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    topic: str,
    wait_s: float,
) -> None:
    """Producers of a segment know of it and are waited for; those of another topic never leave."""
    await make_segment(broker)
    set_bound(monkeypatch, "SEAL_WAIT_S", wait_s)
    client = await connect()
    producer = await client.create_producer(topic)
    await producer.send(b"x")
    async with asyncio.timeout(TIMEOUT_S):
        await broker.topics.loaded()[topic].seal()
    told = await client.wait(producer.events.get())
    assert told.close_producer.request_id == UNSOLICITED_REQUEST_ID
    client.write(producer.frame(b"late")[1])
    await client.ping()
    assert broker.topics.loaded()[topic].ledger.entry_count == 1


async def test_a_topic_that_could_not_be_terminated_goes_on(
    broker: Broker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await connect()
    producer = await client.create_producer(TOPIC)
    await producer.send(b"before")
    topic = broker.topics.loaded()[TOPIC]

    async def away(_: object) -> Position:
        raise MetadataError("The store is away.")

    with monkeypatch.context() as patched:
        patched.setattr(ManagedLedger, "_save_end", away)
        with pytest.raises(MetadataError):
            await topic.seal()
        told = await client.wait(producer.events.get())
        assert told.type == pb.BaseCommand.CLOSE_PRODUCER
    again = await client.create_producer(TOPIC)
    await again.send(b"after")
    assert await stored(broker, TOPIC) == 2
    await broker.topics.loaded()[TOPIC].seal()
    assert await code_of(client.create_producer(TOPIC)) == "TopicTerminatedError"


async def test_schemas_of_producers_share_one_history(connect: Connect) -> None:
    client = await connect()
    plain = await client.create_producer(TOPIC)
    assert plain.success.schema_version == b""
    text = pb.CommandProducer(schema=pb.Schema(name="s", schema_data=b"", type=pb.Schema.String))
    first = await client.create_producer(TOPIC, text)
    again = await client.create_producer(TOPIC, text)
    assert first.success.schema_version == again.success.schema_version == bytes(8)
    other = pb.CommandProducer(schema=pb.Schema(name="s", schema_data=b"", type=pb.Schema.Int32))
    assert await code_of(client.create_producer(TOPIC, other)) == "IncompatibleSchema"


async def test_a_schema_of_bytes_has_a_version_as_any_other(connect: Connect) -> None:
    """Pulsar's Go client sends type None for it, and looks that version up when it reads."""
    client = await connect()
    none = pb.Schema(name="", schema_data=b"", type="None")
    await client.create_producer(TOPIC)
    asked = pb.CommandGetOrCreateSchema(topic=TOPIC, schema=none)
    made = await client.request(pb.BaseCommand.GET_OR_CREATE_SCHEMA, asked)
    assert made.get_or_create_schema_response.schema_version == b""
    get = pb.CommandGetSchema(topic=TOPIC)
    assert await code_of(client.request(pb.BaseCommand.GET_SCHEMA, get)) == "TopicNotFound"
    producer = await client.create_producer(TOPIC, pb.CommandProducer(schema=none))
    assert producer.success.schema_version == bytes(8)
    get.schema_version = producer.success.schema_version
    found = (await client.request(pb.BaseCommand.GET_SCHEMA, get)).get_schema_response
    assert (found.schema.type, found.schema_version) == (none.type, bytes(8))
    text = pb.CommandProducer(schema=pb.Schema(name="s", schema_data=b"", type=pb.Schema.String))
    assert await code_of(client.create_producer(TOPIC, text)) == "IncompatibleSchema"


@pytest.mark.parametrize("name", ["__compaction", "  "])
async def test_initial_subscription_of_the_broker_or_without_a_name_is_refused(
    broker: Broker, connect: Connect, name: str
) -> None:
    options = pb.CommandProducer(initial_subscription_name=name)
    assert await code_of((await connect()).create_producer(TOPIC, options)) == "NotAllowedError"
    assert not broker.topics.loaded()[TOPIC].subscriptions


@pytest.mark.parametrize("topic", [TOPIC, "topic://public/default/t", f"{TOPIC}-partition-0"])
async def test_topic_that_does_not_exist_takes_no_schema(
    broker: Broker, connect: Connect, topic: str
) -> None:
    client = await connect()
    text = pb.Schema(name="s", schema_data=b"", type=pb.Schema.String)
    asked = pb.CommandGetOrCreateSchema(topic=topic, schema=text)
    work = client.request(pb.BaseCommand.GET_OR_CREATE_SCHEMA, asked)
    assert await code_of(work) == "TopicNotFound"
    with pytest.raises(SchemaNotFound):
        await broker.schemas.get(parse_topic_name(topic).schema_id, None)


async def test_topic_takes_schemas_by_the_names_of_its_partitions_and_segments(
    broker: Broker, connect: Connect
) -> None:
    client = await connect()
    await broker.topics.partitioned.create(parse_topic_name(TOPIC), 2)
    scalable = parse_topic_name("topic://public/default/s")
    await broker.scalable.create(scalable, segments=1, properties={})
    text = pb.Schema(name="s", schema_data=b"", type=pb.Schema.String)
    segment = "segment://public/default/s/0000-ffff-0"
    for topic in (TOPIC, f"{TOPIC}-partition-1", "topic://public/default/s", segment):
        asked = pb.CommandGetOrCreateSchema(topic=topic, schema=text)
        made = await client.request(pb.BaseCommand.GET_OR_CREATE_SCHEMA, asked)
        assert made.get_or_create_schema_response.schema_version == bytes(8)


@pytest.mark.parametrize("version", [b"\0", bytes(16)])
async def test_schema_version_of_another_length_is_refused(
    connect: Connect, version: bytes
) -> None:
    client = await connect()
    text = pb.Schema(name="s", schema_data=b"", type=pb.Schema.String)
    await client.create_producer(TOPIC, pb.CommandProducer(schema=text))
    get = pb.CommandGetSchema(topic=TOPIC, schema_version=version)
    assert await code_of(client.request(pb.BaseCommand.GET_SCHEMA, get)) == "TopicNotFound"
    get.schema_version = b""
    found = (await client.request(pb.BaseCommand.GET_SCHEMA, get)).get_schema_response
    assert found.schema_version == bytes(8)


async def test_a_lost_connection_lets_its_producers_go(broker: Broker, connect: Connect) -> None:
    client = await connect()
    producer = await client.create_producer(TOPIC)
    producer.write_many(200)
    await client.ping()
    topic = broker.topics.loaded()[TOPIC]
    await client.close()
    await until(lambda: not topic.producers)
    assert broker.publish_limits.inflight_bytes == 0
    assert topic.messages_in_total == 200


async def test_a_first_subscription_can_come_with_the_producer(
    broker: Broker, connect: Connect
) -> None:
    options = pb.CommandProducer(initial_subscription_name="dead")
    producer = await (await connect()).create_producer(TOPIC, options)
    await producer.send(b"x")
    assert broker.topics.loaded()[TOPIC].subscriptions["dead"].backlog == 1


async def test_a_first_subscription_is_refused_where_policies_forbid_new_ones(
    broker: Broker, connect: Connect
) -> None:
    client = await connect()
    await client.create_producer(TOPIC, pb.CommandProducer(initial_subscription_name="known"))
    forbidden = {"allowAutoSubscriptionCreation": False}
    await broker.topic_policies.update(
        parse_topic_name(TOPIC),
        lambda found: found.changed("autoSubscriptionCreation", forbidden, is_global=False),
    )
    options = pb.CommandProducer(initial_subscription_name="dead")
    assert await code_of(client.create_producer(TOPIC, options)) == "NotAllowedError"
    assert list(broker.topics.loaded()[TOPIC].subscriptions) == ["known"]
    await client.create_producer(TOPIC, pb.CommandProducer(initial_subscription_name="known"))


async def test_many_may_wait_and_the_connection_goes_on(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "MAX_PENDING_REQUESTS", 5)
    client = await connect()
    holder = await client.create_producer(TOPIC)
    waiting = [
        await client.create_producer(TOPIC, pb.CommandProducer(producer_access_mode=WAIT))
        for _ in range(10)
    ]
    await client.ping()
    await holder.close()
    ready = await client.wait(client.events.get())
    assert ready.producer_success.producer_name == waiting[0].name
    await waiting[0].send(b"x")


async def test_a_name_held_by_a_dead_peer_is_given_away(
    broker: Broker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "LIVENESS_CHECK_S", 0.1)
    dead, other = await connect(), await connect()
    await dead.create_producer(TOPIC, named("n"))
    dead.transport.pause_reading()  # type: ignore[union-attr]
    taken = await other.create_producer(TOPIC, named("n"))
    await taken.send(b"x")
    dead.transport.resume_reading()  # type: ignore[union-attr]
    await dead.wait_closed()
    assert list(broker.topics.loaded()[TOPIC].producers) == ["n"]
