"""Replicators of other clusters that publish here, over the bare protocol."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from broker.app.service import Broker
from broker.topics.sequence_store import SequenceStore
from broker.topics.subscription_markers import MARKER_RECEIPT
from broker.topics.topic import TopicUnavailable
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import EARLIEST, Position
from magnetar.protocol.message import parse_metadata
from magnetar.protocol.names import NamespaceName, parse_topic_name
from tests.support.embedded_broker import running
from tests.support.raw_client import BrokerError, RawClient, Receipt
from tests.support.raw_replicator import BY_POSITION, RawReplicator
from tests.support.waiting import until
from tests.unit.broker.admin.conftest import asking_broker

Connect = Callable[..., Awaitable[RawClient]]
TOPIC = "persistent://public/default/t"
NAMESPACE = "/admin/v2/namespaces/public/default"
STATS = "/admin/v2/persistent/public/default/t/stats"
Kind = pb.BaseCommand


async def set_policies(broker: Broker, **policies: object) -> None:
    name = NamespaceName("public", "default")
    await broker.namespaces.change(name, lambda record: record.update(policies))


async def open_client(broker: Broker, *, by_position: bool = True) -> RawClient:
    command = BY_POSITION if by_position else None
    return await RawClient.open("127.0.0.1", broker.port, command)


async def stored(broker: Broker, topic: str = TOPIC) -> list[pb.MessageMetadata]:
    """The metadata of all that is stored, in order."""
    found: list[pb.MessageMetadata] = []
    ledger = (await broker.topics.get(parse_topic_name(topic), create=True)).ledger
    position = EARLIEST
    while entries := await ledger.read(position, max_entries=100, max_bytes=10**9):
        found += [parse_metadata(entry.data) for entry in entries]
        position = ledger.next_position(entries[-1].position)
    return found


@pytest.fixture(params=["drained", "crashed"])
def ending(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How the first broker ends: with its last snapshot taken, or with entries to replay."""
    if request.param == "crashed":

        async def forgets(store: SequenceStore) -> None:
            return None

        monkeypatch.setattr(SequenceStore, "close", forgets)


def marker(replicator: RawReplicator, kind: int) -> tuple[pb.MessageMetadata, pb.CommandSend]:
    metadata = replicator.metadata(None, "pulsar.marker")
    metadata.marker_type = kind
    return metadata, pb.CommandSend(marker=True)


# Receipts


@pytest.mark.parametrize("deduplicates", [False, True])
async def test_receipts_name_the_source_position(
    broker: Broker, connect: Connect, deduplicates: bool
) -> None:
    await set_policies(broker, deduplicationEnabled=deduplicates)
    replicator = await RawReplicator.open(await connect(BY_POSITION), TOPIC)
    assert replicator.by_position
    for source in (Position(7, 0), Position(7, 1), Position(9, 0)):
        assert await replicator.send_at(source)
    assert [each.replicated_from for each in await stored(broker)] == ["east"] * 3


@pytest.mark.parametrize("deduplicates", [False, True])
async def test_receipts_are_usual_ones_unless_the_replicator_announces_positions(
    broker: Broker, connect: Connect, deduplicates: bool
) -> None:
    await set_policies(broker, deduplicationEnabled=deduplicates)
    replicator = await RawReplicator.open(await connect(), TOPIC)
    for number in range(3):
        metadata = replicator.metadata(f"7:{number}", sequence_id=number)
        assert await replicator.send(metadata)


@pytest.mark.parametrize(
    "source", [None, "", "7", "7:", ":7", "7:1:2", "-7:1", "7:-1", "a:b", f"7:{2**63}", "\u0667:1"]
)
async def test_message_without_a_source_position_is_refused(
    broker: Broker, connect: Connect, source: str | None
) -> None:
    replicator = await RawReplicator.open(await connect(BY_POSITION), TOPIC)
    with pytest.raises(BrokerError, match="__MSG_PROP_REPL_SOURCE_POSITION") as refused:
        await replicator.send(replicator.metadata(source))
    assert refused.value.code == pb.PersistenceError
    assert not await stored(broker)


async def test_receipt_names_the_first_position_and_the_last_one_counts(
    broker: Broker, connect: Connect
) -> None:
    # An application has copied the properties of a replicated message into the second one.
    await set_policies(broker, deduplicationEnabled=True)
    replicator = await RawReplicator.open(await connect(BY_POSITION), TOPIC)
    copied = replicator.metadata("9999:5")
    copied.properties.add(key="__MSG_PROP_REPL_SOURCE_POSITION", value="7:1")
    assert await replicator.send_at(Position(7, 0))
    assert await replicator.send(copied, Position(9999, 5))
    assert await replicator.send_at(Position(7, 2))
    assert not await replicator.send(copied, Position(9999, 5))


# Deduplication by position


async def test_what_is_sent_again_is_dropped_where_the_topic_deduplicates(
    broker: Broker, connect: Connect
) -> None:
    await set_policies(broker, deduplicationEnabled=True)
    replicator = await RawReplicator.open(await connect(BY_POSITION), TOPIC)
    sources = [Position(7, 0), Position(7, 10), Position(10, 0), Position(10, 1)]
    assert [await replicator.send_at(each) for each in sources] == [True] * 4
    # Ledger and entry are compared as a pair: 7:11 is below 10:0.
    again = [*sources, Position(7, 11), Position(2, 99)]
    assert [await replicator.send_at(each) for each in again] == [False] * 6
    assert await replicator.send_at(Position(10, 2))
    assert len(await stored(broker)) == 5


async def test_what_is_sent_again_is_stored_again_without_deduplication(
    broker: Broker, connect: Connect
) -> None:
    replicator = await RawReplicator.open(await connect(BY_POSITION), TOPIC)
    assert [await replicator.send_at(Position(7, each)) for each in (0, 1, 0, 1)] == [True] * 4


async def test_clusters_are_counted_apart(broker: Broker, connect: Connect) -> None:
    await set_policies(broker, deduplicationEnabled=True)
    client = await connect(BY_POSITION)
    east = await RawReplicator.open(client, TOPIC, "east")
    west = await RawReplicator.open(client, TOPIC, "west")
    assert [await each.send_at(Position(7, 0)) for each in (east, west)] == [True, True]
    assert [await each.send_at(Position(7, 0)) for each in (east, west)] == [False, False]


async def test_deduplication_that_is_switched_on_holds_at_once(
    broker: Broker, connect: Connect
) -> None:
    replicator = await RawReplicator.open(await connect(BY_POSITION), TOPIC)
    assert await replicator.send_at(Position(7, 0))
    await set_policies(broker, deduplicationEnabled=True)
    assert not await replicator.send_at(Position(7, 0))


@pytest.mark.usefixtures("ending")
@pytest.mark.parametrize("deduplicates", [False, True])
async def test_reconnected_replicator_stores_nothing_twice_after_a_restart(
    tmp_path: Path, deduplicates: bool
) -> None:
    async with running(tmp_path) as broker:
        await set_policies(broker, deduplicationEnabled=deduplicates)
        replicator = await RawReplicator.open(await open_client(broker), TOPIC)
        assert all([await replicator.send_at(Position(7, entry)) for entry in range(10)])
        await broker.drain()
    async with running(tmp_path) as broker:
        again = await RawReplicator.open(await open_client(broker), TOPIC, epoch=1)
        answers = [await again.send_at(Position(7, entry)) for entry in range(7, 13)]
        assert answers == [False] * 3 + [True] * 3
        # Without deduplication only the first messages after a reconnect are compared.
        assert await again.send_at(Position(7, 12)) is not deduplicates
        assert len(await stored(broker)) == (13 if deduplicates else 14)


@pytest.mark.usefixtures("ending")
async def test_new_replicator_stores_nothing_twice_after_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        await set_policies(broker, deduplicationEnabled=True)
        replicator = await RawReplicator.open(await open_client(broker), TOPIC)
        assert all([await replicator.send_at(Position(7, entry)) for entry in range(4)])
        await broker.drain()
    async with running(tmp_path) as broker:
        again = await RawReplicator.open(await open_client(broker), TOPIC)
        answers = [await again.send_at(Position(7, entry)) for entry in range(2, 6)]
        assert answers == [False, False, True, True]


async def test_replicator_sends_nothing_before_its_cluster_is_saved(
    broker: Broker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    # After a crash, a replay would count what it sent by origin.
    client = await connect(BY_POSITION)
    saves: list[str] = []
    failing = [True]
    save_writer = SequenceStore.save_writer

    async def save(store: SequenceStore) -> None:
        saves.append("")
        if failing:
            raise TopicUnavailable("The store is away.")
        await save_writer(store)

    monkeypatch.setattr(SequenceStore, "save_writer", save)
    for _ in range(2):
        with pytest.raises(BrokerError, match="The store is away"):
            await RawReplicator.open(client, TOPIC)
    failing.clear()
    for count in (3, 3):
        replicator = await RawReplicator.open(client, TOPIC)
        assert len(saves) == count
        await replicator.producer.close()


# Deduplication by origin


@pytest.mark.usefixtures("ending")
async def test_origins_are_compared_by_the_ids_of_the_metadata(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        await set_policies(broker, deduplicationEnabled=True)
        client = await open_client(broker, by_position=False)
        replicator = await RawReplicator.open(client, TOPIC)
        sent = [("a", 0), ("b", 5), ("a", 1), ("b", 6), ("a", 1), ("b", 5)]
        answers = [
            await replicator.send(replicator.metadata(None, name, number)) for name, number in sent
        ]
        assert answers == [True] * 4 + [False] * 2
        await broker.drain()
    async with running(tmp_path) as broker:
        client = await open_client(broker, by_position=False)
        again = await RawReplicator.open(client, TOPIC, epoch=1)
        for name, number, new in (("a", 1, False), ("b", 6, False), ("a", 2, True)):
            assert await again.send(again.metadata(None, name, number)) is new


async def test_origin_does_not_touch_a_producer_of_its_name(
    broker: Broker, connect: Connect
) -> None:
    await set_policies(broker, deduplicationEnabled=True)
    client = await connect()
    replicator = await RawReplicator.open(client, TOPIC)
    assert await replicator.send(replicator.metadata(None, "same", 100))
    local = await client.create_producer(TOPIC, pb.CommandProducer(producer_name="same"))
    assert local.success.last_sequence_id == -1
    await local.send(b"x", sequence_id=0)
    assert len(await stored(broker)) == 2


@pytest.mark.parametrize("by_position", [False, True])
async def test_message_that_is_sent_twice_at_once_is_stored_once(
    broker: Broker, connect: Connect, by_position: bool
) -> None:
    await set_policies(broker, deduplicationEnabled=True)
    client = await connect(BY_POSITION if by_position else None)
    replicator = await RawReplicator.open(client, TOPIC)
    producer, metadata = replicator.producer, replicator.metadata("7:1", "a", 3)
    frames = [producer.frame(b"x", metadata=metadata) for _ in range(3)]
    for number, frame in frames:
        producer.send_frame(7 if by_position else number, frame, lambda receipt: None)
    # A later message is answered behind all of them.
    expected = Position(7, 2) if by_position else None
    assert await replicator.send(replicator.metadata("7:2", "a", 4), expected)
    assert [each.sequence_id for each in await stored(broker)] == [3, 4]


# Markers


@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("kind", [10, 11, 12, 13])
async def test_markers_of_replicated_subscriptions_are_stored(
    broker: Broker, connect: Connect, kind: int, by_position: bool
) -> None:
    client = await connect(BY_POSITION if by_position else None)
    replicator = await RawReplicator.open(client, TOPIC)
    expected = MARKER_RECEIPT if by_position else None
    metadata, send = marker(replicator, kind)
    assert await replicator.send(metadata, expected, send=send)
    assert [each.marker_type for each in await stored(broker)] == [kind]


@pytest.mark.parametrize("kind", [0, 9, 14, 20])
async def test_other_markers_are_refused(broker: Broker, connect: Connect, kind: int) -> None:
    replicator = await RawReplicator.open(await connect(BY_POSITION), TOPIC)
    metadata, send = marker(replicator, kind)
    with pytest.raises(BrokerError, match="not replicated") as refused:
        await replicator.send(metadata, send=send)
    assert refused.value.code == pb.PersistenceError
    assert not await stored(broker)


# Refusals


@pytest.mark.parametrize("by_position", [False, True])
async def test_nothing_is_stored_behind_a_refused_message(
    broker: Broker, connect: Connect, by_position: bool
) -> None:
    # Else it would count as stored when it comes again.
    await set_policies(broker, deduplicationEnabled=True)
    client = await connect(BY_POSITION if by_position else None)
    replicator = await RawReplicator.open(client, TOPIC)
    producer = replicator.producer
    answers: list[Receipt] = []
    for entry in range(3):
        metadata = replicator.metadata(f"7:{entry}", sequence_id=entry)
        refused = pb.CommandSend(txnid_most_bits=0, txnid_least_bits=1) if entry == 1 else None
        number, frame = producer.frame(b"x", metadata=metadata, send=refused)
        due = 7 if by_position and entry == 0 else number
        producer.send_frame(due, frame, answers.append)
    await until(lambda: len(answers) == 2)
    await client.ping()
    (first, second) = answers
    assert isinstance(first, pb.CommandSendReceipt)
    assert isinstance(second, BrokerError)
    # By this code Apache Pulsar's replicator sends all again that has no receipt.
    assert second.code == pb.PersistenceError
    again = await RawReplicator.open(client, TOPIC, epoch=1)
    for entry in range(1, 3):
        expected = Position(7, entry) if by_position else None
        assert await again.send(again.metadata(f"7:{entry}", sequence_id=entry), expected)
    assert [each.sequence_id for each in await stored(broker)] == [0, 1, 2]


async def test_damaged_message_is_taken_when_it_comes_again(
    broker: Broker, connect: Connect
) -> None:
    client = await connect(BY_POSITION)
    replicator = await RawReplicator.open(client, TOPIC)
    producer = replicator.producer
    answers: list[Receipt] = []
    number, frame = producer.frame(b"x", metadata=replicator.metadata("7:0"))
    producer.send_frame(number, frame[:-1] + b"y", answers.append)
    await until(lambda: bool(answers))
    assert isinstance(answers[0], BrokerError)
    assert answers[0].code == pb.ChecksumError
    producer.send_frame(7, frame, answers.append)
    await until(lambda: len(answers) == 2)
    assert isinstance(answers[1], pb.CommandSendReceipt)


# Who they are


async def test_replicators_count_in_no_maximum(broker: Broker, connect: Connect) -> None:
    await set_policies(broker, max_producers_per_topic=1)
    client = await connect(BY_POSITION)
    for cluster in ("east", "west"):
        await RawReplicator.open(client, TOPIC, cluster)
    await client.create_producer(TOPIC)
    await RawReplicator.open(client, TOPIC, "south")
    with pytest.raises(BrokerError, match="maxProducersPerTopic"):
        await client.create_producer(TOPIC)


async def test_statistics_show_replicators_by_their_cluster(tmp_path: Path) -> None:
    async with running(tmp_path) as broker, asking_broker(broker) as rest:
        client = await open_client(broker)
        replicator = await RawReplicator.open(client, TOPIC)
        await client.create_producer(TOPIC, pb.CommandProducer(producer_name="local"))
        assert await replicator.send_at(Position(1, 1))
        stats = await rest.get(STATS)
        assert isinstance(stats, dict)
        assert [each["producerName"] for each in stats["publishers"]] == ["local"]
        east = stats["replication"]["east"]
        assert list(stats["replication"]) == ["east"]
        assert east["msgInCount"] == 1
        assert east["bytesInCount"] > 0
        assert east["inboundConnection"].startswith("127.0.0.1:")
        assert east["inboundConnectedSince"]
        assert east["connected"] is False
        assert east["replicationBacklog"] == 0
        await replicator.producer.close()
        stats = await rest.get(STATS)
        assert isinstance(stats, dict)
        assert stats["replication"] == {}
        assert stats["msgInCounter"] == 1


async def test_partitions_show_their_replicators_together(tmp_path: Path) -> None:
    async with running(tmp_path) as broker, asking_broker(broker) as rest:
        path = "/admin/v2/persistent/public/default/p"
        await rest.done("PUT", f"{path}/partitions", 2)
        for partition in range(2):
            topic = f"persistent://public/default/p-partition-{partition}"
            replicator = await RawReplicator.open(await open_client(broker), topic)
            assert await replicator.send_at(Position(1, 1))
        stats = await rest.get(f"{path}/partitioned-stats")
        assert isinstance(stats, dict)
        assert stats["publishers"] == []
        assert stats["replication"]["east"]["msgInCount"] == 2
        assert stats["replication"]["east"]["connected"] is False


async def test_replicators_publish_to_non_persistent_topics(
    broker: Broker, connect: Connect
) -> None:
    topic, client = "non-persistent://public/default/t", await connect(BY_POSITION)
    consumer = await client.subscribe(topic, "s", permits=10)
    replicator = await RawReplicator.open(client, topic)
    await replicator.producer.send(b"x", metadata=replicator.metadata("1:1"))
    assert (await consumer.receive()).metadata.replicated_from == "east"
    metadata, send = marker(replicator, 10)
    with pytest.raises(BrokerError, match="marker"):
        await replicator.send(metadata, send=send)
    async with asking_broker(broker) as rest:
        stats = await rest.get("/admin/v2/non-persistent/public/default/t/stats")
    assert isinstance(stats, dict)
    assert stats["publishers"] == []
    assert stats["replication"]["east"]["msgInCount"] == 1


async def test_replicators_are_refused_on_segments(broker: Broker, connect: Connect) -> None:
    client = await connect(BY_POSITION)
    with pytest.raises(BrokerError, match="which takes those that send") as refused:
        await RawReplicator.open(client, "segment://public/default/t/0000-ffff-0")
    assert refused.value.code == pb.NotAllowedError


@pytest.mark.parametrize(("own", "replicated"), [(False, True), (True, False), (False, False)])
async def test_replicators_add_schemas_where_the_namespace_lets_them(
    tmp_path: Path, own: bool, replicated: bool
) -> None:
    schema = pb.Schema(name="s", schema_data=b"", type=pb.Schema.String)
    name = "pulsar.repl.east-->here"
    async with running(tmp_path) as broker, asking_broker(broker) as rest:
        path = f"{NAMESPACE}/isAllowAutoUpdateSchema"
        text = str(replicated).lower()
        await rest.done("POST", f"{path}?allowAutoUpdateSchemaWithReplicator={text}", own)
        client = await open_client(broker)
        await client.create_producer(TOPIC)
        request = pb.CommandGetOrCreateSchema(topic=TOPIC, schema=schema, producer_name=name)
        options = pb.CommandProducer(producer_name=name, schema=schema)
        if own or replicated:
            answer = await client.request(Kind.GET_OR_CREATE_SCHEMA, request)
            assert answer.get_or_create_schema_response.schema_version == bytes(8)
            await client.create_producer(TOPIC, options)
        else:
            with pytest.raises(BrokerError, match="isAllowAutoUpdateSchema"):
                await client.request(Kind.GET_OR_CREATE_SCHEMA, request)
            with pytest.raises(BrokerError, match="isAllowAutoUpdateSchema"):
                await client.create_producer(TOPIC, options)


@pytest.mark.parametrize("adds", [False, True])
async def test_namespace_may_be_created_without_replicated_schemas(
    tmp_path: Path, adds: bool
) -> None:
    member = "is_allow_auto_update_schema_with_replicator"
    async with running(tmp_path) as broker, asking_broker(broker) as rest:
        await rest.done("PUT", "/admin/v2/namespaces/public/n", {member: adds})
        name = parse_topic_name("persistent://public/n/t")
        assert (await broker.policies.require_of(name)).adds_replicated_schemas is adds


async def test_messages_are_delivered_as_they_came(broker: Broker, connect: Connect) -> None:
    client = await connect(BY_POSITION)
    consumer = await client.subscribe(TOPIC, "s", permits=10)
    replicator = await RawReplicator.open(client, TOPIC)
    metadata = replicator.metadata("1:2", "origin", 77)
    metadata.replicate_to.append("west")
    assert await replicator.send(metadata, Position(1, 2), payload=b"payload")
    delivered = await consumer.receive()
    metadata.publish_time = delivered.metadata.publish_time
    assert (delivered.metadata, delivered.payload) == (metadata, b"payload")
