"""Deduplication over layout changes: nothing is stored twice, and nothing new is dropped."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from broker.app.service import Broker
from broker.topics.deduplication import SNAPSHOT_PROPERTY
from broker.topics.producer import ProducerState
from broker.topics.sequence_store import SequenceStore
from config.bounds import SEQUENCE_ATTACH_S
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import EARLIEST, to_wire
from magnetar.protocol.message import parse_metadata
from magnetar.protocol.names import NamespaceName, parse_topic_name
from storage.ledger.store import DiskFull
from storage.managed_ledger.ledger import ManagedLedger
from tests.support.bounds import set_bound
from tests.support.embedded_broker import running
from tests.support.raw_client import BrokerError, RawClient, RawProducer
from tests.support.waiting import until, until_awaited
from tests.unit.broker.topics.test_produce import named

TOPIC = parse_topic_name("topic://public/default/t")
NO_ID = to_wire(-1)
WHOLE = "segment://public/default/t/0000-ffff-0"
LOWER_KEY, UPPER_KEY = "b", "k3"
"""Keys of the lower and of the upper half, for a client of 5.0.0-M1."""


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with running(tmp_path) as broker:
        await deduplicate(broker)
        yield broker


async def deduplicate(broker: Broker, *, on: bool = True) -> None:
    await broker.namespaces.change(
        NamespaceName("public", "default"), lambda record: record.update(deduplicationEnabled=on)
    )


async def client_of(broker: Broker) -> RawClient:
    """A client that counts its requests from a random number on, as Java clients do."""
    first_id = random.randrange(2**40, 2**50)
    return await RawClient.open("127.0.0.1", broker.port, first_id=first_id)


async def segment_topic(broker: Broker, segment_id: int) -> str:
    layout = (await broker.scalable.get(TOPIC)).layout
    found = layout.segments[segment_id]
    return f"segment://public/default/t/{found.hash_start:04x}-{found.hash_end:04x}-{segment_id}"


async def producer_of(
    client: RawClient, broker: Broker, segment_id: int, name: str = "p", epoch: int = 0
) -> RawProducer:
    """The producer `name` on a segment, as Pulsar's clients name it."""
    topic = await segment_topic(broker, segment_id)
    return await client.create_producer(topic, named(f"{name}-seg-{segment_id}", epoch))


async def send(producer: RawProducer, number: int, key: str | None = None) -> bool:
    """Send one with an id of the application; returns whether it was stored now."""
    metadata = pb.MessageMetadata(publish_time=1000 + number)
    if key is not None:
        metadata.partition_key = key
    receipt = await producer.send(b"x", metadata=metadata, sequence_id=number)
    return receipt.message_id.ledger_id != NO_ID


async def send_all(producer: RawProducer, numbers: Sequence[int]) -> list[int]:
    """Send with these ids; returns those that were stored now."""
    return [number for number in numbers if await send(producer, number)]


async def send_from_another_program(broker: Broker, numbers: Sequence[int] = range(10)) -> None:
    """Store messages of `p` with these ids in segment 0, from a program that ends then."""
    client = await client_of(broker)
    assert await send_all(await producer_of(client, broker, 0), numbers) == [*numbers]
    await client.close()


async def stored(broker: Broker, segment_id: int) -> list[int]:
    topic = await broker.topics.get(
        parse_topic_name(await segment_topic(broker, segment_id)), create=False
    )
    found: list[int] = []
    position = EARLIEST
    while entries := await topic.ledger.read(position, max_entries=100, max_bytes=10**9):
        found += [parse_metadata(entry.data).sequence_id for entry in entries]
        position = topic.ledger.next_position(entries[-1].position)
    return found


async def settled(broker: Broker) -> None:
    """Return when every segment has the ids of its parents."""
    for segment in (await broker.scalable.get(TOPIC)).layout.active:
        name = await segment_topic(broker, segment.segment_id)
        topic = await broker.topics.get(parse_topic_name(name), create=False)
        await until(lambda: not topic.sequence_store.awaits_parents)  # noqa: B023


@pytest.fixture
def unsaved(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Returns a function after which no broker saves sequence ids as it ends: it was killed."""

    async def forgets(store: SequenceStore) -> None:
        return None

    return lambda: monkeypatch.setattr(SequenceStore, "close", forgets)


async def test_resend_of_another_program_after_a_split_is_stored_once(broker: Broker) -> None:
    await broker.scalable.create(TOPIC, segments=1, properties={})
    await send_from_another_program(broker)
    await broker.scalable.split(TOPIC, 0)
    second = await client_of(broker)
    for child in (1, 2):
        producer = await producer_of(second, broker, child)
        assert producer.success.last_sequence_id == 9
        assert await send_all(producer, range(12)) == [10, 11]
        assert await stored(broker, child) == [10, 11]


async def test_ids_are_carried_over_several_changes_and_restarts(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        await deduplicate(broker)
        await broker.scalable.create(TOPIC, segments=1, properties={})
        await send_from_another_program(broker)
        await broker.scalable.split(TOPIC, 0)
        await broker.scalable.rebucket(TOPIC, [1], 3)
        await settled(broker)
    async with running(tmp_path) as broker:
        await broker.scalable.merge(TOPIC, (3, 2))
        await settled(broker)
    async with running(tmp_path) as broker:
        producer = await producer_of(await client_of(broker), broker, 4)
        assert producer.success.last_sequence_id == 9
        assert await send_all(producer, range(5, 12)) == [10, 11]


async def test_carried_ids_and_own_ones_outlive_a_crash(
    tmp_path: Path, unsaved: Callable[[], None]
) -> None:
    async with running(tmp_path) as broker:
        await deduplicate(broker)
        await broker.scalable.create(TOPIC, segments=1, properties={})
        await send_from_another_program(broker)
        await broker.scalable.split(TOPIC, 0)
        await settled(broker)
        await send(await producer_of(await client_of(broker), broker, 1), 20)
        unsaved()
    async with running(tmp_path) as broker:
        producer = await producer_of(await client_of(broker), broker, 1)
        assert producer.success.last_sequence_id == 20
        assert await send_all(producer, range(5, 25)) == [21, 22, 23, 24]


async def test_merged_segment_knows_which_parent_has_a_message(broker: Broker) -> None:
    """A message that one parent lacks is new, though the other has a higher id."""
    await broker.scalable.create(TOPIC, segments=2, properties={})
    first = await client_of(broker)
    lower, upper = [await producer_of(first, broker, each) for each in (0, 1)]
    for number in (0, 2, 4, 6):
        assert await send(lower, number, LOWER_KEY)
    assert await send(upper, 1, UPPER_KEY)
    await first.close()
    await broker.scalable.merge(TOPIC, (0, 1))
    producer = await producer_of(await client_of(broker), broker, 2)
    assert producer.success.last_sequence_id == 6
    found = [
        await send(producer, number, LOWER_KEY if number % 2 == 0 else UPPER_KEY)
        for number in range(9)
    ]
    assert found == [False, False, False, True, False, True, False, True, True]


async def test_message_without_key_may_be_on_either_parent(broker: Broker) -> None:
    """It is dropped only if both have an id as high: dropping a new one would lose it."""
    await broker.scalable.create(TOPIC, segments=2, properties={})
    first = await client_of(broker)
    lower, upper = [await producer_of(first, broker, each) for each in (0, 1)]
    await send_all(lower, (0, 2, 4))
    await send_all(upper, (1,))
    await first.close()
    await broker.scalable.merge(TOPIC, (0, 1))
    producer = await producer_of(await client_of(broker), broker, 2)
    assert await send_all(producer, range(6)) == [2, 3, 4, 5]


async def test_name_that_only_one_parent_knows_covers_its_keys(broker: Broker) -> None:
    await broker.scalable.create(TOPIC, segments=2, properties={})
    first = await client_of(broker)
    await send(await producer_of(first, broker, 0), 5, LOWER_KEY)
    await first.close()
    await broker.scalable.merge(TOPIC, (0, 1))
    producer = await producer_of(await client_of(broker), broker, 2)
    assert not await send(producer, 4, LOWER_KEY)
    assert await send(producer, 4, UPPER_KEY)


async def test_message_without_key_may_be_on_a_parent_without_the_name(broker: Broker) -> None:
    await broker.scalable.create(TOPIC, segments=2, properties={})
    first = await client_of(broker)
    await send(await producer_of(first, broker, 0), 6, LOWER_KEY)
    await first.close()
    await broker.scalable.merge(TOPIC, (0, 1))
    producer = await producer_of(await client_of(broker), broker, 2)
    assert await send_all(producer, (5,)) == [5]


async def test_client_that_counts_anew_on_each_segment_loses_nothing(broker: Broker) -> None:
    """Pulsar's client does so with `initialSequenceId`, whatever the broker answers."""
    await broker.scalable.create(TOPIC, segments=1, properties={})
    client = await client_of(broker)
    producer = await producer_of(client, broker, 0)
    assert await send_all(producer, range(100, 110)) == [*range(100, 110)]
    await broker.scalable.split(TOPIC, 0)
    await producer.close()
    child = await producer_of(client, broker, 1)
    assert child.success.last_sequence_id == 109
    assert await send_all(child, range(100, 105)) == [*range(100, 105)]
    await child.close()
    # Now the segment's own ids count.
    again = await producer_of(client, broker, 1, epoch=1)
    assert again.success.last_sequence_id == 104
    assert await send_all(again, range(103, 107)) == [105, 106]
    await broker.scalable.split(TOPIC, 1)
    await again.close()
    grandchild = await producer_of(client, broker, 3)
    assert await send_all(grandchild, range(100, 103)) == [100, 101, 102]


async def test_client_that_counts_anew_loses_nothing_over_a_crash(
    tmp_path: Path, unsaved: Callable[[], None]
) -> None:
    first_id = 2**45
    async with running(tmp_path) as broker:
        await deduplicate(broker)
        await broker.scalable.create(TOPIC, segments=1, properties={})
        client = await RawClient.open("127.0.0.1", broker.port, first_id=first_id)
        # A snapshot has just been taken, so the next one has to wait.
        await producer_of(client, broker, 0, "another")
        await send_all(await producer_of(client, broker, 0), range(100, 110))
        assert '"writers"' in broker.topics.loaded()[WHOLE].ledger.properties[SNAPSHOT_PROPERTY]
        await broker.scalable.split(TOPIC, 0)
        unsaved()
    async with running(tmp_path) as broker:
        await settled(broker)
        client = await RawClient.open("127.0.0.1", broker.port, first_id=first_id + 1000)
        assert await send_all(await producer_of(client, broker, 1), range(100, 103)) == [
            100,
            101,
            102,
        ]


async def test_producers_that_come_and_go_share_snapshots(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has all names, so one for each of them would keep the event loop busy."""
    await broker.scalable.create(TOPIC, segments=1, properties={})
    client = await client_of(broker)
    loop, saves = asyncio.get_running_loop(), 0
    save = SequenceStore.save

    async def counted(store: SequenceStore) -> None:
        nonlocal saves
        saves += 1
        await save(store)

    monkeypatch.setattr(SequenceStore, "save", counted)
    began_s = loop.time()
    for _ in range(20):
        await (await producer_of(client, broker, 0)).close()
    await until(lambda: saves > 1)
    # The first one begins at once, and the clock may be read late, but not early.
    assert saves <= 2 + (loop.time() - began_s) / SEQUENCE_ATTACH_S


async def test_producers_that_come_together_share_a_snapshot(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await broker.scalable.create(TOPIC, segments=1, properties={})
    client = await client_of(broker)
    await producer_of(client, broker, 0)
    saves = 0
    save = SequenceStore.save

    async def counted(store: SequenceStore) -> None:
        nonlocal saves
        saves += 1
        await save(store)

    monkeypatch.setattr(SequenceStore, "save", counted)
    names = [f"name-{number}" for number in range(20)]
    await asyncio.gather(*(producer_of(client, broker, 0, name) for name in names))
    assert saves <= 3


async def test_a_producer_whose_client_cannot_be_stored_is_refused(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await broker.scalable.create(TOPIC, segments=1, properties={})
    client = await client_of(broker)

    async def failing(ledger: ManagedLedger, changes: object) -> None:
        raise DiskFull("Full.")

    with monkeypatch.context() as patched:
        patched.setattr(ManagedLedger, "set_properties", failing)
        with pytest.raises(BrokerError, match="Full"):
            await producer_of(client, broker, 0)
    await producer_of(client, broker, 0)


@pytest.mark.parametrize("lost", ["with its connection", "as it is refused"])
async def test_first_message_of_a_client_may_not_be_stored(broker: Broker, lost: str) -> None:
    """It has an id all the same, with which the client begins on the children."""
    await broker.scalable.create(TOPIC, segments=1, properties={})
    first_id = 2**45
    client = await RawClient.open("127.0.0.1", broker.port, first_id=first_id)
    producer = await producer_of(client, broker, 0)
    if lost == "as it is refused":
        alien = pb.MessageMetadata(txnid_most_bits=0, txnid_least_bits=77)
        with pytest.raises(BrokerError):
            await producer.send(b"x", metadata=alien, sequence_id=100)
    else:
        await client.close()
        client = await RawClient.open("127.0.0.1", broker.port, first_id=first_id + 50)
        producer = await producer_of(client, broker, 0, epoch=1)
    assert await send_all(producer, (101, 102, 103)) == [101, 102, 103]
    await broker.scalable.split(TOPIC, 0)
    await producer.close()
    child = await producer_of(client, broker, 1)
    assert await send_all(child, (100, 101)) == [100, 101]


async def test_message_refused_in_a_transaction_uses_no_id(broker: Broker) -> None:
    await broker.scalable.create(TOPIC, segments=1, properties={})
    client = await client_of(broker)
    producer = await producer_of(client, broker, 0)
    assert await send(producer, 0)
    gone = pb.MessageMetadata(txnid_most_bits=0, txnid_least_bits=77)
    command = pb.CommandSend(txnid_most_bits=0, txnid_least_bits=77)
    with pytest.raises(BrokerError):
        await producer.send(b"x", metadata=gone, send=command, sequence_id=1)
    await client.close()
    await broker.scalable.split(TOPIC, 0)
    child = await producer_of(await client_of(broker), broker, 1)
    assert child.success.last_sequence_id == 0
    assert await send_all(child, range(3)) == [1, 2]


async def test_live_client_sends_again_what_has_no_receipt(broker: Broker) -> None:
    """Its ids go on, so what the parent has is stored once."""
    await broker.scalable.create(TOPIC, segments=1, properties={})
    client = await client_of(broker)
    producer = await producer_of(client, broker, 0)
    await send_all(producer, range(10))
    await broker.scalable.split(TOPIC, 0)
    await producer.close()
    child = await producer_of(client, broker, 1)
    assert await send_all(child, range(7, 12)) == [10, 11]


async def test_producer_closed_before_the_split_was_another_one(broker: Broker) -> None:
    """The same client may open its producer anew, and send all again."""
    await broker.scalable.create(TOPIC, segments=1, properties={})
    client = await client_of(broker)
    producer = await producer_of(client, broker, 0)
    await send_all(producer, range(10))
    await producer.close()
    await broker.scalable.split(TOPIC, 0)
    child = await producer_of(client, broker, 1)
    assert await send_all(child, range(12)) == [10, 11]


async def test_producer_waits_until_the_parents_ids_are_final(broker: Broker) -> None:
    await broker.scalable.create(TOPIC, segments=1, properties={})
    client, other = await client_of(broker), await client_of(broker)
    producer = await producer_of(client, broker, 0)
    await send(producer, 0)
    await broker.scalable.split(TOPIC, 0)
    waiting = asyncio.ensure_future(producer_of(other, broker, 1))
    unnamed = await other.create_producer(await segment_topic(broker, 1))
    assert unnamed.success.last_sequence_id == -1, "it waits for nothing"
    assert await send(producer, 1)
    assert not waiting.done()
    await producer.close()
    child = await waiting
    assert child.success.last_sequence_id == 1
    assert await send_all(child, range(3)) == [2]


async def test_wait_for_the_parents_ends_when_the_segment_is_unloaded(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "CARRIED_WAIT_S", 3600.0)
    await broker.scalable.create(TOPIC, segments=1, properties={})
    client, other = await client_of(broker), await client_of(broker)
    producer = await producer_of(client, broker, 0)
    await broker.scalable.split(TOPIC, 0)
    waiting = asyncio.ensure_future(producer_of(other, broker, 1))
    name = parse_topic_name(await segment_topic(broker, 1))
    child = await broker.topics.get(name, create=False)
    await until(lambda: "p-seg-1" in child.producers)
    await broker.topics.unload(name)
    with pytest.raises(BrokerError) as raised:
        await waiting
    assert raised.value.code == pb.ServiceNotReady
    await producer.close()
    assert (await producer_of(other, broker, 1)).success.last_sequence_id == -1


async def test_wait_for_the_parents_is_bounded(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "CARRIED_WAIT_S", 0.05)
    await broker.scalable.create(TOPIC, segments=1, properties={})
    client = await client_of(broker)
    producer = await producer_of(client, broker, 0)
    await broker.scalable.split(TOPIC, 0)
    with pytest.raises(BrokerError, match="0000-ffff-0") as raised:
        await producer_of(client, broker, 1)
    assert raised.value.code == pb.ServiceNotReady
    await producer.close()
    await settled(broker)
    assert (await producer_of(client, broker, 1)).success.last_sequence_id == -1


async def test_without_the_policy_nothing_waits_and_nothing_is_dropped(broker: Broker) -> None:
    await deduplicate(broker, on=False)
    await broker.scalable.create(TOPIC, segments=1, properties={})
    client = await client_of(broker)
    producer = await producer_of(client, broker, 0)
    await send_all(producer, range(10))
    await broker.scalable.split(TOPIC, 0)
    child = await producer_of(await client_of(broker), broker, 1)
    assert child.success.last_sequence_id == -1
    assert await send_all(child, range(3)) == [0, 1, 2]
    await producer.close()
    await settled(broker)
    # Nor are they later, when the policy has come and the producer reconnects.
    await deduplicate(broker)
    await child.close()
    again = await producer_of(await client_of(broker), broker, 1, epoch=1)
    assert again.success.last_sequence_id == 2
    assert await send_all(again, range(5)) == [3, 4]


async def test_ids_of_a_time_without_the_policy_are_carried_too(broker: Broker) -> None:
    await deduplicate(broker, on=False)
    await broker.scalable.create(TOPIC, segments=1, properties={})
    await send_from_another_program(broker)
    await broker.scalable.split(TOPIC, 0)
    await deduplicate(broker)
    producer = await producer_of(await client_of(broker), broker, 1)
    assert await send_all(producer, range(12)) == [10, 11]


async def test_batches_and_chunks_count_by_their_highest_ids(broker: Broker) -> None:
    await broker.scalable.create(TOPIC, segments=1, properties={})
    first = await client_of(broker)
    producer = await producer_of(first, broker, 0)
    await send_batch(producer, 0, 4)
    for chunk in range(2):
        await send_chunk(producer, 5, chunk, of=2)
    # This one is not complete, so it does not count.
    await send_chunk(producer, 6, 0, of=2)
    await first.close()
    await broker.scalable.split(TOPIC, 0)
    child = await producer_of(await client_of(broker), broker, 1)
    assert child.success.last_sequence_id == 5
    assert not await send_batch(child, 0, 4)
    assert [await send_chunk(child, 5, chunk, of=2) for chunk in range(2)] == [False, False]
    assert [await send_chunk(child, 6, chunk, of=2) for chunk in range(2)] == [True, True]
    assert await send_batch(child, 7, 9)


async def send_batch(producer: RawProducer, first: int, last: int) -> bool:
    count = last - first + 1
    metadata = pb.MessageMetadata(num_messages_in_batch=count, highest_sequence_id=last)
    command = pb.CommandSend(num_messages=count, highest_sequence_id=last)
    receipt = await producer.send(b"x", metadata=metadata, send=command, sequence_id=first)
    return receipt.message_id.ledger_id != NO_ID


async def send_chunk(producer: RawProducer, number: int, chunk: int, *, of: int) -> bool:
    metadata = pb.MessageMetadata(
        uuid=f"u-{number}", chunk_id=chunk, num_chunks_from_msg=of, total_chunk_msg_size=of
    )
    command = pb.CommandSend(is_chunk=True)
    receipt = await producer.send(b"x", metadata=metadata, send=command, sequence_id=number)
    return receipt.message_id.ledger_id != NO_ID


async def test_names_without_a_segment_are_carried_as_they_are(broker: Broker) -> None:
    await broker.scalable.create(TOPIC, segments=1, properties={})
    first = await client_of(broker)
    plain = await first.create_producer(WHOLE, named("plain"))
    await send_all(plain, range(5))
    await send_all(await producer_of(first, broker, 0), range(3))
    await first.close()
    await broker.scalable.split(TOPIC, 0)
    client = await client_of(broker)
    again = await client.create_producer(await segment_topic(broker, 1), named("plain"))
    assert again.success.last_sequence_id == 4
    assert await send_all(again, range(7)) == [5, 6]
    assert (await producer_of(client, broker, 1)).success.last_sequence_id == 2
    other = await producer_of(client, broker, 1, name="other")
    assert other.success.last_sequence_id == -1


async def test_pruned_parents_have_left_their_ids(tmp_path: Path) -> None:
    async with running(tmp_path, unsubscribed_retention_minutes=0) as broker:
        await deduplicate(broker)
        await broker.scalable.create(TOPIC, segments=1, properties={})
        first = await client_of(broker)
        await send_all(await producer_of(first, broker, 0), range(5))
        await broker.scalable.split(TOPIC, 0)
        # The parent is not sealed yet.
        await broker.scalable.prune_all()
        assert 0 in (await broker.scalable.get(TOPIC)).layout.segments
        await first.close()

        async def is_pruned() -> bool:
            await broker.scalable.prune_all()
            return 0 not in (await broker.scalable.get(TOPIC)).layout.segments

        await until_awaited(is_pruned)
        for child in (1, 2):
            producer = await producer_of(await client_of(broker), broker, child)
            assert await send_all(producer, range(6)) == [5]


async def test_producer_that_leaves_while_it_waits_holds_nothing_up(broker: Broker) -> None:
    await broker.scalable.create(TOPIC, segments=1, properties={})
    client, other = await client_of(broker), await client_of(broker)
    producer = await producer_of(client, broker, 0)
    await send(producer, 0)
    await broker.scalable.split(TOPIC, 0)
    waiting = asyncio.ensure_future(producer_of(other, broker, 1))
    child = await broker.topics.get(parse_topic_name(await segment_topic(broker, 1)), create=False)
    await until(lambda: "p-seg-1" in child.producers)
    assert child.producers["p-seg-1"].state is ProducerState.OPENING
    await other.close()
    await until(lambda: "p-seg-1" not in child.producers)
    waiting.cancel()
    await producer.close()
    await settled(broker)
    assert (await producer_of(client, broker, 1)).success.last_sequence_id == 0
