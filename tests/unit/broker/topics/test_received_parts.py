"""Senders of another cluster's segments that publish to a segment here, over the bare protocol."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from broker.app.service import Broker
from broker.topics.received_parts import ReceivedParts
from broker.topics.replicated_messages import ReplicatedMessage
from broker.topics.replicated_ranges import LAST_HASH, Mark, PartRecord, SourceSegment
from broker.topics.replicated_ranges import NOTHING as NONE
from broker.topics.segment_sources import SegmentSources, SourceState
from broker.topics.sequence_store import SequenceStore
from broker.topics.topic import Topic
from broker.topics.topic_stats import replication_stats
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import EARLIEST, LONG_MAX, Position, to_wire
from magnetar.protocol.names import parse_topic_name
from storage.managed_ledger.types import ManagedLedgerFenced
from storage.managed_ledger.writer import GroupCallback, LedgerWriter
from tests.support.embedded_broker import running
from tests.support.raw_client import BrokerError, RawClient, RawProducer
from tests.support.waiting import until

Connect = Callable[[], Awaitable[RawClient]]
Kind = pb.BaseCommand
NAME = parse_topic_name("topic://public/default/t")
WHOLE = "segment://public/default/t/0000-ffff-0"
SOURCE = SourceSegment("east", 7, 3)
STATE = SourceState(SOURCE, 1, 5, frozenset({3, 4}), frozenset({4}), EARLIEST)
OTHER = STATE._replace(source=SOURCE._replace(segment_id=4), drained=frozenset())
SENDER = "pulsar.repl.east.3"
NOTHING = pb.ReplicatedRange(hash_start=0, ledger_id=-1, entry_id=-1)


def up_to(entry: int, start: int = 0) -> pb.ReplicatedRange:
    """What a sender is told if everything up to an entry is stored."""
    return pb.ReplicatedRange(hash_start=start, ledger_id=1, entry_id=entry)


async def attach(
    client: RawClient, state: SourceState = STATE, topic: str = WHOLE, name: str = SENDER
) -> RawProducer:
    """Open the producer of a sender."""
    options = pb.CommandProducer(producer_name=name, source_state=state.to_wire())
    return await client.create_producer(topic, options)


async def told(
    client: RawClient, state: SourceState = STATE, topic: str = WHOLE
) -> list[pb.ReplicatedRange]:
    """What a sender is told when it attaches."""
    return list((await attach(client, state, topic)).success.replicated_ranges)


def part(
    entry: int, start: int = 0, end: int = LAST_HASH, source: SourceSegment = SOURCE
) -> pb.MessageMetadata:
    """The metadata of a part."""
    metadata = pb.MessageMetadata(
        producer_name="p", sequence_id=9, publish_time=1, replicated_from=source.cluster
    )
    record = PartRecord(Position(1, entry), start, end)
    metadata.replicated_part.CopyFrom(record.to_wire(source))
    return metadata


async def send(producer: RawProducer, metadata: pb.MessageMetadata) -> bool:
    """Whether a part is stored now; False: it was before."""
    receipt = await producer.send(b"m", metadata=metadata)
    if receipt.message_id.entry_id == to_wire(-1):
        assert receipt.message_id.ledger_id == to_wire(-1)
        return False
    return True


async def refused(producer: RawProducer, metadata: pb.MessageMetadata, match: str) -> int:
    """The code with which a part is refused."""
    with pytest.raises(BrokerError, match=match) as refusal:
        await producer.send(b"m", metadata=metadata)
    return refusal.value.code


def segment(broker: Broker, name: str = WHOLE) -> Topic:
    """A segment that is loaded."""
    return broker.topics.loaded()[name]


def sources_of(broker: Broker, name: str = WHOLE) -> SegmentSources:
    """What a segment has of other clusters."""
    sources = segment(broker, name).sequence_store.sources
    assert sources is not None
    return sources


@pytest.fixture
async def sender(broker: Broker, connect: Connect) -> RawClient:
    """A client, and a scalable topic with one segment."""
    await broker.scalable.create(NAME, segments=1, properties={})
    return await connect()


async def test_connected_command_announces_that_segments_are_taken(sender: RawClient) -> None:
    assert sender.connected.segment_replication


async def test_a_sender_is_told_what_is_stored_of_its_segment(sender: RawClient) -> None:
    first = await attach(sender)
    assert list(first.success.replicated_ranges) == [NOTHING]
    assert await send(first, part(0))
    assert await send(first, part(1, 0, 99))
    assert await told(sender) == [up_to(1), up_to(0, 100)]
    other = STATE._replace(source=SOURCE._replace(incarnation=8))
    assert await told(sender, other) == [NOTHING]


async def test_what_a_sender_has_acknowledged_counts_as_stored(sender: RawClient) -> None:
    assert await told(sender, STATE._replace(acknowledged=Position(1, 6))) == [up_to(6)]


async def test_a_part_that_is_stored_is_answered_without_a_position(
    broker: Broker, sender: RawClient
) -> None:
    producer = await attach(sender)
    assert await send(producer, part(0))
    assert not await send(producer, part(0))
    assert await send(producer, part(1))
    assert segment(broker).ledger.entry_count == 2


async def test_statistics_add_up_the_senders_of_a_cluster(
    broker: Broker, connect: Connect, sender: RawClient
) -> None:
    first = await attach(sender, STATE._replace(drained=frozenset()))
    other = await attach(await connect(), OTHER, name="pulsar.repl.east.4")
    for producer, source in ((first, SOURCE), (first, SOURCE), (other, OTHER.source)):
        assert await send(producer, part(producer.next_sequence_id, source=source))
    now_s = asyncio.get_running_loop().time()
    shown = replication_stats(segment(broker).producers.values(), now_s)
    assert shown["east"]["msgInCount"] == 3
    assert list(shown) == ["east"]


@pytest.mark.parametrize("ending", ["drained", "crashed"])
async def test_a_sender_is_told_the_same_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    if ending == "crashed":

        async def forgets(store: SequenceStore) -> None:
            return None

        monkeypatch.setattr(SequenceStore, "close", forgets)
    async with running(tmp_path) as broker:
        await broker.scalable.create(NAME, segments=1, properties={})
        client = await RawClient.open("127.0.0.1", broker.port)
        producer = await attach(client)
        for entry in range(3):
            assert await send(producer, part(entry))
        await client.close()
    async with running(tmp_path) as broker:
        client = await RawClient.open("127.0.0.1", broker.port)
        # That the newest layout is known was durable before the first attach was answered.
        with pytest.raises(BrokerError, match="has a newer layout") as stale:
            await attach(client, STATE._replace(layout_epoch=4))
        assert stale.value.code == pb.ProducerFenced
        (ended,) = (
            await attach(client, OTHER, name="pulsar.repl.east.4")
        ).success.replicated_ranges
        assert ended.entry_id == LONG_MAX
        assert await told(client) == [up_to(2)]
        await client.close()


async def test_a_newer_session_ends_the_one_before_it(connect: Connect, sender: RawClient) -> None:
    first, later = await attach(sender), await attach(await connect())
    assert (await sender.wait(first.events.get())).type == Kind.CLOSE_PRODUCER
    assert await send(later, part(0))


async def test_a_stale_sender_ends_no_session(connect: Connect, sender: RawClient) -> None:
    producer = await attach(sender, STATE._replace(owner_epoch=2))
    for state in (STATE, STATE._replace(owner_epoch=2, layout_epoch=4)):
        with pytest.raises(BrokerError, match="has a newer") as stale:
            await attach(await connect(), state)
        assert stale.value.code == pb.ProducerFenced
    assert await send(producer, part(0))


async def test_the_session_of_an_ancestor_ends(connect: Connect, sender: RawClient) -> None:
    of_ancestor = await attach(sender, OTHER, name="pulsar.repl.east.4")
    await attach(await connect())
    code = await refused(of_ancestor, part(0, source=OTHER.source), "has ended: attach again")
    assert code == pb.PersistenceError


async def test_a_part_out_of_order_closes_the_sender(broker: Broker, sender: RawClient) -> None:
    producer = await attach(sender)
    with pytest.raises(BrokerError, match=r"Part 1 .* is out of order") as refusal:
        await producer.send(b"m", metadata=part(0), sequence_id=1)
    assert refusal.value.code == pb.PersistenceError
    assert not segment(broker).ledger.entry_count
    assert not segment(broker).producers
    assert await told(sender) == [NOTHING]


def marker() -> pb.MessageMetadata:
    metadata = part(0)
    metadata.marker_type = 10
    return metadata


def chunk(chunk_id: int, *, of: str = "east") -> pb.MessageMetadata:
    """The metadata of a chunk without a record."""
    return pb.MessageMetadata(
        producer_name="p",
        sequence_id=9,
        publish_time=1,
        replicated_from=of,
        uuid="u",
        num_chunks_from_msg=2,
        chunk_id=chunk_id,
    )


def impossible() -> pb.MessageMetadata:
    metadata = part(0)
    metadata.replicated_part.hash_start = LAST_HASH + 1
    return metadata


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        (pb.MessageMetadata(), "has no record of its source"),
        (chunk(1), "has no record of its source"),
        (chunk(0, of="north"), "has no record of its source"),
        (part(0, source=SOURCE._replace(segment_id=4)), "is of segment 4 of cluster east"),
        (part(0, source=SOURCE._replace(incarnation=8)), "is of segment 3 of cluster east"),
        (impossible(), "the record of the part cannot be"),
        (marker(), "Markers are not replicated to segments"),
    ],
)
async def test_a_part_that_is_none_is_refused(
    broker: Broker, sender: RawClient, metadata: pb.MessageMetadata, reason: str
) -> None:
    producer = await attach(sender)
    assert await refused(producer, metadata, f"(?i){reason}") == pb.PersistenceError
    assert not segment(broker).ledger.entry_count


async def test_chunks_before_the_last_one_need_no_record(broker: Broker, sender: RawClient) -> None:
    producer = await attach(sender)
    last = part(5)
    last.MergeFrom(chunk(1))
    for metadata in (chunk(0), last):
        receipt = await producer.send(b"m", metadata=metadata, send=pb.CommandSend(is_chunk=True))
        assert receipt.message_id.entry_id != to_wire(-1)
    assert await told(sender) == [up_to(5)]
    assert segment(broker).ledger.entry_count == 2


@pytest.mark.parametrize(
    ("topic", "name", "state", "reason"),
    [
        (WHOLE, SENDER, None, "which takes those that send"),
        (WHOLE, "p", STATE, "is for names that begin with"),
        ("persistent://public/default/p", SENDER, STATE, "on segments"),
        (WHOLE, "pulsar.repl.east.4", STATE, "name it pulsar.repl.<cluster>.3"),
        (WHOLE, "pulsar.repl." + "e" * 256 + ".3", STATE, "name it pulsar.repl.<cluster>.3"),
        (WHOLE, "pulsar.repl.3", STATE, "name it pulsar.repl.<cluster>.3"),
        (WHOLE, SENDER, STATE._replace(segments=frozenset({4})), "send all of it"),
        (WHOLE, SENDER, STATE._replace(drained=frozenset({9})), "send all of it"),
        (WHOLE, SENDER, STATE._replace(acknowledged=Position(3, -9)), "is no position"),
        (WHOLE, SENDER, STATE._replace(acknowledged=Position(-2, 0)), "is no position"),
        (WHOLE, SENDER, STATE._replace(acknowledged=Position(LONG_MAX, 0)), "is no position"),
        (WHOLE, SENDER, STATE._replace(segments=frozenset(range(2049))), "2048 at most"),
        (WHOLE, "pulsar.repl.standalone.3", STATE, "back to its own cluster"),
    ],
)
async def test_a_sender_that_cannot_be_one_is_refused(
    sender: RawClient, topic: str, name: str, state: SourceState | None, reason: str
) -> None:
    options = pb.CommandProducer(producer_name=name)
    if state is not None:
        options.source_state.CopyFrom(state.to_wire())
    with pytest.raises(BrokerError, match=reason) as refusal:
        await sender.create_producer(topic, options)
    assert refusal.value.code == pb.NotAllowedError


def not_taken(*_: object) -> int:
    raise ManagedLedgerFenced("The test says no.")


def not_stored(_: object, entries: Sequence[bytes], done: GroupCallback) -> int:
    for _ in entries:
        asyncio.get_running_loop().call_soon(done, (), ManagedLedgerFenced("The test says no."))
    return len(entries)


@pytest.mark.parametrize("fails", [not_taken, not_stored])
async def test_a_failed_append_ends_every_session(
    broker: Broker,
    connect: Connect,
    sender: RawClient,
    monkeypatch: pytest.MonkeyPatch,
    fails: Callable[..., int],
) -> None:
    producer = await attach(sender, STATE._replace(drained=frozenset()))
    await attach(await connect(), OTHER, name="pulsar.repl.east.4")
    sources = sources_of(broker)
    monkeypatch.setattr(LedgerWriter, "append_all", fails)
    await refused(producer, part(0), "The test says no")
    assert sources.failures == 1
    assert [each.runs[0].mark.entry_id for each in sources.durable().values()] == [-1, -1]
    monkeypatch.undo()
    await until(lambda: WHOLE not in broker.topics.loaded())
    assert await told(await connect(), STATE._replace(drained=frozenset())) == [NOTHING]


def of_two_sessions() -> tuple[SegmentSources, ReceivedParts, ReceivedParts]:
    """Two senders."""
    sources = SegmentSources(0, LAST_HASH)
    first, other = (
        ReceivedParts(sources, sources.attach(state))
        for state in (STATE._replace(drained=frozenset()), OTHER)
    )
    return sources, first, other


def test_a_part_that_is_stored_though_another_one_is_lost_counts() -> None:
    sources, first, other = of_two_sessions()
    messages = [ReplicatedMessage(0, 0, record=PartRecord(Position(1, 8), 0, 9)) for _ in "ab"]
    assert not first.is_duplicate(messages[0])
    assert not other.is_duplicate(messages[1])
    first.lost()
    other.stored(messages[1], Position(5, 5))
    assert sources.durable()[OTHER.source].at(0) == Mark(1, 8)
    assert sources.durable()[SOURCE].at(0) == NONE


def test_a_part_that_is_lost_with_others_ends_no_later_session() -> None:
    sources, first, other = of_two_sessions()
    message = ReplicatedMessage(0, 0, record=PartRecord(Position(1, 8), 0, 9))
    assert not first.is_duplicate(message)
    assert not other.is_duplicate(message)
    first.lost()
    later = ReceivedParts(sources, sources.attach(OTHER))
    assert not later.is_duplicate(message)
    other.lost()
    later.stored(message, Position(5, 5))
    assert later.is_duplicate(ReplicatedMessage(1, 1, record=message.record))


# Layout changes


async def test_a_sealed_segment_takes_no_sender_and_its_children_tell_the_rest(
    broker: Broker, connect: Connect, sender: RawClient
) -> None:
    producer = await attach(sender)
    assert await send(producer, part(0))
    assert await send(producer, part(1, 0, 0x7FFF))
    await broker.scalable.split(NAME, 0)
    await until(lambda: segment(broker).sealing)
    options = pb.CommandProducer(producer_name=SENDER, source_state=STATE.to_wire(), epoch=1)
    with pytest.raises(BrokerError, match="is sealed") as refusal:
        await (await connect()).create_producer(WHOLE, options)
    assert refusal.value.code == pb.TopicTerminatedError
    await sender.close()
    client = await connect()
    left, right = (f"segment://public/default/t/{each}" for each in ("0000-7fff-1", "8000-ffff-2"))
    assert await told(client, topic=left) == [up_to(1)]
    assert await told(client, topic=right) == [up_to(0, 0x8000)]


async def test_a_child_takes_no_sender_before_its_parent_is_sealed(
    broker: Broker, connect: Connect, sender: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.topics.sequence_store.CARRIED_WAIT_S", 0.01)
    producer = await sender.create_producer(WHOLE)
    await broker.scalable.split(NAME, 0)
    child = "segment://public/default/t/0000-7fff-1"
    with pytest.raises(BrokerError, match="are not here yet") as refusal:
        await attach(await connect(), topic=child)
    assert refusal.value.code == pb.ServiceNotReady
    await producer.close()
    await until(lambda: not segment(broker, child).sequence_store.awaits_parents)
    assert await told(await connect(), topic=child) == [NOTHING]
